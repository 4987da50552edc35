"""`crf export RUN --atif DIR`: the sessions of a run as ATIF documents, for other tools to read."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "write the sessions of a run as ATIF documents, one file per session"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory with conversations in it")
    parser.add_argument("--atif", required=True, metavar="DIR", help="a new folder for the documents")


def run(args: argparse.Namespace) -> int:
    from composer_replication.cli.console import say
    from composer_replication.ingestion.export import export_atif
    from composer_replication.runs import RunDir

    run_dir = RunDir.open(args.run)
    if not run_dir.meta("conversations").settings.get("scrubbed"):
        say("crf export: this run was ingested with --no-scrub: the documents hold whatever secrets the logs held")
    written = export_atif(run_dir, Path(args.atif))
    for path in written:
        print(path)
    say(f"{len(written)} ATIF documents in {args.atif}")
    return 0
