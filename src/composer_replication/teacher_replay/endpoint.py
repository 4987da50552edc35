"""An HTTP client for endpoints with the chat-completions API, and the outcome of each attempt.

Connections are split into several pools, because a single large pool spends more time on finding a free connection than
the requests take. The key is sent only in a header.
"""

from __future__ import annotations

import asyncio
import email.utils
import re
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from types import TracebackType
from typing import Any, Literal, NamedTuple, cast

import orjson

from composer_replication.errors import InputError, explain
from composer_replication.messages import call_entry, content_text, written_calls
from composer_replication.optional import require
from composer_replication.teacher_replay.requests import Request
from composer_replication.teacher_replay.teachers import read_amount, to_nano

_CONNECTIONS_PER_POOL = 8
_CONNECT_S = 10.0  # detects an unreachable address long before an answer would time out


class TeacherClient:
    """An async context manager that sends requests to endpoints, at most `max_concurrency` at a time."""

    def __init__(self, *, max_concurrency: int = 64, timeout_s: float = 120.0) -> None:
        self._httpx: Any = require("httpx", extra="replay")
        self._num_pools = -(-max_concurrency // _CONNECTIONS_PER_POOL)
        self._timeout_s = timeout_s
        self._pools: list[Any] = []
        self._free: asyncio.Queue[Any] = asyncio.Queue()
        self._max_concurrency = max_concurrency

    async def __aenter__(self) -> TeacherClient:
        limits = self._httpx.Limits(
            max_connections=_CONNECTIONS_PER_POOL, max_keepalive_connections=_CONNECTIONS_PER_POOL, keepalive_expiry=30
        )
        context = self._httpx.create_ssl_context()  # shared, because creating one takes longer than a request
        for _ in range(self._num_pools):
            timeout = self._httpx.Timeout(self._timeout_s, connect=min(self._timeout_s, _CONNECT_S))
            pool = self._httpx.AsyncClient(limits=limits, timeout=timeout, verify=context, trust_env=True)
            self._pools.append(pool)
        for number in range(self._max_concurrency):
            self._free.put_nowait(self._pools[number % self._num_pools])
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for pool in self._pools:
            await pool.aclose()
        self._pools.clear()

    async def send(self, request: Request) -> Reply | FailedRequest:
        """Make one attempt to send a request. Failures are returned as FailedRequest; only cancellation raises."""
        pool = await self._free.get()
        try:
            outcome = await self._post(pool, request)
        finally:
            self._free.put_nowait(pool)
        return _without_key(outcome, request.teacher.api_key)

    async def get_json(self, url: str, api_key: str | None) -> tuple[int, bytes]:
        """Send a GET request, which lists the endpoint's models; return the status and the body."""
        pool = await self._free.get()
        what = f"GET {url.partition('?')[0]}"
        try:
            async with asyncio.timeout(self._timeout_s):
                async with pool.stream("GET", url, headers=_headers(api_key)) as response:
                    body = await _limited_body(response)
        except TimeoutError:
            got = f"no complete answer within {self._timeout_s:g} s"
            raise InputError(explain(what, got=got, expected="a complete answer")) from None
        except (self._httpx.HTTPError, self._httpx.InvalidURL) as error:
            raise InputError(explain(what, got=type(error).__name__, expected="an answer")) from None
        finally:
            self._free.put_nowait(pool)
        if isinstance(body, FailedRequest):
            raise InputError(explain(what, got=body.error, expected="an answer"))
        return response.status_code, body

    async def _post(self, pool: Any, request: Request) -> Reply | FailedRequest:
        httpx = self._httpx
        url = f"{request.teacher.base_url}/chat/completions"
        headers = _headers(request.teacher.api_key) | {"content-type": "application/json"}
        response: Any = None
        try:
            async with asyncio.timeout(self._timeout_s):
                async with pool.stream("POST", url, content=request.body, headers=headers) as response:
                    body = await _limited_body(response)
        except (httpx.LocalProtocolError, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            reason = f"not sent: {type(error).__name__}"  # the text of the error may hold the header
            return FailedRequest(reason, False, "none", scope="connection")
        except httpx.PoolTimeout:
            return FailedRequest("no connection was free", True, "none")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return _connection_failure(f"no connection: {type(error).__name__}: {error}", was_sent=False)
        except TimeoutError:
            body = _connection_failure(f"no answer within {self._timeout_s:g} s", was_sent=True)
        except httpx.HTTPError as error:
            body = _connection_failure(f"connection broke: {type(error).__name__}: {error}", was_sent=True)
        if isinstance(body, FailedRequest):
            return body if response is None else _with_status(response.status_code, response.headers, body)
        if request.teacher.api_key:  # before texts are truncated, which could leave part of a key
            body = body.replace(request.teacher.api_key.encode(), b"<key>")
        return _parse_response(response.status_code, response.headers, body, request)


def _headers(api_key: str | None) -> dict[str, str]:
    return _ACCEPTED_ENCODINGS | ({"authorization": f"Bearer {api_key}"} if api_key else {})


def _without_key(outcome: Reply | FailedRequest, key: str | None) -> Reply | FailedRequest:
    # An endpoint may quote the key in its error message.
    if isinstance(outcome, FailedRequest) and key and key in outcome.error:
        return outcome._replace(error=outcome.error.replace(key, "<key>"))
    return outcome


# ---- bodies of answers

# The size of a body is limited during decompression, because a megabyte of gzip can expand to gigabytes. Only gzip is
# requested, and decompressed here: HTTP clients decompress a whole chunk before its size can be checked.

MAX_BODY = 16 * 2**20
_ACCEPTED_ENCODINGS = {"accept-encoding": "gzip"}
_GZIP_BITS = zlib.MAX_WBITS | 16
_GZIP_MAGIC = b"\x1f\x8b"


async def _limited_body(response: Any) -> bytes | FailedRequest:
    """Return the decompressed body of a streamed answer, or a failure if the body is too long or has an unknown
    encoding.

    At most `MAX_BODY` bytes are in memory; any bytes beyond that are neither decompressed nor read.
    """
    encoding = str(response.headers.get("content-encoding", "")).strip().lower()
    decoders = {"": _Uncompressed, "identity": _Uncompressed, "gzip": _Gzip, "x-gzip": _Gzip, "deflate": _Deflate}
    if encoding not in decoders:
        return _unreadable(f"an answer in an encoding that was not asked for: {encoding[:40]!r}")
    decoder = decoders[encoding]()
    parts, room, num_raw = list[bytes](), MAX_BODY, 0
    async for raw in response.aiter_raw():
        try:
            part = decoder.decompress(raw, room + 1)
        except zlib.error:
            return _unreadable("an answer that cannot be unpacked")
        room, num_raw = room - len(part), num_raw + len(raw)
        if room < 0 or num_raw > MAX_BODY:
            return _unreadable(f"an answer of more than {MAX_BODY} bytes")
        parts.append(part)
    if num_raw and not decoder.is_whole:
        return _connection_failure("an answer that breaks off", was_sent=True)
    return b"".join(parts)


def _unreadable(error: str) -> FailedRequest:
    # The answer has arrived and is billed. A retry would get the same encoding, and be billed again.
    return FailedRequest(error, False, "unknown")


class _Uncompressed:
    is_whole = True

    def decompress(self, raw: bytes, _limit: int) -> bytes:
        return raw


class _Gzip:
    """Decompresses any number of gzip members; ignores data after the last one."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(wbits=_GZIP_BITS)
        self._pending = b""  # bytes after a member that may be the beginning of another one

    @property
    def is_whole(self) -> bool:
        return self._member.eof

    def decompress(self, raw: bytes, limit: int) -> bytes:
        parts = list[bytes]()
        while raw and limit > 0:
            if self._member.eof:
                raw = self._pending + raw
                if len(raw) < len(_GZIP_MAGIC):
                    self._pending = raw
                    break
                if not raw.startswith(_GZIP_MAGIC):
                    self._pending = raw[: len(_GZIP_MAGIC)]
                    break
                self._member, self._pending = zlib.decompressobj(wbits=_GZIP_BITS), b""
            parts.append(self._member.decompress(raw, limit))
            limit -= len(parts[-1])
            raw = self._member.unused_data
        return b"".join(parts)


class _Deflate:
    """Decompresses deflate with a zlib header, as the standard requires, or without it, as some servers send it."""

    def __init__(self) -> None:
        self._begin, self._stream = b"", None

    @property
    def is_whole(self) -> bool:
        return self._stream is not None and self._stream.eof

    def decompress(self, raw: bytes, limit: int) -> bytes:
        if self._stream is None:
            raw = self._begin = self._begin + raw
            if len(raw) < 2:
                return b""
            has_header = raw[0] & 15 == zlib.DEFLATED and int.from_bytes(raw[:2]) % 31 == 0
            self._stream = zlib.decompressobj(wbits=zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
        return self._stream.decompress(raw, limit)


# ---- outcomes

# The amount that an answer counts under the cap never depends on the endpoint's claims alone. Claimed token counts are
# charged at the teacher's price if they are plausible for the characters sent and received. A claimed `cost` can only
# raise that amount: a discount cannot be distinguished from a false claim, and with the user's own provider key `cost`
# omits the provider's bill. In all other cases the answer counts with the reserved maximum.

Billing = Literal["none", "unknown"]
FailureScope = Literal["call", "account", "connection"]
# A request refused with one of these was not processed. After any other status it may have been.
_REFUSED = {400, 401, 402, 403, 404, 405, 409, 410, 413, 415, 422, 429}
_RETRIED = {408, 409, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529}
_IN_FLIGHT = "openrouter_in_flight_budget"
_MODERATED = frozenset({"reasons", "flagged_input"})
_MAX_ERROR = 300
# The minimum number of tokens of a text with a common tokenizer, measured with the tokenizers of Qwen2.5, GPT-4o,
# Claude, DeepSeek-V3, Gemma 3, Llama 3 and SmolLM2 on this repository, agents' logs, hex, numbers and text in 30
# languages. Text and code have 3 to 5 characters per token. A token never contains two words, and at most three digits.
# Chinese, Japanese and Korean have 0.3 to 2.4 characters per token (up to 4.2 in pieces of about 20 characters).
# Counting bytes would not work: Hindi has 9 bytes per token with Gemma 3, 8 with GPT-4o.
_MAX_CHARS_PER_TOKEN, _USUAL_CHARS_PER_TOKEN, _SLACK = 7, 4, 0.9
_MAX_DIGITS_PER_TOKEN, _MAX_WIDE_PER_TOKEN = 3, 3
# "src/a_b2.py" -> src, a, b, py; "हिन्दी" is one word, although Python does not count its vowel signs as letters.
_WORD = re.compile("[A-Za-z\u0080-\U0010ffff]+")
# A repetition of symbols, or of one letter or digit, is few tokens, however long it is: "=====" -> "=",
# "-=-=-=-=" -> "-=", "|---|---|---|---" -> "|---", "AAAAAAAA" -> "A".
_REPETITION = re.compile(r"([\W_]{1,4}?|.)\1{3,}")
# Hangul, kana, Chinese characters, emoji: each character of "한글", not "é".
_WIDE = re.compile("[\u1100-\u11ff\u2e80-\ua4cf\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\U0001f000-\U0003ffff]")


class Reply(NamedTuple):
    """A teacher's assistant message. `error` is set if the message is unusable because it was cut off or filtered.

    `cost_nano` is the amount, in nano-dollars, that the reply counts toward the cap; None means the reserved maximum.
    """

    message: dict[str, Any]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cost_nano: int | None
    error: str | None = None


class FailedRequest(NamedTuple):
    """A failed attempt. `cost_nano` is set if more was billed than reserved; otherwise `billing` says what was billed.

    `scope` is what the failure affects: only this call, every call with this key (wrong key, no credit), or the
    connection.
    """

    error: str
    is_retried: bool
    billing: Billing
    retry_after_s: float | None = None
    cost_nano: int | None = None
    scope: FailureScope = "call"


def _parse_response(status: int, headers: Mapping[str, str], body: bytes, request: Request) -> Reply | FailedRequest:
    """Return the reply or the failure of a request that got a response. A response that cannot be parsed is a
    failure.
    """
    try:
        return _parse(status, headers, body, request)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        return FailedRequest(f"an answer that cannot be read: {type(error).__name__}", True, "unknown")


def _parse(status: int, headers: Mapping[str, str], body: bytes, request: Request) -> Reply | FailedRequest:
    data = _parse_object(body)
    if data is None and 200 <= status < 300:
        what = "an empty body" if not body.strip() else "a body that is no JSON object"
        return FailedRequest(f"HTTP 200 with {what}", True, "unknown")
    cost = None if data is None else _charged_cost(data, request)
    was_answered = 200 <= status < 300
    outcome = _parse_answer(data, cost) if data is not None and was_answered else _refusal(status, headers, data, body)
    # A failure of unknown cost counts with its reserved maximum, and a refusal with 0. Only a bill above the maximum
    # counts more.
    is_overrun = cost is not None and cost > request.bound_nano
    return outcome._replace(cost_nano=cost) if isinstance(outcome, FailedRequest) and is_overrun else outcome


def _parse_answer(data: dict[str, Any], cost: int | None) -> Reply | FailedRequest:
    choice = _first_choice(data)
    inner = choice.get("error") if choice else None
    if data.get("error") or inner:
        return _embedded_error(data.get("error") or inner)
    if choice is None or not isinstance(choice.get("message"), dict):
        return FailedRequest("HTTP 200 without a message", True, "unknown")
    return _parse_reply(choice, data, cost)


def _connection_failure(error: str, *, was_sent: bool) -> FailedRequest:
    """Return the failure of a request that got no response. A request that was sent may have been billed."""
    return FailedRequest(error, True, "unknown") if was_sent else FailedRequest(error, True, "none", scope="connection")


def _with_status(status: int, headers: Mapping[str, str], unread: FailedRequest) -> FailedRequest:
    """Return the failure for a response whose body could not be read; the HTTP status still shows whether it was a
    refusal.
    """
    return unread if 200 <= status < 300 else _refusal(status, headers, None, unread.error.encode())


def _parse_reply(choice: dict[str, Any], data: dict[str, Any], cost: int | None) -> Reply | FailedRequest:
    reason = str(choice.get("finish_reason") or "")
    message = _clean_message(choice["message"])
    if reason == "error":
        return FailedRequest("finish_reason error", True, "unknown")
    error = None
    if reason in ("length", "content_filter"):
        error = f"finish_reason {reason}"
    elif not message.get("content") and not message.get("tool_calls"):
        return FailedRequest("HTTP 200 with an empty message", True, "unknown")
    prompt, completion = _claimed_tokens(_usage(data)) or (0, 0)
    return Reply(message, reason, prompt, completion, cost, error)


def _clean_message(message: dict[str, Any]) -> dict[str, Any]:
    """Keep only the fields of a message that belong to an answer; providers add many others."""
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


def _embedded_error(error: Any) -> FailedRequest:
    # HTTP 200 with an error: generation had begun. The error code decides whether to retry.
    about: dict[str, Any] = error if isinstance(error, dict) else {"message": str(error)}
    code = about.get("code")
    status = int(code) if isinstance(code, int) or (isinstance(code, str) and re.fullmatch("[0-9]{3}", code)) else 502
    is_retried = status in _RETRIED or status >= 500
    return FailedRequest(f"error in HTTP 200: {_error_text(about)}", is_retried, "unknown")


def _refusal(status: int, headers: Mapping[str, str], data: dict[str, Any] | None, body: bytes) -> FailedRequest:
    error: Any = (data or {}).get("error") or (data or {}).get("detail")
    about: dict[str, Any] = error if isinstance(error, dict) else {"message": str(error or _printable(body))}
    billing: Billing = "none" if status in _REFUSED else "unknown"
    wait = _retry_after_s(headers)
    is_retried = status in _RETRIED
    metadata: Any = about.get("metadata")
    details: Mapping[str, Any] = cast("dict[str, Any]", metadata) if isinstance(metadata, dict) else {}
    if status == 402:  # credits are used up, or temporarily reserved by other requests
        is_retried = details.get("limit_source") == _IN_FLIGHT
    # 403 is used for keys and budgets, and for text that moderation rejected, which affects only one call.
    is_account_wide = (status in (401, 402) and not is_retried) or (status == 403 and not _MODERATED & set(details))
    return FailedRequest(
        f"HTTP {status}: {_error_text(about)}",
        is_retried,
        billing,
        wait,
        scope="account" if is_account_wide else "call",
    )


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the number of seconds to wait according to the Retry-After header (a number or a date); None without
    the header.
    """
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


def _charged_cost(data: dict[str, Any], request: Request) -> int | None:
    """Return the amount that an answer counts toward the cap, in nano-dollars; None means the reserved maximum.

    The tokenizer is unknown here, so a claimed count that is too low goes unnoticed unless it is below `_min_tokens`.
    """
    sent, price = _parse_object(request.body) or {}, request.teacher.price
    usage, max_tokens = _usage(data), sent.get("max_tokens") or 0
    read = [text for message in sent.get("messages") or () for text in _message_texts(message)]
    written = [text for message in _choice_messages(data) for text in _message_texts(message)]
    cost, tokens = _claimed_cost(usage), _claimed_tokens(usage)
    is_plausible = tokens is not None and tokens[0] >= _min_tokens(read) and tokens[1] >= _min_tokens(written)
    if tokens is not None and cost is not None and is_plausible:
        was_cut = (_first_choice(data) or {}).get("finish_reason") == "length"
        completion = max(tokens[1], max_tokens) if was_cut else tokens[1]
        return max(cost, price.bound(tokens[0], completion))
    counted = cost or 0
    if (
        sum(map(len, written)) > _MAX_CHARS_PER_TOKEN * max_tokens > 0
    ):  # the endpoint ignored max_tokens, so count every byte as a token
        counted = max(counted, price.bound(len(request.body), sum(len(text.encode()) for text in written)))
    return counted if counted > request.bound_nano else None


def _min_tokens(texts: Sequence[str]) -> float:
    """Return the smallest plausible number of tokens for these texts with any common tokenizer."""
    num_chars = num_words = num_digits = num_wide = 0
    for text in texts:
        shorter = _REPETITION.sub(r"\1", " ".join(text.split()))  # includes spaces, which are often part of a token
        narrow, wide = (shorter, 0) if shorter.isascii() else _WIDE.subn(" ", shorter)
        digits = sum(map(narrow.count, "0123456789"))
        num_chars += len(shorter) - wide - digits
        num_words += len(_WORD.findall(narrow))
        num_digits, num_wide = num_digits + digits, num_wide + wide
    of_words = max(num_chars / _MAX_CHARS_PER_TOKEN, _SLACK * min(num_words, num_chars / _USUAL_CHARS_PER_TOKEN))
    of_wide = max(0.0, num_wide / _MAX_WIDE_PER_TOKEN - 1)
    # Minus one token, because a short text can be unusual; but any text has at least one token.
    return max(min(1, num_chars + num_digits + num_wide), of_words + num_digits / _MAX_DIGITS_PER_TOKEN + of_wide - 1)


def _claimed_cost(usage: Mapping[str, Any]) -> int | None:
    """Return the cost that the endpoint claims, with 0 for missing amounts; None if an amount is invalid."""
    details = usage.get("cost_details")
    upstream = cast("dict[str, Any]", details).get("upstream_inference_cost") if isinstance(details, dict) else None
    billed, by_provider = (Decimal(0) if cost is None else read_amount(cost) for cost in (usage.get("cost"), upstream))
    if billed is None or by_provider is None:
        return None
    # With the user's own key OpenRouter bills a fee and the provider bills the rest; otherwise `cost` includes both.
    return to_nano(billed + by_provider if usage.get("is_byok") else max(billed, by_provider))


def _claimed_tokens(usage: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the claimed prompt and completion tokens, including hidden thinking; None if a count is invalid."""
    prompt, completion = (_count(usage.get(name)) for name in ("prompt_tokens", "completion_tokens"))
    if prompt is None or completion is None:
        return None
    details = usage.get("completion_tokens_details")
    thought = _count(cast("dict[str, Any]", details).get("reasoning_tokens")) if isinstance(details, dict) else None
    thought, total = thought or 0, _count(usage.get("total_tokens")) or 0
    # Most endpoints count thinking as completion. For the others, the total or the larger count shows it.
    return prompt, max(completion if thought <= completion else completion + thought, total - prompt)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _choice_messages(data: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the message of every choice in a response."""
    choices = data.get("choices")
    for choice in cast("list[Any]", choices) if isinstance(choices, list) else ():
        if isinstance(choice, dict) and isinstance(message := cast("dict[str, Any]", choice).get("message"), dict):
            yield cast("dict[str, Any]", message)


def _message_texts(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a message that must have been counted as tokens: its content, visible thinking, refusal,
    and call arguments.
    """
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


def _parse_object(body: bytes) -> dict[str, Any] | None:
    try:
        value: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def _error_text(about: Mapping[str, Any]) -> str:
    code, message = about.get("code"), about.get("message")
    return _printable(" ".join(str(part) for part in (code, message) if part is not None).encode())


def _printable(body: bytes) -> str:
    text = body[: 4 * _MAX_ERROR].decode("utf-8", "replace")
    return "".join(c if c.isprintable() else " " for c in text)[:_MAX_ERROR].strip()
