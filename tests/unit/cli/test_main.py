"""The command's own boundary: whatever happens below is a sentence and an exit status, never a traceback."""

from __future__ import annotations

import io
import re
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors

from composer_replication.cli import console, inspect, sites
from composer_replication.cli import main as command
from composer_replication.cli.progress import byte_progress, call_progress
from output_facts import lines_with

UNFORESEEN = [
    RuntimeError(),
    KeyError("x"),
    RecursionError("deep"),
]


@pytest.mark.parametrize("error", UNFORESEEN, ids=lambda error: type(error).__name__)
def test_what_nobody_foresaw_is_a_sentence(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_args: Any) -> int:
        raise error

    monkeypatch.setattr(sites, "run", fails)
    monkeypatch.delenv("CRF_DEBUG", raising=False)
    assert command.main(["sites", "run"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"crf sites: {type(error).__name__}")
    assert "Traceback" not in told.err
    assert "CRF_DEBUG=1" in told.err
    assert told.err.count("\n") == 1
    monkeypatch.setenv("CRF_DEBUG", "1")
    with pytest.raises(type(error)):
        command.main(["sites", "run"])


KNOWN = [
    # Only a damaged store has to be moved away, with the files beside it.
    (sqlite3.DatabaseError("database disk image is malformed\nmore"), ["teacher_cache.sqlite", "malformed", "-wal"]),
    (sqlite3.OperationalError("database or disk is full"), ["teacher_cache.sqlite", "full"]),
    (MemoryError(), ["memory"]),
    (safetensors.SafetensorError("header too large"), ["safetensors", "header too large"]),
]


@pytest.mark.parametrize(("error", "facts"), KNOWN, ids=lambda each: type(each).__name__)
def test_what_lies_outside_of_the_program_is_named(
    error: Exception, facts: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_args: Any) -> int:
        raise error

    monkeypatch.setattr(sites, "run", fails)
    monkeypatch.delenv("CRF_DEBUG", raising=False)
    assert command.main(["sites", "run"]) == 1
    told = capsys.readouterr().err
    assert lines_with(told, *facts)
    assert ("-wal" in told) == ("-wal" in facts)
    assert "CRF_DEBUG" not in told  # as for what nobody foresaw
    assert told.count("\n") == 1


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError(30, "Read-only file system")])
def test_a_disk_that_takes_nothing_is_named(
    error: OSError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fails(_args: Any) -> int:
        raise error

    monkeypatch.setattr(sites, "run", fails)
    assert command.main(["sites", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    for part in (str(error.strerror), command._ADVICE_BY_ERRNO[error.errno], command._RUN_AGAIN):
        assert part in told


@pytest.mark.parametrize(
    ("typed", "meant"), [("--no-scru", "--no-scrub"), ("--reraed", "--reread"), ("--foobarbaz", None)]
)
def test_an_option_that_a_verb_does_not_have_ends_with_its_usage_and_the_nearest(typed, meant, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["ingest", "logs", "-o", "run", typed])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: crf ingest")
    *_, error = said.strip().splitlines()
    assert re.findall(r"--[\w-]+", error) == [typed, *([] if meant is None else [meant])]


MISTYPED = [
    (["trian", "run"], "crf", "train"),
    (["evalute", "--help"], "crf", "evaluate"),
    (["world", "lgos"], "crf world", "logs"),
    (["--verison"], "crf", "--version"),
    (["--verison", "train"], "crf", "--version"),
    (["ingest", "--no-scru"], "crf ingest", "--no-scrub"),  # which also lacks its logs
    (["sites", "run", "--josn=1", "extra"], "crf sites", "--json"),
]


@pytest.mark.parametrize(
    ("words", "program", "meant"), MISTYPED, ids=lambda each: " ".join(each) if isinstance(each, list) else each
)
def test_a_mistyped_word_ends_with_the_nearest(words, program, meant, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert ended.value.code == command.USAGE_ERROR
    *_, error = capsys.readouterr().err.strip().splitlines()
    assert error.startswith(f"{program}: error: ")
    assert re.findall(r"[\w-]+", error)[-1] == meant


def test_a_verb_that_is_like_no_other_gets_no_suggestion(capsys):
    with pytest.raises(SystemExit):
        command.main(["xyzzy"])
    *_, error = capsys.readouterr().err.strip().splitlines()
    named = re.findall(r"[\w-]+", error)
    assert [named.count(verb) for verb in command.VERBS] == [1] * len(command.VERBS)  # in the list of all alone


def test_streams_that_were_closed_are_no_terminals_and_stop_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`crf … >&- 2>&-`: Python has None in their place."""
    for name in ("stdin", "stdout", "stderr"):
        with monkeypatch.context() as patch:
            patch.setattr(sys, name, None)
            assert not inspect._uses_color(None)
            assert console.terminal_width() == 160
            with byte_progress("reading", quiet=False) as progress:
                progress(1, 2)
            with call_progress(3, 5.0, quiet=False):
                console.log("talk")
            console.show(console.table("t", ("a",), [("row",)]))
            console.write_json("{}")
        told = capsys.readouterr()
        assert (told.out == "") == (name == "stdout")
        assert (told.err == "") == (name == "stderr")
        assert "talk" not in told.out
    closed = io.StringIO()
    closed.close()
    assert not console.is_terminal(closed)
