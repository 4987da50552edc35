"""What every executor does, in tests that each of them runs: a subclass gives the harness."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest

from composer_replication.diloco.serverless.executor import Executor, ReplicaHandle, ServerlessExecutor
from composer_replication.diloco.serverless.replica_process import MAX_LINE_CHARACTERS
from composer_replication.errors import InputError
from refusals import refusal

BODIES = "executors.replica_bodies"
TESTS = str(Path(__file__).resolve().parents[1])
ENV = {"PYTHONPATH": os.pathsep.join([TESTS, str(Path(TESTS).parent / "src")])}  # of this checkout
LONGEST_S = 60.0


class Harness(Protocol):
    """One executor and its service."""

    has_results: bool

    def make(self, *, secrets: tuple[str, ...] = (), env: Mapping[str, str] = ENV) -> Executor: ...

    def kill(self, executor: Executor, handle: ReplicaHandle) -> None:
        """What a spot machine that goes away does to a replica."""
        ...

    def seen_by_anybody(self) -> str:
        """What the service shows of its jobs besides logs."""
        ...


def wait_until(is_so: Callable[[], bool], what: str, seconds: float = LONGEST_S) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def pids_in(folder: Path, rank: int) -> list[int]:
    path = folder / f"pids-{rank}"
    wait_until(path.exists, f"the processes of rank {rank}")
    return [int(line) for line in path.read_text().split()]


def command_lines() -> str:
    texts = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            texts.append(path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
        except OSError:
            continue
    return "\n".join(texts)


class ExecutorConformance:
    """The suite. `harness` is a fixture of the subclass."""

    @pytest.fixture
    def executor(self, harness: Harness) -> Executor:
        return harness.make()

    def launch(self, executor: Executor, body: str, *, n: int = 1, **args: Any) -> list[ReplicaHandle]:
        return executor.launch_replicas(n, f"{BODIES}.{body}", args, timeout=LONGEST_S)

    def ended(self, executor: Executor, body: str, **args: Any) -> dict[str, Any]:
        (outcome,) = executor.collect(self.launch(executor, body, **args), timeout=LONGEST_S)
        return outcome

    def test_it_is_one_of_the_protocol(self, executor: Executor):
        assert isinstance(executor, ServerlessExecutor)

    def test_replicas_come_in_rank_order_and_each_has_its_rank(self, executor: Executor, harness: Harness):
        handles = self.launch(executor, "greet", n=2, word="hello")
        outcomes = executor.collect(handles, timeout=LONGEST_S)
        assert [handle.rank for handle in handles] == [0, 1]
        assert {handle.backend_name for handle in handles} == {executor.backend_name}
        assert [(each["rank"], each["status"], each["exit_code"], each["error"]) for each in outcomes] == [
            (0, "succeeded", 0, None),
            (1, "succeeded", 0, None),
        ]
        for rank, handle in enumerate(handles):
            assert f"rank {rank} says hello" in executor.stream_logs(handle)
            assert json.loads(json.dumps(handle.metadata)) == handle.metadata
        if harness.has_results:
            assert [each["result"] for each in outcomes] == [{"rank": rank, "word": "hello"} for rank in (0, 1)]

    def test_a_module_is_its_main_and_the_rank_may_have_another_variable(self, executor: Executor):
        first = executor.launch_replicas(1, BODIES, {})
        second = executor.launch_replicas(1, f"{BODIES}.greet_by", {"word": "x", "rank_env": "OTHER_RANK"})
        assert [each["status"] for each in executor.collect([*first, *second], timeout=LONGEST_S)] == ["succeeded"] * 2
        assert "rank 0 says main" in executor.stream_logs(first[0])

    def test_one_that_raises_has_failed_and_says_with_what(self, executor: Executor):
        outcome = self.ended(executor, "raises", words="the words of it")
        assert (outcome["status"], outcome["exit_code"]) == ("failed", 1)
        assert "ValueError: the words of it" in outcome["error"]

    def test_an_exit_status_is_told(self, executor: Executor):
        outcome = self.ended(executor, "exits", status=7)
        assert (outcome["status"], outcome["exit_code"]) == ("failed", 7)
        assert re.search(r"\b7\b", outcome["error"])

    def test_a_missing_module_is_named(self, executor: Executor):
        (outcome,) = executor.collect(executor.launch_replicas(1, "nowhere.to_be.found", {}), timeout=LONGEST_S)
        assert outcome["status"] == "failed"
        assert "nowhere" in outcome["error"]

    def test_a_replica_ended_by_a_signal_is_told_from_one_that_failed(self, executor: Executor):
        outcome = self.ended(executor, "kills_itself")
        assert outcome["status"] == "failed"
        assert outcome["exit_code"] in (-9, 137)
        assert "SIGKILL" in outcome["error"]

    def test_cancel_ends_it_with_its_children_and_may_be_said_twice(self, executor: Executor, tmp_path: Path):
        handle, other = self.launch(executor, "waits", n=2, folder=str(tmp_path))
        pids, others = pids_in(tmp_path, 0), pids_in(tmp_path, 1)
        assert executor.poll(handle) == "running"
        executor.cancel(handle)
        executor.cancel(handle)
        wait_until(lambda: executor.poll(handle) == "cancelled", "cancelled")
        wait_until(lambda: not any(map(is_alive, pids)), "its processes gone")
        assert all(map(is_alive, others))
        assert executor.collect([handle])[0]["status"] == "cancelled"
        executor.cancel(other)
        wait_until(lambda: not any(map(is_alive, others)), "the other's processes gone")

    def test_cancel_leaves_one_that_has_ended_as_it_is(self, executor: Executor):
        handles = self.launch(executor, "greet", word="x")
        executor.collect(handles, timeout=LONGEST_S)
        executor.cancel(handles[0])
        assert executor.poll(handles[0]) == "succeeded"

    def test_collect_waits_no_longer_than_it_was_told(self, executor: Executor, tmp_path: Path):
        handles = self.launch(executor, "waits", folder=str(tmp_path))
        pids_in(tmp_path, 0)
        started = time.monotonic()
        (outcome,) = executor.collect(handles, timeout=0.3)
        assert time.monotonic() - started < 10
        assert (outcome["status"], outcome["exit_code"]) == ("running", None)
        assert "running" in outcome["error"]
        executor.cancel(handles[0])

    def test_logs_are_bounded_in_lines_and_in_their_length(self, executor: Executor):
        handles = self.launch(executor, "talks", lines=300)
        assert executor.collect(handles, timeout=LONGEST_S)[0]["status"] == "succeeded"
        wait_until(lambda: "no newline" in executor.stream_logs(handles[0]), "the whole log")
        last = executor.stream_logs(handles[0], n_lines=3).splitlines()
        everything = executor.stream_logs(handles[0], n_lines=1_000)
        assert last == ["line 298", "line 299", "no newline"]
        assert executor.stream_logs(handles[0], n_lines=0) == ""
        assert "ä漢字🙂" in everything
        assert "\ufffd\ufffd no UTF-8" in everything
        assert "a colour" in everything
        assert not {"\x00", "\x07", "\x1b", "\x9b"} & {*everything}  # nothing that a terminal acts upon
        assert re.search(rf"x \[[^\]]*\b{MAX_LINE_CHARACTERS:,}\b", everything)  # where a line was cut
        assert len(everything) < 50_000
        with refusal(InputError, what="n_lines", got="-1"):
            executor.stream_logs(handles[0], n_lines=-1)

    def test_a_killed_rank_is_relaunched(self, executor: Executor, harness: Harness, tmp_path: Path):
        handles = self.launch(executor, "dies_at_first", n=2, folder=str(tmp_path))
        assert [each["status"] for each in executor.collect(handles, timeout=LONGEST_S)] == ["failed", "failed"]
        again = executor.relaunch(handles[1])
        assert (again.rank, again.metadata["attempt"]) == (1, 1)
        (outcome,) = executor.collect([again], timeout=LONGEST_S)
        assert outcome["status"] == "succeeded"
        assert executor.poll(handles[1]) == "failed"

    def test_one_that_has_finished_is_not_relaunched(self, executor: Executor):
        handles = self.launch(executor, "greet", word="x")
        executor.collect(handles, timeout=LONGEST_S)
        with refusal(InputError, what="rank 0", got="succeeded"):
            executor.relaunch(handles[0])

    def test_a_start_whose_handle_was_lost_is_found_by_its_name_and_ended(
        self, executor: Executor, harness: Harness, tmp_path: Path
    ):
        job = executor.job(f"{BODIES}.waits", {"folder": str(tmp_path)}, gpu=None, timeout_s=LONGEST_S)
        assert executor.find(job.launch, 1, 0) == []
        handle = executor.start(replace(job, rank=1))
        pids = pids_in(tmp_path, 1)
        another = harness.make()
        assert another.find(job.launch, 1, 1) == another.find(job.launch, 0, 0) == []
        (lost,) = another.find(job.launch, 1, 0)
        assert (lost.rank, lost.attempt, another.poll(lost)) == (1, 0, "running")
        assert another.end_start(job.launch, 1, 0) is None
        wait_until(lambda: not any(map(is_alive, pids)), "its processes gone")
        assert executor.collect([handle], timeout=LONGEST_S)[0]["status"] == "cancelled"

    def test_where_one_cannot_be_started_the_others_are_ended_also_one_whose_answer_was_lost(
        self, executor: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        start = executor._start

        def loses_the_second(job: Any) -> dict[str, Any]:
            metadata = start(job)
            pids_in(tmp_path, job.rank)
            if job.rank == 1:
                raise ConnectionError("the answer was lost")
            return metadata

        monkeypatch.setattr(executor, "_start", loses_the_second)
        with pytest.raises(ConnectionError):
            self.launch(executor, "waits", n=3, folder=str(tmp_path))
        pids = pids_in(tmp_path, 0) + pids_in(tmp_path, 1)
        wait_until(lambda: not any(map(is_alive, pids)), "the processes gone")
        assert not (tmp_path / "pids-2").exists()

    def test_a_machine_that_goes_away_is_a_failure_and_a_running_rank_is_not_relaunched(
        self, executor: Executor, harness: Harness, tmp_path: Path
    ):
        (handle,) = self.launch(executor, "waits", folder=str(tmp_path))
        pids = pids_in(tmp_path, 0)
        with refusal(InputError, what="rank 0", got="running"):
            executor.relaunch(handle)
        harness.kill(executor, handle)
        wait_until(lambda: executor.poll(handle) == "failed", "failed")
        wait_until(lambda: not is_alive(pids[0]), "the replica gone")
        (tmp_path / "pids-0").unlink()
        again = executor.relaunch(handle)
        pids_in(tmp_path, 0)
        executor.cancel(again)

    def test_a_secret_goes_by_name_and_its_value_is_nowhere_to_be_seen(
        self, harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        value = f"hush-{os.urandom(12).hex()}"
        monkeypatch.setenv("CRF_TEST_SECRET", value)
        executor = harness.make(secrets=("CRF_TEST_SECRET",))
        told, kept = self.launch(executor, "tells", secret="CRF_TEST_SECRET"), []
        try:
            kept = self.launch(executor, "keeps", secret="CRF_TEST_SECRET", folder=str(tmp_path))
            wait_until((tmp_path / "has-it").exists, "the secret at the replica")
            seen = command_lines() + harness.seen_by_anybody()
        finally:
            for handle in kept:
                executor.cancel(handle)
        assert (tmp_path / "has-it").read_text() == str(len(value))
        outcomes = executor.collect(told, timeout=LONGEST_S)
        log = executor.stream_logs(told[0])
        assert "token=[CRF_TEST_SECRET]" in log
        assert "401 for [CRF_TEST_SECRET]" in outcomes[0]["error"]
        assert value not in "".join([seen, log, json.dumps(outcomes), repr(told), repr(kept), repr(vars(executor))])

    def test_a_secret_that_is_not_set_is_named_before_anything_starts(self, harness: Harness):
        executor = harness.make(secrets=("CRF_TEST_NOT_SET",))
        with refusal(InputError, what="secrets", got="CRF_TEST_NOT_SET"):
            self.launch(executor, "greet", word="x")

    def test_a_value_where_a_name_belongs_is_refused_and_not_repeated(self, harness: Harness):
        with pytest.raises(InputError) as caught:
            harness.make(secrets=("hf_Abc/123+456",))
        assert "Abc" not in str(caught.value)

    @pytest.mark.parametrize(
        ("n", "entrypoint", "args", "what", "got"),
        [
            (0, BODIES, {}, "n_replicas", "0"),
            (True, BODIES, {}, "n_replicas", "True"),
            (1, "not a name", {}, "entrypoint", "'not a name'"),
            (1, "os; rm -rf", {}, "entrypoint", "'os; rm -rf'"),
            (1, BODIES, {"word": object()}, "entrypoint_args['word']", "object"),
            (1, BODIES, {"word": float("nan")}, "entrypoint_args['word']", "float"),
            (1, BODIES, {"word": "x" * 200_000}, "entrypoint_args", " bytes"),
            (1, BODIES, {"rank_env": "A=B"}, "rank_env", "'A=B'"),
        ],
    )
    def test_a_wrong_launch_is_refused(self, executor: Executor, n, entrypoint, args, what, got):
        with refusal(InputError, what=what, got=got):
            executor.launch_replicas(n, entrypoint, args)

    def test_a_handle_of_another_executor_is_refused(self, executor: Executor):
        with refusal(InputError, what="handle", got="elsewhere", expected=executor.backend_name):
            executor.poll(ReplicaHandle(0, "elsewhere"))
