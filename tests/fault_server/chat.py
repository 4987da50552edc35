"""A chat request as the server reads it: checked, fingerprinted, its prompt counted."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from fault_server.settings import Settings

# Where a request is routed and what it is called do not change what is asked.
NOT_ASKED = frozenset({"provider", "usage", "user", "stream", "transforms", "route", "metadata", "session_id"})
PLAIN_FIELDS = {
    *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "temperature", "top_p", "max_tokens"),
    *("max_completion_tokens", "n", "seed", "stop", "stream", "user", "response_format", "logprobs", "top_logprobs"),
    *("frequency_penalty", "presence_penalty"),
}
JsonObject = dict[str, Any]


class BadRequest(Exception):
    """The request is refused, unbilled; `body` is the JSON that says why."""

    def __init__(self, status: int, message: str, body: JsonObject | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = body or {"error": {"code": status, "message": message}}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    model: str
    fingerprint: str
    session: str
    messages_hash: str
    num_messages: int
    tools: list[JsonObject]
    tool_choice: Any
    parallel_tool_calls: bool
    max_tokens: int
    prompt_tokens: int
    num_bytes: int  # of the whole body: no count of its tokens is larger


def fingerprint(body: JsonObject) -> str:
    """The name of what is asked: equal for requests that differ in routing fields and key order only."""
    return _hash(_canonical({name: value for name, value in body.items() if name not in NOT_ASKED}))


def read_chat(raw: bytes, session_header: str | None, settings: Settings) -> ChatRequest:
    body = _parsed(raw)
    _check(body, settings)
    messages, tools = body["messages"], body.get("tools") or []
    text = _canonical(messages)
    num_bytes = len(text) + (len(_canonical(tools)) if tools else 0)
    # A number may be written shorter by the client than by us, and the count may never pass what was sent.
    prompt_tokens = max(1, int(min(num_bytes, len(raw)) / settings.bytes_per_token))
    if prompt_tokens > settings.context_length:
        raise BadRequest(400, f"This endpoint's maximum context length is {settings.context_length} tokens.")
    asked = body.get("max_completion_tokens", body.get("max_tokens"))
    return ChatRequest(
        model=body["model"],
        fingerprint=fingerprint(body),
        session=session_header or session_of(messages),
        messages_hash=_hash(text),
        num_messages=len(messages),
        tools=tools,
        tool_choice=body.get("tool_choice"),
        parallel_tool_calls=body.get("parallel_tool_calls", True) is not False,
        max_tokens=settings.default_max_tokens if asked is None else asked,
        prompt_tokens=prompt_tokens,
        num_bytes=len(raw),
    )


def session_of(messages: list[JsonObject]) -> str:
    """Hash of the messages up to the first that is not the system's: one system prompt serves many sessions."""
    end = next((at for at, message in enumerate(messages) if message.get("role") != "system"), len(messages) - 1)
    return _hash(_canonical(messages[: end + 1]))


def _parsed(raw: bytes) -> JsonObject:
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise BadRequest(400, f"The body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest(400, "The body is not a JSON object.")
    return body


def _check(body: JsonObject, settings: Settings) -> None:
    unknown = sorted(set(body) - PLAIN_FIELDS)
    if unknown and settings.dialect == "plain":
        raise BadRequest(422, "unknown fields", {"detail": f"Unexpected fields in the request: {unknown}"})
    messages, asked = body.get("messages"), body.get("max_completion_tokens", body.get("max_tokens"))
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise BadRequest(400, "messages: expected a list of at least one message.")
    if body.get("model") not in settings.prices:
        raise BadRequest(400, f"{body.get('model')} is not a valid model ID")
    if asked is not None and (type(asked) is not int or asked < 1):
        raise BadRequest(400, "max_tokens: expected a positive integer.")
    if body.get("stream"):
        raise BadRequest(400, "stream: this server answers whole replies only.")
    if not isinstance(body.get("tools") or [], list):
        raise BadRequest(400, "tools: expected a list.")


def _canonical(value: Any) -> bytes:
    # Lone surrogates are legal in JSON text and must not stop the server.
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
