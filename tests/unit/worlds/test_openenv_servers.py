"""A server of OpenEnv that is careless or hostile: names, rewards, sizes and logins. The client here is a stand-in."""

from __future__ import annotations

import inspect
import json
import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from composer_replication.config import CrfConfig, load
from composer_replication.config.train import GRPOSection
from composer_replication.errors import ConfigError, RunError
from composer_replication.trainer.from_config.grpo import NamedSource, named_sources
from composer_replication.trainer.rollouts.worlds import openenv
from composer_replication.trainer.rollouts.worlds.openenv import address_without_login, openenv_environment
from refusals import refusal

URL, SECRET = "http://127.0.0.1:8000", "s3cret"


class Server:
    """What it says of its tools, what a step pays, and what it was asked."""

    def __init__(self, tools: Any = None, reward: Any = None) -> None:
        self.tools, self.reward, self.actions, self.addresses = tools, reward, list[Any](), list[str]()

    def client(self, base_url: str) -> Any:
        self.addresses.append(base_url)
        named = {name: getattr(self, name) for name in ("reset", "step")}
        session = SimpleNamespace(connect=lambda: None, close=lambda: None, **named)
        return SimpleNamespace(sync=lambda: session)

    def reset(self, **_row: Any) -> Any:
        return SimpleNamespace(observation={"text": "", "metadata": {"tools": self.tools}}, reward=None, done=False)

    def step(self, action: Any) -> Any:
        self.actions.append(action)
        return SimpleNamespace(observation={"text": "seen"}, reward=self.reward, done=False)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    def start(server: Any) -> Any:
        core: Any = ModuleType("openenv.core")
        core.GenericEnvClient = server.client
        monkeypatch.setitem(sys.modules, "openenv", ModuleType("openenv"))
        monkeypatch.setitem(sys.modules, "openenv.core", core)
        return server

    monkeypatch.delenv(openenv.LOGIN, raising=False)
    return start


def tool(name: Any, *parameters: str, **fields: Any) -> dict[str, Any]:
    properties = {each: {"type": "string"} for each in parameters}
    return {"function": {"name": name, "parameters": {"properties": properties, "required": []}, **fields}}


@pytest.mark.parametrize(
    "name", ["reset", "get_reward", "_act", "__class__", "__init__", "class", "a-b", "", None, 7, "x" * 200 + "\x1b"]
)
def test_a_tool_takes_no_place_of_ours_and_has_a_name_of_python(serve: Any, name: Any) -> None:
    serve(Server([tool("look"), tool(name)]))
    with refusal(ConfigError, what="tool", got=repr(name)[:20]) as raised:
        openenv_environment(URL)
    assert len(str(raised.value)) < 300
    assert "\x1b" not in str(raised.value)


@pytest.mark.parametrize(
    "tools",
    [
        [tool("look"), tool("look")],
        ["look"],
        "look",
        [tool("look", parameters=["x"])],
        [tool("look", parameters={"properties": {"x": "string"}})],
        [tool("look", "max-lines", "max_lines")],
    ],
)
def test_tools_that_cannot_be_methods_are_refused_with_a_reason(serve: Any, tools: Any) -> None:
    serve(Server(tools))
    with refusal(ConfigError, what="OpenEnv"):
        openenv_environment(URL)


def test_parameters_that_python_has_no_name_for_reach_the_server_by_theirs(serve: Any) -> None:
    server = serve(Server([tool("grep", "from", "max-lines", "self", "2nd", "path")]))
    environment = openenv_environment(URL)()
    environment.reset()
    assert list(inspect.signature(environment.grep).parameters) == ["from_", "max_lines", "self_", "_2nd", "path"]
    environment.grep(from_="a", max_lines=3, self_="b", _2nd="c", path="d")
    environment.grep(**{"from": "e", "max-lines": 4})
    arguments = {"from": "a", "max-lines": 3, "self": "b", "2nd": "c", "path": "d"}
    assert [each["arguments"] for each in server.actions] == [arguments, {"from": "e", "max-lines": 4}]


