"""`crf world`: one session to read, many as logs; the same seed gives the same bytes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from composer_replication.cli.main import main
from composer_replication.envs.workspace import TestRunner, generate_task
from composer_replication.envs.workspace.generate import FIRST_TRAINING_SEED
from composer_replication.envs.workspace.sandbox import shared_runner
from composer_replication.steps.around import world


def test_one_session_is_shown_with_its_script(capsys):
    assert main(["world", "play", "--seed", "9"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(generate_task(9).prompt)
    assert "[edit_unread: edit_not_read]" in shown
    assert "[puts right turn 1" in shown
    assert "reward 1: " in shown
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
    ("given", "said"),
    [
        (["-n", "3"], "got no folder, expected -o DIR"),
        (["-n", "0", "-o", "new"], "expected 1 or more"),
        (["-o", "there"], "expected a new folder"),
        (["-o", "new", "--agent", "nobody"], "expected one of ['careless', 'expert']"),
        (["-o", "new", "--rate", "noop"], "expected NAME=RATE"),
        (["-o", "new", "--rate", "noop=1"], "which can be made in place of Edit, expected at most 1 together"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, monkeypatch, capsys, given, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    assert main(["world", "logs", *given]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_tests_behind_no_wall_are_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CRF_SANDBOX", "rlimits")
    shared_runner.cache_clear()
    try:
        for given in (["play", "--seed", "9"], ["logs", "-n", "1", "-o", str(tmp_path / "logs")]):
            assert main(["world", *given]) == 0
            assert "tests ran behind no wall (rlimits): limits alone" in capsys.readouterr().err
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
