"""A server of OpenEnv as an environment with tools: `train.grpo.environment = "http://127.0.0.1:8000"`.

Tools: where the first observation's metadata list `tools` (schemas as chat APIs have them), each is a method, and a
call is the action {"name", "arguments"}; else there is one, `act`, with the fields of the server's action. A model
reads an observation's `text`, or all of it as JSON. The reward is the sum of what the server paid; metadata may name an
action `end` that ends an episode whose agent just stopped.

A server is not trusted: its tools take no place of ours, what it paid has to be a number, and of its schema no more is
read than `MOST_BYTES`. A login goes with the address from the variable CRF_OPENENV_LOGIN, and is shown nowhere.
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
_NOT_SHOWN = ("done", "reward", "metadata")
_PLAIN = (str, int, float, bool)
_NO_ANSWER = (OSError, RuntimeError, ValueError)  # sockets and time-outs; its library's; an address that is none
SECONDS, MOST_BYTES = 30.0, 2**20
LOGIN = "CRF_OPENENV_LOGIN"
"""user:password of a server that asks for it: an address in a config is written down and shown."""


def is_address(name: str) -> bool:
    """Whether a name is an address of a server."""
    return name.startswith(_SCHEMES)


def openenv_environment(url: str) -> Callable[[], Any]:
    """What makes environments on that server; it is asked for its tools now, once."""
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
    kind = type("OpenEnvEnvironment", (_OpenEnvSession,), methods)
    return lambda: kind(connect)


def shown_address(url: str) -> str:
    """An address without the login that may be in it."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _with_login(url: str) -> str:
    parts, login = urllib.parse.urlsplit(url), os.environ.get(LOGIN, "")
    if not login or "@" in parts.netloc:
        return url
    if ":" not in login or urllib.parse.quote(login, safe="!$&'()*+,;=:") != login:
        expected = "user:password without / ? # @ % or blanks: its client sends them as they are written"
        raise ConfigError(explain(LOGIN, got="something else", expected=expected))
    return urllib.parse.urlunsplit(parts._replace(netloc=f"{login}@{parts.netloc}"))


class _OpenEnvSession:
    """One session at a time; `reset` begins an episode in it. The tools are added by `openenv_environment`."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect, self._client = connect, None
        self._paid, self._is_over, self._end = 0.0, False, None
        self._no_number: Any = None

    def reset(self, *, prompt: Any = None, **row: Any) -> str | None:
        """Begins the episode of a row: its plain columns go to the server. Without a prompt, the server's is read."""
        if self._client is None:
            self._client = self._connect()
        result = self._client.reset(**{name: value for name, value in row.items() if isinstance(value, _PLAIN)})
        self._paid, self._is_over, self._end = 0.0, False, _metadata(result).get("end")
        self._no_number = None
        return None if prompt else self._seen(result)

    def get_reward(self) -> float:
        """What was paid; an episode that is not over is ended first, where the server says how."""
        if not self._is_over and isinstance(self._end, Mapping):
            self._act(dict(self._end))
        if self._no_number is not None:
            got = f"{self._no_number!r:.80} as what a step paid"
            raise RunError(explain("OpenEnv server", got=got, expected="a finite number, or none"))
        return self._paid

    def _act(self, action: Mapping[str, Any]) -> str:
        if self._client is None:
            raise RunError(explain("OpenEnv session", got="an action", expected="reset before it"))
        return self._seen(self._client.step(dict(action)))

    def _seen(self, result: Any) -> str:
        # Told when the reward is asked for: of what a tool raises, TRL makes an answer to the model.
        if isinstance(result.reward, int | float) and math.isfinite(result.reward):
            self._paid += float(result.reward)
        elif result.reward is not None:
            self._no_number = result.reward
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
    metadata = inner or getattr(result, "metadata", None)
    return metadata if isinstance(metadata, Mapping) else {}


