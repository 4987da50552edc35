"""`crf hints RUN`: what is said about each mistake that may be taught; strike one out, or let a model write them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from composer_replication.cli.console import (
    add_config_arguments,
    add_gate_arguments,
    add_short,
    config_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from composer_replication.runs import RunDir
    from composer_replication.types import ErrorSite, Hint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory with sites in it (`crf sites RUN`)")
    parser.add_argument("--kind", action="append", metavar="KIND", help="show only this kind; may be repeated")
    parser.add_argument("--drop", action="append", metavar="ID", help="strike this site out, for good; may be repeated")
    parser.add_argument("--keep", action="append", metavar="ID", help="take a --drop back; `crf sites` writes it again")
    parser.add_argument("--json", action="store_true", help="print the hints as JSON")
    add_short(parser, "--writer", key="sites.writer", metavar="FILE")
    add_short(parser, "--max-usd", key="sites.max_usd")
    add_config_arguments(parser, "sites")
    add_gate_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from composer_replication.cli.console import say
    from composer_replication.cli.sites import check_kinds, write_sites
    from composer_replication.runs import RunDir
    from composer_replication.runs.files import read_sites, strike_sites

    section, run_dir = config_of(args).sites, RunDir.open(args.run)
    if section.writer is not None:
        done = write_sites(section, run_dir, no_scrub=args.no_scrub, allowed=args.allow)
        say(f"hints by a model: {', '.join(f'{what} {number}' for what, number in sorted(done.hints.items()))}")
        if set(done.hints) == {"refused: no answer"}:
            say("the model answered nothing: look at its address, its name and its key. The hints are the rules' own")
            return 1
    for identities, is_struck, words in (
        (args.drop, True, "struck out"),
        (args.keep, False, "taken back, and written again by `crf sites`"),
    ):
        for site in strike_sites(run_dir, identities, is_struck=is_struck) if identities else ():
            say(f"{words}: site {site.id} ({site.kind})")
    hints = [(site, hint) for site, hint in read_sites(run_dir) if site.is_kept and hint is not None]
    check_kinds(args.kind or (), {site.kind for site, _ in hints})
    rows = [row for row in hints if not args.kind or row[0].kind in args.kind]
    _show(run_dir, rows, as_json=args.json)
    say(f"{len(rows)} of {len(hints)} hints. `--drop ID` strikes one out; `crf sites RUN --show ID` shows its call")
    return 0


def _show(run_dir: RunDir, hints: Sequence[tuple[ErrorSite, Hint]], *, as_json: bool) -> None:
    from composer_replication.cli.console import plain, print_json

    if as_json:
        rows = [{"site": s.id, "kind": s.kind, "source": h.source, "hint": h.text} for s, h in hints]
        print_json({"run": str(run_dir.root), "hints": rows})
        return
    for site, hint in hints:
        print(plain(f"{site.id}  {site.kind}, {hint.source}"))
        print(plain(f"    {hint.text}"))
