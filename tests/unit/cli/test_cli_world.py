"""`crf world`: one session to read, many as logs; the same seed gives the same bytes."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from composer_replication.cli import world
from composer_replication.cli.main import main
from composer_replication.envs.workspace import TestRunner, generate_task
from composer_replication.envs.workspace.generate import FIRST_TRAINING_SEED
from composer_replication.envs.workspace.sandbox import LIMITS_ONLY, shared_runner
from output_facts import lines_with


def test_one_session_is_shown_with_its_script(capsys):
    assert main(["world", "play", "--seed", "9"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(generate_task(9).prompt)
    assert "[edit_unread: edit_not_read]" in shown
    assert re.search(r"\[[^]:]*\bturn 1\b[^]]*\]$", shown, re.MULTILINE)  # which one it corrects
    assert lines_with(shown, "reward 1")
    assert main(["world", "play", "--seed", "9", "--agent", "expert", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema_version"] == "ATIF-v1.8"


def test_nothing_that_a_terminal_would_act_upon_is_printed(capsys, monkeypatch):
    monkeypatch.setattr(world, "generate_task", lambda *a, **k: replace(generate_task(*a, **k), prompt="a\x1b[31mb"))
    assert main(["world", "play", "--seed", "0"]) == 0
    assert capsys.readouterr().out.startswith("a\ufffd[31mb\n")


def test_logs_are_the_same_bytes_for_the_same_seed(tmp_path, capsys):
    given = ["-n", "4", "--seed", "20", "--difficulty", "medium", "--rate", "edit_unread=0.6", "--json"]
    for name in ("one", "two"):
        assert main(["world", "logs", "-o", str(tmp_path / name), *given]) == 0
    done = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert done[0]["sessions"] == 4
    assert done[0]["sandbox"] == TestRunner().kind
    assert done[0]["mistakes"] == done[1]["mistakes"]
    assert next(each["rate"] for each in done[0]["mistakes"] if each["mistake"] == "edit_unread") == 0.6
    one, two = (
        {path.name: path.read_bytes() for path in (tmp_path / name / "-workspace").iterdir()} for name in ("one", "two")
    )
    assert one == two
    assert len(one) == 4


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        (["-n", "0", "-o", "new"], ["sessions", 0, 1]),
        (["-o", "taken"], ["taken", "folder"]),
        (["-o", "new", "--agent", "nobody"], ["--agent", "'nobody'", "careless", "expert"]),
        (["-o", "new", "--rate", "noop"], ["--rate", "noop", "NAME=RATE", "edit_unread"]),
        (["-o", "new", "--rate", "noop=1"], ["rates", "noop", "Edit", 1]),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, monkeypatch, capsys, given, facts):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    assert main(["world", "logs", *given]) == 1
    assert lines_with(capsys.readouterr().err, *facts)
    assert [each.name for each in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        (["logs", "-n", "3"], ["-o/--output"]),
        (["play", "-n", "3"], ["-n 3"]),
        (["play", "-o", "logs"], ["-o logs"]),
        (["logs", "-o", "x", "--prot", "1"], ["--prot 1"]),
        (["advisers", "--prot", "1"], ["--prot 1", "--port"]),
    ],
)
def test_an_option_that_does_nothing_there_is_refused_with_the_verb_s_own_usage(given, facts, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["world", *given])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(f"usage: crf world {given[0]} ")
    *_, error = told.splitlines()
    assert error.startswith(f"crf world {given[0]}: error: ")
    assert lines_with(error, *facts)


def test_each_of_its_verbs_has_a_page_of_its_own(capsys):
    pages = []
    for verb in ("play", "logs", "advisers"):
        with pytest.raises(SystemExit):
            main(["world", verb, "--help"])
        pages.append(capsys.readouterr().out)
    assert [("--port" in page, "--output" in page, "--agent" in page) for page in pages] == [
        (False, False, True),
        (False, True, True),
        (True, False, False),
    ]


def test_a_port_that_cannot_be_had_is_a_sentence(capsys):
    import socket

    assert main(["world", "advisers", "--port", "99999"]) == 1
    assert lines_with(capsys.readouterr().err, "--port", 99999, 65535)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["world", "advisers", "-n", "1", "--port", str(port)]) == 1
    said = capsys.readouterr().err
    assert lines_with(said, f"--port {port}")
    assert said.count("\n") == 1


def test_ctrl_c_is_how_advisers_end(capsys, monkeypatch):
    from composer_replication.envs.adviser_server import AdviserServer

    def interrupted(_self):
        raise KeyboardInterrupt

    monkeypatch.setattr(AdviserServer, "wait", interrupted)
    assert main(["world", "advisers", "-n", "1", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["base_url"].startswith("http://127.0.0.1:")
    assert told.err.splitlines()[-1].startswith("crf world advisers: ")


def test_tests_behind_no_wall_are_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CRF_SANDBOX", "rlimits")
    shared_runner.cache_clear()
    try:
        for given in (["play", "--seed", "9"], ["logs", "-n", "1", "-o", str(tmp_path / "logs")]):
            assert main(["world", *given]) == 0
            assert lines_with(capsys.readouterr().err, "rlimits", LIMITS_ONLY)
    finally:
        shared_runner().close()
        shared_runner.cache_clear()


def test_seeds_kept_for_evaluation_are_not_what_is_played_unless_named(capsys):
    shown = []
    for given in ([], ["--seed", str(FIRST_TRAINING_SEED)], ["--seed", "0"]):
        assert main(["world", "play", *given]) == 0
        shown.append(capsys.readouterr().out)
    assert FIRST_TRAINING_SEED == 10_000
    assert shown[0] == shown[1] != shown[2]