@pytest.mark.parametrize("reward", [math.inf, math.nan, "much"])
def test_what_is_no_number_is_no_reward(serve: Any, reward: Any) -> None:
    server = serve(Server([tool("look")], reward))
    environment = openenv_environment(URL)()
    environment.reset()
    assert environment.look() == "seen", "what a tool raises would be an answer to the model"
    with refusal(RunError, what="OpenEnv", got=repr(reward)):
        environment.get_reward()
    server.reward = 2
    environment.reset()
    environment.look()
    assert environment.get_reward() == 2.0


class Reply:
    """Of `urlopen`: as many bytes as are asked for."""

    def __init__(self, text: bytes) -> None:
        self.text, self.read_bytes = text, 0

    def __enter__(self) -> Reply:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def read(self, most: int = -1) -> bytes:
        self.read_bytes = len(self.text) if most < 0 else min(most, len(self.text))
        return self.text[: self.read_bytes]


@pytest.mark.parametrize(
    "text", [b" " * (2 * openenv.MAX_BYTES), b"[]", b'{"action": 3}', b"no json", b'{"action": {"properties": [1]}}']
)
def test_a_schema_that_is_none_is_refused_and_a_large_one_is_not_read(
    serve: Any, monkeypatch: Any, text: bytes
) -> None:
    serve(Server())
    reply = Reply(text)
    monkeypatch.setattr(openenv.urllib.request, "urlopen", lambda *_given, **_named: reply)
    with refusal(ConfigError, what="OpenEnv"):
        openenv_environment(URL)
    assert reply.read_bytes <= openenv.MAX_BYTES + 1


def test_a_login_comes_from_the_environment_and_goes_to_the_server_alone(serve: Any, monkeypatch: Any) -> None:
    server, asked = serve(Server()), list[Any]()

    def answer(request: Any, timeout: float) -> Reply:
        asked.append(request)
        return Reply(json.dumps({"action": {"properties": {"door": {"type": "string"}}}}).encode())

    monkeypatch.setattr(openenv.urllib.request, "urlopen", answer)
    monkeypatch.setenv(openenv.LOGIN, f"user:{SECRET}")
    assert callable(openenv_environment(URL)().act)
    assert server.addresses[0] == f"http://user:{SECRET}@127.0.0.1:8000"
    assert asked[0].full_url == f"{URL}/schema"
    assert asked[0].get_header("Authorization") == "Basic dXNlcjpzM2NyZXQ="
    monkeypatch.setenv(openenv.LOGIN, f"user:{SECRET}/@")
    with pytest.raises(ConfigError, match=openenv.LOGIN) as raised:
        openenv_environment(URL)
    assert SECRET not in str(raised.value)


def test_a_password_is_neither_shown_nor_stored(serve: Any, monkeypatch: Any) -> None:
    def refuse(base_url: str) -> Any:
        raise ConnectionError(f"Failed to connect to {base_url.replace('http', 'ws')}/ws: refused")

    serve(SimpleNamespace(client=refuse))
    url = f"http://user:{SECRET}@h:1"
    with refusal(ConfigError, what="http://h:1") as raised:
        openenv_environment(url)
    assert SECRET not in str(raised.value)
    assert raised.value.__cause__ is None
    with pytest.raises(ConfigError, match=openenv.LOGIN) as raised:
        load(CrfConfig, None, [f"train.grpo.environment={url}"])
    assert SECRET not in str(raised.value)
    config = load(CrfConfig, None, ["train.mode=grpo"])
    object.__setattr__(config.train.grpo, "environment", url)  # as an older config may have it
    assert named_sources(config) == [NamedSource("environment", "http://h:1", None)]


@pytest.mark.parametrize("name", ["module:name", "verifiers:x", "https://h/path@2", "ws://[::1]:8000"])
def test_names_without_a_login_stay(name: str) -> None:
    assert GRPOSection(environment=name).environment == name
    assert address_without_login(name) == name
