"""Why replicas failed is told by those who look after them, as it happens; so is a run that stalls."""

from __future__ import annotations

import functools
import os
import re
import sys
import time
import types
from typing import Any

import pytest
from paid_service import ID, PaidExecutor, launch_file

from composer_replication import errors
from composer_replication.cli.diloco import _launch_table, _round_line, _show_status
from composer_replication.cli.replicas import launch_status
from composer_replication.cli.replicas.launch_status import (
    LaunchStatus,
    ReplicaStatus,
    _RoundTiming,
    read_launch_status,
    start_replicas,
)
from composer_replication.cli.replicas.launches import LaunchNotice
from composer_replication.cli.replicas.supervision import _find_trainer, supervise
from composer_replication.diloco.rounds.patience import RankTaken
from composer_replication.diloco.rounds.progress import RunProgress
from composer_replication.diloco.rounds.records import Layout
from composer_replication.diloco.serverless.replica_process import REFUSED, _would_recur
from composer_replication.diloco.store import StoreUnavailable, open_store
from composer_replication.errors import InputError
from refusals import refusal

HOSTILE = "\x1b]0;owned\x07\x1b[2J[bold red]"
TRACEBACK = "Traceback (most recent call last):\n  File 'x.py', line 1, in f\n    g()\nValueError: the words\nbye\n"


class Talking(PaidExecutor):
    """Its replicas say `words`, and end with `code`."""

    words, code, num_logs = TRACEBACK, 1, 0

    def stream_logs(self, handle, *, n_lines=200):
        self.num_logs += 1
        return self.shown(self.words, n_lines)

    def exit_code(self, handle):
        return {"succeeded": 0, "failed": self.code}.get(self.poll(handle))

    def log_place(self, handle):
        return f"paid logs {handle.rank}"


class Launched:
    def __init__(self, folder):
        self.store = open_store(str(folder / "bucket"))
        self.file = launch_file(folder, replicas=2)
        self.executor = Talking(folder / "paid")
        self.messages: list[str] = []
        start_replicas(self.file, self.executor)

    def tend(self, relaunches, *then) -> LaunchStatus:
        events = list(then)
        on_status = lambda _sight: events.pop(0)() if events else None  # noqa: E731
        how = {"relaunches": relaunches, "on_status": on_status, "on_message": self.messages.append, "every_s": 0.01}
        return supervise(self.store, self.file, self.executor, **how)


@pytest.fixture
def launched(tmp_path) -> Launched:
    return Launched(tmp_path)


def test_a_look_shows_the_exit_the_error_and_the_log_of_each_that_failed(launched, capsys):
    launched.executor.says(0, "failed")
    launched.executor.words = TRACEBACK.replace("the words", f"the words {HOSTILE}")
    first, second = read_launch_status(launched.store, launched.file, launched.executor).replicas
    assert (first.exit_code, first.log, second.exit_code, second.error) == (1, "paid logs 0", None, "")
    assert re.search(r"\b1\b.*\bValueError: the words \ufffd\]0;owned\ufffd.*\bbye$", first.error)
    sight = read_launch_status(launched.store, launched.file, launched.executor)
    assert launched.executor.num_logs == 1  # what has ended is not asked about again
    assert _show_status(sight, "box", as_json=False) == 1
    shown = capsys.readouterr()
    assert re.search(r"\brank 0\b.*\b1\b.*\bValueError: the words\b.*\bpaid logs 0\b", shown.err)
    assert "`crf diloco collect box --launch 0 --timeout 0 -o DIR`" in shown.err
    assert not {"\x1b", "\x07"} & {*shown.out, *shown.err}


def test_a_secret_that_a_replica_prints_is_in_no_line(tmp_path, monkeypatch):
    launched = Launched(tmp_path)
    monkeypatch.setenv("CRF_TEST_SECRET", "hush-0123456789")
    launched.executor.secrets = ("CRF_TEST_SECRET",)
    launched.executor.words = TRACEBACK.replace("the words", "401 for hush-0123456789")
    launched.executor.says(0, "failed")
    first = read_launch_status(launched.store, launched.file, launched.executor).replicas[0]
    assert "401 for [CRF_TEST_SECRET]" in first.error
    assert "hush" not in str(first)


def test_who_waits_is_told_at_once_why_one_failed_that_is_not_started_again(launched):
    launched.executor.says(0, "failed")
    told_while_running = []

    def other_ends():
        told_while_running.extend(launched.messages)
        launched.executor.says(1, "succeeded")

    launched.tend(0, lambda: None, other_ends)
    (line,) = told_while_running
    assert re.search(r"\brank 0\b.*\bValueError: the words\b.*\bbye\b.*\bpaid logs 0\b.* --relaunch 0\b", line)
    assert [line for line in launched.messages if "--relaunch 0" in line] == told_while_running  # once


def test_one_that_was_started_again_shows_why(launched):
    launched.executor.says(0, "failed")

    def look_in_between():
        first = read_launch_status(launched.store, launched.file, launched.executor).replicas[0]
        assert (first.status, first.attempt) == ("running", 1)
        assert "ValueError: the words" in first.error
        for rank, attempt in ((0, 1), (1, 0)):
            launched.executor.says(rank, "succeeded", attempt)

    launched.tend(3, lambda: None, look_in_between)
    assert re.search(r"\brank 0\b.*\b1\D+3\b", launched.messages[0])


