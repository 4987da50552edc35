"""The faults by name, what each may cost, and which one a request meets, by seed, fingerprint and attempt."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

OK = "ok"


@dataclass(frozen=True)
class Fault:
    """A way to fail.

    `group`: retry (asking again may help), final (it will not), cut (an answer that is not whole), answer (a good one
    in an odd form). `billed`: never (refused before any work), may (work may have been done), always.
    """

    name: str
    group: str
    billed: str
    says: str


FAULTS = (
    Fault("error_body", "retry", "may", "200 with nothing but an error object"),
    Fault("error_beside_choices", "retry", "may", "200, half an answer, finish_reason error, error object in the body"),
    Fault("choice_error", "retry", "may", "200, half an answer, the error object inside the choice"),
    Fault("finish_error", "retry", "may", "200, half an answer, finish_reason error and no error object"),
    Fault("in_flight_budget", "retry", "never", "402 for too much in flight, Retry-After"),
    Fault("timeout_408", "retry", "may", "408"),
    Fault("rate_limit_seconds", "retry", "never", "429, Retry-After in seconds"),
    Fault("rate_limit_date", "retry", "never", "429, Retry-After as an HTTP date"),
    Fault("rate_limit_bare", "retry", "never", "429 without Retry-After"),
    Fault("http_500", "retry", "may", "500, JSON error"),
    Fault("http_502", "retry", "may", "502, a gateway's HTML page"),
    Fault("http_503", "retry", "never", "503, plain text"),
    Fault("http_503_after", "retry", "never", "503, JSON error, Retry-After in seconds"),
    Fault("http_529", "retry", "never", "529, JSON error"),
    Fault("reset", "retry", "may", "connection reset before the first byte"),
    Fault("closed", "retry", "may", "connection closed before the first byte"),
    Fault("truncated", "retry", "may", "connection closed within the body"),
    Fault("truncated_chunked", "retry", "may", "the same within a chunked body"),
    Fault("empty_body", "retry", "may", "200, Content-Length 0"),
    Fault("invalid_json", "retry", "may", "200, a whole body that is half a JSON text"),
    Fault("json_not_object", "retry", "may", "200, a JSON list"),
    Fault("empty_choices", "retry", "may", "200, no choices"),
    Fault("content_null", "retry", "may", "200, neither content nor tool calls"),
    Fault("slow", "retry", "may", "nothing for slow_s, then the answer (408 if unbilled)"),
    Fault("out_of_credit", "final", "never", "402, the account is empty"),
    Fault("key_limit", "final", "never", "403, the key's own budget is spent"),
    Fault("finish_length", "cut", "always", "half an answer, finish_reason length, all of max_tokens used"),
    Fault("finish_filter", "cut", "always", "half an answer, finish_reason content_filter"),
    Fault("delayed_headers", "answer", "always", "the answer after delay_s"),
    Fault("dribble", "answer", "always", "the answer in pieces over delay_s"),
    Fault("chunked", "answer", "always", "the answer in a chunked body"),
    Fault("padded", "answer", "always", "white space before the JSON"),
    Fault("extra_fields", "answer", "always", "unknown fields at every level"),
    Fault("usage_missing", "answer", "always", "no usage"),
    Fault("cost_missing", "answer", "always", "usage without a cost"),
    Fault("cost_malformed", "answer", "always", "the cost is no amount: null, -1, true, text, 1e999"),
    Fault("overcharge", "answer", "always", "billed and reported above any reservation"),
    Fault("idle_close", "answer", "always", "the answer; the connection closes at the next request, unread"),
)
BY_NAME = {fault.name: fault for fault in FAULTS}


def group(name: str) -> tuple[str, ...]:
    """The names of the faults of a group: retry, final, cut or answer."""
    return tuple(fault.name for fault in FAULTS if fault.group == name)


def evenly(rate: float, names: Iterable[str]) -> dict[str, float]:
    """A rate shared equally by the named faults: `faults=evenly(0.2, group("retry"))`."""
    names = tuple(names)
    return {name: rate / len(names) for name in names}


def draw(*parts: object) -> float:
    """A number in [0, 1) that is the same for the same parts in any process and order."""
    return draw_int(*parts) / 2**64


def draw_int(*parts: object) -> int:
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest)


class FaultPlan:
    """Which fault an attempt meets, and whether it is billed."""

    def __init__(
        self,
        seed: int,
        rates: Mapping[str, float],
        sticky: Iterable[str],
        billed_share: float | Mapping[str, float],
        max_faulty_attempts: int | None,
    ) -> None:
        self._seed = seed
        sticky = set(sticky)
        # Sorted, so that the order in which the rates were written changes nothing.
        self._by_attempt = _thresholds({name: rates[name] for name in sorted(rates) if name not in sticky})
        self._sticky = _thresholds({name: rates[name] for name in sorted(rates) if name in sticky})
        self._shares = billed_share if isinstance(billed_share, Mapping) else {}
        self._share = 0.5 if isinstance(billed_share, Mapping) else billed_share
        self._max_faulty_attempts = max_faulty_attempts

    def fault(self, fingerprint: str, attempt: int) -> str:
        if self._sticky and (stuck := _pick(self._sticky, draw(self._seed, "sticky", fingerprint))):
            return stuck
        if self._max_faulty_attempts is not None and attempt >= self._max_faulty_attempts:
            return OK
        return _pick(self._by_attempt, draw(self._seed, "fault", fingerprint, attempt)) or OK

    def is_billed(self, fault: str, fingerprint: str, attempt: int) -> bool:
        if fault == OK:
            return True
        kind = BY_NAME[fault].billed
        share = self._shares.get(fault, {"never": 0.0, "may": self._share, "always": 1.0}[kind])
        return draw(self._seed, "billed", fingerprint, attempt) < share


def _thresholds(rates: Mapping[str, float]) -> list[tuple[float, str]]:
    return list(zip(accumulate(rates.values()), rates, strict=True))


def _pick(thresholds: list[tuple[float, str]], at: float) -> str | None:
    return next((name for upper, name in thresholds if at < upper), None)
