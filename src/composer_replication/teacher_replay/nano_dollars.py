"""Money as whole nano-dollars: sums are exact, and a bound is never rounded below what it bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, Decimal, InvalidOperation
from typing import Any, NamedTuple

from composer_replication.errors import InputError, explain

NANO = 10**9
# SQLite holds sums below 2**63: a thousand amounts that are none of this world still fit.
_MOST = 2**53


def to_nano(dollars: float | str | Decimal) -> int:
    """Rounded up to the next nano-dollar; what no ledger can hold is the most that one can."""
    amount = Decimal(str(dollars))
    return _MOST if amount > _MOST // NANO else int((amount * NANO).to_integral_value(ROUND_CEILING))


def to_dollars(nano: int) -> float:
    return nano / NANO


class Price(NamedTuple):
    """US dollars per million tokens, and per request where a provider takes that too."""

    input_per_mtok: Decimal
    output_per_mtok: Decimal
    per_request: Decimal = Decimal(0)

    def bound(self, prompt_tokens: int, completion_tokens: int) -> int:
        """The most that this many tokens can cost, in nano-dollars."""
        tokens = prompt_tokens * self.input_per_mtok + completion_tokens * self.output_per_mtok
        return to_nano(tokens / 1_000_000 + self.per_request)


def price_of(teacher: Mapping[str, Any]) -> Price | None:
    """A teacher's price; None where it has none. A price that is no price is an error, not a zero."""
    token_prices = [teacher.get(name) for name in ("input_per_mtok", "output_per_mtok")]
    if any(price is None for price in token_prices):
        return None
    read, written, request = (_amount(price, teacher) for price in (*token_prices, teacher.get("per_request_usd") or 0))
    return Price(read, written, request)


def check_cap(max_total_usd: float) -> int:
    """The cap in nano-dollars, rounded down: a cap is a promise."""
    if not isinstance(max_total_usd, int | float | Decimal) or not math.isfinite(max_total_usd) or max_total_usd < 0:
        raise InputError(explain("max_total_usd", got=repr(max_total_usd), expected="0 or more US dollars"))
    return int(Decimal(str(max_total_usd)) * NANO)


def _amount(value: object, teacher: Mapping[str, Any]) -> Decimal:
    try:
        amount = Decimal(str(value))
    except InvalidOperation:
        amount = Decimal("NaN")
    if not amount.is_finite() or amount < 0 or isinstance(value, bool):
        expected = "US dollars, 0 or more"
        raise InputError(explain(f"price of {teacher.get('slug')}", got=repr(value), expected=expected))
    return amount
