"""What came back from an endpoint, told apart: a reply, or a failure with what it means for retrying and for money.

What an answer counts for under the cap is never taken from the endpoint's word alone. Its token counts are credited at
the teacher's price where they are plausible for the characters that were sent and received; a `cost` can only raise
that (a stated discount cannot be told from a lie, and with the user's own provider key the `cost` leaves out what the
provider bills). In every other case the answer counts for the reserved bound.
"""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, NamedTuple, cast

import orjson

from composer_replication.actions.messages import call_entry, content_text, written_calls
from composer_replication.teacher_replay.nano_dollars import to_nano
from composer_replication.teacher_replay.requests import Request

Billing = Literal["none", "unknown"]
Concerns = Literal["call", "account", "connection"]
# A request that was refused was not worked on. Of everything else nobody can be sure.
_REFUSED = {400, 401, 402, 403, 404, 405, 409, 410, 413, 415, 422, 429}
_RETRIED = {408, 409, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529}
_IN_FLIGHT = "openrouter_in_flight_budget"
_MODERATED = frozenset({"reasons", "flagged_input"})
_MAX_ERROR = 300
# Fewest tokens that a usual tokenizer makes of a text, measured with the tokenizers of Qwen2.5, GPT-4o, Claude,
# DeepSeek-V3, Gemma 3, Llama 3 and SmolLM2 on this repository, agents' logs, hex, numbers and text in 30 languages.
# Text and code have 3 to 5 characters per token, and a token never holds two words. A token holds three digits at most.
# Chinese, Japanese and Korean have 0.3 to 2.4 characters per token (up to 4.2 in pieces of about 20 characters).
# Bytes would not do: Hindi has 9 bytes per token with Gemma 3, 8 with GPT-4o.
_MOST_CHARS_PER_TOKEN, _USUAL_CHARS_PER_TOKEN, _SLACK = 7, 4, 0.9
_MOST_DIGITS_PER_TOKEN, _MOST_WIDE_PER_TOKEN = 3, 3
# "src/a_b2.py" -> src, a, b, py; "हिन्दी" is one word, though its vowel signs are no letters to Python.
_WORD = re.compile("[A-Za-z\u0080-\U0010ffff]+")
# Repeated signs, or one repeated letter or digit, are few tokens however long they are: "=====" -> "=",
# "-=-=-=-=" -> "-=", "|---|---|---|---" -> "|---", "AAAAAAAA" -> "A".
_RUN = re.compile(r"([\W_]{1,4}?|.)\1{3,}")
# Hangul, kana, Chinese characters, emoji.
_WIDE = re.compile("[\u1100-\u11ff\u2e80-\ua4cf\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\U0001f000-\U0003ffff]")


class Reply(NamedTuple):
    """An assistant message. `error` where it is no answer all the same: it was cut off, or filtered.

    `cost_nano` is what it counts for under the cap; None is the reserved bound.
    """

    message: dict[str, Any]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cost_nano: int | None
    error: str | None = None


class Failure(NamedTuple):
    """No message. `cost_nano` where more was billed than was reserved; else `billing` says what is known.

    `concerns`: this call alone, whoever asks (a key, credit), or the way there. The last two are every call's.
    """

    error: str
    is_retried: bool
    billing: Billing
    retry_after_s: float | None = None
    cost_nano: int | None = None
    concerns: Concerns = "call"


def read_response(status: int, headers: Mapping[str, str], body: bytes, request: Request) -> Reply | Failure:
    """Return the outcome of a request that got an answer of some kind. What cannot be read is a failure too."""
    try:
        return _read(status, headers, body, request)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        return Failure(f"an answer that cannot be read: {type(error).__name__}", True, "unknown")


def _read(status: int, headers: Mapping[str, str], body: bytes, request: Request) -> Reply | Failure:
    data = _object(body)
    if data is None and 200 <= status < 300:
        what = "an empty body" if not body.strip() else "a body that is no JSON object"
        return Failure(f"HTTP 200 with {what}", True, "unknown")
    cost = None if data is None else _counted_cost(data, request)
    was_answered = 200 <= status < 300
    outcome = _answer(data, cost) if data is not None and was_answered else _refusal(status, headers, data, body)
    # What a failure was worth cannot be seen, so it counts for its bound, or for nothing if it was a refusal. Only a
    # bill above the bound counts for more.
    is_overrun = cost is not None and cost > request.bound_nano
    return outcome._replace(cost_nano=cost) if isinstance(outcome, Failure) and is_overrun else outcome


