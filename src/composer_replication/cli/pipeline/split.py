"""`crf split RUN`: which sessions are learnt from, and which judge what was learnt."""

from __future__ import annotations

import argparse

from composer_replication.cli.options import add_config_arguments, add_short, config_of

HELP = "choose the sessions to learn from and those that judge it, once and for all later steps"
_WHAT_FOR = {
    "train": "learnt from",
    "validation": "choose when to stop and what to keep; learnt from where nothing asks",
    "test": "seen by the evaluation alone",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory with conversations in it")
    add_short(parser, "--by", key="split.by", metavar="WHAT")
    add_short(parser, "--test", key="split.test")
    add_short(parser, "--validation", key="split.validation")
    add_config_arguments(parser, "split")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")


def run(args: argparse.Namespace) -> int:
    from composer_replication.cli.console import print_json, say, show, table
    from composer_replication.runs import RunDir
    from composer_replication.steps.split import write_split

    section, run_dir = config_of(args).split, RunDir.open(args.run)
    done = write_split(section, run_dir)
    counts = done.counts()
    if args.json:
        states = {"test_states": done.num_test_states, "near_duplicates": done.num_near_duplicates}
        print_json({"run": str(run_dir.root), "sides": counts, **states})
        return 0
    rows = [
        (count.side, count.sessions, count.conversations, *((time or "")[:10] for time in (count.first, count.last)))
        for count in counts
    ]
    columns = ("side", "sessions", "contexts", "first began", "last began", "what for")
    show(table("Sessions", columns, [(*row, _WHAT_FOR[row[0]]) for row in rows]))
    say(
        f"{run_dir.path('split')}: of {done.num_test_states:,} states of the test {done.num_near_duplicates:,} stand in"
        " sessions that are learnt from as well, nearly word for word: an evaluation leaves them out"
    )
    return 0
