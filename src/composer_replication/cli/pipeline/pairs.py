"""`crf pairs RUN`: what the teachers agree on, and what sessions put right, against what was done; filtered."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from composer_replication.cli.console import add_gate_arguments
from composer_replication.cli.options import add_config_arguments, add_short, config_of

if TYPE_CHECKING:
    from rich.table import Table

    from composer_replication.config import PairsConfig
    from composer_replication.pairs.agreement import PairReport
    from composer_replication.runs import RunDir
    from composer_replication.steps.pairs import PairsOfRun

_SOURCES = {
    "teachers": "what teachers agree on, what the student did",
    "correction": "the call that should have been made, the one that failed",
    "user": "the call as the user wanted it, the one refused",
    "acted_at_once": "a call that worked, the look that it did without",
}
HELP = "make preference pairs of what teachers agree on, and of what sessions put right themselves"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", help="a run directory with conversations in it, and teacher calls if there are any"
    )
    parser.add_argument("--export", metavar="FILE", help="also write a preference data set for TRL's DPOTrainer")
    add_short(parser, "--threshold", key="pairs.threshold")
    add_short(parser, "--where-it-worked", key="pairs.where_it_worked", value=True)
    add_short(parser, "--thinking", key="pairs.thinking", value=True)
    add_short(parser, "--no-corrections", key="pairs.corrections", value=False, help="take teachers' answers alone")
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
    if export is not None and pairs.num_exported:
        from composer_replication.atomic import atomic_write_text
        from composer_replication.use.cards import preferences_card

        atomic_write_text(_card_of(export), preferences_card(run_dir, export.name))
    _show(run_dir, pairs, section, args)
    return 0


def _card_of(export: Path) -> Path:
    """Beside the file, under a name that nobody else's page has."""
    return export.with_suffix(".card.md")


def _show(run_dir: RunDir, pairs: PairsOfRun, section: PairsConfig, args: argparse.Namespace) -> None:
    from composer_replication.cli.console import print_json, say, show, table

    if args.json:
        report = None if pairs.report is None else pairs.report.to_dict()
        by_source = {**pairs.by_source, "failures": pairs.num_failures}
        record = {"report": report, "filters": dict(pairs.filtered), "sources": by_source}
        print_json({"run": str(run_dir.root), **record, "without_opposite": dict(pairs.without_opposite)})
        return
    show(
        *(() if pairs.report is None else _report_tables(pairs.report)),
        table("Filters", ("what", "pairs"), sorted(pairs.filtered.items())),
        table("Pairs", ("source", "pairs", "chosen, and rejected"), _source_rows(pairs.by_source)),
    )
    num_kept = pairs.filtered.get("kept", 0)
    say(f"{run_dir.path('pairs')}: {num_kept} pairs{_shares(pairs)}")
    for line in _notes(pairs, section):
        say(line)
    if args.export is not None:
        card = f"; {_card_of(Path(args.export))} says what they are"
        say(f"{args.export}: {pairs.num_exported} rows{card}" if pairs.num_exported else "nothing to export")


def _report_tables(report: PairReport) -> tuple[Table, Table]:
    from composer_replication.cli.console import table

    rows = [
        (
            kind,
            agreement.num_states,
            agreement.num_consensus,
            _share(agreement.with_each_other),
            _share(agreement.with_student),
        )
        for kind, agreement in sorted(report.agreement.items(), key=lambda item: -item[1].num_states)
    ]
    columns = ("student did", "states", "consensus", "teachers agree", "with student")
    return (
        table("Agreement", columns, rows, caption="Shares of pairs of teachers, and of votes for the student's action"),
        table("States without a pair", ("why", "states"), sorted(report.drops.items())),
    )


def _source_rows(by_source: Mapping[str, int]) -> list[tuple[str, int, str]]:
    return [(name, by_source.get(name, 0), what) for name, what in _SOURCES.items() if name in by_source]


def _notes(pairs: PairsOfRun, section: PairsConfig) -> Iterator[str]:
    """What somebody who reads the figures should know besides."""
    report = pairs.report
    if section.corrections and not pairs.num_failures:
        yield "no call of this run failed by the model's doing: there is nothing that a session put right"
    if number := sum(pairs.without_opposite.values()):
        by_kind = ", ".join(f"{count} for a {how.rpartition('_')[2]}" for how, count in pairs.without_opposite.items())
        yield (
            f"{number} pairs say to look first ({by_kind}) and have no opposite from a state where acting at once was"
            " right: more of them than of those may teach to look always"
        )
    if report is None:
        if section.corrections:
            yield "no replay in this run: all pairs are the sessions' own. `crf replay RUN` asks other models too"
        return
    if not pairs.filtered.get("kept", 0) and report.drops.get("no_votes"):
        unheard = report.drops["no_votes"]
        yield f"no teacher's answer counts for {unheard} of the states that were asked: `crf replay RUN` asks anew"
    if report.num_rejected_worked:
        dropped = "are none" if not section.where_it_worked else "are among them (rejected_action_worked)"
        more = "" if section.where_it_worked else "; --where-it-worked makes them too"
        yield f"{report.num_rejected_worked} pairs would reject an action that worked: they {dropped}{more}"


def _shares(pairs: PairsOfRun) -> str:
    """Who they are from: the states that teachers were asked about say nothing about pairs of the sessions' own."""
    if pairs.report is None:
        return ""
    from_teachers = pairs.by_source.get("teachers", 0)
    from_sessions = sum(number for name, number in pairs.by_source.items() if name != "teachers")
    states = f"{pairs.report.num_asked} states that teachers were asked about"
    return f": {from_teachers} from the {states}, {from_sessions} from the sessions alone"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
