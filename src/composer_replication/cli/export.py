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
    import os

    from composer_replication.cli.console import plain, say
    from composer_replication.ingestion.export import export_atif
    from composer_replication.ingestion.last_gate import gate_of
    from composer_replication.runs import RunDir

    run_dir = RunDir.open(args.run)
    gate = gate_of(run_dir, os.environ, no_scrub=args.no_scrub, allowed=args.allow)
    if args.no_scrub:
        say("crf export: --no-scrub: nothing is looked at, and the documents hold whatever the run holds")
    written = export_atif(run_dir, Path(args.atif), gate=gate)
    for path in written:
        print(plain(str(path)))
    say(f"{len(written)} ATIF documents in {args.atif}")
    return 0
