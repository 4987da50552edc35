"""A chat server on loopback that charges its published price for real tokens, and says of it whatever it likes.

Its ledger counts every token that it was sent and that it sent, by its own tokenizer, at the published price. What its
`usage` says is another matter: `LIES` are the ways in which it differs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

WORDS = ("read", "the", "failing", "test", "first", "then", "change", "one", "line", "of", "parser", "and", "run", "it")
_TOKEN = re.compile(r"\w+|[^\w\s]")  # "pytest -q" -> pytest, -, q


def body_quarters(raw: bytes, _texts: list[str]) -> int:
    return math.ceil(len(raw) / 4)


def text_quarters(_raw: bytes, texts: list[str]) -> int:
    return math.ceil(sum(map(len, texts)) / 4)


def words_and_signs(_raw: bytes, texts: list[str]) -> int:
    return sum(len(_TOKEN.findall(text)) for text in texts)


def characters(_raw: bytes, texts: list[str]) -> int:
    return sum(map(len, texts))


def all_bytes(raw: bytes, _texts: list[str]) -> int:
    return len(raw)


USUAL = (body_quarters, text_quarters, words_and_signs)
DENSE = (characters, all_bytes)


@dataclass(frozen=True)
class Bill:
    """What one answer really costs, in dollars, and its tokens; `thought` of those written are not shown."""

    prompt: int
    written: int
    thought: int
    usd: float


def honest(bill: Bill) -> dict[str, Any]:
    tokens = {
        "prompt_tokens": bill.prompt,
        "completion_tokens": bill.written,
        "total_tokens": bill.prompt + bill.written,
    }
    about = {"completion_tokens_details": {"reasoning_tokens": bill.thought}}
    return {**tokens, **about, "cost": bill.usd, "is_byok": False, "cost_details": {"upstream_inference_cost": None}}


def _changed(**changes: Any) -> Callable[[Bill], Any]:
    return lambda bill: {**honest(bill), **changes}


def _byok(bill: Bill) -> dict[str, Any]:
    return {**honest(bill), "cost": 0, "is_byok": True, "cost_details": {"upstream_inference_cost": bill.usd}}


def _thought_beside(bill: Bill) -> dict[str, Any]:
    shown = {"completion_tokens": bill.written - bill.thought}
    return {key: value for key, value in {**honest(bill), **shown}.items() if key != "cost"}


def fewer(share: float) -> Callable[[Bill], dict[str, Any]]:
    """Return a usage block with that share of the tokens and of the cost."""

    def usage(bill: Bill) -> dict[str, Any]:
        tokens = {"prompt_tokens": int(bill.prompt * share), "completion_tokens": int(bill.written * share)}
        return {**tokens, "cost": bill.usd * share}

    return usage


# Each of these is false, or leaves something out, in a way that shows whatever the tokenizer is.
LIES: dict[str, Callable[[Bill], Any]] = {
    "own key": _byok,
    "own key, nothing of the provider": _changed(cost=0, is_byok=True),
    "free": _changed(cost=0),
    "discount": lambda bill: {
        **honest(bill),
        "cost": bill.usd / 10,
        "prompt_tokens_details": {"cached_tokens": bill.prompt},
    },
    "zeros": lambda _: {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0, "cost": 0},
    "ones": lambda _: {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    "cost alone": lambda bill: {"cost": bill.usd / 100},
    "prompt alone": _changed(completion_tokens=0, total_tokens=0, cost=0),
    "answer alone": _changed(prompt_tokens=0, total_tokens=0, cost=0),
    "missing": lambda _: None,
    "empty": lambda _: {},
    "a list": lambda _: [0, 0],
    "text": _changed(prompt_tokens="1", completion_tokens="1", cost="0"),
    "words for a cost": _changed(cost="nothing"),
    "true": _changed(prompt_tokens=True, completion_tokens=True, total_tokens=True, cost=False),
    "negative": _changed(prompt_tokens=-1, completion_tokens=-1, cost=-1),
    "negative cost": _changed(cost=-0.5),
    "fractions": _changed(prompt_tokens=0.5, completion_tokens=0.5, cost=0),
    "not a number": _changed(cost=float("nan")),
    "infinite": _changed(cost=float("-inf")),
    "nested": _changed(prompt_tokens={"a": 1}, completion_tokens=[1], cost={"usd": 0}, cost_details=[1]),
    "thought beside": _thought_beside,
}
# These show where a token has about four characters, as in usual tokenizers; of a denser one they may be true.
FEWER = {"half": fewer(0.5), "a tenth": fewer(0.1), "a hundredth": fewer(0.01)}
HUGE = {
    "huge": _changed(prompt_tokens=10**15, completion_tokens=10**15, cost=1e30),
    "beyond 64 bits": _changed(prompt_tokens=2**70, cost=1e308),
}
FAULTS = ("http_500", "cut", "silence", "redirect", "error_inside", "empty")


@dataclass
class BillingServer:
    """`usage_of` makes the usage block of an answer; `fault_share` of the answers fail, and are charged anyway."""

    prices: dict[str, tuple[float, float]]
    tokenizer: Callable[[bytes, list[str]], int]
    usage_of: Callable[[Bill], Any]
    draw: random.Random
    fault_share: float = 0.0
    latency_s: float = 0.0
    num_characters: int | None = None
    words: tuple[str, ...] = WORDS
    num_requests: int = 0
    bills: list[Decimal] = field(default_factory=list)
    base_url: str = ""
    _connections: list[Any] = field(default_factory=list)

    @property
    def total_usd(self) -> Decimal:
        return sum(self.bills, Decimal(0))

    @contextlib.asynccontextmanager
    async def running(self):
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            self.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
            yield self
            await asyncio.gather(*self._connections)  # they end with the client's

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.append(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                raw = await reader.readexactly(int(head.split("content-length:")[1].split("\r\n")[0]))
                self.num_requests += 1
                await asyncio.sleep(self.draw.uniform(0, self.latency_s))
                writer.write(answer := self._answer(raw))
                await writer.drain()
                if b"connection: close" in answer:
                    break
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    def _answer(self, raw: bytes) -> bytes:
        asked = json.loads(raw)
        message, texts = self._message(bool(asked.get("tools")))
        per_input, per_output = self.prices[asked["model"]]
        shown, most = self.tokenizer(json.dumps(message).encode(), texts), asked["max_tokens"]
        reason, thought = "stop", 0
        if self.num_characters is None:  # an honest answer is no longer than was asked for
            thought = self.draw.randint(0, max(0, most - shown)) if self.draw.random() < 0.2 else 0
            reason, shown = ("length", most) if shown > most else ("stop", shown)
        prompt = self.tokenizer(raw, [text for each in asked["messages"] for text in _texts(each)])
        usd = (Decimal(str(per_input)) * prompt + Decimal(str(per_output)) * (shown + thought)) / 10**6
        self.bills.append(usd)
        usage = self.usage_of(Bill(prompt, shown + thought, thought, float(usd)))
        body = {"choices": [{"message": message, "finish_reason": reason}], "usage": usage}
        if self.draw.random() < self.fault_share:
            return self._fault(self.draw.choice(FAULTS), body)
        return _http(200, json.dumps(body).encode())

    def _message(self, has_tools: bool) -> tuple[dict[str, Any], list[str]]:
        if self.num_characters is not None:
            text = "x" * self.num_characters
        else:
            text = " ".join(self.draw.choice(self.words) for _ in range(self.draw.randint(6, 30)))
        if not has_tools or self.draw.random() < 0.5:
            return {"role": "assistant", "content": text}, [text]
        arguments = json.dumps({"command": text})
        call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}, [arguments]

    def _fault(self, name: str, body: dict[str, Any]) -> bytes:
        data = json.dumps(body).encode()
        match name:
            case "http_500":
                return _http(500, json.dumps({"error": {"message": "no"}, "usage": body["usage"]}).encode())
            case "cut":
                return _http(200, data, length=len(data) + 10, close=True)
            case "silence":
                return b""
            case "redirect":
                return _http(307, b"", extra="location: /v1/elsewhere\r\n")
            case "error_inside":
                return _http(200, json.dumps({**body, "error": {"code": 502, "message": "no"}}).encode())
            case _:
                empty = [{"message": {"role": "assistant", "content": ""}, "finish_reason": "stop"}]
                return _http(200, json.dumps({**body, "choices": empty}).encode())


def _texts(message: dict[str, Any]) -> list[str]:
    calls = message.get("tool_calls") or ()
    return [message.get("content") or "", *(call["function"]["arguments"] for call in calls)]


def _http(status: int, body: bytes, *, length: int | None = None, close: bool = False, extra: str = "") -> bytes:
    size = len(body) if length is None else length
    end = "connection: close\r\n" if close else ""
    return (
        f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n{end}{extra}\r\n".encode()
        + body
    )
