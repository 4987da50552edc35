"""One HTTP client for any endpoint with the chat-completions API, and the outcome of each attempt.

A few connection pools share the work: a single pool with all connections spends more time on finding a free one than
the requests take. The key is sent in a header and appears nowhere else.
"""

from __future__ import annotations

import asyncio
import email.utils
import re
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from types import TracebackType
from typing import Any, Literal, NamedTuple, cast

import orjson

from composer_replication.errors import InputError, explain
from composer_replication.messages import call_entry, content_text, written_calls
from composer_replication.optional import require
from composer_replication.teacher_replay.requests import Request
from composer_replication.teacher_replay.teachers import to_nano

_CONNECTIONS_A_POOL = 8
_CONNECT_S = 10.0  # an unreachable address is noticed long before an answer would be due


class TeacherClient:
    """Sends requests, at most `max_concurrency` at a time; an async context manager."""

    def __init__(self, *, max_concurrency: int = 64, timeout_s: float = 120.0) -> None:
        self._httpx: Any = require("httpx", extra="replay")
        self._num_pools = -(-max_concurrency // _CONNECTIONS_A_POOL)
        self._timeout_s = timeout_s
        self._pools: list[Any] = []
        self._free: asyncio.Queue[Any] = asyncio.Queue()
        self._max_concurrency = max_concurrency

    async def __aenter__(self) -> TeacherClient:
        limits = self._httpx.Limits(
            max_connections=_CONNECTIONS_A_POOL, max_keepalive_connections=_CONNECTIONS_A_POOL, keepalive_expiry=30
        )
        context = self._httpx.create_ssl_context()  # created once: it takes longer than a request
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
        """Make one attempt. Every failure is returned as a FailedRequest; only cancellation is raised."""
        pool = await self._free.get()
        try:
            outcome = await self._post(pool, request)
        finally:
            self._free.put_nowait(pool)
        return _without_key(outcome, request.teacher.api_key)

    async def get_json(self, url: str, api_key: str | None) -> tuple[int, bytes]:
        """Send a plain GET request, for lists of models; return status and body."""
        pool = await self._free.get()
        what = f"GET {url.partition('?')[0]}"
        try:
            async with asyncio.timeout(self._timeout_s):
                async with pool.stream("GET", url, headers=_headers(api_key)) as response:
                    body = await _limited_body(response)
        except TimeoutError:
            got = f"none within {self._timeout_s:g} s"
            raise InputError(explain(what, got=got, expected="a whole answer")) from None
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
            return FailedRequest(reason, False, "none", concerns="connection")
        except httpx.PoolTimeout:
            return FailedRequest("no connection was free", True, "none")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return broken(f"no connection: {type(error).__name__}: {error}", was_sent=False)
        except TimeoutError:
            body = broken(f"no answer within {self._timeout_s:g} s", was_sent=True)
        except httpx.HTTPError as error:
            body = broken(f"connection broke: {type(error).__name__}: {error}", was_sent=True)
        if isinstance(body, FailedRequest):
            return body if response is None else _with_status(response.status_code, response.headers, body)
        if request.teacher.api_key:  # before anything is cut: half a key is still most of it
            body = body.replace(request.teacher.api_key.encode(), b"<key>")
        return read_response(response.status_code, response.headers, body, request)


def _headers(api_key: str | None) -> dict[str, str]:
    return ASKED_FOR | ({"authorization": f"Bearer {api_key}"} if api_key else {})


def _without_key(outcome: Reply | FailedRequest, key: str | None) -> Reply | FailedRequest:
    # An endpoint may quote the key in its error message.
    if isinstance(outcome, FailedRequest) and key and key in outcome.error:
        return outcome._replace(error=outcome.error.replace(key, "<key>"))
    return outcome


# ---- bodies of answers

# The body is bounded while it is decompressed, since a megabyte of gzip can become gigabytes. Only gzip is requested,
# and it is decompressed here: HTTP clients decompress a whole chunk before its size can be checked.

MAX_BODY = 16 * 2**20
ASKED_FOR = {"accept-encoding": "gzip"}
_GZIP_BITS = zlib.MAX_WBITS | 16
_GZIP_BEGINS = b"\x1f\x8b"


async def _limited_body(response: Any) -> bytes | FailedRequest:
    """Return the whole decompressed body of a streamed answer, or a failure if it is too long or in an unknown
    encoding.

    Never more than `MAX_BODY` bytes are held: the rest is neither decompressed nor read.
    """
    encoding = str(response.headers.get("content-encoding", "")).strip().lower()
    unpackers = {"": _AsItIs, "identity": _AsItIs, "gzip": _Gzip, "x-gzip": _Gzip, "deflate": _Deflate}
    if encoding not in unpackers:
        return _unreadable(f"an answer in an encoding that was not asked for: {encoding[:40]!r}")
    unpacking = unpackers[encoding]()
    parts, room, num_raw = list[bytes](), MAX_BODY, 0
    async for raw in response.aiter_raw():
        try:
            part = unpacking.unpack(raw, room + 1)
        except zlib.error:
            return _unreadable("an answer that cannot be unpacked")
        room, num_raw = room - len(part), num_raw + len(raw)
        if room < 0 or num_raw > MAX_BODY:
            return _unreadable(f"an answer of more than {MAX_BODY} bytes")
        parts.append(part)
    if num_raw and not unpacking.is_whole:
        return broken("an answer that breaks off", was_sent=True)
    return b"".join(parts)


def _unreadable(error: str) -> FailedRequest:
    # The whole answer came and is paid for. A retry would get, and pay for, the same encoding.
    return FailedRequest(error, False, "unknown")


class _AsItIs:
    is_whole = True

    def unpack(self, raw: bytes, _limit: int) -> bytes:
        return raw


class _Gzip:
    """Decompresses gzip members one after another, as the format allows; ignores what follows the last member."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(wbits=_GZIP_BITS)
        self._behind = b""  # after a member: what may begin another one

    @property
    def is_whole(self) -> bool:
        return self._member.eof

    def unpack(self, raw: bytes, limit: int) -> bytes:
        parts = list[bytes]()
        while raw and limit > 0:
            if self._member.eof:
                raw = self._behind + raw
                if len(raw) < len(_GZIP_BEGINS):
                    self._behind = raw
                    break
                if not raw.startswith(_GZIP_BEGINS):
                    self._behind = raw[: len(_GZIP_BEGINS)]
                    break
                self._member, self._behind = zlib.decompressobj(wbits=_GZIP_BITS), b""
            parts.append(self._member.decompress(raw, limit))
            limit -= len(parts[-1])
            raw = self._member.unused_data
        return b"".join(parts)


class _Deflate:
    """Decompresses deflate with the header of zlib, as the standard says, or without it, as some servers send it."""

    def __init__(self) -> None:
        self._begin, self._stream = b"", None

    @property
    def is_whole(self) -> bool:
        return self._stream is not None and self._stream.eof

    def unpack(self, raw: bytes, limit: int) -> bytes:
        if self._stream is None:
            raw = self._begin = self._begin + raw
            if len(raw) < 2:
                return b""
            has_header = raw[0] & 15 == zlib.DEFLATED and int.from_bytes(raw[:2]) % 31 == 0
            self._stream = zlib.decompressobj(wbits=zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
        return self._stream.decompress(raw, limit)


# ---- outcomes

# What an answer counts for under the cap never depends on the endpoint's word alone. Its token counts are charged at
# the teacher's price if they are plausible for the characters sent and received. A stated `cost` can only raise that: a
# discount cannot be told from a lie, and with the user's own provider key `cost` omits what the provider bills. In all
# other cases the answer counts for the reserved bound.

Billing = Literal["none", "unknown"]
Concerns = Literal["call", "account", "connection"]
# A refused request was not worked on. In all other cases nobody can be sure.
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
# Hangul, kana, Chinese characters, emoji: each character of "한글", not "é".
_WIDE = re.compile("[\u1100-\u11ff\u2e80-\ua4cf\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\U0001f000-\U0003ffff]")


class Reply(NamedTuple):
    """An assistant message. `error` is set if the message is unusable: cut off, or filtered.

    `cost_nano` is what it counts for under the cap; None is the reserved bound.
    """

    message: dict[str, Any]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cost_nano: int | None
    error: str | None = None


class FailedRequest(NamedTuple):
    """A failed attempt. `cost_nano` is set if more was billed than was reserved; else `billing` says what is known.

    `concerns` is whose problem it is: this call alone, everyone with this key (a key, credit), or the connection.
    """

    error: str
    is_retried: bool
    billing: Billing
    retry_after_s: float | None = None
    cost_nano: int | None = None
    concerns: Concerns = "call"


def read_response(status: int, headers: Mapping[str, str], body: bytes, request: Request) -> Reply | FailedRequest:
    """Return the outcome of a request that got any response. A response that cannot be parsed is a failure, too."""
    try:
        return _read(status, headers, body, request)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        return FailedRequest(f"an answer that cannot be read: {type(error).__name__}", True, "unknown")


def _read(status: int, headers: Mapping[str, str], body: bytes, request: Request) -> Reply | FailedRequest:
    data = _object(body)
    if data is None and 200 <= status < 300:
        what = "an empty body" if not body.strip() else "a body that is no JSON object"
        return FailedRequest(f"HTTP 200 with {what}", True, "unknown")
    cost = None if data is None else _counted_cost(data, request)
    was_answered = 200 <= status < 300
    outcome = _answer(data, cost) if data is not None and was_answered else _refusal(status, headers, data, body)
    # The cost of a failure is unknown, so it counts for its bound, or for nothing if it was a refusal. Only a bill
    # above the bound counts for more.
    is_overrun = cost is not None and cost > request.bound_nano
    return outcome._replace(cost_nano=cost) if isinstance(outcome, FailedRequest) and is_overrun else outcome


def _answer(data: dict[str, Any], cost: int | None) -> Reply | FailedRequest:
    choice = _first_choice(data)
    inner = choice.get("error") if choice else None
    if data.get("error") or inner:
        return _error_inside(data.get("error") or inner)
    if choice is None or not isinstance(choice.get("message"), dict):
        return FailedRequest("HTTP 200 without a message", True, "unknown")
    return _reply(choice, data, cost)


def broken(error: str, *, was_sent: bool) -> FailedRequest:
    """Return the failure of a request without a response: if it may have arrived, it may have been billed."""
    return (
        FailedRequest(error, True, "unknown") if was_sent else FailedRequest(error, True, "none", concerns="connection")
    )


def _with_status(status: int, headers: Mapping[str, str], unread: FailedRequest) -> FailedRequest:
    """Return the failure for a response whose body could not be read; a refusal is still recognized by its status."""
    return unread if 200 <= status < 300 else _refusal(status, headers, None, unread.error.encode())


def _reply(choice: dict[str, Any], data: dict[str, Any], cost: int | None) -> Reply | FailedRequest:
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
    """Return the parts of a message that an answer consists of; providers add many others."""
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


def _error_inside(error: Any) -> FailedRequest:
    # HTTP 200 with an error: generation had begun. The code says whether a retry can help.
    about: dict[str, Any] = error if isinstance(error, dict) else {"message": str(error)}
    code = about.get("code")
    status = int(code) if isinstance(code, int) or (isinstance(code, str) and re.fullmatch("[0-9]{3}", code)) else 502
    is_retried = status in _RETRIED or status >= 500
    return FailedRequest(f"error in HTTP 200: {_told(about)}", is_retried, "unknown")


def _refusal(status: int, headers: Mapping[str, str], data: dict[str, Any] | None, body: bytes) -> FailedRequest:
    error: Any = (data or {}).get("error") or (data or {}).get("detail")
    about: dict[str, Any] = error if isinstance(error, dict) else {"message": str(error or _shown(body))}
    billing: Billing = "none" if status in _REFUSED else "unknown"
    wait = retry_after(headers)
    is_retried = status in _RETRIED
    metadata: Any = about.get("metadata")
    details: Mapping[str, Any] = cast("dict[str, Any]", metadata) if isinstance(metadata, dict) else {}
    if status == 402:  # credits are used up, or only for as long as other requests hold them
        is_retried = details.get("limit_source") == _IN_FLIGHT
    # 403 is used for keys and budgets, and for a text that a moderator rejected, which concerns one call only.
    is_of_all = (status in (401, 402) and not is_retried) or (status == 403 and not _MODERATED & set(details))
    return FailedRequest(
        f"HTTP {status}: {_told(about)}", is_retried, billing, wait, concerns="account" if is_of_all else "call"
    )


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait, from either form of the header; None without one."""
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
    if (
        sum(map(len, written)) > _MOST_CHARS_PER_TOKEN * max_tokens > 0
    ):  # the endpoint ignored max_tokens: count bytes as tokens
        counted = max(counted, price.bound(len(request.body), sum(len(text.encode()) for text in written)))
    return counted if counted > request.bound_nano else None


def _fewest_tokens(texts: Sequence[str]) -> float:
    """Return the fewest tokens that a usual tokenizer makes of texts: a smaller count is not a count of them."""
    num_chars = num_words = num_digits = num_wide = 0
    for text in texts:
        shorter = _RUN.sub(r"\1", " ".join(text.split()))  # blanks too, as they are often part of a token
        narrow, wide = (shorter, 0) if shorter.isascii() else _WIDE.subn(" ", shorter)
        digits = sum(map(narrow.count, "0123456789"))
        num_chars += len(shorter) - wide - digits
        num_words += len(_WORD.findall(narrow))
        num_digits, num_wide = num_digits + digits, num_wide + wide
    of_words = max(num_chars / _MOST_CHARS_PER_TOKEN, _SLACK * min(num_words, num_chars / _USUAL_CHARS_PER_TOKEN))
    of_wide = max(0.0, num_wide / _MOST_WIDE_PER_TOKEN - 1)
    # One token less, because a short text can be an unusual one; but any text has at least one token.
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
    """Return dollars, 0 for None. Returns None if the value is not an amount: text, negative, not finite, a boolean."""
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
    """Return the tokens read and written, including hidden thinking; None if they are not two counts."""
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


def _messages_of(data: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the message of every choice."""
    choices = data.get("choices")
    for choice in cast("list[Any]", choices) if isinstance(choices, list) else ():
        if isinstance(choice, dict) and isinstance(message := cast("dict[str, Any]", choice).get("message"), dict):
            yield cast("dict[str, Any]", message)


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a message that a tokenizer certainly saw: words, visible thinking, arguments."""
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
