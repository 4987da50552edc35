"""What our adapter takes for granted about OpenEnv. A failure after an upgrade names what moved."""

from __future__ import annotations

from dataclasses import fields
from importlib.metadata import version

import pytest

core = pytest.importorskip("openenv.core")
from fastapi.testclient import TestClient  # noqa: E402
from library_names import assert_parameters, named  # noqa: E402
from openenv.core import client_types, env_server  # noqa: E402

from composer_replication.envs import openenv_server as adapter  # noqa: E402

pytestmark = [pytest.mark.envs, pytest.mark.filterwarnings("ignore")]
SAYS = f"openenv {version('openenv')}"
PARAMETERS = {
    "Environment.reset": ["self", "seed", "episode_id", "kwargs"],
    "Environment.step": ["self", "action", "timeout_s", "kwargs"],
    "Environment.__init__": ["self", "transform", "rubric"],
    "EnvClient._step_payload": ["self", "action"],
    "EnvClient._parse_result": ["self", "payload"],
    "EnvClient._parse_state": ["self", "payload"],
    "EnvClient.sync": ["self"],
    "create_fastapi_app": [
        "env",
        "action_cls",
        "observation_cls",
        "max_concurrent_envs",
        "concurrency_config",
        "env_name",
        "state_cls",
        "mode",
        "reset_observation_cls",
    ],
}
FIELDS = {
    "Action": {"metadata"},
    "Observation": {"done", "reward", "metadata"},
    "State": {"episode_id", "step_count"},
    "ConcurrencyConfig": {"max_concurrent_envs", "session_timeout"},
}


@pytest.mark.parametrize(("path", "expected"), PARAMETERS.items(), ids=list(PARAMETERS))
def test_a_function_keeps_its_parameters(path, expected):
    assert_parameters(core, path, expected, SAYS)


@pytest.mark.parametrize(("path", "expected"), FIELDS.items(), ids=list(FIELDS))
def test_a_record_has_exactly_these_fields(path, expected):
    found = set(named(core, path, SAYS).model_fields)
    assert found == expected, f"{SAYS}: {path} has {sorted(found)}, the adapter expects {sorted(expected)}"


def test_what_an_environment_and_a_client_have_to_define():
    found = sorted(env_server.Environment.__abstractmethods__), sorted(core.EnvClient.__abstractmethods__)
    expected = ["reset", "state", "step"], ["_parse_result", "_parse_state", "_step_payload"]
    assert found == expected, f"{SAYS}: abstract are {found}"
    assert env_server.Environment.SUPPORTS_CONCURRENT_SESSIONS is False, f"{SAYS}: concurrency is allowed by default"


def test_the_result_of_a_step_is_these_values():
    found = [each.name for each in fields(client_types.StepResult)]
    assert found == ["observation", "reward", "done", "metadata"], f"{SAYS}: StepResult is {found}"


def test_reward_and_end_travel_beside_the_observation():
    seen = env_server.serialization.serialize_observation(adapter.WorkspaceObservation(text="a", reward=0.5, done=True))
    expected = {"text": "a", "failed": False, "kind": None, "metadata": {}}
    assert seen == {"observation": expected, "reward": 0.5, "done": True}, f"{SAYS}: an observation travels as {seen}"


def test_plain_http_has_no_sessions():
    """A step over HTTP meets a new world: the page and the module say to use the WebSocket."""
    with TestClient(adapter.create_app(), raise_server_exceptions=False) as http:
        assert http.post("/reset", json={"seed": 0}).status_code == 200
        status = http.post("/step", json={"action": {"name": "LS", "arguments": {"path": "/workspace"}}}).status_code
        assert status == 500, f"{SAYS}: a step over HTTP after a reset over HTTP answers {status}"
        assert http.get("/state").json()["seed"] is None, f"{SAYS}: HTTP keeps a session now"
