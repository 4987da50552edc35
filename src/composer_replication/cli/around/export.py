"""`crf export RUN --atif DIR`: the sessions of a run as ATIF documents, for other tools to read."""

from __future__ import annotations

import argparse
from pathlib import Path

from composer_replication.cli.console import add_gate_arguments

HELP = "write the sessions of a run as ATIF documents, one file per session"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory with conversations in it")
    parser.add_argument("--atif", required=True, metavar="DIR", help="a new folder for the documents")
    add_gate_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from composer_replication.cli.console import plain, say
    from composer_replication.runs import RunDir
    from composer_replication.steps.around.export import export_atif

    run_dir = RunDir.open(args.run)
    if args.no_scrub:
        say("crf export: --no-scrub: nothing is looked at, and the documents hold whatever the run holds")
    written = export_atif(run_dir, Path(args.atif), no_scrub=args.no_scrub, allowed=args.allow)
    for path in written:
        print(plain(str(path)))
    say(f"{len(written)} ATIF documents in {args.atif}")
    return 0
