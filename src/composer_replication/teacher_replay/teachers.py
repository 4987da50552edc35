"""Teachers: the default ones, what the description of a teacher may hold, and prices in whole nano-dollars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple, cast

from composer_replication.canonical_json import decode
from composer_replication.errors import InputError, explain
from composer_replication.types import TeacherSpec

OPENROUTER = "https://openrouter.ai/api/v1"
OPENROUTER_KEY = "OPENROUTER_API_KEY"
# Published prices; `crf teachers` looks up those of today. Every request to OpenRouter states its price as the maximum
# (`provider.max_price`), so that a price increase leads to a refusal and not to a higher bill.
# Claude Opus 4.7 and GPT-5: OpenRouter's list of 2026-06-12, as models.dev keeps it
# (github.com/anomalyco/models.dev, providers/openrouter/models).
# DeepSeek V4 Pro: its price at peak hours, twice that of other hours, as api-docs.deepseek.com/quick_start/pricing
# had it on 2026-10-27; other providers on OpenRouter asked for less.
DEFAULT_TEACHERS: list[TeacherSpec] = [
    TeacherSpec(slug="anthropic/claude-opus-4.7", input_per_mtok=5.0, output_per_mtok=25.0),
    TeacherSpec(slug="openai/gpt-5", input_per_mtok=1.25, output_per_mtok=10.0),
    TeacherSpec(slug="deepseek/deepseek-v4-pro", input_per_mtok=1.32, output_per_mtok=3.96),
]
_OURS = {
    "model",
    "messages",
    "tools",
    "n",
    "best_of",
    "stream",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "prompt",
    "transforms",
    "models",
    # Each of these is billed in addition to the tokens of prompt and answer, or at another price.
    "plugins",
    "web_search_options",
    "service_tier",
    "prediction",
}
_KNOWN = {"slug", "input_per_mtok", "output_per_mtok", "per_request_usd", "base_url", "api_key_env", "extra"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """A checked teacher. Its repr does not show the key."""

    slug: str
    base_url: str
    price: Price
    extra: Mapping[str, Any]
    api_key: str | None = field(repr=False)
    key_name: str = "api_key"
    """The origin of the key: an environment variable, or the argument."""

    @property
    def is_openrouter(self) -> bool:
        return self.base_url.rstrip("/") == OPENROUTER


def read_specs(path: str | None, key: str) -> list[dict[str, Any]]:
    """Return the teachers described in a file of `crf teachers`; `key` is the option that names the file."""

    def refused(got: object) -> InputError:
        expected, fix = "a JSON list of teachers, each an object", "`crf teachers -o teachers.json` writes one."
        return InputError(explain(f"{key} {path or ''}".rstrip(), got=got, expected=expected, fix=fix))

    if path is None:
        raise refused("none")
    try:
        specs: Any = decode(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise refused(error) from error
    if not isinstance(specs, list):
        raise refused(f"JSON, but no list: {type(specs).__name__}")
    for number, spec in enumerate(cast("list[object]", specs), start=1):
        if not isinstance(spec, dict):
            raise refused(f"a list whose item {number} is {spec!r:.60}")
    return cast("list[dict[str, Any]]", specs)


def writer_in(path: str | None) -> str | None:
    """Return the model that writes hints, the first of such a file; None if only templates do."""
    first, *_ = [{}] if path is None else read_specs(path, "sites.writer") or [{}]
    return None if not first else str(first.get("slug"))


def read_teachers(
    specs: Sequence[Mapping[str, Any]],
    *,
    environment: Mapping[str, str],
    api_key: str | None = None,
    base_url: str | None = None,
    prices: Mapping[str, Price] | None = None,
) -> list[Teacher]:
    """Return teachers with their endpoint, price and key. Raises for anything missing, before a request is sent."""
    if not specs:
        raise InputError(explain("teachers", got="none", expected="at least one"))
    slugs = [str(spec.get("slug") or "") for spec in specs]
    if len(set(slugs)) < len(slugs) or not all(slugs):
        raise InputError(explain("teachers", got=f"slugs {slugs}", expected="each with a slug of its own"))
    return [_read(spec, environment, api_key, base_url, prices or {}) for spec in specs]


def _read(
    spec: Mapping[str, Any],
    environment: Mapping[str, str],
    api_key: str | None,
    base_url: str | None,
    prices: Mapping[str, Price],
) -> Teacher:
    slug = str(spec["slug"])
    if unknown := sorted(set(spec) - _KNOWN):
        raise InputError(explain(f"teacher {slug}", got=f"keys {unknown}", expected=f"among {sorted(_KNOWN)}"))
    address = str(spec.get("base_url") or base_url or OPENROUTER).rstrip("/")
    if "@" in address.partition("://")[2].partition("/")[0]:
        fix = "Put the key into an environment variable and name it with api_key_env."
        raise InputError(explain(f"base_url of {slug}", got="a name or password in it", expected="none", fix=fix))
    if not address.startswith(("http://", "https://")):
        raise InputError(explain(f"base_url of {slug}", got=repr(address), expected="http:// or https://"))
    key_name = spec.get("api_key_env")
    key = environment.get(str(key_name)) if key_name else api_key or environment.get(OPENROUTER_KEY)
    if key is None and (key_name or address == OPENROUTER):
        raise MissingKeyError(str(key_name or OPENROUTER_KEY), slug)
    price = price_of(spec) or prices.get(slug)
    if price is None:
        fix = "`crf teachers` looks prices up; or give input_per_mtok and output_per_mtok."
        raise InputError(explain(f"price of {slug}", got="none", expected="one: a cap needs it", fix=fix))
    # The key of one endpoint is sent to another address only if the user asked for that by name.
    default = (base_url or OPENROUTER).rstrip("/")
    is_meant = bool(key_name) or address == OPENROUTER or (api_key is not None and address == default)
    return Teacher(
        slug=slug,
        base_url=address,
        price=price,
        extra=_extra(spec, slug),
        api_key=_clean(key) if is_meant else None,
        key_name=str(key_name) if key_name else "api_key" if api_key else OPENROUTER_KEY,
    )


def _extra(spec: Mapping[str, Any], slug: str) -> dict[str, Any]:
    """Return further fields of the request, except those that decide its cost or content."""
    extra: Any = spec.get("extra") or {}
    if not isinstance(extra, Mapping):
        raise InputError(explain(f"extra of {slug}", got=type(extra).__name__, expected="fields of a request"))
    if ours := sorted(_OURS & set(extra)):
        fix = "Longest answers, sampling and tools are settings of the replay."
        raise InputError(explain(f"extra of {slug}", got=f"{ours}", expected="none of ours", fix=fix))
    return dict(extra)


def _clean(key: str | None) -> str | None:
    """Return a key without line ends, of which files from other systems have several kinds."""
    if key is None:
        return None
    stripped = key.strip()
    if not stripped or not all(33 <= ord(character) < 127 for character in stripped):
        got = f"{len(stripped)} characters, some of which no key has"
        raise InputError(explain("a teacher's key", got=got, expected="printable ASCII without blanks"))
    return stripped


class MissingKeyError(InputError, RuntimeError):
    """The environment variable that should hold a teacher's key is not set."""

    def __init__(self, variable: str, slug: str) -> None:
        super().__init__(
            explain(f"key of {slug}", got=f"no {variable} in the environment", expected=f"export {variable}=…")
        )


