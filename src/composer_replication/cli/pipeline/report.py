"""`crf report RUN`: the run as a page to look at, and as markdown."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "write report.html and report.md: did it help, what was learnt from, and every decision to look at"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory; what it lacks is said in the report")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="where to write the page, instead of report.html in the run"
    )
    parser.add_argument(
        "--trained-in", metavar="DIR", type=Path, help="the folder that `crf train` wrote to, where that is not the run"
    )
    parser.add_argument("--json", action="store_true", help="print what was written, the verdict and what is missing")


def run(args: argparse.Namespace) -> int:
    from composer_replication.cli.console import plain, print_json, say
    from composer_replication.report.records import by_command
    from composer_replication.runs import RunDir
    from composer_replication.runs.lineage import half_trained
    from composer_replication.steps.report import write_report

    done = write_report(RunDir.open(args.run), args.output, trained_in=args.trained_in)
    if args.json:
        print_json(
            {
                "html": str(done.html),
                "markdown": str(done.markdown),
                "sessions": done.num_sessions,
                "session_pages": None if done.folder is None else str(done.folder),
                "verdict": done.verdict.word,
                "hints": done.hint_tests._asdict(),
                "sentences": list(done.verdict.sentences),
                "missing": [artefact.file_name for artefact in done.absent],
            }
        )
        return 0
    print(plain(f"{done.verdict.label}. {' '.join(done.verdict.sentences)}"))
    print(plain(str(done.html)))
    print(plain(str(done.markdown)))
    if done.folder is not None:
        say(f"{done.num_sessions:,} sessions: a page each in {done.folder}, which belongs beside the report")
    if unfinished := half_trained(args.trained_in or Path(args.run)):
        say(f"half made: {unfinished}")
    for command, files in by_command(done.absent).items():
        say(f"missing: {', '.join(files)}; `{command}` writes {'it' if len(files) == 1 else 'them'}")
    for artefact in done.absent:
        if artefact.reason:
            say(f"cannot be read: {artefact.file_name}: {artefact.reason}")
    return 0
