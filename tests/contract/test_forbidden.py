"""Nothing is unpickled, evaluated or swallowed; no stubs; no paths of one machine; names that mean one thing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from forbidden_code import find_forbidden
from repository import ROOT, python_files, relative, repository_files

SOURCES = python_files("src")

# Broad `except` exists at boundaries only: a teacher call, a replica, a service that rents machines, a CLI command, and
# the files of somebody's model: the libraries that read them say what is wrong by any exception, bare `Exception` too.
ALLOWED: dict[str, set[str]] = {
    "src/composer_replication/batch/model_folder.py": {"broad except"},
    # The program behind the limits of chat templates: whatever a stranger's template raises is its refusal.
    "src/composer_replication/batch/render/template_server.py": {"broad except"},
    "src/composer_replication/cli/main.py": {"broad except"},
    "src/composer_replication/diloco/serverless/executor.py": {"broad except"},
    "src/composer_replication/diloco/serverless/replica_process.py": {"broad except"},
    # The program inside the sandbox: running strangers' code, whatever it raises, is what it is for.
    "src/composer_replication/envs/workspace/in_sandbox.py": {"broad except", "eval", "exec"},
}

UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b")
# The field uses these words in opposite senses; kl_ts and kl_st say who is compared with whom.
AMBIGUOUS_KL = re.compile(r"\b(?:forward|reverse)[\s_\-]*kl(?:\b|_)", re.IGNORECASE)
# A path that exists on one machine only. What stands before it must not make it a part of another path or address.
_STARTS = (r"home/\w", r"Users/\w", r"root(?![\w.-])", r"work(?![\w.-])", r"tmp/")
# Here homes are the subject: what hides them, and the session logs and secrets it is tried on.
ABOUT_HOMES = (
    "src/composer_replication/privacy/",
    "tests/unit/scrub/",
    "tests/unit/privacy/",
    "tests/unit/ingestion/",
    "tests/unit/cli/",
    "tests/unit/hint_generator/",
    "examples/sessions/",
    "examples/refusals/",
    "docs/guides/conventions.md",
    "tests/data/",
    "benchmarks/session_logs.py",
    "benchmarks/scrub.py",
)
MACHINE_PATH = re.compile(r"(?<![\w.\-/}>*)])/(?:" + "|".join(_STARTS) + ")")


def text_of(path: Path) -> str:
    """The text of a file; nothing for a file that is not text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def lines_with(pattern: re.Pattern[str], text: str) -> list[int]:
    return [text.count("\n", 0, match.start()) + 1 for match in pattern.finditer(text)]


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_a_source_file_holds_nothing_forbidden(path):
    allowed = ALLOWED.get(relative(path), set())
    assert [found for found in find_forbidden(text_of(path)) if found.name not in allowed] == []


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_a_source_file_is_finished_and_names_its_divergences_by_direction(path):
    assert lines_with(UNFINISHED, text_of(path)) == []
    assert lines_with(AMBIGUOUS_KL, text_of(path)) == []


def test_no_file_of_the_repository_holds_a_path_of_one_machine():
    found = [
        f"{relative(path)}:{line}"
        for path in repository_files()
        if not relative(path).startswith(ABOUT_HOMES)
        for line in lines_with(MACHINE_PATH, text_of(path))
    ]
    assert found == []


def test_the_instructions_for_agents_are_short_and_written_once():
    agents, claude = ROOT / "AGENTS.md", ROOT / "CLAUDE.md"
    assert 0 < len(text_of(agents).splitlines()) <= 80
    if claude.is_symlink():
        assert claude.resolve() == agents
    else:
        assert "AGENTS.md" in text_of(claude)
        assert len(text_of(claude).splitlines()) <= 5


PLANTED = {
    "import pickle": "pickle",
    "from pickle import loads": "pickle",
    "import torch.utils.pickle as p": "pickle",
    "numpy.load(path, allow_pickle=True)": "pickle",
    "torch.load(path, weights_only=True)": "torch.load",
    "from torch import load": "torch.load",
    "AutoModel.from_pretrained(name, trust_remote_code=True)": "trust_remote_code",
    "options = {'trust_remote_code': True}": "trust_remote_code",
    "AutoModel.from_pretrained(name, trust_remote_code=anything)": "trust_remote_code",
    "AutoModel.from_pretrained(name)": "trust_remote_code not said",
    "AutoModel.from_config(config)": "trust_remote_code not said",
    "eval(text)": "eval",
    "exec(code)": "exec",
    "os.system(command)": "system",
    "subprocess.run(command, shell=True)": "shell",
    "def f():\n    raise NotImplementedError": "NotImplementedError",
    "def f():\n    raise NotImplementedError('later')": "NotImplementedError",
    "try: ...\nexcept: ...": "broad except",
    "try: ...\nexcept Exception as error: ...": "broad except",
    "try: ...\nexcept (OSError, BaseException): ...": "broad except",
    "with contextlib.suppress(Exception): ...": "broad except",
}


@pytest.mark.parametrize("source", PLANTED)
def test_a_planted_violation_is_flagged(source):
    assert [found.name for found in find_forbidden(source)] == [PLANTED[source]]


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "AutoModel.from_pretrained(name, trust_remote_code=False)",
        "try: ...\nexcept (OSError, ValueError): ...",
        "with contextlib.suppress(FileNotFoundError): ...",
        "safetensors.torch.load_file(path)",
        "subprocess.run(command, shell=False)",
        "'eval(x) and pickle are words here'",
    ],
)
def test_harmless_code_is_not_flagged(source):
    assert find_forbidden(source) == []


@pytest.mark.parametrize("start", ["home/ada/x", "Users/ada", "root", "root/x", "work/main", "tmp/x"])
def test_a_planted_machine_path_is_flagged(start):
    assert lines_with(MACHINE_PATH, f"one\npath = '/{start}'") == [2]


@pytest.mark.parametrize(
    "text", ["https://example.org/home/x", "a/work/b", "${X}/tmp/y", "<run>/tmp/x", "/workspace", "/root_dir", "and/or"]
)
def test_a_part_of_another_path_is_no_machine_path(text):
    assert lines_with(MACHINE_PATH, text) == []


@pytest.mark.parametrize("words", ["forward KL", "reverse-KL", "Forward_KL", "reverse_kl_loss", "reversekl"])
def test_planted_ambiguous_names_are_flagged(words):
    assert lines_with(AMBIGUOUS_KL, f"x = 1  # {words} of the rows") == [1]
    assert lines_with(AMBIGUOUS_KL, "one forward over kl_ts, in reverse order") == []
