"""What a fault server is told at its start, and the exact replies of a script."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from fault_server.faults import BY_NAME, OK

# USD per million tokens, (input, output). Only gpt-5's is the published one; the others are this server's own.
DEFAULT_PRICES: dict[str, tuple[float, float]] = {
    "anthropic/claude-opus-4.7": (5.0, 25.0),
    "openai/gpt-5": (1.25, 10.0),
    "deepseek/deepseek-v4-pro": (0.27, 1.1),
}
DIALECTS = ("openrouter", "plain")
ENDS = ("keep", "close", "reset", "idle_close")
PICO_PER_USD = 10**12


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One scripted reply: a named fault (or "ok"), or exact bytes when `status` is given.

    `body` is sent as it is when it is text and as JSON otherwise. `cut_after` sends that many bytes of the body under
    the full Content-Length. `billed` is a bool, or an amount in USD; None leaves it to the settings, and exact bytes
    unbilled. Status 0 sends nothing and only ends the connection as `end` says.
    """

    fault: str = OK
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = ""
    cut_after: int | None = None
    end: str = "keep"
    delay_s: float = 0.0
    retry_after_s: int | None = None
    billed: bool | float | str | None = None

    def __post_init__(self) -> None:
        if self.fault != OK and self.fault not in BY_NAME:
            raise ValueError(f"Reply.fault: got {self.fault!r}, expected {OK!r} or one of {sorted(BY_NAME)}")
        if self.end not in ENDS:
            raise ValueError(f"Reply.end: got {self.end!r}, expected one of {ENDS}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    seed: int = 0
    prices: Mapping[str, tuple[float, float]] = field(default_factory=lambda: dict(DEFAULT_PRICES))
    unpriced: tuple[str, ...] = ()  # billed, but the models list does not say at what price
    faults: Mapping[str, float] = field(default_factory=dict)  # name -> share of the requests
    sticky: tuple[str, ...] = ()  # drawn without the attempt number: asking again meets the same fault
    billed_share: float | Mapping[str, float] = 0.5  # of the faults that may be billed; or by name, any fault
    max_faulty_attempts: int | None = None  # from this attempt on every reply is good (sticky faults stay)
    latency_s: tuple[float, float] = (0.0, 0.0)  # every reply's wait is drawn from this range by fingerprint
    slow_s: float = 30.0
    delay_s: float = 0.05
    retry_after_s: int = 1
    tool_share: float = 0.7  # of the replies to a request with tools
    agreement: float = 0.5  # share of the replies that any model would give to these messages
    bytes_per_token: float = 4.0  # 1.0 is the worst a reservation by bytes has to cover
    default_max_tokens: int = 4096
    context_length: int = 1_000_000
    dialect: str = "openrouter"  # "plain": unknown fields give 422, usage carries no cost
    require_auth: bool = False
    credit_usd: float | None = None  # once this much is billed every request gets 402

    def __post_init__(self) -> None:
        self._check_faults()
        for share in ("tool_share", "agreement"):
            _check_share(share, getattr(self, share))
        if self.bytes_per_token < 1:
            raise ValueError(f"bytes_per_token: got {self.bytes_per_token}, expected at least 1")
        if self.dialect not in DIALECTS:
            raise ValueError(f"dialect: got {self.dialect!r}, expected one of {DIALECTS}")
        if unknown := set(self.unpriced) - set(self.prices):
            raise ValueError(f"unpriced: {sorted(unknown)} are not in prices")
        for model in self.prices:
            self.pico_per_token(model)

    def _check_faults(self) -> None:
        shares = self.billed_share if isinstance(self.billed_share, Mapping) else {}
        if unknown := ({*self.faults, *self.sticky, *shares}) - set(BY_NAME):
            raise ValueError(f"faults: got {sorted(unknown)}, expected names among {sorted(BY_NAME)}")
        if without := set(self.sticky) - set(self.faults):
            raise ValueError(f"sticky: {sorted(without)} have no rate in faults")
        for name, share in [*self.faults.items(), *shares.items()]:
            _check_share(name, share)
        if isinstance(self.billed_share, float | int):
            _check_share("billed_share", self.billed_share)
        if sum(self.faults.values()) > 1 + 1e-9:
            raise ValueError(f"faults: the rates sum to {sum(self.faults.values())}, expected at most 1")

    def pico_per_token(self, model: str) -> tuple[int, int]:
        """Price of one token, input and output, in 1e-12 USD: integers, so that sums of costs are exact."""
        pico = [Decimal(str(price)) * (PICO_PER_USD // 10**6) for price in self.prices[model]]
        if any(each != int(each) or each < 0 for each in pico):
            raise ValueError(f"prices[{model!r}]: got {self.prices[model]}, expected >= 0 with at most 6 decimals")
        return int(pico[0]), int(pico[1])

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Settings:
        fixed = {name: tuple(record[name]) for name in ("unpriced", "sticky", "latency_s")}
        prices = {model: tuple(pair) for model, pair in record["prices"].items()}
        return cls(**{**record, **fixed, "prices": prices})


def _check_share(name: str, share: float) -> None:
    if not 0 <= share <= 1:
        raise ValueError(f"{name}: got {share}, expected a share between 0 and 1")