def test_what_would_be_refused_again_is_not_started_again(launched):
    launched.executor.code = REFUSED
    for rank in (0, 1):
        launched.executor.says(rank, "failed")
    sight = launched.tend(3)
    assert [each.attempt for each in sight.replicas] == [0, 0]
    assert re.search(rf"\brank 0\b.*\b{REFUSED}\b.*\bValueError: the words\b", launched.messages[0])


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (ModuleNotFoundError("x"), True),
        (errors.MissingExtraError("x"), True),
        (ImportError("cannot import name 'trian' from 'mine'"), True),
        (ImportError("libcuda.so.1: cannot open shared object file"), False),  # of one bad machine
        (caused(errors.MissingExtraError("x"), OSError("libcuda.so.1")), False),
        (caused(errors.MissingExtraError("x"), ModuleNotFoundError("y")), True),
        (errors.NotEnoughMemoryError("x"), False),  # what is free now
        (errors.ConfigError("x"), True),
        (errors.StaleArtefactError("x"), True),
        (errors.ArtefactNotFoundError("x"), True),
        (errors.ArtefactCorruptError("x"), False),  # of a download, which may come whole the next time
        (RankTaken("x"), False),  # by one that is about to end
        (StoreUnavailable("x", uri="s3://box"), False),
        (ValueError("x"), False),
        (MemoryError(), False),
    ],
)
def test_an_error_that_may_pass_is_told_from_one_that_does_not(error, is_final):
    assert _would_recur(error) is is_final


@pytest.mark.parametrize(
    ("function", "given", "parts"),
    [
        ("trian", {}, {"what": "--trainer-fn trian", "expected": "composer_replication.diloco.tiny_trainer"}),
        ("train", {"exchnges": 4}, {"what": ".train", "got": "'exchnges'", "fix": "--trainer-kwargs-json"}),
    ],
)
def test_a_trainer_that_cannot_be_called_is_an_error_that_no_start_mends(function, given, parts):
    with refusal(InputError, **parts):
        _find_trainer("composer_replication.diloco.tiny_trainer", function, given)


def test_a_decorator_may_supply_arguments_and_a_built_in_says_nothing_of_its_own(monkeypatch):
    def train(*, manager, rank, world_size, config):
        return config

    @functools.wraps(train)
    def wrapper(**given):
        return train(config=1, **given)

    mine: Any = types.ModuleType("mine")
    mine.train = wrapper
    monkeypatch.setitem(sys.modules, "mine", mine)
    assert _find_trainer("mine", "train", {})(manager=None, rank=0, world_size=1) == 1
    assert _find_trainer("builtins", "dict", {}) is dict


RUNNING = [ReplicaStatus(rank, "running", 0, "", "") for rank in (0, 1)]


def sight_after(since_s: float, usual_s: float, replicas=RUNNING) -> LaunchStatus:
    progress = RunProgress(0, 2, 4, (0, 1), (0,), (), None, 0, ())
    notice = LaunchNotice(number=0, id=ID, executor="local", replicas=2, commits=10, started=time.time() - 100)
    return LaunchStatus(notice, replicas, progress, None, _RoundTiming(since_s, usual_s))


@pytest.mark.parametrize(("since_s", "usual_s"), [(90, 40), (9, 1), (0, 0)])
def test_a_round_that_is_no_later_than_rounds_are_has_an_eta(since_s, usual_s):
    sight = sight_after(since_s, usual_s)
    assert sight.stalled_s is None
    assert sight.eta_s == pytest.approx(150, abs=5)
    assert re.search(r"\b[23](\.5)? min\b", _round_line(sight))


def test_a_run_whose_rounds_do_not_end_is_said_to_stall_and_has_no_eta():
    sight = sight_after(300, 40)
    assert (sight.stalled_s, sight.eta_s) == (300, None)
    line = _round_line(sight)
    assert re.search(r"\brank 1\b.*\b5 min\b.*\b40 s\b", line)
    assert re.findall(r"\d+ (?:s|min|h)\b", line) == ["5 min", "40 s"]  # and none that is left
    assert "5 min" in str(_launch_table(sight).caption)


def test_a_run_that_has_ended_does_not_stall():
    ended = [ReplicaStatus(rank, "succeeded", 0, "", "", 0) for rank in (0, 1)]
    assert sight_after(300, 40, ended).stalled_s is None


def test_the_pace_is_that_of_the_outcomes_in_the_bucket(launched, tmp_path, monkeypatch):
    layout, now = Layout(0), time.time()
    progress = RunProgress(0, 2, 3, (0, 1), (0,), (), None, 0, ())
    for step, ago in ((0, 400), (1, 360), (2, 300)):
        launched.store.put(layout.outcome(step, 0), b"x")
        os.utime(tmp_path / "bucket" / layout.outcome(step, 0), (now - ago, now - ago))
    monkeypatch.setattr(launch_status, "read_progress", lambda *_args: progress)
    monkeypatch.setattr(launch_status, "read_commit", lambda *_args: (0, None))
    timing = read_launch_status(launched.store, launched.file, launched.executor).timing
    assert timing is not None
    assert timing.since_s == pytest.approx(300, abs=5)
    assert timing.usual_s == pytest.approx(50, abs=1)
