"""Dead replicas are started again as long as there is a run to come back to; services may fail meanwhile."""

from __future__ import annotations

import json
import re
import tracemalloc

import pytest
from paid_service import ID, PaidExecutor, launch_file, names

from composer_replication.cli.diloco import _launch_table, _round_line
from composer_replication.cli.replicas import launch_status, supervision
from composer_replication.cli.replicas.launch_status import (
    LaunchStatus,
    ReplicaStatus,
    cancel,
    read_launch_status,
    start_replicas,
)
from composer_replication.cli.replicas.launches import LaunchNotice
from composer_replication.cli.replicas.supervision import supervise
from composer_replication.diloco.rounds.progress import RoundSummary, RunProgress
from composer_replication.diloco.rounds.records import Layout, pack
from composer_replication.diloco.store import open_store
from composer_replication.errors import RunError
from refusals import refusal


def names_all(line: str, *facts: str) -> bool:
    """Whether all of these are in a line about a replica: ranks, numbers, and the words of its log or service."""
    return all(re.search(rf"\b{fact}\b", line) for fact in facts)


FAILED = (r"rank 1\b.*\b1", "its last words")  # its exit status, too


class Launched:
    """A launch of the paid service; `then` says what happens between two looks."""

    def __init__(self, folder, **given):
        self.store = open_store(str(folder / "bucket"))
        self.file = launch_file(folder, replicas=2, **given)
        self.executor = PaidExecutor(folder / "paid")
        start_replicas(self.file, self.executor)
        self.messages: list[str] = []
        self.looks = 0

    def tend(self, *then, relaunches=3) -> LaunchStatus:
        events = list(then)

        def on_status(_sight):
            self.looks += 1
            assert self.looks < 500
            if events:
                events.pop(0)()

        how = {"relaunches": relaunches, "on_status": on_status, "on_message": self.messages.append, "every_s": 0.01}
        return supervise(self.store, self.file, self.executor, **how)

    def statuses(self, sight: LaunchStatus) -> list[tuple[str, int]]:
        return [(each.status, each.attempt) for each in sight.replicas]


@pytest.fixture
def launched(tmp_path) -> Launched:
    return Launched(tmp_path)


def test_one_that_dies_in_the_middle_is_started_again(launched):
    def dies():
        launched.executor.says(1, "failed")

    def all_end():
        launched.executor.says(0, "succeeded")
        launched.executor.says(1, "succeeded", 1)

    sight = launched.tend(dies, lambda: None, all_end)
    assert launched.statuses(sight) == [("succeeded", 0), ("succeeded", 1)]
    (line,) = launched.messages
    assert names_all(line, *FAILED, r"1\D+3")


def test_one_is_started_again_so_often_and_no_more(launched):
    launched.executor.says(0, "failed")
    launched.executor.says(1, "cancelled")
    sight = launched.tend(lambda: None, lambda: launched.executor.says(0, "failed", 1), relaunches=1)
    assert launched.statuses(sight) == [("failed", 1), ("cancelled", 0)]


def test_one_is_not_started_again_when_another_has_finished(launched):
    launched.executor.says(0, "succeeded")
    launched.executor.says(1, "failed")
    sight = launched.tend()
    assert launched.statuses(sight) == [("succeeded", 0), ("failed", 0)]
    (line,) = launched.messages
    assert names_all(line, *FAILED, "rank 0")


def test_one_is_not_started_again_when_all_exchanges_are_made(launched, monkeypatch):
    made = RunProgress(0, 2, 4, (0, 1), (), (), None, 0, ())
    monkeypatch.setattr(launch_status, "read_progress", lambda *_args: made)
    for rank in (0, 1):
        launched.executor.says(rank, "failed")
    launched.tend()
    assert launched.executor.running == []
    assert names_all(launched.messages[0], "rank [01]", "its last words", "4")


def test_one_is_not_started_again_that_has_left_what_it_ended_with(launched):
    launched.store.put("launch/000000/output/001/done.json", b"{}")
    launched.executor.says(1, "failed")
    sight = launched.tend(lambda: None, lambda: launched.executor.says(0, "cancelled"))
    assert launched.statuses(sight)[1] == ("failed", 0)
    (line,) = launched.messages
    assert names_all(line, *FAILED, "bucket")


def test_one_is_not_started_again_in_a_launch_that_somebody_cancels(launched):
    def cancelled_elsewhere():
        launched.executor.says(1, "failed")
        cancel(launched.file, PaidExecutor(launched.executor.folder), pause_s=0)

    launched.tend(cancelled_elsewhere)
    assert launched.executor.running == []
    (line,) = launched.messages
    assert names_all(line, *FAILED, "launch")


def test_a_service_that_fails_for_a_while_is_asked_again(launched):
    launched.executor.trouble["silent"] = [0, 1]

    def is_back():
        launched.executor.trouble.clear()
        for rank in (0, 1):
            launched.executor.says(rank, "succeeded")

    first = read_launch_status(launched.store, launched.file, launched.executor)
    assert [each.status for each in first.replicas] == ["unknown", "unknown"]
    assert launched.statuses(launched.tend(lambda: None, lambda: None, is_back)) == [("succeeded", 0)] * 2


def test_a_service_that_stays_away_is_an_error_that_says_that_replicas_may_run(launched):
    launched.executor.trouble["silent"] = [1]
    launched.executor.patience_s = 0.05
    with refusal(RunError, what="rank 1", got="ServiceDown: 500 at a question", fix=f"Look for {ID} at paid.example"):
        launched.tend()


