"""An OpenEnv server as an environment with tools: `train.grpo.environment = "http://127.0.0.1:8000"`.

If the metadata of the first observation list `tools` (schemas as in chat APIs), each tool is a method, and a call is
the action {"name", "arguments"}. Otherwise there is a single tool, `act`, with the fields of the server's action. The
model reads the `text` of an observation, or the whole observation as JSON. The reward is the sum of the rewards of all
steps. The metadata may contain an action `end`, which ends an episode when the agent stops.

The server is not trusted: its tools cannot replace our methods, rewards have to be numbers, and at most `MAX_BYTES` of
its schema are read. Login credentials come from the environment variable CRF_OPENENV_LOGIN, and are never shown.
"""

from __future__ import annotations

import base64
import inspect
import json
import keyword
import math
import os
import re
import urllib.parse
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
# Fields of an observation that the model does not see.
_NOT_SHOWN = ("done", "reward", "metadata")
# The types of columns that are sent to the server.
_PLAIN = (str, int, float, bool)
# Errors from sockets and timeouts, from the OpenEnv library, and for an address that cannot be parsed.
_CONNECTION_ERRORS = (OSError, RuntimeError, ValueError)
SECONDS, MAX_BYTES = 30.0, 2**20
LOGIN = "CRF_OPENENV_LOGIN"
"""The variable with user:password, which must not be in the address, because configs are stored and shown."""


def is_address(name: str) -> bool:
    """Return whether an environment's name is the address of a server."""
    return name.startswith(_SCHEMES)


def openenv_environment(url: str) -> Callable[[], Any]:
    """Request the tools of this server once, and return a factory for environments with these tools."""
    core = require("openenv.core", extra="openenv")
    url = _with_login(url)

    def connect() -> Any:
        session = core.GenericEnvClient(base_url=url).sync()
        session.connect()
        return session

    schemas, is_named = _schemas(url, connect)
    methods: dict[str, Any] = {}
    for schema in schemas:
        name = _tool_name(schema, methods)
        methods[name] = _method(schema, is_named)
    # One class per server, because TRL reads the tools from the methods of an environment.
    kind = type("OpenEnvEnvironment", (_OpenEnvSession,), methods)
    return lambda: kind(connect)


def address_without_login(url: str) -> str:
    """Return the address without the login that it may contain."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _with_login(url: str) -> str:
    parts, login = urllib.parse.urlsplit(url), os.environ.get(LOGIN, "")
    if not login or "@" in parts.netloc:
        return url
    if ":" not in login or urllib.parse.quote(login, safe="!$&'()*+,;=:") != login:
        # OpenEnv's client does not decode percent escapes. The value itself is a secret and not shown.
        expected = "user:password without / ? # @ % or spaces"
        raise ConfigError(explain(LOGIN, got="a value in another format", expected=expected))
    return urllib.parse.urlunsplit(parts._replace(netloc=f"{login}@{parts.netloc}"))


class _OpenEnvSession:
    """An environment with its own session on the server. `openenv_environment` makes a subclass that has the tools."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect, self._client = connect, None
        self._reward, self._is_over, self._end = 0.0, False, None
        self._invalid_reward: Any = None

    def reset(self, *, prompt: Any = None, **row: Any) -> str | None:
        """Begin an episode, and return the first observation as the prompt, or None if the row has a prompt.

        The row's other columns are sent to the server if their values have plain types.
        """
        if self._client is None:
            self._client = self._connect()
        result = self._client.reset(**{name: value for name, value in row.items() if isinstance(value, _PLAIN)})
        self._reward, self._is_over, self._end = 0.0, False, _metadata(result).get("end")
        self._invalid_reward = None
        return None if prompt else self._observe(result)

    def get_reward(self) -> float:
        """End the episode if it is unfinished and the server has an `end` action, and return the sum of the rewards."""
        if not self._is_over and isinstance(self._end, Mapping):
            self._act(dict(self._end))
        if self._invalid_reward is not None:
            got = f"{self._invalid_reward!r:.80}"
            raise RunError(
                explain("reward for a step on the OpenEnv server", got=got, expected="a finite number or null")
            )
        return self._reward

    def _act(self, action: Mapping[str, Any]) -> str:
        if self._client is None:
            raise RunError(explain("OpenEnv session", got="an action before reset()", expected="reset() first"))
        return self._observe(self._client.step(dict(action)))

    def _observe(self, result: Any) -> str:
        """Add the reward of a step to the sum, and return its observation as text."""
        # An invalid reward is reported by `get_reward`, because TRL would show an exception raised here to the model.
        if isinstance(result.reward, int | float) and math.isfinite(result.reward):
            self._reward += float(result.reward)
        elif result.reward is not None:
            self._invalid_reward = result.reward
        self._is_over = self._is_over or bool(result.done)
        return _observation_text(result.observation)


def _observation_text(observation: Any) -> str:
    """Return an observation as the text that the model reads."""
    if isinstance(observation, Mapping) and isinstance(observation.get("text"), str):
        return observation["text"]
    if isinstance(observation, Mapping):
        observation = {name: value for name, value in observation.items() if name not in _NOT_SHOWN}
    return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False, default=str)


def _metadata(result: Any) -> Mapping[str, Any]:
    """Return the metadata of a step, which servers put either next to the observation or inside it."""
    inner = result.observation.get("metadata") if isinstance(result.observation, Mapping) else None
    metadata = inner or getattr(result, "metadata", None)
    return metadata if isinstance(metadata, Mapping) else {}


