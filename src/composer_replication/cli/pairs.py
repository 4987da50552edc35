"""`crf pairs RUN`: what the teachers agree on against what the student did, filtered."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from composer_replication.cli.console import add_gate_arguments
from composer_replication.cli.options import add_config_arguments, add_short, config_of

if TYPE_CHECKING:
    from composer_replication.config import PairsConfig
    from composer_replication.runs import RunDir
    from composer_replication.steps.pairs import PairsOfRun

HELP = "make preference pairs of what teachers agree on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory with teacher calls in it")
    parser.add_argument("--export", metavar="FILE", help="also write a preference data set for TRL's DPOTrainer")
    add_short(parser, "--threshold", key="pairs.threshold")
    add_short(parser, "--where-it-worked", key="pairs.where_it_worked", value=True)
    add_short(parser, "--thinking", key="pairs.thinking", value=True)
    add_short(parser, "--recipe", key="pairs.recipe", metavar="FILE")
    add_short(parser, "--no-filter", key="pairs.filters", value="none", help="keep every pair")
    text = "run data-juicer's operators (extra: replaysim)"
    add_short(parser, "--data-juicer", key="pairs.filters", value="data_juicer", help=text)
    add_gate_arguments(parser)
    add_config_arguments(parser, "pairs")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    from composer_replication.cli.console import say
    from composer_replication.runs import RunDir
    from composer_replication.steps.pairs import write_pairs

    section, run_dir = config_of(args).pairs, RunDir.open(args.run)
    if args.export is not None and args.no_scrub:
        say("crf pairs: --no-scrub: nothing is looked at, and the data set holds whatever the run holds")
    export = None if args.export is None else Path(args.export)
    pairs = write_pairs(section, run_dir, export=export, no_scrub=args.no_scrub, allowed=args.allow)
    _show(run_dir, pairs, section, args)
    return 0


def _show(run_dir: RunDir, pairs: PairsOfRun, section: PairsConfig, args: argparse.Namespace) -> None:
    from composer_replication.cli.console import print_json, say, show, table

    if args.json:
        print_json({"run": str(run_dir.root), "report": pairs.report.to_dict(), "filters": dict(pairs.filtered)})
        return
    report = pairs.report
    rows = [
        (kind, each.num_states, each.num_consensus, _share(each.with_each_other), _share(each.with_student))
        for kind, each in sorted(report.agreement.items(), key=lambda item: -item[1].num_states)
    ]
    columns = ("student did", "states", "consensus", "teachers agree", "with student")
    show(
        table("Agreement", columns, rows, caption="Shares of pairs of teachers, and of votes for the student's action"),
        table("States without a pair", ("why", "states"), sorted(report.drops.items())),
        table("Filters", ("what", "pairs"), sorted(pairs.filtered.items())),
    )
    kept = pairs.filtered.get("kept", 0)
    say(f"{run_dir.path('pairs')}: {kept} pairs of {report.num_states} states")
    if not kept and report.drops.get("no_votes"):
        unheard = report.drops["no_votes"]
        say(f"no teacher's answer counts for {unheard} of the states that were asked about: `crf replay RUN` asks anew")
    if report.num_rejected_worked:
        dropped = "are none" if not section.where_it_worked else "are among them (rejected_action_worked)"
        say(
            f"{report.num_rejected_worked} pairs would reject an action that worked: they {dropped}"
            + ("" if section.where_it_worked else "; --where-it-worked makes them too")
        )
    if args.export is not None:
        say(f"{args.export}: {pairs.num_exported or 0} rows" if pairs.num_exported else "nothing to export")


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
