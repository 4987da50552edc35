"""Services that take their time: nobody waits for them without an end, and a refusal is told from a lost answer."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest

from composer_replication.diloco.serverless import modal, ray
from composer_replication.diloco.serverless.hf_jobs import HFJobsExecutor
from composer_replication.diloco.serverless.modal import ModalExecutor
from composer_replication.diloco.serverless.ray import RayExecutor
from composer_replication.errors import RunError
from refusals import refusal

LONGEST_S = 20.0  # that a hanging client of these tests hangs, so that a failure is one, too


@pytest.fixture
def hangs() -> Iterator[Any]:
    """A call of a client that says nothing."""
    end = threading.Event()
    yield lambda *_args, **_options: end.wait(LONGEST_S)
    end.set()


def test_a_sandbox_that_is_never_made_is_not_waited_for(hangs, monkeypatch):
    anything = types.SimpleNamespace(app_id="ap-1", pip_install=lambda *_packages: None)
    client: Any = types.ModuleType("modal")
    client.App = types.SimpleNamespace(lookup=lambda *_args, **_options: anything)
    client.Image = types.SimpleNamespace(debian_slim=lambda **_options: anything)
    client.Sandbox = types.SimpleNamespace(create=hangs, list=lambda **_options: [])
    monkeypatch.setitem(sys.modules, "modal", client)
    monkeypatch.setattr(modal, "_START_S", 0.2, raising=False)
    with refusal(RunError, what="rank 0", got="0.2 s") as caught:
        ModalExecutor().launch_replicas(1, "executors.replica_bodies", {})
    assert "Modal" in caught.value.what
    assert "rank 0" in caught.value.__notes__[0]


def test_a_cluster_that_does_not_answer_is_not_waited_for(hangs, monkeypatch):
    client: Any = types.ModuleType("ray")
    client.is_initialized, client.init = lambda: False, hangs
    monkeypatch.setitem(sys.modules, "ray", client)
    monkeypatch.setattr(ray, "_CONNECT_S", 0.2, raising=False)
    with refusal(RunError, what="Ray", got="0.2 s"):
        RayExecutor("ray://nobody.example:10001")


@pytest.mark.parametrize(
    ("status", "is_refusal"), [(401, True), (402, True), (429, True), (408, False), (500, False), (504, False)]
)
def test_a_refusal_of_the_hub_is_told_from_a_lost_answer(status, is_refusal):
    class HubError(Exception):
        response = types.SimpleNamespace(status_code=status)

    executor = HFJobsExecutor(packages=())
    assert executor.was_refused(HubError()) is is_refusal
    assert not executor.was_refused(RunError("no answer within 180 s"))
