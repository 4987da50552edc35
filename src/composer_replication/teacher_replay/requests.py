"""Requests to teachers: their bytes, what they may cost, and the key under which the reply is kept."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from composer_replication.canonical_json import encode, encode_as_written
from composer_replication.errors import InputError, explain
from composer_replication.teacher_replay.injection_fence import as_sent, fence
from composer_replication.teacher_replay.teachers import Teacher
from composer_replication.types import Message

# Only where OpenRouter is asked: other servers answer 422 to fields they do not know.
_OPENROUTER_PROVIDER = {"require_parameters": True, "data_collection": "deny", "enforce_distillable_text": True}
_MAX_KNOWN_PREFIXES = 4096


class Request(NamedTuple):
    """What is sent, where, the most it can cost in nano-dollars, its session, and its name to people."""

    teacher: Teacher
    key: bytes
    body: bytes
    bound_nano: int
    session: str = ""
    place: str = "a request"


class Settings(NamedTuple):
    """What every request of a replay has in common."""

    max_tokens: int = 1024
    temperature: float = 0.0
    seed: int | None = None
    fence: bool = True

    def check(self) -> None:
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise InputError(explain("max_tokens", got=repr(self.max_tokens), expected="1 or more"))


class RequestBuilder:
    """Builds requests of one teacher. Keys are rolling hashes: a longer state of a session costs what is new in it."""

    def __init__(self, teacher: Teacher, settings: Settings) -> None:
        settings.check()
        self._teacher, self._settings = teacher, settings
        self._prefixes: dict[tuple[bytes, int], tuple[bytes, Message]] = {}

    def build(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        session: str = "",
        *,
        place: str = "a request",
    ) -> Request:
        """The request for one state. `messages` are those of the state; fencing happens here, with a session's mark."""
        sent_messages = fence(messages, session) if self._settings.fence else as_sent(messages)
        parameters = self._parameters(tools)
        body = encode_as_written({**parameters, "messages": sent_messages}, where=f"request to {self._teacher.slug}")
        # A token is at least a byte, and the JSON around a message is longer than what a template puts around it.
        bound = self._teacher.price.bound(len(body), self._settings.max_tokens)
        return Request(self._teacher, self._key(parameters, messages), body, bound, session, place)

    def _parameters(self, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
        settings, teacher = self._settings, self._teacher
        parameters: dict[str, Any] = {
            "model": teacher.slug,
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
        }
        if settings.seed is not None:
            parameters["seed"] = settings.seed
        if tools:
            parameters["tools"] = list(tools)
        extra = dict(teacher.extra)
        if teacher.is_openrouter:
            prices = {"prompt": float(teacher.price.input_per_mtok), "completion": float(teacher.price.output_per_mtok)}
            theirs: Any = extra.pop("provider", {})
            parameters["provider"] = {**_OPENROUTER_PROVIDER, **theirs, "max_price": prices}
        return parameters | extra

    def _key(self, parameters: Mapping[str, Any], messages: Sequence[Message]) -> bytes:
        about = {**parameters, "base_url": self._teacher.base_url, "fence": self._settings.fence}
        key = hashlib.sha256(encode(about, where="request parameters")).digest()
        for message in messages:
            known_prefix = self._prefixes.get((key, id(message)))
            if known_prefix is not None and known_prefix[1] is message:
                key = known_prefix[0]
                continue
            before, key = key, hashlib.sha256(key + encode(message, where="message")).digest()
            if len(self._prefixes) >= _MAX_KNOWN_PREFIXES:
                self._prefixes.clear()
            self._prefixes[before, id(message)] = (key, message)
        return key
