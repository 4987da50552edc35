"""[render] from the command line: `crf train` and `crf inspect` read it alike, and both say what was done."""

from __future__ import annotations

import json

import pytest
from claude_records import Log, call, text, thinking
from crf import must
from transformers import Qwen2Config

from composer_replication.cli.main import main
from composer_replication.cli.site_page import _THINKING
from composer_replication.runs import RunDir
from composer_replication.runs.files import read_sites
from output_facts import lines_with
from tokenizer_assets import load

NOT_READ = "<tool_use_error>File has not been read yet. Read it first before writing to it.</tool_use_error>"
# Qwen3's manner: an empty block on the last turn alone, and a switch in the prompt.
HYBRID = (
    "{% for m in messages %}<|{{ 'Assistant' if m.role == 'assistant' else 'User' }}|>"
    "{% if m.role == 'assistant' and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with a site at a turn that thinks and a good turn; a template; a model's folder without weights."""
    folder = tmp_path_factory.mktemp("render")
    log = Log(session="aaaaaaaa-1111")
    log.user("go")
    edit = {"file_path": "/repo/a.py", "old_string": "x", "new_string": "y"}
    log.assistant("m1", thinking("Zorro wonders."), text("I edit."), call("t1", "Edit", **edit))
    log.result("t1", NOT_READ, is_error=True)
    log.assistant("m2", thinking("Zorro knows."), text("I read it first."))
    (folder / "logs").mkdir()
    (folder / "logs" / "aaaaaaaa-1111.jsonl").write_bytes(log.lines())
    must("ingest", "logs", "-o", "run", cwd=folder)
    must("sites", "run", cwd=folder)
    load("thinker").save_pretrained(folder / "model")
    Qwen2Config(vocab_size=len(load("thinker")), hidden_size=32, num_hidden_layers=1).save_pretrained(folder / "model")
    (folder / "hybrid.jinja").write_text(HYBRID)
    (folder / "run.toml").write_text(
        '[train]\nmodel = "model"\nrun = "run"\n[render]\nchat_template = "hybrid.jinja"\n'
    )
    (folder / "id").write_text(json.loads((folder / "run" / "sites.jsonl").read_text().splitlines()[0])["id"])
    return folder


@pytest.fixture
def crf(folder, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "110")

    def run(verb, *arguments):
        given = ["run", (folder / "id").read_text()] if verb == "inspect" else ["--dry-run", "--json"]
        given += [] if verb == "inspect" else ["--set", f"train.output='{tmp_path}'"]
        status = main([verb, *given, "--config", "run.toml", *arguments])
        out, err = capsys.readouterr()
        assert status == 0, err
        return out

    return run


SETTINGS = {
    "default": ((), "left_out", True),
    "context": (("--set", "render.other_thinking=context"), "context", False),
    "student": (("--set", "render.student_models=['claude-*']"), "target", False),
    "off": (
        ("--set", "render.student_models=['*']", "--set", "render.template_variables.enable_thinking=false"),
        "left_out",
        True,
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_inspect_shows_and_train_counts_what_the_section_says(crf, name):
    settings, outcome, is_quiet = SETTINGS[name]
    view = json.loads(crf("inspect", "--json", *settings))
    assert (view["student"]["thinking"], view["student"]["has_empty_thought"]) == (outcome, is_quiet)
    assert ("Zorro wonders." in view["student"]["text"]) == (outcome == "target")
    counts = json.loads(crf("train", *settings))["counts"]
    shown = {key: n for key, n in counts.items() if key.startswith(("thinking", "empty_thought"))}
    assert shown == {f"thinking_{outcome}": 2} | ({"empty_thought_as_header": 2} if is_quiet else {})
    target = view["student"]["target"]
    assert counts["sdpo_kl"] == target[1] - target[0]


def test_the_page_says_what_was_done_with_thinking(crf):
    assert lines_with(crf("inspect", "--no-color"), "thinking", _THINKING["left_out"], "header")
    learned = crf("inspect", *SETTINGS["student"][0])
    assert lines_with(learned, "thinking", _THINKING["target"])
    assert _THINKING["left_out"] not in learned


def test_a_template_that_is_not_there_is_named_by_its_key(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    status = main(["train", "--dry-run", "--config", "run.toml", "--set", "render.chat_template=none.jinja"])
    assert status == 1
    assert lines_with(capsys.readouterr().err, "render.chat_template", "none.jinja")


@pytest.mark.parametrize("verb", [("train", "--dry-run"), ("inspect", "run", "SITE")])
def test_a_variable_that_the_template_does_not_read_is_refused(folder, capsys, monkeypatch, verb):
    monkeypatch.chdir(folder)
    given = [(folder / "id").read_text() if each == "SITE" else each for each in verb]
    for name, fix in (("enable_thinkng", "'enable_thinking'"), ("xyz", "render.chat_template")):
        status = main([*given, "--config", "run.toml", "--set", f"render.template_variables.{name}=false"])
        assert status == 1
        assert lines_with(capsys.readouterr().err, "render.template_variables", f"'{name}'", "model", fix)


def test_a_pattern_that_matches_no_model_is_named_with_those_there_are(folder, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(folder)
    given = ["train", "--dry-run", "--config", "run.toml", "--set", f"train.output='{tmp_path}'"]
    assert main([*given, "--set", "render.student_models=['claude-*', 'qwen*']"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "render.student_models" in line]
    assert len(said) == 1
    assert lines_with(said[0], "'qwen*'")
    assert "'claude-*'" not in said[0]
    assert "claude-" in said[0]


def test_the_plan_says_which_turns_are_good_and_why_others_are_not(crf):
    plan = json.loads(crf("train"))
    assert (plan["counts"]["model_turns"], plan["counts"]["good_turns"]) == (2, 1)
    assert plan["drops"] == {"lm_ce: failed_call": 1}


def test_the_tools_of_the_run_are_shown_as_in_training_and_said(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = Log(session="aaaaaaaa-1111")
    log.user("go")
    log.assistant("m1", call("t1", "Read", file_path="/repo/b.py"))
    log.result("t1", "x = 1")
    log.assistant("m2", call("t2", "Edit", file_path="/repo/a.py", old_string="x", new_string="y"))
    log.result("t2", NOT_READ, is_error=True)
    (tmp_path / "log.jsonl").write_bytes(log.lines())
    assert main(["ingest", "log.jsonl", "-o", "run"]) == main(["sites", "run"]) == 0
    load("mistral_tools").save_pretrained(tmp_path / "model")
    (tmp_path / "run.toml").write_text('[train]\nmodel = "model"\nrun = "run"\n')
    (tmp_path / "none.json").write_text("[]")
    [identity] = [site.id for site, _ in read_sites(RunDir.open("run"))]

    def inspect(*options):
        capsys.readouterr()
        assert main(["inspect", "run", identity, *options]) == 0
        return capsys.readouterr().out

    shown, trained = (
        json.loads(inspect("--json", *each)) for each in (("--tokenizer", "model"), ("--config", "run.toml"))
    )
    assert shown == trained
    before = load("mistral_tools").decode(shown["student"]["ids"][: shown["student"]["header"][0]])
    assert '"properties": {"file_path": {"type": "string"}}' in before
    assert lines_with(inspect("--tokenizer", "model"), "tokenizer model", "tools", 1, "claude_code")
    assert lines_with(inspect("--tokenizer", "model", "--tools", "none.json"), "tokenizer model", "tools: none")
