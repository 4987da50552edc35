"""Teachers: the default ones, the format of their descriptions, and prices in whole nano-dollars."""

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
# Published prices; `crf teachers` looks up the current ones. Every request to OpenRouter states its price as the
# maximum (`provider.max_price`), so a price increase leads to a refusal instead of a higher bill. Claude Opus 4.7 and
# GPT-5: OpenRouter's list of 2026-06-12, as models.dev keeps it (github.com/anomalyco/models.dev,
# providers/openrouter/models). DeepSeek V4 Pro: its price at peak hours, twice that of other hours, as
# api-docs.deepseek.com/quick_start/pricing had it on 2026-10-27; other providers on OpenRouter asked for less.
DEFAULT_TEACHERS: list[TeacherSpec] = [
    TeacherSpec(slug="anthropic/claude-opus-4.7", input_per_mtok=5.0, output_per_mtok=25.0),
    TeacherSpec(slug="openai/gpt-5", input_per_mtok=1.25, output_per_mtok=10.0),
    TeacherSpec(slug="deepseek/deepseek-v4-pro", input_per_mtok=1.32, output_per_mtok=3.96),
]
_RESERVED_FIELDS = {
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
_SPEC_KEYS = {"slug", "input_per_mtok", "output_per_mtok", "per_request_usd", "base_url", "api_key_env", "extra"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """A teacher whose description has been checked. Its repr does not show the key."""

    slug: str
    base_url: str
    price: Price
    extra: Mapping[str, Any]
    api_key: str | None = field(repr=False)
    key_name: str = "api_key"
    """Where the key came from: the name of an environment variable or of an argument."""

    @property
    def is_openrouter(self) -> bool:
        return self.base_url.rstrip("/") == OPENROUTER


def read_specs(path: str | None, key: str) -> list[dict[str, Any]]:
    """Read descriptions of teachers from a file that `crf teachers` wrote; `key` is the option that names the file."""

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
        raise refused(f"JSON of type {type(specs).__name__}")
    for number, spec in enumerate(cast("list[object]", specs), start=1):
        if not isinstance(spec, dict):
            raise refused(f"a list whose item {number} is {spec!r:.60}")
    return cast("list[dict[str, Any]]", specs)


def hint_writer_name(path: str | None) -> str | None:
    """Return the name of the model that writes hints, the first one in the file; None if only templates write hints."""
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
    """Check descriptions of teachers, and complete them with endpoint, price and key. Raises InputError if anything
    is missing.
    """
    if not specs:
        raise InputError(explain("teachers", got="none", expected="at least one"))
    slugs = [str(spec.get("slug") or "") for spec in specs]
    if len(set(slugs)) < len(slugs) or not all(slugs):
        raise InputError(explain("teachers", got=f"slugs {slugs}", expected="a unique slug for each"))
    return [_read(spec, environment, api_key, base_url, prices or {}) for spec in specs]


def _read(
    spec: Mapping[str, Any],
    environment: Mapping[str, str],
    api_key: str | None,
    base_url: str | None,
    prices: Mapping[str, Price],
) -> Teacher:
    slug = str(spec["slug"])
    if unknown := sorted(set(spec) - _SPEC_KEYS):
        raise InputError(explain(f"teacher {slug}", got=f"keys {unknown}", expected=f"among {sorted(_SPEC_KEYS)}"))
    address = str(spec.get("base_url") or base_url or OPENROUTER).rstrip("/")
    if "@" in address.partition("://")[2].partition("/")[0]:
        fix = "Put the key into an environment variable, and set api_key_env to its name."
        raise InputError(
            explain(f"base_url of {slug}", got="an address with a user name or password", expected="neither", fix=fix)
        )
    if not address.startswith(("http://", "https://")):
        raise InputError(explain(f"base_url of {slug}", got=repr(address), expected="http:// or https://"))
    key_name = spec.get("api_key_env")
    key = environment.get(str(key_name)) if key_name else api_key or environment.get(OPENROUTER_KEY)
    if key is None and (key_name or address == OPENROUTER):
        raise MissingKeyError(str(key_name or OPENROUTER_KEY), slug)
    price = _parse_price(spec) or prices.get(slug)
    if price is None:
        fix = "Run `crf teachers` to look up prices, or set input_per_mtok and output_per_mtok."
        raise InputError(explain(f"price of {slug}", got="none", expected="a price, for the spending cap", fix=fix))
    # The key for one endpoint is sent to another address only if the user requested that explicitly.
    default = (base_url or OPENROUTER).rstrip("/")
    may_send_key = bool(key_name) or address == OPENROUTER or (api_key is not None and address == default)
    return Teacher(
        slug=slug,
        base_url=address,
        price=price,
        extra=_extra(spec, slug),
        api_key=_strip_key(key) if may_send_key else None,
        key_name=str(key_name) if key_name else "api_key" if api_key else OPENROUTER_KEY,
    )


def _extra(spec: Mapping[str, Any], slug: str) -> dict[str, Any]:
    """Return the additional request fields in a description. Raises InputError for fields that determine a request's
    cost or content.
    """
    extra: Any = spec.get("extra") or {}
    if not isinstance(extra, Mapping):
        raise InputError(explain(f"extra of {slug}", got=type(extra).__name__, expected="fields of a request"))
    if ours := sorted(_RESERVED_FIELDS & set(extra)):
        fix = "Set the length of answers, sampling and tools in the options of the replay."
        raise InputError(explain(f"extra of {slug}", got=f"{ours}", expected="no reserved fields", fix=fix))
    return dict(extra)


def _strip_key(key: str | None) -> str | None:
    """Strip whitespace and line ends from a key. Raises InputError if other invalid characters remain."""
    if key is None:
        return None
    stripped = key.strip()
    if not stripped or not all(33 <= ord(character) < 127 for character in stripped):
        got = f"{len(stripped)} characters, some of them not printable ASCII"
        raise InputError(explain("a teacher's key", got=got, expected="only printable ASCII, without spaces"))
    return stripped


class MissingKeyError(InputError, RuntimeError):
    """The environment variable that should hold a teacher's key is not set."""

    def __init__(self, variable: str, slug: str) -> None:
        super().__init__(
            explain(f"key of {slug}", got=f"no {variable} in the environment", expected=f"export {variable}=…")
        )


# ---- money

# Amounts are whole nano-dollars, so sums are exact, and maximum costs are rounded up.

NANO = 10**9
# SQLite stores sums below 2**63, so a thousand amounts of this size still fit.
_MAX_NANO = 2**53


def to_nano(dollars: float | str | Decimal) -> int:
    """Convert dollars to nano-dollars, rounded up and limited to the amounts that the ledger can store."""
    amount = Decimal(str(dollars))
    return _MAX_NANO if amount > _MAX_NANO // NANO else int((amount * NANO).to_integral_value(ROUND_CEILING))


def to_dollars(nano: int) -> float:
    return nano / NANO


class Price(NamedTuple):
    """A price in US dollars per million tokens, and per request for providers that also charge for requests."""

    input_per_mtok: Decimal
    output_per_mtok: Decimal
    per_request: Decimal = Decimal(0)

    def bound(self, prompt_tokens: int, completion_tokens: int) -> int:
        """Return the maximum cost of this many tokens, in nano-dollars."""
        tokens = prompt_tokens * self.input_per_mtok + completion_tokens * self.output_per_mtok
        return to_nano(tokens / 1_000_000 + self.per_request)


def _parse_price(teacher: Mapping[str, Any]) -> Price | None:
    """Return the price in a teacher's description, or None. Raises InputError for an invalid price."""
    token_prices = [teacher.get(name) for name in ("input_per_mtok", "output_per_mtok")]
    if any(price is None for price in token_prices):
        return None
    read, written, request = (_amount(price, teacher) for price in (*token_prices, teacher.get("per_request_usd") or 0))
    return Price(read, written, request)


def check_cap(max_total_usd: float) -> int:
    """Convert a cap to nano-dollars, rounded down. Raises InputError for an invalid amount."""
    if not isinstance(max_total_usd, int | float | Decimal) or not math.isfinite(max_total_usd) or max_total_usd < 0:
        raise InputError(explain("max_total_usd", got=repr(max_total_usd), expected="0 or more US dollars"))
    return int(Decimal(str(max_total_usd)) * NANO)


def read_amount(value: object) -> Decimal | None:
    """Return an amount of dollars; None if the value is not a finite number of at least 0 (booleans are not
    numbers).
    """
    try:
        amount = Decimal(str(value))
    except InvalidOperation:  # of None, a boolean or a list as well
        return None
    return amount if amount.is_finite() and amount >= 0 else None


def _amount(value: object, teacher: Mapping[str, Any]) -> Decimal:
    amount = read_amount(value)
    if amount is None:
        expected = "US dollars, 0 or more"
        raise InputError(explain(f"price of {teacher.get('slug')}", got=repr(value), expected=expected))
    return amount