def _schemas(url: str, connect: Callable[[], Any]) -> tuple[list[Mapping[str, Any]], bool]:
    """Return the tools' schemas, and whether the server lists tools, so that a call is sent as {"name",
    "arguments"}.
    """
    try:
        session = connect()
    except _CONNECTION_ERRORS as error:
        fix = "Start the server first; for the workspace: python -m composer_replication.envs.openenv_server."
        raise _no_answer(url, error, "an answer", fix) from None  # the cause may contain the login
    try:
        tools = _metadata(session.reset()).get("tools")
    finally:
        with suppress(*_CONNECTION_ERRORS):  # the tools have been read, so a failure to close does not matter
            session.close()
    if tools:
        listed = list(tools) if isinstance(tools, list | tuple) else [tools]
        return [schema.get("function", schema) if isinstance(schema, Mapping) else {} for schema in listed], True
    action = _read_action(url)
    properties = {name: parameter for name, parameter in _mapping(action, "properties").items() if name != "metadata"}
    required = [name for name in action.get("required") or () if name in properties]
    about = action.get("description") or "Acts in the environment."
    return [
        {"name": "act", "description": about, "parameters": {"properties": properties, "required": required}}
    ], False


def _read_action(url: str) -> Mapping[str, Any]:
    """Return the schema of the server's action, from /schema."""
    parts = urllib.parse.urlsplit(url)
    request = urllib.request.Request(f"{_plain_http(address_without_login(url))}/schema")  # noqa: S310 (a scheme of ours)
    if "@" in parts.netloc:
        login = parts.netloc.rpartition("@")[0]
        request.add_header("Authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as reply:  # noqa: S310 (as above)
            # Read one byte more than allowed, to detect a longer response.
            text = reply.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES:,} bytes")
        action = json.loads(text)["action"]
        if not isinstance(action, Mapping):
            raise TypeError("the action is not an object")
    except (*_CONNECTION_ERRORS, KeyError, TypeError) as error:
        raise _no_answer(url, error, "the schema of its action at /schema") from None  # the cause may contain the login
    return action


def _no_answer(url: str, error: Exception, expected: str, fix: str = "") -> ConfigError:
    login = urllib.parse.urlsplit(url).netloc.rpartition("@")[0]
    text = str(error).replace(f"{login}@", "") if login else str(error)
    what = f"OpenEnv server {address_without_login(url)}"
    return ConfigError(explain(what, got=f"{type(error).__name__}: {text}", expected=expected, fix=fix))


def _plain_http(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{'https' if scheme in ('https', 'wss') else 'http'}://{rest.rstrip('/')}"


def _mapping(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = schema.get(name) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(
            explain(f"{name} of a tool on the OpenEnv server", got=f"{value!r:.80}", expected="a JSON object")
        )
    return value


def _tool_name(schema: Mapping[str, Any], methods: Mapping[str, Any]) -> str:
    """Return a tool's name.

    Raises ConfigError if it cannot be a method's name, or is already the name of a method.
    """
    name = schema.get("name")
    is_plain = isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name) and name[0] != "_"
    if not is_plain or hasattr(_OpenEnvSession, str(name)) or name in methods:
        expected = "a unique Python identifier that does not begin with _ and is not reset or get_reward"
        raise ConfigError(explain("a tool on the OpenEnv server", got=f"the name {name!r:.80}", expected=expected))
    return str(name)


def _parameter_names(tool: str, properties: Mapping[str, Any]) -> dict[str, str]:
    """Map Python names to the server's parameter names: `from_` to `from`, `max_lines` to `max-lines`."""
    names: dict[str, str] = {}
    for server_name in properties:
        # "max-lines" -> "max_lines"
        name = re.sub(r"\W", "_", str(server_name)) or "_"
        name = f"_{name}" if name[0].isdigit() else name
        name = f"{name}_" if keyword.iskeyword(name) or name == "self" else name
        if name in names:
            got = f"parameters {names[name]!r:.80} and {server_name!r:.80}"
            expected = "names that differ in letters or digits"
            raise ConfigError(explain(f"tool {tool} on the OpenEnv server", got=got, expected=expected))
        names[name] = server_name
    return names


def _method(schema: Mapping[str, Any], is_named: bool) -> Callable[..., str]:
    """Return a tool as a method. TRL reads its schema from the method's signature, types and Google-style docstring."""
    name, parameters = schema["name"], _mapping(schema, "parameters")
    properties, required = _mapping(parameters, "properties"), parameters.get("required") or ()
    server_names = _parameter_names(name, properties)
    fields = {key: _mapping(properties, server_name) for key, server_name in server_names.items()}

    def tool(self: _OpenEnvSession, /, **kwargs: Any) -> str:
        arguments = {server_names.get(key, key): value for key, value in kwargs.items()}
        return self._act({"name": name, "arguments": arguments} if is_named else arguments)

    def kind(value: Mapping[str, Any]) -> type:
        return _TYPES.get(str(value.get("type")), str)

    lines = [f"    {key}: {value.get('description') or value.get('title') or key}" for key, value in fields.items()]
    tool.__name__, tool.__qualname__ = name, f"OpenEnvEnvironment.{name}"
    tool.__doc__ = "\n".join([str(schema.get("description") or name), *(["", "Args:", *lines] if lines else [])])
    tool.__annotations__ = {key: kind(value) for key, value in fields.items()} | {"return": str}
    signature = [
        inspect.Parameter(
            key,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if server_names[key] in required else value.get("default"),
            annotation=kind(value),
        )
        for key, value in fields.items()
    ]
    # inspect.signature, from which TRL builds the schema, reads this attribute instead of **kwargs.
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    tool.__dict__["__signature__"] = inspect.Signature([first, *signature], return_annotation=str)
    return tool
