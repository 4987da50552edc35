"""The bytes of each fault, when they are sent, and how the connection ends."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

from fault_server.answers import Answer, half_of
from fault_server.chat import ChatRequest, JsonObject
from fault_server.faults import BY_NAME, OK, draw_int
from fault_server.settings import PICO_PER_USD, Reply, Settings

REASONS = {status.value: status.phrase for status in HTTPStatus} | {529: "Site is overloaded"}
CREATED = 1_750_000_000  # fixed: the same request gets the same bytes
BAD_COSTS = ("null", "-1", "true", '"free"', "1e999")
NO_COST = frozenset({"usage_missing", "cost_missing", "cost_malformed"})
# The cost can be read from these replies, if the dialect reports one at all.
TELLS_COST = {OK, "error_beside_choices", "choice_error", "finish_error", "empty_choices", "content_null", "slow"} | {
    fault.name for fault in BY_NAME.values() if fault.group in ("cut", "answer") and fault.name not in NO_COST
}


@dataclass(frozen=True, slots=True)
class Delivery:
    """Steps of (seconds to wait, bytes to send), then how the connection ends: keep, close, reset or idle_close."""

    status: int  # 0 when no byte is sent
    steps: tuple[tuple[float, bytes], ...]
    end: str = "keep"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request, its answer, and what was decided about it."""

    chat: ChatRequest
    answer: Answer
    settings: Settings
    fault: str
    attempt: int
    pico: int  # what was billed, 0 if nothing was
    completion_tokens: int
    retry_after_s: int
    is_billed: bool

    @property
    def generation_id(self) -> str:
        return f"gen-{self.chat.fingerprint}-{self.attempt}"

    @property
    def tells_cost(self) -> bool:
        return self.settings.dialect == "openrouter" and self.fault in TELLS_COST

    def usage(self) -> JsonObject:
        prompt, completion = self.chat.prompt_tokens, self.completion_tokens
        usage: JsonObject = {"prompt_tokens": prompt, "completion_tokens": completion}
        usage["total_tokens"] = prompt + completion
        if self.settings.dialect == "plain":
            return usage
        # Division of integers rounds correctly: the exact cost in 1e-12 USD can be had back by rounding.
        usage |= {"cost": self.pico / PICO_PER_USD, "is_byok": False}
        usage["prompt_tokens_details"] = {"cached_tokens": 0, "cache_write_tokens": 0, "audio_tokens": 0}
        usage["cost_details"] = {"upstream_inference_cost": None}
        usage["completion_tokens_details"] = {"reasoning_tokens": completion - self.answer.completion_tokens}
        return usage

    def completion(self, answer: Answer | None = None, finish_reason: str | None = None) -> JsonObject:
        answer = answer or self.answer
        reason = finish_reason or answer.finish_reason
        choice = {"index": 0, "logprobs": None, "finish_reason": reason, "message": answer.message()}
        head: JsonObject = {
            "id": self.generation_id,
            "object": "chat.completion",
            "created": CREATED,
            "model": self.chat.model,
        }
        if self.settings.dialect == "openrouter":
            choice["native_finish_reason"] = reason
            head["provider"] = "fault server"
        return {**head, "choices": [choice], "usage": self.usage()}

    def http(self, body: JsonObject | bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> bytes:
        data = body if isinstance(body, bytes) else json_bytes(body)
        return http_bytes(status, data, {"X-Generation-Id": self.generation_id, **(headers or {})})


def json_bytes(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def http_bytes(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """A whole response; a Content-Length or Transfer-Encoding among the headers is kept as it is."""
    lines = {"Content-Type": "application/json", **(headers or {})}
    if not {"Content-Length", "Transfer-Encoding"} & set(lines):
        lines["Content-Length"] = str(len(body))
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status} {REASONS.get(status, 'Unknown')}\r\n{head}\r\n".encode() + body


def error_json(code: int, message: str, **metadata: Any) -> JsonObject:
    error: JsonObject = {"code": code, "message": message}
    return {"error": error | {"metadata": metadata} if metadata else error}


def deliver(exchange: Exchange) -> Delivery:
    return DELIVERIES[exchange.fault](exchange)


def deliver_exactly(reply: Reply) -> Delivery:
    """The bytes of a scripted reply that names its status; no byte at all for status 0."""
    data = reply.body.encode() if isinstance(reply.body, str) else json_bytes(reply.body)
    if not reply.status:
        return Delivery(0, ((reply.delay_s, b""),), reply.end)
    whole = http_bytes(reply.status, data, reply.headers)
    if reply.cut_after is None:
        return Delivery(reply.status, ((reply.delay_s, whole),), reply.end)
    sent = whole[: len(whole) - len(data) + reply.cut_after]
    return Delivery(reply.status, ((reply.delay_s, sent),), "close" if reply.end == "keep" else reply.end)


def retry_after(seconds: int, form: str = "seconds") -> dict[str, str]:
    if form == "seconds":
        return {"Retry-After": str(seconds)}
    return {"Retry-After": formatdate(math.ceil(time.time() + seconds), usegmt=True)}


def _now(data: bytes, status: int = 200, end: str = "keep") -> Delivery:
    return Delivery(status, ((0.0, data),), end)


def _ok(exchange: Exchange) -> Delivery:
    return _now(exchange.http(exchange.completion()))


def _error(status: int, message: str, form: str = "", **metadata: Any) -> Callable[[Exchange], Delivery]:
    def make(exchange: Exchange) -> Delivery:
        headers = retry_after(exchange.retry_after_s, form) if form else {}
        if status == 429 and form:
            reset_ms = int((time.time() + exchange.retry_after_s) * 1000)
            headers |= {"X-RateLimit-Limit": "60", "X-RateLimit-Remaining": "0", "X-RateLimit-Reset": str(reset_ms)}
        return _now(http_bytes(status, json_bytes(error_json(status, message, **metadata)), headers), status)

    return make


def _page(status: int, content_type: str, text: str) -> Callable[[Exchange], Delivery]:
    return lambda exchange: _now(http_bytes(status, text.encode(), {"Content-Type": content_type}), status)


def _changed(change: Callable[[Exchange, JsonObject], None], half: bool = False, reason: str | None = None):
    """The answer with `change` made to its JSON; half of it, or under another finish_reason, if so asked."""

    def make(exchange: Exchange) -> Delivery:
        body = exchange.completion(half_of(exchange.answer) if half else None, reason)
        change(exchange, body)
        return _now(exchange.http(body))

    return make


def _broken_off() -> JsonObject:
    return error_json(502, "Provider disconnected mid-generation", provider_name="fault server")["error"]


def _empty_message(exchange: Exchange, body: JsonObject) -> None:
    body["choices"][0]["message"] = {"role": "assistant", "content": None}
    body["choices"][0]["finish_reason"] = "stop"


def _add_unknown(exchange: Exchange, body: JsonObject) -> None:
    choice = body["choices"][0]
    for at in (body, choice, choice["message"], body["usage"], *choice["message"].get("tool_calls", ())):
        at["x_unknown"] = {"nested": [1, None, "\u00e9\u2028"]}


def _cost_malformed(exchange: Exchange) -> Delivery:
    body = exchange.completion()
    body["usage"]["cost"] = "@cost@"
    bad = BAD_COSTS[draw_int("cost", exchange.chat.fingerprint) % len(BAD_COSTS)]
    # Replaced in the text, because 1e999 cannot be had from json.dumps.
    return _now(exchange.http(json_bytes(body).replace(b'"@cost@"', bad.encode())))


def _truncated(exchange: Exchange) -> Delivery:
    body = json_bytes(exchange.completion())
    whole = exchange.http(body)
    return _now(whole[: len(whole) - len(body) // 2], end="close")


def _chunked(exchange: Exchange) -> Delivery:
    body = json_bytes(exchange.completion())
    half = len(body) // 2
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:half], body[half:]))
    return _now(exchange.http(chunks + b"0\r\n\r\n", headers={"Transfer-Encoding": "chunked"}))


def _truncated_chunked(exchange: Exchange) -> Delivery:
    whole = _chunked(exchange).steps[0][1]
    return _now(whole[: len(whole) * 2 // 3], end="close")


def _invalid_json(exchange: Exchange) -> Delivery:
    body = json_bytes(exchange.completion())
    return _now(exchange.http(body[: len(body) // 2]))


def _dribble(exchange: Exchange) -> Delivery:
    data, pause = exchange.http(exchange.completion()), exchange.settings.delay_s / 4
    size = math.ceil(len(data) / 4)
    return Delivery(200, tuple((pause, data[at : at + size]) for at in range(0, len(data), size)))


def _slow(exchange: Exchange) -> Delivery:
    late = _ok(exchange) if exchange.is_billed else DELIVERIES["timeout_408"](exchange)
    return replace(late, steps=((exchange.settings.slow_s, late.steps[0][1]),))


def _delayed(exchange: Exchange) -> Delivery:
    return Delivery(200, ((exchange.settings.delay_s, _ok(exchange).steps[0][1]),))


BUSY = "Rate limit exceeded"
DELIVERIES: dict[str, Callable[[Exchange], Delivery]] = {
    OK: _ok,
    "error_body": lambda exchange: _now(exchange.http({"error": _broken_off()})),
    "error_beside_choices": _changed(lambda _, body: body.update(error=_broken_off()), half=True, reason="error"),
    "choice_error": _changed(lambda _, body: body["choices"][0].update(error=_broken_off()), half=True, reason="error"),
    "finish_error": _changed(lambda *_: None, half=True, reason="error"),
    "in_flight_budget": _error(402, "Budget in flight", "seconds", limit_source="openrouter_in_flight_budget"),
    "timeout_408": _error(408, "Request timed out"),
    "rate_limit_seconds": _error(429, BUSY, "seconds"),
    "rate_limit_date": _error(429, BUSY, "date"),
    "rate_limit_bare": _error(429, BUSY),
    "http_500": _error(500, "Internal Server Error"),
    "http_502": _page(502, "text/html", "<html><body><h1>502 Bad Gateway</h1></body></html>"),
    "http_503": _page(503, "text/plain", "no healthy upstream"),
    "http_503_after": _error(503, "No available model provider", "seconds"),
    "http_529": _error(529, "Overloaded"),
    "reset": lambda exchange: Delivery(0, ((0.0, b""),), "reset"),
    "closed": lambda exchange: Delivery(0, ((0.0, b""),), "close"),
    "truncated": _truncated,
    "truncated_chunked": _truncated_chunked,
    "empty_body": lambda exchange: _now(exchange.http(b"")),
    "invalid_json": _invalid_json,
    "json_not_object": lambda exchange: _now(exchange.http(json_bytes([exchange.completion()]))),
    "empty_choices": _changed(lambda _, body: body.update(choices=[])),
    "content_null": _changed(_empty_message),
    "slow": _slow,
    "out_of_credit": _error(402, "Insufficient credits. Add more using the credits page."),
    # The page does not give the value for a key's budget; a client may only look whether there is one.
    "key_limit": _error(403, "Key limit exceeded", limit_source="openrouter_key_budget"),
    "finish_length": _changed(lambda *_: None, half=True, reason="length"),
    "finish_filter": _changed(lambda *_: None, half=True, reason="content_filter"),
    "delayed_headers": _delayed,
    "dribble": _dribble,
    "chunked": _chunked,
    "padded": lambda exchange: _now(exchange.http(b"\n         \n" + json_bytes(exchange.completion()))),
    "extra_fields": _changed(_add_unknown),
    "usage_missing": _changed(lambda _, body: body.pop("usage")),
    "cost_missing": _changed(lambda _, body: body["usage"].pop("cost", None)),
    "cost_malformed": _cost_malformed,
    "overcharge": _ok,
    "idle_close": lambda exchange: replace(_ok(exchange), end="idle_close"),
}