def _answer(data: dict[str, Any], cost: int | None) -> Reply | Failure:
    choice = _first_choice(data)
    inner = choice.get("error") if choice else None
    if data.get("error") or inner:
        return _error_inside(data.get("error") or inner)
    if choice is None or not isinstance(choice.get("message"), dict):
        return Failure("HTTP 200 without a message", True, "unknown")
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
        return Failure("finish_reason error", True, "unknown")
    error = None
    if reason in ("length", "content_filter"):
        error = f"finish_reason {reason}"
    elif not message.get("content") and not message.get("tool_calls"):
        return Failure("HTTP 200 with an empty message", True, "unknown")
    prompt, completion = _claimed_tokens(_usage(data)) or (0, 0)
    return Reply(message, reason, prompt, completion, cost, error)


def _clean_message(message: dict[str, Any]) -> dict[str, Any]:
    """What an answer is made of; providers add much else."""
    clean_message: dict[str, Any] = {"role": "assistant", "content": content_text(message.get("content"), separator="")}
    calls = [
        call_entry(call.id if isinstance(call.id, str) else "", call.name, _as_text(call.arguments))
        for call in written_calls(message)
        if isinstance(call.name, str)
    ]
    return clean_message | {"tool_calls": calls} if calls else clean_message


def _as_text(arguments: object) -> str:
    return (
        arguments if isinstance(arguments, str) else orjson.dumps(arguments if arguments is not None else {}).decode()
    )


def _error_inside(error: Any) -> Failure:
    """HTTP 200 with an error: generation had begun. Its code says whether asking again can help."""
    about: dict[str, Any] = error if isinstance(error, dict) else {"message": str(error)}
    code = about.get("code")
    status = int(code) if isinstance(code, int) or (isinstance(code, str) and re.fullmatch("[0-9]{3}", code)) else 502
    is_retried = status in _RETRIED or status >= 500
    return Failure(f"error in HTTP 200: {_told(about)}", is_retried, "unknown")


def _refusal(status: int, headers: Mapping[str, str], data: dict[str, Any] | None, body: bytes) -> Failure:
    error: Any = (data or {}).get("error") or (data or {}).get("detail")
    about: dict[str, Any] = error if isinstance(error, dict) else {"message": str(error or _shown(body))}
    billing: Billing = "none" if status in _REFUSED else "unknown"
    wait = retry_after(headers)
    is_retried = status in _RETRIED
    metadata: Any = about.get("metadata")
    details: Mapping[str, Any] = cast("dict[str, Any]", metadata) if isinstance(metadata, dict) else {}
    if status == 402:  # credits are gone, or only for as long as other requests hold them
        is_retried = details.get("limit_source") == _IN_FLIGHT
    # 403 is said of keys and budgets, and of a text that a moderator did not like: that is one call's.
    is_of_all = (status in (401, 402) and not is_retried) or (status == 403 and not _MODERATED & set(details))
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


def _counted_cost(data: dict[str, Any], request: Request) -> int | None:
    """Return what an answer counts for under the cap, in nano-dollars; None is the reserved bound.

    No tokenizer is known here, so a count that is too low, but not below `_fewest_tokens`, is not noticed.
    """
    sent, price = _object(request.body) or {}, request.teacher.price
    usage, max_tokens = _usage(data), sent.get("max_tokens") or 0
    read = [text for message in sent.get("messages") or () for text in _texts(message)]
    written = [text for message in _messages_of(data) for text in _texts(message)]
    cost, tokens = _claimed_cost(usage), _claimed_tokens(usage)
    is_plausible = tokens is not None and tokens[0] >= _fewest_tokens(read) and tokens[1] >= _fewest_tokens(written)
    if tokens is not None and cost is not None and is_plausible:
        was_cut = (_first_choice(data) or {}).get("finish_reason") == "length"
        completion = max(tokens[1], max_tokens) if was_cut else tokens[1]
        return max(cost, price.bound(tokens[0], completion))
    counted = cost or 0
    if sum(map(len, written)) > _MOST_CHARS_PER_TOKEN * max_tokens > 0:  # it ignores max_tokens: count bytes as tokens
        counted = max(counted, price.bound(len(request.body), sum(len(text.encode()) for text in written)))
    return counted if counted > request.bound_nano else None


