"""`crf hints RUN`: list the hints of a run, reject or restore hints, or let a model write them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from composer_replication.cli.console import (
    add_config_arguments,
    add_config_flag,
    add_gate_arguments,
    config_from_args,
    log,
    plain,
    print_json,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from composer_replication.runs import RunDir
    from composer_replication.types import ErrorSite, Hint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory with sites in it (`crf sites RUN`)")
    parser.add_argument("--kind", action="append", metavar="KIND", help="show only this kind; may be repeated")
    parser.add_argument("--drop", action="append", metavar="ID", help="reject this site permanently; may be repeated")
    parser.add_argument(
        "--keep", action="append", metavar="ID", help="undo a --drop; `crf sites` writes the hint again"
    )
    parser.add_argument("--json", action="store_true", help="print the hints as JSON")
    add_config_flag(parser, "--writer", key="sites.writer", metavar="FILE")
    add_config_flag(parser, "--max-usd", key="sites.max_usd")
    add_config_arguments(parser, "sites")
    add_gate_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """List the hints, after `--writer`, `--drop` and `--keep` have changed them."""
    from composer_replication.cli.sites import check_kinds, log_writer_outcomes, write_sites
    from composer_replication.runs import RunDir
    from composer_replication.runs.files import mark_rejected, read_sites

    section, run_dir = config_from_args(args).sites, RunDir.open(args.run)
    if section.writer is not None:
        outcomes = write_sites(section, run_dir, no_scrub=args.no_scrub, allowed=args.allow).writer_outcomes
        log_writer_outcomes(outcomes)
        if set(outcomes) == {"refused: no answer"}:
            log("The hint writer returned no answer, so template hints are used. Check its base_url, model and API key")
            return 1
    for site in mark_rejected(run_dir, args.drop) if args.drop else ():
        log(f"Rejected site {site.id} ({site.kind})")
    for site in mark_rejected(run_dir, args.keep, is_rejected=False) if args.keep else ():
        log(f"Restored site {site.id} ({site.kind}); `crf sites` writes its hint again")
    hints = [(site, hint) for site, hint in read_sites(run_dir) if site.is_kept and hint is not None]
    check_kinds(args.kind or (), {site.kind for site, _ in hints})
    rows = [row for row in hints if not args.kind or row[0].kind in args.kind]
    _show(run_dir, rows, as_json=args.json)
    log(f"{len(rows)} of {len(hints)} hints. `--drop ID` rejects one; `crf sites RUN --show ID` shows its call")
    return 0


def _show(run_dir: RunDir, hints: Sequence[tuple[ErrorSite, Hint]], *, as_json: bool) -> None:
    if as_json:
        rows = [{"site": s.id, "kind": s.kind, "source": h.source, "hint": h.text} for s, h in hints]
        print_json({"run": str(run_dir.root), "hints": rows})
        return
    for site, hint in hints:
        print(plain(f"{site.id}  {site.kind}, {hint.source}"))
        print(plain(f"    {hint.text}"))
