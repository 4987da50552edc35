"""Replicas as Jobs of the Hub: huggingface_hub's own client against a server on loopback."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from composer_replication.diloco.serverless.executor import Executor, ReplicaHandle
from composer_replication.diloco.serverless.hf_jobs import HFJobsExecutor
from executors.conformance import ENV, ExecutorConformance
from executors.hf_server import TOKEN, HubServer

pytestmark = pytest.mark.diloco


class HubHarness:
    has_results = False

    def __init__(self, server: HubServer) -> None:
        self.server = server

    def make(self, *, secrets: tuple[str, ...] = (), env: Mapping[str, str] = ENV) -> HFJobsExecutor:
        executor = HFJobsExecutor(secrets=secrets, env=env, packages=(), endpoint=self.server.url, token=TOKEN)
        executor.poll_interval_s = 0.2
        return executor

    def kill(self, executor: Executor, handle: ReplicaHandle) -> None:
        self.server.jobs.containers[handle.metadata["job"]].kill()

    def seen_by_anybody(self) -> str:
        return str([self.server.jobs.shown(name) for name in self.server.jobs.requests])


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        server = HubServer()
        yield server
        server.close()


@pytest.fixture
def harness(server: HubServer) -> HubHarness:
    return HubHarness(server)


class TestHFJobs(ExecutorConformance):
    """The suite."""


def test_the_job_has_its_hardware_its_labels_and_its_time(harness, server):
    executor = harness.make()
    handles = executor.launch_replicas(1, "executors.replica_bodies", {}, gpu="h100x1", timeout=60)
    request = server.jobs.requests[handles[0].metadata["job"]]
    executor.collect(handles)
    assert (request["flavor"], request["timeoutSeconds"], request["labels"]["crf-rank"]) == ("h100x1", 60, "0")
    assert request["dockerImage"] == "python:3.11"


def test_packages_are_installed_before_the_replica_starts_and_no_shell_reads_them(server):
    executor = HFJobsExecutor(packages=("a; touch b",), endpoint=server.url, token=TOKEN)
    handles = executor.launch_replicas(1, "executors.replica_bodies", {})
    assert executor.collect(handles)[0]["status"] == "failed"  # pip refuses that name
    command = server.jobs.requests[handles[0].metadata["job"]]["command"]
    assert command[0:2] == ["sh", "-c"]
    assert command[3:] == ["sh", "a; touch b"]
    assert 'install --quiet "$@" && exec python -m' in command[2]


def test_another_process_asks_by_the_handle_alone(harness):
    handles = harness.make().launch_replicas(1, "executors.replica_bodies", {})
    assert harness.make().collect(handles)[0]["status"] == "succeeded"
