"""Look up the prices that an endpoint lists under /models, in US dollars per token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal
from difflib import get_close_matches
from typing import Any, NamedTuple, cast

import orjson

from composer_replication.errors import InputError, explain
from composer_replication.teacher_replay.endpoint import TeacherClient
from composer_replication.teacher_replay.teachers import read_amount
from composer_replication.types import TeacherSpec

_MILLION = Decimal(1_000_000)


class ListedModel(NamedTuple):
    """A model that an endpoint offers, with its price, its context length, and whether it supports tools. Unknown
    values are None.
    """

    slug: str
    spec: TeacherSpec | None
    context_length: int | None
    takes_tools: bool | None


async def list_models(base_url: str, api_key: str | None, *, timeout_s: float = 30.0) -> list[ListedModel]:
    """Return all models of an endpoint, in the endpoint's order."""
    url = f"{base_url.rstrip('/')}/models"
    async with TeacherClient(max_concurrency=1, timeout_s=timeout_s) as client:
        status, body = await client.get_json(url, api_key)
    try:
        data: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        data = None
    rows = data.get("data") if isinstance(data, dict) else None
    if status != 200 or not isinstance(rows, list):
        raise InputError(explain(f"GET {url}", got=f"HTTP {status}", expected="200 and a list of models"))
    return [
        _parse_model(row) for row in cast("list[Any]", rows) if isinstance(row, dict) and isinstance(row.get("id"), str)
    ]


def add_prices(teachers: Iterable[Mapping[str, Any]], listed: Iterable[ListedModel]) -> list[TeacherSpec]:
    """Add the prices that endpoints list to the teachers. Raises InputError for a teacher that is not listed or has
    no price.
    """
    entries = {entry.slug: entry for entry in listed}
    priced_teachers: list[TeacherSpec] = []
    for teacher in teachers:
        slug = str(teacher["slug"])
        entry = entries.get(slug)
        if entry is None or entry.spec is None:
            got = "a model that is not listed" if entry is None else "a listed model without a price"
            near = get_close_matches(slug, [name for name in entries if name != slug and entries[name].spec], n=1)
            fix = f"Did you mean {near[0]}?" if near else ""
            raise InputError(explain(f"teacher {slug}", got=got, expected="a listed model with a price", fix=fix))
        priced_teachers.append(cast("TeacherSpec", {**teacher, **entry.spec}))
    return priced_teachers


def _parse_model(row: dict[str, Any]) -> ListedModel:
    slug, pricing, parameters = row["id"], row.get("pricing"), row.get("supported_parameters")
    length = row.get("context_length")
    spec = _parse_price_fields(slug, cast("dict[str, Any]", pricing)) if isinstance(pricing, dict) else None
    takes_tools = "tools" in parameters if isinstance(parameters, list) else None
    return ListedModel(slug, spec, length if isinstance(length, int) else None, takes_tools)


def _parse_price_fields(slug: str, pricing: dict[str, Any]) -> TeacherSpec | None:
    amounts = [read_amount(pricing.get(name)) for name in ("prompt", "completion")]
    if None in amounts:
        return None  # some routers list -1 for "it depends"
    prompt, completion = cast("list[Decimal]", amounts)
    # Writing to a provider's cache costs more than plain input, so the maximum cost uses the higher price.
    written = read_amount(pricing.get("input_cache_write")) or Decimal(0)
    spec = TeacherSpec(
        slug=slug,
        input_per_mtok=float(max(prompt, written) * _MILLION),
        output_per_mtok=float(max(completion, read_amount(pricing.get("internal_reasoning")) or Decimal(0)) * _MILLION),
    )
    if request := read_amount(pricing.get("request")):
        spec["per_request_usd"] = float(request)
    return spec
