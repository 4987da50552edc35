"""Replicas as processes of this machine: the suite, and what is theirs alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from composer_replication.diloco.serverless import LocalProcessExecutor
from composer_replication.diloco.serverless.executor import Executor, ReplicaHandle
from composer_replication.errors import InputError
from executors import replica_bodies
from executors.conformance import ENV, TESTS, ExecutorConformance, is_alive, pids_in, wait_until


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
        with pytest.raises(InputError, match="top of a module"):
            executor.launch_replicas(1, function, {})

    def test_a_gpu_is_warned_about(self, executor: Executor):
        with pytest.warns(UserWarning, match="CUDA_VISIBLE_DEVICES"):
            handles = executor.launch_replicas(1, replica_bodies.greet, {"word": "x"}, gpu="A100")
        executor.collect(handles)

    def test_the_time_it_may_take_is_kept(self, executor: Executor, tmp_path: Path):
        handles = executor.launch_replicas(1, replica_bodies.waits, {"folder": str(tmp_path)}, timeout=0.5)
        (outcome,) = executor.collect(handles)
        assert (outcome["status"], outcome["exit_code"]) == ("failed", 124)
        assert "out of time" in outcome["error"]
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
