"""`crf teachers`: look up what an endpoint's models cost, and write a teachers file with today's prices."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from composer_replication.cli.console import log, print_json, show, table

if TYPE_CHECKING:
    from composer_replication.teacher_replay.prices import ListedModel

_MAX_SHOWN = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--slug",
        action="append",
        metavar="MODEL",
        help="name of a teacher; may be repeated; default: the default teachers",
    )
    parser.add_argument("--base-url", metavar="URL", help="an OpenAI-compatible endpoint; default: OpenRouter")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable with the endpoint's API key")
    parser.add_argument("--all", action="store_true", help="list every model of the endpoint")
    parser.add_argument("--json", action="store_true", help="print the models and their prices as JSON")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the teachers here, for `crf replay --teachers`")


def run(args: argparse.Namespace) -> int:
    import asyncio
    import os

    from composer_replication.errors import InputError
    from composer_replication.teacher_replay.prices import add_prices, list_models
    from composer_replication.teacher_replay.teachers import DEFAULT_TEACHERS, OPENROUTER, OPENROUTER_KEY

    base_url = args.base_url or OPENROUTER
    variable = args.api_key_env or (OPENROUTER_KEY if base_url == OPENROUTER else None)
    try:
        listed = asyncio.run(list_models(base_url, os.environ.get(variable) if variable else None))
    except InputError as error:
        raise InputError(f"{error}. {_advice_without_prices(args.slug or ())}") from error
    if args.all:
        _show(listed, as_json=args.json)
        return 0
    slugs = args.slug or [teacher["slug"] for teacher in DEFAULT_TEACHERS]
    address = {"base_url": args.base_url} if args.base_url else {}
    key = {"api_key_env": args.api_key_env} if args.api_key_env else {}
    teachers = add_prices([{"slug": slug, **address, **key} for slug in slugs], listed)
    models = {model.slug: model for model in listed}
    _show([models[teacher["slug"]] for teacher in teachers], as_json=args.json)
    if args.output is not None:
        from composer_replication.atomic import atomic_write_json, resolve_link

        atomic_write_json(resolve_link(args.output), teachers)
        log(f"{args.output}: {len(teachers)} teachers with prices")
    return 0


def _advice_without_prices(slugs: Sequence[str]) -> str:
    """Return advice for an endpoint that lists no prices.

    For each unknown teacher name, the advice suggests the most similar default teacher.
    """
    from difflib import get_close_matches

    from composer_replication.teacher_replay.teachers import DEFAULT_TEACHERS

    default_slugs = [teacher["slug"] for teacher in DEFAULT_TEACHERS]
    close = {
        slug: get_close_matches(slug, default_slugs, n=1, cutoff=0.5) for slug in slugs if slug not in default_slugs
    }
    suggestions = "".join(f" {slug} is unknown: did you mean {names[0]}?" for slug, names in close.items() if names)
    example = '[{"slug": "openai/gpt-5", "input_per_mtok": 1.25, "output_per_mtok": 10.0}]'
    return f"Prices come from the endpoint; without it, write the teachers file by hand: {example}.{suggestions}"


def _show(listed: Sequence[ListedModel], *, as_json: bool) -> None:
    if as_json:
        print_json({"models": [model._asdict() for model in listed]})
        return
    rows = [
        (
            model.slug,
            "" if model.spec is None else f"{model.spec['input_per_mtok']:.2f}",  # pyright: ignore[reportTypedDictNotRequiredAccess]
            "" if model.spec is None else f"{model.spec['output_per_mtok']:.2f}",  # pyright: ignore[reportTypedDictNotRequiredAccess]
            "" if model.context_length is None else f"{model.context_length:,}",
            {True: "yes", False: "no", None: ""}[model.takes_tools],
        )
        for model in listed
    ]
    columns = ("model", "$ in / million", "$ out / million", "context", "tools")
    show(table("Teachers", columns, rows[:_MAX_SHOWN], caption="US dollars per million tokens, from the endpoint"))
    if len(rows) > _MAX_SHOWN:
        log(f"{len(rows) - _MAX_SHOWN} more; select models with --slug")