# ---- money

# Amounts are whole nano-dollars: sums are exact, and a bound is never rounded down below what it bounds.

NANO = 10**9
# SQLite holds sums below 2**63: a thousand absurdly large amounts still fit.
_MOST = 2**53


def to_nano(dollars: float | str | Decimal) -> int:
    """Return nano-dollars, rounded up and limited to what a ledger can hold."""
    amount = Decimal(str(dollars))
    return _MOST if amount > _MOST // NANO else int((amount * NANO).to_integral_value(ROUND_CEILING))


def to_dollars(nano: int) -> float:
    return nano / NANO


class Price(NamedTuple):
    """US dollars per million tokens, and per request if a provider charges that, too."""

    input_per_mtok: Decimal
    output_per_mtok: Decimal
    per_request: Decimal = Decimal(0)

    def bound(self, prompt_tokens: int, completion_tokens: int) -> int:
        """Return the highest cost of this many tokens, in nano-dollars."""
        tokens = prompt_tokens * self.input_per_mtok + completion_tokens * self.output_per_mtok
        return to_nano(tokens / 1_000_000 + self.per_request)


def price_of(teacher: Mapping[str, Any]) -> Price | None:
    """Return a teacher's price, or None if it has none. Raises for an invalid price."""
    token_prices = [teacher.get(name) for name in ("input_per_mtok", "output_per_mtok")]
    if any(price is None for price in token_prices):
        return None
    read, written, request = (_amount(price, teacher) for price in (*token_prices, teacher.get("per_request_usd") or 0))
    return Price(read, written, request)


def check_cap(max_total_usd: float) -> int:
    """Return the cap in nano-dollars, rounded down."""
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
