"""Replicas as processes of this machine: the suite, and what is theirs alone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from composer_replication.diloco.serverless import LocalProcessExecutor
from composer_replication.diloco.serverless import local_process as processes
from composer_replication.diloco.serverless.executor import Executor, ReplicaHandle, _describe_exit
from composer_replication.errors import InputError, RunError
from executors import replica_bodies
from executors.conformance import ENV, TESTS, ExecutorConformance, is_alive, pids_in, wait_until
from refusals import refusal


class LocalHarness:
    has_results = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self, *, secrets: tuple[str, ...] = (), env: Mapping[str, str] = ENV) -> LocalProcessExecutor:
        return LocalProcessExecutor(secrets=secrets, env=env, folder=self.folder)

    def kill(self, executor: Executor, handle: ReplicaHandle) -> None:
        os.kill(handle.metadata["pid"], signal.SIGKILL)

    def seen_by_anybody(self) -> str:
        return "".join(path.read_text() for path in self.folder.rglob("*") if path.is_file())


class TestLocalProcess(ExecutorConformance):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> LocalHarness:
        return LocalHarness(tmp_path / "replicas")

    def test_a_function_is_called_by_its_name(self, executor: Executor):
        handles = executor.launch_replicas(1, replica_bodies.greet, {"word": "by name"})
        assert executor.collect(handles)[0]["result"] == {"rank": 0, "word": "by name"}
        assert {"pid", "start_ts"} <= handles[0].metadata.keys()

    @pytest.mark.parametrize("function", [lambda: None, print, object()])
    def test_a_function_without_a_name_of_its_own_is_refused(self, executor: Executor, function):
        with refusal(InputError, what="entrypoint", got=repr(function)):
            executor.launch_replicas(1, function, {})

    def test_a_gpu_is_warned_about(self, executor: Executor):
        with pytest.warns(UserWarning, match="CUDA_VISIBLE_DEVICES"):
            handles = executor.launch_replicas(1, replica_bodies.greet, {"word": "x"}, gpu="A100")
        executor.collect(handles)

    @pytest.mark.parametrize(
        ("entrypoint", "args"),
        [
            ("nowhere.to_be.found", {}),
            ("executors.replica_bodies.nobody", {}),
            ("composer_replication.optional.require", {"module": "no_such_package", "extra": "train"}),
            ("composer_replication.diloco.store.open_store", {"uri": "s3:/x"}),
        ],
        ids=["module", "function", "extra", "argument"],
    )
    def test_what_another_start_would_repeat_has_an_exit_status_of_its_own(self, executor: Executor, entrypoint, args):
        (outcome,) = executor.collect(executor.launch_replicas(1, entrypoint, args))
        assert (outcome["status"], outcome["exit_code"]) == ("failed", 78)
        assert re.search(r"\b78\b", outcome["error"])

    def test_the_time_it_may_take_is_kept(self, executor: Executor, tmp_path: Path):
        handles = executor.launch_replicas(1, replica_bodies.waits, {"folder": str(tmp_path)}, timeout=0.5)
        (outcome,) = executor.collect(handles)
        assert (outcome["status"], outcome["exit_code"]) == ("failed", 124)
        assert outcome["error"].startswith(_describe_exit(124))
        assert not any(map(is_alive, pids_in(tmp_path, 0)))

    def test_a_value_that_is_no_json_is_said_to_be_lost(self, executor: Executor):
        handles = executor.launch_replicas(1, "pathlib.Path", {})
        (outcome,) = executor.collect(handles)
        assert (outcome["status"], outcome["result"]) == ("succeeded", None)
        assert "PosixPath" in executor.stream_logs(handles[0])

    def test_nothing_is_left_when_the_launcher_is_killed(self, tmp_path: Path):
        with start_launcher(tmp_path, tied=True) as launcher:
            pids = pids_in(tmp_path, 0) + pids_in(tmp_path, 1)
            launcher.kill()
        wait_until(lambda: not any(map(is_alive, pids)), "the replicas gone with their launcher")

    def test_replicas_that_are_not_tied_are_found_again_by_their_handles(self, tmp_path: Path):
        launcher = start_launcher(tmp_path, tied=False)
        pids = pids_in(tmp_path, 0) + pids_in(tmp_path, 1)
        handles = [ReplicaHandle(**each) for each in json.loads(launcher.communicate()[0])]
        assert launcher.returncode == 0
        another = LocalProcessExecutor()
        assert [another.poll(handle) for handle in handles] == ["running", "running"]
        for handle in handles:
            another.cancel(handle)
        assert [each["status"] for each in another.collect(handles)] == ["cancelled", "cancelled"]
        wait_until(lambda: not any(map(is_alive, pids)), "the replicas gone")


def stranger(argument: str = "x") -> subprocess.Popen[bytes]:
    """A process that was not launched here."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", argument])


