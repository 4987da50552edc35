"""`crf completion`: a real shell completes what the parsers know; every verb has --json, and codes are one table."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess

import pytest

from composer_replication.cli.completion import _options_by_verb
from composer_replication.cli.main import EXIT_CODES, VERBS, build_parser, main

ASK = """
source {script}
COMP_WORDS=({words})
COMP_CWORD={at}
_shtab_crf
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    import contextlib
    import io

    path = tmp_path_factory.mktemp("shell") / "crf.bash"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["completion", "bash"]) == 0
    path.write_text(printed.getvalue())
    return path


def completed(script, *words):
    quoted = " ".join(f"'{each}'" for each in words)
    text = ASK.format(script=script, words=quoted, at=len(words) - 1)
    done = subprocess.run(["bash", "--norc", "-c", text], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_a_real_bash_completes_verbs_options_and_choices(script):
    assert completed(script, "crf", "") == [*VERBS]
    assert completed(script, "crf", "--") == ["--help", "--version"]
    assert completed(script, "crf", "ju") == ["judge"]
    assert completed(script, "crf", "train", "--dr") == ["--dry-run"]
    assert set(completed(script, "crf", "ingest", "--")) >= {"--output", "--exclude", "--no-scrub", "--json"}
    assert completed(script, "crf", "world", "logs", "--s") == ["--seed"]
    assert completed(script, "crf", "world", "a") == ["advisers"]
    assert completed(script, "crf", "export", "run", "--precision", "b") == ["bfloat16"]
    assert completed(script, "crf", "completion", "f") == ["fish"]
    assert completed(script, "crf", "split", "run", "--test", "") == []  # a number


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_a_real_bash_completes_paths(script):
    beginning = str(script)[:-2]
    assert completed(script, "crf", "ingest", beginning) == [str(script)]
    assert completed(script, "crf", "ingest", "--output", beginning) == [str(script)]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_are_told_every_verb_and_option(shell, capsys):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    for verb, options in _options_by_verb(build_parser()).items():
        assert re.search(rf"\b{verb}\b", text)
        for name in (name for name in options if name.startswith("--")):
            assert re.search(rf"-l {name[2:]}\b" if shell == "fish" else rf"{name}[\[,}}]", text), name
    if shutil.which(shell):
        subprocess.run([shell, "-n", "/dev/stdin"], input=text, text=True, check=True, timeout=60)


def test_the_script_for_zsh_registers_itself_when_it_is_sourced(capsys):
    assert main(["completion", "zsh"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#compdef crf\n")
    assert "(eval|file) ]]" in text


def parsers():
    (verbs,) = (each for each in build_parser()._actions if isinstance(each, argparse._SubParsersAction))
    for verb, parser in verbs.choices.items():
        inner = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
        yield from ((f"{verb} {name}", each) for name, each in inner[0].choices.items()) if inner else [(verb, parser)]


def test_every_verb_prints_json():
    assert [name for name, parser in parsers() if "--json" not in parser._option_string_actions] == []


def test_exit_codes_are_those_of_the_table(capsys):
    assert sorted(EXIT_CODES) == [0, 1, 2, 3, 130]
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    for code, what in EXIT_CODES.items():
        assert f"{code} {what.partition(',')[0]}" in printed
    with pytest.raises(SystemExit) as ended:
        main(["nothing"])
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("verb", "has_own_words"),
    [(["sites", "run"], False), (["replay", "run"], True), (["train"], True), (["chat", "m"], True)],
)
def test_whoever_interrupts_is_told_what_that_means_for_this_verb(verb, has_own_words, monkeypatch, capsys):
    from composer_replication.cli import main as command

    def interrupted(_args):
        raise KeyboardInterrupt

    module = command._import_verb(verb[0])
    assert hasattr(module, "WHEN_INTERRUPTED") == has_own_words
    words = module.WHEN_INTERRUPTED if has_own_words else command._WHEN_INTERRUPTED
    assert has_own_words == (words != command._WHEN_INTERRUPTED)
    monkeypatch.setattr(module, "run", interrupted)
    assert main(verb) == 130
    said = capsys.readouterr().err
    assert said.startswith(f"crf {verb[0]}: ")
    assert said.endswith(f"{words}\n")
    assert said.count("\n") == 1
