"""Machines that are paid for are never lost: each start is noted before it is asked for, and all of them are ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paid_service import ID, Denied, PaidExecutor, ServiceDown, launch_file, names

from composer_replication.cli.replicas import launch_status as starting
from composer_replication.cli.replicas.launch_status import (
    _Unended,
    cancel,
    describe_cancellation,
    start_replica,
    start_replicas,
)
from composer_replication.cli.replicas.launches import LaunchFile
from composer_replication.errors import RunError
from refusals import refusal


def test_a_start_is_noted_before_it_is_asked_for_and_its_handle_before_the_next(tmp_path):
    file, noted = launch_file(tmp_path), []

    def on_status(_job):
        content = json.loads(file.path.read_text())
        noted.append([(each["rank"], each["handle"] is not None) for each in content["starts"]])

    start_replicas(file, PaidExecutor(tmp_path / "paid", seen=on_status))
    assert noted == [
        [(0, False)],
        [(0, True), (1, False)],
        [(0, True), (1, True), (2, False)],
    ]
    assert [each.handle is not None for each in file.read().starts] == [True] * 3


@pytest.mark.parametrize("trouble", ["denied", "unanswered"])
def test_a_launch_that_fails_in_the_middle_ends_what_it_has_started_and_says_so(tmp_path, trouble):
    file, executor = launch_file(tmp_path), PaidExecutor(tmp_path / "paid", **{trouble: 1})
    cause = "Denied: 403" if trouble == "denied" else "ServiceDown: 504"
    with refusal(RunError, what="rank 1", got=cause) as caught:
        start_replicas(file, executor)
    assert isinstance(caught.value.__cause__, Denied if trouble == "denied" else ServiceDown)
    assert caught.value.fix
    assert "`crf diloco cancel`" not in caught.value.fix
    assert executor.running == []
    assert executor.cancelled == (names(0) if trouble == "denied" else names(0, 1))
    assert file.read().cancelled is not None


def test_a_start_that_is_not_listed_may_come_and_is_not_said_to_have_ended(tmp_path, monkeypatch):
    file, executor = launch_file(tmp_path), PaidExecutor(tmp_path / "paid", refused=1)
    with refusal(RunError, what="rank 1", got="ServiceDown: 500", fix="rank 1") as caught:
        start_replicas(file, executor)
    assert "`crf diloco cancel`" in caught.value.fix
    assert executor.running == []
    assert [(each.rank, each.attempt) for each in cancel(file, executor, pause_s=0)] == [(1, 0)]
    executor.says(1, "running")  # minutes later
    assert cancel(file, executor, pause_s=0) == []
    assert executor.cancelled == names(0, 1)


def test_what_a_service_does_not_list_long_after_the_asking_is_not_there(tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])

    def slow(_job):
        clock[0] += 200.0

    file, executor = launch_file(tmp_path, replicas=1), PaidExecutor(tmp_path / "paid", refused=0, seen=slow)
    with refusal(RunError, what="rank 0", fix="`crf diloco cancel`"):
        start_replicas(file, executor)
    assert file.read().starts[0].asked_until == 1200.0
    clock[0] = 1399.0  # 61 s would do for a service that is quick to answer
    assert len(cancel(file, executor, pause_s=0)) == 1
    clock[0] = 1401.0
    assert cancel(file, executor, pause_s=0) == []


@pytest.mark.parametrize(("looked", "settled"), [(10.0, 71.0), (5000.0, 5001.0)])
def test_one_whose_asker_was_killed_counts_from_the_first_look(tmp_path, monkeypatch, looked, settled):
    clock = [0.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    file, executor = launch_file(tmp_path, replicas=1), PaidExecutor(tmp_path / "paid")
    file.begin(0, 0)
    clock[0] = looked
    assert len(cancel(file, executor, pause_s=0)) == (looked == 10.0)
    clock[0] = settled
    assert cancel(file, executor, pause_s=0) == []


def test_replicas_without_a_file_that_are_not_listed_are_named_too(tmp_path):
    executor = PaidExecutor(tmp_path / "paid", refused=1)
    with pytest.raises(ServiceDown) as caught:
        executor.launch_replicas(2, "nobody.calls_it", {})
    assert executor.running == []
    (note,) = caught.value.__notes__
    assert note.startswith("rank 1")
    assert "RunError: rank 1" in note


def test_what_cannot_be_ended_is_named_and_the_others_are_ended(tmp_path):
    file = launch_file(tmp_path)
    executor = PaidExecutor(tmp_path / "paid", denied=2, unending=[0])
    with refusal(RunError, what="rank 2", fix="ServiceDown: 500 at the end") as caught:
        start_replicas(file, executor)
    assert "rank 0" in caught.value.fix
    assert f"Look for {ID} at paid.example" in caught.value.fix
    assert executor.running == names(0)
    assert cancel(file, executor, pause_s=0) == [_Unended(0, 0, "ServiceDown: 500 at the end")]
    executor.trouble.clear()
    assert cancel(file, executor, pause_s=0) == []
    assert executor.running == []


def test_ctrl_c_while_it_starts_ends_what_it_has_started(tmp_path):
    file, executor, messages = launch_file(tmp_path), PaidExecutor(tmp_path / "paid", interrupted=1), []
    with pytest.raises(KeyboardInterrupt):
        start_replicas(file, executor, messages.append)
    assert executor.running == []
    (line,) = messages
    assert line.startswith("launch 0, rank 1")


@pytest.mark.parametrize("killed", [0, 2])
def test_kill_9_in_the_middle_leaves_a_file_by_which_all_is_ended(tmp_path, killed):
    file = launch_file(tmp_path)
    helper = Path(__file__).with_name("paid_service.py")
    done = subprocess.run([sys.executable, str(helper), str(tmp_path), str(killed)], env=os.environ)
    assert done.returncode == -signal.SIGKILL
    executor = PaidExecutor(tmp_path / "paid")
    assert executor.running == names(*range(killed + 1))
    assert file.read().latest_starts[killed].handle is None  # the answer is lost, the start is not
    assert cancel(file, executor, pause_s=0) == []
    assert executor.running == []


def test_a_full_disk_keeps_no_machine_running(tmp_path, monkeypatch):
    file, executor = launch_file(tmp_path), PaidExecutor(tmp_path / "paid")

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LaunchFile, "note", full)
    monkeypatch.setattr(LaunchFile, "mark_cancelled", full)
    with pytest.raises(RunError, match="No space left"):
        start_replicas(file, executor)
    assert executor.running == []
    assert executor.cancelled == names(0)


def test_cancel_tries_every_start_also_earlier_ones_and_more_than_once(tmp_path):
    file, executor = launch_file(tmp_path), PaidExecutor(tmp_path / "paid")
    start_replicas(file, executor)
    launch = file.read().launch
    start_replica(file, launch, executor, 1, 1)  # the first one of its rank was thought dead
    tries = []

    class Flaky(PaidExecutor):
        def cancel(self, handle):
            tries.append(handle.metadata["job"])
            if tries.count(handle.metadata["job"]) < 3:
                raise ServiceDown("503")
            super().cancel(handle)

    assert cancel(file, Flaky(tmp_path / "paid"), pause_s=0) == []
    assert executor.running == []
    assert sorted(tries) == sorted(3 * [*names(0, 1, 2), *names(1, attempt=1)])


def test_nothing_is_started_after_a_cancel_and_what_was_being_started_is_ended(tmp_path):
    file, executor = launch_file(tmp_path), PaidExecutor(tmp_path / "paid")
    start_replicas(file, executor)
    cancel(file, executor, pause_s=0)
    with refusal(RunError, what="rank 0", got="launch"):
        start_replica(file, file.read().launch, executor, 0, 1)
    assert executor.running == []
    another = launch_file(tmp_path / "another")
    slow = PaidExecutor(tmp_path / "paid-2", seen=lambda job: another.mark_cancelled() if job.rank == 1 else None)
    with refusal(RunError, what="launch 0, rank 1", got="rank 1"):
        start_replicas(another, slow)
    assert slow.running == []


def test_two_who_look_after_a_launch_do_not_start_one_rank_twice(tmp_path):
    file, executor = launch_file(tmp_path), PaidExecutor(tmp_path / "paid")
    start_replicas(file, executor)
    start_replica(file, file.read().launch, executor, 0, 1)
    with refusal(RunError, what="rank 0", got="1", fix="process"):
        start_replica(file, file.read().launch, executor, 0, 1)
    assert executor.running == sorted([*names(0, 1, 2), *names(0, attempt=1)])


def test_one_that_another_process_is_starting_is_not_said_to_have_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(starting, "_MAX_WAIT_FOR_STARTER_S", 0.1)
    file, executor = launch_file(tmp_path), PaidExecutor(tmp_path / "paid")
    file.begin(0, 0)
    with file.starting():
        unended = cancel(file, executor, pause_s=0.01)
    assert [(each.rank, each.attempt) for each in unended] == [(0, 0)]
    assert "process" in unended[0].why
    told = describe_cancellation(unended, file.read().launch, executor)
    assert "rank 0" in told
    assert unended[0].why in told
