"""Replicas on a Ray cluster of two CPUs, which is started for them."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from composer_replication.diloco.serverless.executor import Executor, ReplicaHandle
from composer_replication.diloco.serverless.ray import RayExecutor
from executors.conformance import ENV, ExecutorConformance
from executors.rented_launches import check_that_a_killed_machine_is_replaced_and_heals

pytestmark = [pytest.mark.diloco, pytest.mark.filterwarnings("ignore::ResourceWarning:ray")]


class RayHarness:
    has_results = False

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    def make(self, *, secrets: tuple[str, ...] = (), env: Mapping[str, str] = ENV) -> RayExecutor:
        return RayExecutor(secrets=secrets, env=env, num_cpus=0.1)

    def kill(self, executor: Executor, handle: ReplicaHandle) -> None:
        assert isinstance(executor, RayExecutor)
        os.kill(self._ray.get(executor._actor(handle).process_id.remote()), signal.SIGKILL)

    def seen_by_anybody(self) -> str:
        return str(self._ray.nodes())


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="make test-diloco")
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, namespace="crf-diloco", object_store_memory=10**8
    )
    yield ray
    ray.shutdown()


@pytest.fixture
def harness(cluster) -> RayHarness:
    return RayHarness(cluster)


class TestRay(ExecutorConformance):
    """The suite."""


def test_one_that_waits_for_a_node_is_pending_and_can_be_cancelled(cluster):
    executor = RayExecutor(num_cpus=64, env=ENV)
    (handle,) = executor.launch_replicas(1, "executors.replica_bodies", {})
    assert executor.poll(handle) == "pending"
    executor.cancel(handle)
    assert executor.poll(handle) == "cancelled"


def test_of_four_over_s3_one_whose_actor_is_gone_is_started_again_and_heals(harness, tmp_path, capsys, monkeypatch):
    # Without `detached` the actors are gone when `launch` has ended, and `collect` has nobody to ask.
    where = ["--executor", "ray", "--option", "num_cpus=0.1", "--option", "detached=true"]
    said = check_that_a_killed_machine_is_replaced_and_heals(harness, where, tmp_path, capsys, monkeypatch)
    assert re.search(r"\brank 1\b.*\(1 ", said)