def _schemas(url: str, connect: Callable[[], Any]) -> tuple[list[Mapping[str, Any]], bool]:
    """The tools' schemas, and whether a call is an action by name."""
    try:
        session = connect()
    except _NO_ANSWER as error:
        fix = "Start it first; for the workspace: python -m composer_replication.envs.openenv_server."
        raise _no_answer(url, error, "an answer", fix) from None  # the cause may show a login
    try:
        tools = _metadata(session.reset()).get("tools")
    finally:
        with suppress(*_NO_ANSWER):  # what is asked for is known by now
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
    """The schema of the server's action, over HTTP."""
    parts = urllib.parse.urlsplit(url)
    request = urllib.request.Request(f"{_plain_http(shown_address(url))}/schema")  # noqa: S310 (a scheme of ours)
    if "@" in parts.netloc:
        login = parts.netloc.rpartition("@")[0]
        request.add_header("Authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as reply:  # noqa: S310 (as above)
            text = reply.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES:,} bytes")
        action = json.loads(text)["action"]
        if not isinstance(action, Mapping):
            raise TypeError("an action that is no object")
    except (*_NO_ANSWER, KeyError, TypeError) as error:
        raise _no_answer(url, error, "the schema of its action at /schema") from None
    return action


def _no_answer(url: str, error: Exception, expected: str, fix: str = "") -> ConfigError:
    login = urllib.parse.urlsplit(url).netloc.rpartition("@")[0]
    text = str(error).replace(f"{login}@", "") if login else str(error)
    what = f"OpenEnv server {shown_address(url)}"
    return ConfigError(explain(what, got=f"{type(error).__name__}: {text}", expected=expected, fix=fix))


def _plain_http(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{'https' if scheme in ('https', 'wss') else 'http'}://{rest.rstrip('/')}"


def _mapping(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = schema.get(name) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(explain(f"{name} of a tool of the OpenEnv server", got=f"{value!r:.80}", expected="a table"))
    return value


def _tool_name(schema: Mapping[str, Any], methods: Mapping[str, Any]) -> str:
    """A name that can be a method's and is none of ours: a server's `reset` would be called in the place of ours."""
    name = schema.get("name")
    is_plain = isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name) and name[0] != "_"
    if not is_plain or hasattr(_OpenEnvSession, str(name)) or name in methods:
        expected = "a Python name of its own that does not begin with _ and is not reset or get_reward"
        raise ConfigError(explain("a tool of the OpenEnv server", got=f"the name {name!r:.80}", expected=expected))
    return str(name)


def _parameter_names(tool: str, properties: Mapping[str, Any]) -> dict[str, str]:
    """The server's name of each parameter, by one that Python takes: `from` is from_, `max-lines` is max_lines."""
    names: dict[str, str] = {}
    for server_name in properties:
        name = re.sub(r"\W", "_", str(server_name)) or "_"
        name = f"_{name}" if name[0].isdigit() else name
        name = f"{name}_" if keyword.iskeyword(name) or name == "self" else name
        if name in names:
            got = f"the parameters {names[name]!r:.80} and {server_name!r:.80}"
            expected = "names that differ in letters and digits"
            raise ConfigError(explain(f"tool {tool} of the OpenEnv server", got=got, expected=expected))
        names[name] = server_name
    return names


def _method(schema: Mapping[str, Any], is_named: bool) -> Callable[..., str]:
    """A tool as a method with the signature, types and Google docstring that TRL makes its schema of."""
    name, parameters = schema["name"], _mapping(schema, "parameters")
    properties, required = _mapping(parameters, "properties"), parameters.get("required") or ()
    own_names = _parameter_names(name, properties)
    fields = {key: _mapping(properties, server_name) for key, server_name in own_names.items()}

    def tool(self: _OpenEnvSession, /, **given: Any) -> str:
        arguments = {own_names.get(key, key): value for key, value in given.items()}
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
            default=inspect.Parameter.empty if own_names[key] in required else value.get("default"),
            annotation=kind(value),
        )
        for key, value in fields.items()
    ]
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    tool.__dict__["__signature__"] = inspect.Signature([first, *signature], return_annotation=str)
    return tool