class TestIdentity:
    """A signal goes to the process that was launched and to none that has its number."""

    @pytest.fixture
    def launched(self, tmp_path: Path) -> Iterator[tuple[ReplicaHandle, list[int]]]:
        owner = LocalProcessExecutor(folder=tmp_path / "replicas", env=ENV, tied=False)
        (handle,) = owner.launch_replicas(1, replica_bodies.waits, {"folder": str(tmp_path)}, timeout=60)
        yield handle, pids_in(tmp_path, 0)
        owner.cancel(handle)

    @pytest.mark.parametrize("change", ["pid", "began", "name", "pid of everybody", "no proof"])
    def test_one_that_does_not_prove_to_be_it_is_refused_by_name(self, launched, change):
        handle, pids = launched
        other = stranger(handle.metadata["name"])
        try:
            wrong = {
                "pid": {"pid": other.pid},  # it has the name, and began at another time
                "began": {"began": "another boot 1"},
                "name": {"name": "somebody.0.0"},
                "pid of everybody": {"pid": -1},
                "no proof": {"began": "", "name": ""},
            }[change]
            forged = ReplicaHandle(0, "local_process", {**handle.metadata, **wrong})
            with refusal(RunError, what="rank 0", got=str(forged.metadata["pid"]), fix="`pgrep -f "):
                LocalProcessExecutor().cancel(forged)
            assert other.poll() is None
            assert all(map(is_alive, pids))
            assert LocalProcessExecutor().poll(handle) == "running"  # nor is it said to be cancelled
        finally:
            other.kill()
            other.wait()

    def test_a_number_that_was_given_out_again_is_another_process(self, tmp_path: Path):
        """After the replica has ended its number is a stranger's: nothing is sent, and it has failed."""
        owner = LocalProcessExecutor(folder=tmp_path / "replicas", env=ENV)
        (handle,) = owner.launch_replicas(1, replica_bodies.exits, {"status": 3})
        owner.collect([handle])
        other = stranger()
        try:
            again = ReplicaHandle(0, "local_process", {**handle.metadata, "pid": other.pid})
            LocalProcessExecutor().cancel(again)
            assert LocalProcessExecutor().poll(again) == "failed"
            assert other.poll() is None
        finally:
            other.kill()
            other.wait()

    def test_one_is_alive_also_where_there_are_no_locks(self, launched, monkeypatch):
        handle, _ = launched
        monkeypatch.setattr("composer_replication.diloco.serverless.local_process.try_lock", lambda _descriptor: True)
        assert LocalProcessExecutor().poll(handle) == "running"

    def test_one_of_another_machine_is_neither_asked_nor_ended_here(self, launched):
        handle, pids = launched
        elsewhere = ReplicaHandle(0, "local_process", {**handle.metadata, "host": "elsewhere"})
        executor = LocalProcessExecutor()
        assert not executor.reaches(elsewhere)
        for ask in (executor.poll, executor.cancel):
            with refusal(RunError, what="rank 0", got="elsewhere", expected=handle.metadata["host"]):
                ask(elsewhere)
        assert all(map(is_alive, pids))

    def test_a_process_is_looked_up_the_same_way_by_ps(self, launched):
        handle, _ = launched
        by_proc = processes._look_up(handle.metadata["pid"])
        by_ps = processes._from_ps(handle.metadata["pid"])
        assert by_proc is not None
        assert by_ps is not None
        assert (by_ps.parent, by_ps.arguments) == (by_proc.parent, by_proc.arguments)
        assert by_ps == processes._from_ps(handle.metadata["pid"])
        assert processes._from_ps(2**22 + 1) is None

    @pytest.mark.parametrize(("is_program", "expected"), [(True, ("python", "-m", "x")), (False, ())])
    def test_a_program_in_the_midst_of_its_start_is_looked_at_again(self, tmp_path, monkeypatch, is_program, expected):
        own = tmp_path / "7"
        own.mkdir()
        (own / "stat").write_bytes(Path(f"/proc/{os.getpid()}/stat").read_bytes())
        (own / "cmdline").touch()
        if is_program:  # threads of the kernel have none, and are not waited for
            (own / "exe").symlink_to(sys.executable)
        monkeypatch.setattr(processes, "_PROC", tmp_path)
        monkeypatch.setattr(processes.time, "sleep", lambda _: (own / "cmdline").write_bytes(b"python\0-m\0x\0"))
        known = processes._from_proc(7)
        assert known is not None
        assert known.arguments == expected

    def test_a_signal_is_not_sent_to_another_process_than_was_looked_at(self):
        other = stranger()
        try:
            known = processes._look_up(other.pid)
            assert known is not None
            assert not processes._send_signal(known._replace(began="earlier"), signal.SIGKILL)
            assert other.poll() is None
            assert processes._send_signal(known, signal.SIGKILL)
        finally:
            other.kill()
            other.wait()
        assert not processes._send_signal(known, signal.SIGKILL)  # it is gone


def start_launcher(folder: Path, *, tied: bool) -> subprocess.Popen[str]:
    code = f"""
import json, dataclasses, os, time
from composer_replication.diloco.serverless import LocalProcessExecutor
executor = LocalProcessExecutor(folder={str(folder / "replicas")!r}, tied={tied})
handles = executor.launch_replicas(2, "executors.replica_bodies.waits", {{"folder": {str(folder)!r}}}, timeout=60)
print(json.dumps([dataclasses.asdict(each) for each in handles]), flush=True)
time.sleep(60 if {tied} else 0)
os._exit(0)
"""
    environment = {**os.environ, "PYTHONPATH": TESTS}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