def _fewest_tokens(texts: Sequence[str]) -> float:
    """Return the fewest tokens that a usual tokenizer makes of texts: a smaller count is not a count of them."""
    num_chars = num_words = num_digits = num_wide = 0
    for text in texts:
        shorter = _RUN.sub(r"\1", " ".join(text.split()))  # blanks too, which are often part of a token
        narrow, wide = (shorter, 0) if shorter.isascii() else _WIDE.subn(" ", shorter)
        digits = sum(map(narrow.count, "0123456789"))
        num_chars += len(shorter) - wide - digits
        num_words += len(_WORD.findall(narrow))
        num_digits, num_wide = num_digits + digits, num_wide + wide
    of_words = max(num_chars / _MOST_CHARS_PER_TOKEN, _SLACK * min(num_words, num_chars / _USUAL_CHARS_PER_TOKEN))
    of_wide = max(0.0, num_wide / _MOST_WIDE_PER_TOKEN - 1)
    # One token less, because a short text can be an unusual one; but nothing that was written has no token.
    return max(min(1, num_chars + num_digits + num_wide), of_words + num_digits / _MOST_DIGITS_PER_TOKEN + of_wide - 1)


def _claimed_cost(usage: Mapping[str, Any]) -> int | None:
    """Return what the endpoint says that all parties billed, 0 where it says nothing; None if that is not an amount."""
    details = usage.get("cost_details")
    upstream = cast("dict[str, Any]", details).get("upstream_inference_cost") if isinstance(details, dict) else None
    billed, by_provider = _amount(usage.get("cost")), _amount(upstream)
    if billed is None or by_provider is None:
        return None
    # With the user's own key OpenRouter bills a fee and the provider bills the rest; otherwise its price holds both.
    return to_nano(billed + by_provider if usage.get("is_byok") else max(billed, by_provider))


def _amount(value: object) -> Decimal | None:
    """Return dollars, 0 for none; None where the value is not an amount: text, negative, not finite, a boolean."""
    if value is None:
        return Decimal(0)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        amount = Decimal(str(value))
    except InvalidOperation:
        return None
    return amount if amount.is_finite() and amount >= 0 else None


def _claimed_tokens(usage: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the tokens read and written, thinking that is not shown included; None where they are not two counts."""
    prompt, completion = (_count(usage.get(name)) for name in ("prompt_tokens", "completion_tokens"))
    if prompt is None or completion is None:
        return None
    details = usage.get("completion_tokens_details")
    thought = _count(cast("dict[str, Any]", details).get("reasoning_tokens")) if isinstance(details, dict) else None
    thought, total = thought or 0, _count(usage.get("total_tokens")) or 0
    # Most endpoints count thinking as completion; some beside it, and then the total or the larger count shows that.
    return prompt, max(completion if thought <= completion else completion + thought, total - prompt)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _messages_of(data: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the message of every choice."""
    choices = data.get("choices")
    for choice in cast("list[Any]", choices) if isinstance(choices, list) else ():
        if isinstance(choice, dict) and isinstance(message := cast("dict[str, Any]", choice).get("message"), dict):
            yield cast("dict[str, Any]", message)


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a message that a tokenizer saw for certain: words, thinking that is shown, arguments."""
    yield content_text(message.get("content"), separator="")
    thinking = [text for name in ("reasoning", "reasoning_content") if isinstance(text := message.get(name), str)]
    yield max(thinking, key=len, default="")
    yield refusal if isinstance(refusal := message.get("refusal"), str) else ""
    yield from (_as_text(call.arguments) for call in written_calls(message))


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
    return _shown(" ".join(str(part) for part in (code, message) if part is not None).encode())


def _shown(body: bytes) -> str:
    text = body[: 4 * _MAX_ERROR].decode("utf-8", "replace")
    return "".join(c if c.isprintable() else " " for c in text)[:_MAX_ERROR].strip()
