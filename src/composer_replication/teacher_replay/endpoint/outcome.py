"""What came back from an endpoint, told apart: a reply, or a failure with what it means for retrying and for money."""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, NamedTuple, cast

import orjson

from composer_replication.actions.messages import call_entry, content_text, written_calls
from composer_replication.teacher_replay.nano_dollars import Price, to_nano

Billing = Literal["none", "unknown"]
Concerns = Literal["call", "account", "connection"]
# A request that was refused was not worked on. Of everything else nobody can be sure.
_REFUSED = {400, 401, 402, 403, 404, 405, 409, 410, 413, 415, 422, 429}
_RETRIED = {408, 409, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529}
_IN_FLIGHT = "openrouter_in_flight_budget"
_MODERATED = frozenset({"reasons", "flagged_input"})
_MAX_ERROR = 300


class Reply(NamedTuple):
    """An assistant message. `error` where it is no answer all the same: it was cut off, or filtered."""

    message: dict[str, Any]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cost_nano: int | None
    error: str | None = None


class Failure(NamedTuple):
    """No message. `cost_nano` where the endpoint said what it took; else `billing` says what is known.

    `concerns`: this call alone, whoever asks (a key, credit), or the way there. The last two are every call's.
    """

    error: str
    is_retried: bool
    billing: Billing
    retry_after_s: float | None = None
    cost_nano: int | None = None
    concerns: Concerns = "call"


def read_response(status: int, headers: Mapping[str, str], body: bytes, price: Price) -> Reply | Failure:
    """The outcome of a request that got an answer of some kind. What cannot be read is a failure too."""
    try:
        return _read(status, headers, body, price)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        return Failure(f"an answer that cannot be read: {type(error).__name__}", True, "unknown")


def _read(status: int, headers: Mapping[str, str], body: bytes, price: Price) -> Reply | Failure:
    data = _object(body)
    if not 200 <= status < 300:
        refusal = _refusal(status, headers, data, body)
        said = None if data is None else _cost(data, price)
        return refusal if said is None else refusal._replace(cost_nano=said)
    if data is None:
        what = "an empty body" if not body.strip() else "a body that is no JSON object"
        return Failure(f"HTTP 200 with {what}", True, "unknown")
    cost = _cost(data, price)
    choice = _first_choice(data)
    inner = choice.get("error") if choice else None
    if data.get("error") or inner:
        return _error_inside(data.get("error") or inner, cost)
    if choice is None or not isinstance(choice.get("message"), dict):
        return Failure("HTTP 200 without a message", True, "unknown", cost_nano=cost)
    return _reply(choice, data, cost)


def broken(error: str, *, was_sent: bool) -> Failure:
    """A request without an answer: if it may have arrived, it may have been billed."""
    return Failure(error, True, "unknown") if was_sent else Failure(error, True, "none", concerns="connection")


def with_status(status: int, headers: Mapping[str, str], unread: Failure) -> Failure:
    """An answer whose body could not be read: a refusal is one all the same, by its status."""
    return unread if 200 <= status < 300 else _refusal(status, headers, None, unread.error.encode())


def _reply(choice: dict[str, Any], data: dict[str, Any], cost: int | None) -> Reply | Failure:
    reason = str(choice.get("finish_reason") or "")
    message = _clean_message(choice["message"])
    if reason == "error":
        return Failure("finish_reason error", True, "unknown", cost_nano=cost)
    error = None
    if reason in ("length", "content_filter"):
        error = f"finish_reason {reason}"
    elif not message.get("content") and not message.get("tool_calls"):
        return Failure("HTTP 200 with an empty message", True, "unknown", cost_nano=cost)
    usage = _usage(data)
    tokens = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    prompt, completion = (each if isinstance(each, int) and each >= 0 else 0 for each in tokens)
    return Reply(message, reason, prompt, completion, cost, error)


def _clean_message(message: dict[str, Any]) -> dict[str, Any]:
    """What an answer is made of; providers add much else."""
    found: dict[str, Any] = {"role": "assistant", "content": content_text(message.get("content"), separator="")}
    calls = [
        call_entry(call.id if isinstance(call.id, str) else "", call.name, _as_text(call.arguments))
        for call in written_calls(message)
        if isinstance(call.name, str)
    ]
    return found | {"tool_calls": calls} if calls else found


def _as_text(arguments: object) -> str:
    return (
        arguments if isinstance(arguments, str) else orjson.dumps(arguments if arguments is not None else {}).decode()
    )


def _error_inside(error: Any, cost: int | None) -> Failure:
    """HTTP 200 with an error: generation had begun. Its code says whether asking again can help."""
    about: dict[str, Any] = error if isinstance(error, dict) else {"message": str(error)}
    code = about.get("code")
    known = int(code) if isinstance(code, int) or (isinstance(code, str) and re.fullmatch("[0-9]{3}", code)) else 502
    is_retried = known in _RETRIED or known >= 500
    return Failure(f"error in HTTP 200: {_told(about)}", is_retried, "unknown", cost_nano=cost)


def _refusal(status: int, headers: Mapping[str, str], data: dict[str, Any] | None, body: bytes) -> Failure:
    error: Any = (data or {}).get("error") or (data or {}).get("detail")
    about: dict[str, Any] = error if isinstance(error, dict) else {"message": str(error or _shown(body))}
    billing: Billing = "none" if status in _REFUSED else "unknown"
    wait = retry_after(headers)
    is_retried = status in _RETRIED
    metadata: Any = about.get("metadata")
    said: Mapping[str, Any] = cast("dict[str, Any]", metadata) if isinstance(metadata, dict) else {}
    if status == 402:  # credits are gone, or only for as long as other requests hold them
        is_retried = said.get("limit_source") == _IN_FLIGHT
    # 403 is said of keys and budgets, and of a text that a moderator did not like: that is one call's.
    is_of_all = (status in (401, 402) and not is_retried) or (status == 403 and not _MODERATED & set(said))
    return Failure(
        f"HTTP {status}: {_told(about)}", is_retried, billing, wait, concerns="account" if is_of_all else "call"
    )


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait, from either form of the header; None without one."""
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _cost(data: dict[str, Any], price: Price) -> int | None:
    """What the endpoint says it took, or the tokens it counted at the teacher's price; None where it says neither."""
    usage = _usage(data)
    said = usage.get("cost")
    if isinstance(said, int | float | str) and not isinstance(said, bool):
        try:
            amount = Decimal(str(said))
        except InvalidOperation:
            amount = Decimal(-1)
        if amount.is_finite() and amount >= 0:
            return to_nano(amount)
    tokens = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    if all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in tokens):
        return price.bound(*cast("list[int]", tokens))
    return None


def _usage(data: dict[str, Any]) -> dict[str, Any]:
    usage = data.get("usage")
    return cast("dict[str, Any]", usage) if isinstance(usage, dict) else {}


def _first_choice(data: dict[str, Any]) -> dict[str, Any] | None:
    choices = data.get("choices")
    first: Any = choices[0] if isinstance(choices, list) and choices else None
    return cast("dict[str, Any]", first) if isinstance(first, dict) else None


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        value: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def _told(about: Mapping[str, Any]) -> str:
    code, message = about.get("code"), about.get("message")
    return _shown(" ".join(str(each) for each in (code, message) if each is not None).encode())


def _shown(body: bytes) -> str:
    text = body[: 4 * _MAX_ERROR].decode("utf-8", "replace")
    return "".join(c if c.isprintable() else " " for c in text)[:_MAX_ERROR].strip()
