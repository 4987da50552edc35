"""Replicas on Modal: its own client against a server on loopback that speaks its protocol."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

import pytest

from composer_replication.diloco.serverless.executor import Executor, ReplicaHandle
from composer_replication.diloco.serverless.modal import ModalExecutor
from composer_replication.errors import InputError
from executors.conformance import ENV, ExecutorConformance
from executors.rented_launches import check_that_a_killed_machine_is_replaced_and_heals

pytestmark = pytest.mark.diloco


class ModalHarness:
    has_results = False

    def __init__(self, service) -> None:
        self.service = service

    def make(self, *, secrets: tuple[str, ...] = (), env: Mapping[str, str] = ENV) -> ModalExecutor:
        executor = ModalExecutor(secrets=secrets, env=env)
        executor.poll_interval_s = 0.2
        return executor

    def kill(self, executor: Executor, handle: ReplicaHandle) -> None:
        self.service.containers[handle.metadata["sandbox"]].kill()

    def seen_by_anybody(self) -> str:
        """What a dashboard shows; secrets and variables are not among it, nor are they in an image."""
        return f"{self.service.definitions}{self.service.tags}{self.service.images}"


@pytest.fixture(scope="module")
def service() -> Iterator[object]:
    modal = pytest.importorskip("modal", reason="make test-diloco")
    from executors.modal_server import ModalServer

    server = ModalServer()
    account = {"MODAL_SERVER_URL": server.url, "MODAL_TOKEN_ID": "ak-loopback", "MODAL_TOKEN_SECRET": "as-loopback"}
    before = {name: os.environ.get(name) for name in account}
    os.environ.update(account)
    yield server.service
    modal.Client.from_env()._close()
    server.close()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture
def harness(service) -> ModalHarness:
    return ModalHarness(service)


class TestModal(ExecutorConformance):
    """The suite."""


def test_the_image_has_the_package_and_the_sandbox_its_gpu(harness, service):
    executor = ModalExecutor(gpu="H100", env=ENV, modal_secrets=("known",))
    handles = executor.launch_replicas(1, "executors.replica_bodies", {}, timeout=60.5)
    executor.collect(handles)
    definition = service.definitions[handles[0].metadata["sandbox"]]
    commands = " ".join(service.images[definition.image_id].dockerfile_commands)
    assert "pip install 'composer-replication[diloco,serverless,train]'" in commands
    assert definition.resources.gpu_config.gpu_type == "H100"
    assert definition.timeout_secs == 61
    assert "st-known" in definition.secret_ids
    assert service.tags[handles[0].metadata["sandbox"]]["crf-rank"] == "0"


def test_a_registry_s_image_is_taken_as_it_is(harness, service):
    executor = ModalExecutor("ghcr.io/somebody/trainer:1", env=ENV)
    handles = executor.launch_replicas(1, "executors.replica_bodies", {})
    executor.collect(handles)
    image = service.images[service.definitions[handles[0].metadata["sandbox"]].image_id]
    assert image.dockerfile_commands[0] == "FROM ghcr.io/somebody/trainer:1"


def test_another_process_asks_by_the_handle_alone(harness):
    handles = harness.make().launch_replicas(1, "executors.replica_bodies", {})
    assert harness.make().collect(handles)[0]["status"] == "succeeded"


def test_a_time_that_no_sandbox_has_is_refused(harness):
    with pytest.raises(InputError, match="86400"):
        harness.make().launch_replicas(1, "executors.replica_bodies", {}, timeout=90_000)


def test_of_four_over_s3_one_whose_sandbox_is_gone_is_started_again_and_heals(harness, tmp_path, capsys, monkeypatch):
    where = ["--executor", "modal", "--option", "packages=[]"]
    said = check_that_a_killed_machine_is_replaced_and_heals(harness, where, tmp_path, capsys, monkeypatch)
    assert re.search(r"\brank 1\b.*SIGKILL.*\(1 ", said)
