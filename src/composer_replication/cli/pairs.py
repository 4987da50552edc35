"""`crf pairs RUN`: what the teachers agree on against what the student did, filtered."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from composer_replication.cli.console import add_gate_arguments

if TYPE_CHECKING:
    from composer_replication.runs import RunDir
    from composer_replication.teacher_replay.run_pairs import PairsOfRun

HELP = "make preference pairs of what teachers agree on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory with teacher calls in it")
    parser.add_argument("--threshold", type=int, metavar="N", help="votes that make a consensus; default: the replay's")
    parser.add_argument(
        "--where-it-worked", action="store_true", help="also pairs that reject an action which worked; counted"
    )
    parser.add_argument("--thinking", action="store_true", help="leave thinking in the texts, where a side has any")
    parser.add_argument("--recipe", metavar="FILE", help="filters as a data-juicer recipe; default: ours")
    parser.add_argument("--no-filter", action="store_true", help="keep every pair")
    parser.add_argument("--data-juicer", action="store_true", help="run data-juicer's operators (extra: replaysim)")
    parser.add_argument("--export", metavar="FILE", help="also write a preference data set for TRL's DPOTrainer")
    add_gate_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    import os

    from composer_replication.cli.console import say
    from composer_replication.ingestion.last_gate import gate_of
    from composer_replication.pairs.normalise.normalizer import DJNormalizer
    from composer_replication.runs import RunDir
    from composer_replication.teacher_replay.run_pairs import PairChoices, write_pairs

    run_dir = RunDir.open(args.run)
    gate = None
    if args.export is not None:  # first: a run that may not go out is not worked on
        gate = gate_of(run_dir, os.environ, no_scrub=args.no_scrub, allowed=args.allow)
        if args.no_scrub:
            say("crf pairs: --no-scrub: nothing is looked at, and the data set holds whatever the run holds")
    backend = "data_juicer" if args.data_juicer else "native"
    normalizer = DJNormalizer(args.recipe, skip_dj=args.no_filter, backend=backend)
    found = write_pairs(
        run_dir,
        threshold=args.threshold,
        normalizer=normalizer,
        export=None if args.export is None else Path(args.export),
        choices=PairChoices(where_it_worked=args.where_it_worked, thinking=args.thinking),
        gate=gate,
    )
    _show(run_dir, found, args)
    return 0


def _show(run_dir: RunDir, found: PairsOfRun, args: argparse.Namespace) -> None:
    from composer_replication.cli.console import print_json, say, show, table

    if args.json:
        print_json({"run": str(run_dir.root), "report": found.report.to_dict(), "filters": dict(found.filtered)})
        return
    report = found.report
    rows = [
        (kind, each.num_states, each.num_consensus, _share(each.with_each_other), _share(each.with_student))
        for kind, each in sorted(report.agreement.items(), key=lambda item: -item[1].num_states)
    ]
    columns = ("student did", "states", "consensus", "teachers agree", "with student")
    show(
        table("Agreement", columns, rows, caption="Shares of pairs of teachers, and of votes for the student's action"),
        table("States without a pair", ("why", "states"), sorted(report.drops.items())),
        table("Filters", ("what", "pairs"), sorted(found.filtered.items())),
    )
    kept = found.filtered.get("kept", 0)
    say(f"{run_dir.path('pairs')}: {kept} pairs of {report.num_states} states")
    if report.num_rejected_worked:
        dropped = "are none" if not args.where_it_worked else "are among them (rejected_action_worked)"
        say(
            f"{report.num_rejected_worked} pairs would reject an action that worked: they {dropped}"
            + ("" if args.where_it_worked else "; --where-it-worked makes them too")
        )
    if args.export is not None:
        say(f"{args.export}: {found.num_exported or 0} rows" if found.num_exported else "nothing to export")


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
