"""A server of OpenEnv as an environment with tools: `train.grpo.environment = "http://127.0.0.1:8000"`.

Tools: where the first observation's metadata list `tools` (schemas as chat APIs have them), each is a method, and a
call is the action {"name", "arguments"}; else there is one, `act`, with the fields of the server's action. A model
reads an observation's `text`, or all of it as JSON. The reward is the sum of what the server paid; metadata may name an
action `end` that ends an episode whose agent just stopped.
"""

from __future__ import annotations

import inspect
import json
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from composer_replication.errors import ConfigError, RunError, explain
from composer_replication.optional import require

_TYPES: dict[str, type] = {
    "string": str,
    "number": float,
    "integer": int,
    "boolean": bool,
    "array": list,
    "object": dict,
}
_SCHEMES = ("http://", "https://", "ws://", "wss://")
_NOT_SHOWN = ("done", "reward", "metadata")
_PLAIN = (str, int, float, bool)
SECONDS = 30.0


def is_address(name: str) -> bool:
    """Whether a name is an address of a server."""
    return name.startswith(_SCHEMES)


def openenv_environment(url: str) -> Callable[[], Any]:
    """What makes environments on that server; it is asked for its tools now, once."""
    core = require("openenv.core", extra="openenv")

    def connect() -> Any:
        session = core.GenericEnvClient(base_url=url).sync()
        session.connect()
        return session

    schemas, is_named = _schemas(url, connect)
    methods = {each["name"]: _method(each, is_named) for each in schemas}
    made = type("OpenEnvEnvironment", (_Session,), methods)
    return lambda: made(connect)


class _Session:
    """One session at a time; `reset` begins an episode in it. The tools are added by `openenv_environment`."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect, self._client = connect, None
        self._paid, self._is_over, self._end = 0.0, False, None

    def reset(self, *, prompt: Any = None, **row: Any) -> str | None:
        """Begins the episode of a row: its plain columns go to the server. Without a prompt, the server's is read."""
        if self._client is None:
            self._client = self._connect()
        result = self._client.reset(**{name: value for name, value in row.items() if isinstance(value, _PLAIN)})
        self._paid, self._is_over, self._end = 0.0, False, _metadata(result).get("end")
        return None if prompt else self._seen(result)

    def get_reward(self) -> float:
        """What was paid; an episode that is not over is ended first, where the server says how."""
        if not self._is_over and isinstance(self._end, Mapping):
            self._act(dict(self._end))
        return self._paid

    def _act(self, action: Mapping[str, Any]) -> str:
        if self._client is None:
            raise RunError(explain("OpenEnv session", got="an action", expected="reset before it"))
        return self._seen(self._client.step(dict(action)))

    def _seen(self, result: Any) -> str:
        self._paid += float(result.reward or 0.0)
        self._is_over = self._is_over or bool(result.done)
        return shown(result.observation)


def shown(observation: Any) -> str:
    """What a model reads of an observation."""
    if isinstance(observation, Mapping) and isinstance(observation.get("text"), str):
        return observation["text"]
    if isinstance(observation, Mapping):
        observation = {name: value for name, value in observation.items() if name not in _NOT_SHOWN}
    return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False, default=str)


def _metadata(result: Any) -> Mapping[str, Any]:
    """A server writes them beside its observation or into it."""
    inner = result.observation.get("metadata") if isinstance(result.observation, Mapping) else None
    return inner or getattr(result, "metadata", None) or {}


def _schemas(url: str, connect: Callable[[], Any]) -> tuple[list[dict[str, Any]], bool]:
    """The tools' schemas, and whether a call is an action by name."""
    try:
        session = connect()
    except Exception as error:  # of sockets, of its library, of the server's own refusal
        got = f"{type(error).__name__}: {error}"
        fix = "Start it first; for the workspace: python -m composer_replication.envs.openenv_server."
        raise ConfigError(explain(f"OpenEnv server {url}", got=got, expected="an answer", fix=fix)) from error
    try:
        tools = _metadata(session.reset()).get("tools")
    finally:
        with suppress(Exception):  # what is asked for is known by now
            session.close()
    if tools:
        return [each.get("function", each) for each in tools], True
    with urllib.request.urlopen(f"{_plain_http(url)}/schema", timeout=SECONDS) as reply:  # noqa: S310 (a scheme of ours)
        action = json.load(reply)["action"]
    properties = {name: each for name, each in action.get("properties", {}).items() if name != "metadata"}
    required = [name for name in action.get("required", ()) if name in properties]
    about = action.get("description") or "Acts in the environment."
    return [
        {"name": "act", "description": about, "parameters": {"properties": properties, "required": required}}
    ], False


def _plain_http(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{'https' if scheme in ('https', 'wss') else 'http'}://{rest.rstrip('/')}"


def _method(schema: Mapping[str, Any], is_named: bool) -> Callable[..., str]:
    """A tool as a method with the signature, types and Google docstring that TRL makes its schema of."""
    name, properties = schema["name"], schema.get("parameters", {}).get("properties", {})
    required = schema.get("parameters", {}).get("required", ())

    def tool(self: _Session, /, **given: Any) -> str:
        return self._act({"name": name, "arguments": given} if is_named else given)

    def kind(value: Mapping[str, Any]) -> type:
        return _TYPES.get(str(value.get("type")), str)

    lines = [f"    {key}: {value.get('description') or value.get('title') or key}" for key, value in properties.items()]
    tool.__name__, tool.__qualname__ = name, f"OpenEnvEnvironment.{name}"
    tool.__doc__ = "\n".join([schema.get("description") or name, *(["", "Args:", *lines] if lines else [])])
    tool.__annotations__ = {key: kind(value) for key, value in properties.items()} | {"return": str}
    parameters = [
        inspect.Parameter(
            key,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if key in required else value.get("default"),
            annotation=kind(value),
        )
        for key, value in properties.items()
    ]
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    tool.__dict__["__signature__"] = inspect.Signature([first, *parameters], return_annotation=str)
    return tool