def test_a_start_whose_answer_was_lost_is_found_and_not_paid_for_twice(launched):
    launched.executor.says(1, "failed")
    launched.executor.trouble["unanswered"] = 1

    def all_end():
        launched.executor.says(0, "succeeded")
        launched.executor.says(1, "succeeded", 1)

    sight = launched.tend(lambda: None, lambda: None, all_end)
    assert launched.statuses(sight) == [("succeeded", 0), ("succeeded", 1)]
    assert names_all(launched.messages[0], "rank 1", "ServiceDown: 504 after the start")
    handle = launched.file.read().latest_starts[1].handle
    assert handle is not None
    assert [handle.metadata["job"]] == names(1, attempt=1)
    assert not (launched.executor.folder / f"{ID}.1.2").exists()


def test_a_start_that_the_service_does_not_list_is_believed_lost_after_a_while(launched, monkeypatch):
    launched.executor.says(1, "failed")
    launched.executor.trouble["refused"] = 1

    def may_start():
        assert read_launch_status(launched.store, launched.file, launched.executor).replicas[1].status == "unknown"
        monkeypatch.setattr(launched.executor, "listed_s", 0.0)
        launched.executor.trouble.clear()

    def all_end():
        launched.executor.says(0, "succeeded")
        launched.executor.says(1, "succeeded", 2)

    sight = launched.tend(lambda: None, may_start, lambda: None, all_end)
    assert launched.statuses(sight) == [("succeeded", 0), ("succeeded", 2)]
    assert any(names_all(line, "rank 1", r"2\D+3") for line in launched.messages)


def test_a_service_that_never_lists_a_start_is_an_error_that_says_that_it_may_run(launched):
    launched.executor.says(1, "failed")
    launched.executor.trouble |= {"unanswered": 1, "unlisting": [1]}
    launched.executor.patience_s = 0.05
    with refusal(RunError, what="rank 1", got="ServiceDown: 500 at a list", fix=f"Look for {ID} at paid.example"):
        launched.tend()


def test_one_that_comes_after_its_rank_was_started_again_is_ended(launched, monkeypatch):
    monkeypatch.setattr(supervision, "_LATE_CHECK_S", 0.0)
    monkeypatch.setattr(launched.executor, "listed_s", 0.0)
    launched.executor.says(1, "failed")
    launched.executor.trouble["refused"] = 1

    def comes_late():
        assert launched.executor.running == sorted([*names(0), *names(1, attempt=2)])
        launched.executor.says(1, "running", 1)
        launched.executor.trouble["unending"] = [1]

    def can_be_ended():
        assert launched.executor.running == sorted([*names(0), *names(1, attempt=1), *names(1, attempt=2)])
        launched.executor.trouble.clear()

    def all_end():
        assert launched.executor.running == sorted([*names(0), *names(1, attempt=2)])
        launched.executor.says(0, "succeeded")
        launched.executor.says(1, "succeeded", 2)

    def may_start():
        launched.executor.trouble.clear()

    steps = [lambda: None, may_start, comes_late, lambda: None, can_be_ended, lambda: None, all_end]
    assert launched.statuses(launched.tend(*steps)) == [("succeeded", 0), ("succeeded", 2)]
    about_it = [line for line in launched.messages if names_all(line, "rank 1", "start 1")]
    *cannot_be_ended, ended = [names_all(line, "ServiceDown: 500 at the end") for line in about_it]
    assert any(cannot_be_ended)
    assert not ended


@pytest.mark.parametrize(
    "about",
    [{"world_size": 10**12}, {"world_size": "2"}, {"world_size": True}, {}],
    ids=["huge", "text", "true", "none"],
)
def test_rounds_that_somebody_spoilt_are_said_and_cost_nothing(launched, about):
    key = Layout(0).about(0)
    launched.store.put(key, pack("about", Layout(0).address(key), {"run": "0" * 32, **about}))
    tracemalloc.start()
    sight = read_launch_status(launched.store, launched.file, launched.executor)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sight.progress is None
    assert sight.trouble is not None
    assert names_all(sight.trouble, "rounds", "bucket")
    assert peak < 50e6
    assert [each.status for each in sight.replicas] == ["running", "running"]
    cancel(launched.file, launched.executor, pause_s=0)
    assert launched.executor.running == []


def test_a_bucket_that_cannot_be_read_starts_nothing_and_ends_no_watch(launched):
    launched.store.put(Layout(0).about(0), b"\x1b[2J no record")
    launched.store.put("launch/000000/launch.json", json.dumps({"number": 0, "id": "\x1b[2J"}).encode())
    for rank in (0, 1):
        launched.executor.says(rank, "failed")
    launched.executor.patience_s = 0.2
    sight = launched.tend()
    assert launched.looks > 2  # it may be over soon
    assert launched.statuses(sight) == [("failed", 0)] * 2
    assert sight.trouble is not None
    assert "\x1b" not in "".join([sight.trouble, *launched.messages])
    assert len(launched.messages) == 2


def test_what_rounds_say_is_shown_within_bounds_and_without_markup():
    notice = LaunchNotice(number=0, id=ID, executor="local", replicas=40, commits=4, started=0.0)
    last = RoundSummary(0, (*range(30), 10**9, "\x1b[2J"), (), 1e300, 2**63)  # pyright: ignore[reportArgumentType]
    progress = RunProgress(0, 40, 1, (), (), (), None, 0, (last,))
    line = _round_line(LaunchStatus(notice, [], progress))
    assert re.search(r"^round 1\D+4\b.*\brank 0, 1, 2,.*\b15\D+14\b.* 277777\.8 h", line)
    assert "\x1b" not in line
    hostile = LaunchStatus(notice, [ReplicaStatus(0, "unknown", 0, "", "[bold]\x1b[2J")], None, "[red]\x1b[2Jspoilt")
    caption = str(_launch_table(hostile).caption)
    assert caption == r"\[red]" + "\ufffd[2Jspoilt"
