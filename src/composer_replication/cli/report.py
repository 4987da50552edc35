"""`crf report RUN`: write a report on the run, report.html and report.md, from the run's files."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from composer_replication.cli.console import log, plain, print_json
from composer_replication.errors import InputError, explain
from composer_replication.evaluation.report.build import Report, build_report, folder_of
from composer_replication.runs import RunDir
from composer_replication.runs.directory import record_outside_copy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory; the report lists its missing files")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="file of the page; default: report.html in the run"
    )
    parser.add_argument(
        "--trained-in", metavar="DIR", type=Path, help="the folder that `crf train` wrote to, if it is not the run"
    )
    parser.add_argument("--json", action="store_true", help="print what was written, the verdict and what is missing")


def run(args: argparse.Namespace) -> int:
    from composer_replication.evaluation.report.records import by_command
    from composer_replication.runs.lineage import describe_unfinished

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
        log(f"{done.num_sessions:,} sessions: a page each in {done.folder}; keep that folder next to the report")
    if unfinished := describe_unfinished(args.trained_in or Path(args.run)):
        log(f"unfinished: {unfinished}")
    for command, files in by_command(done.absent).items():
        log(f"missing: {', '.join(files)}; `{command}` writes {'it' if len(files) == 1 else 'them'}")
    for artefact in done.absent:
        if artefact.reason:
            log(f"cannot be read: {artefact.file_name}: {artefact.reason}")
    return 0


# "00012.html", and ".00012.html.tmp", which a killed report leaves; not "12.html" or "notes.html"
_SESSION_PAGE = re.compile(r"\.?(\d{5})\.html(\.tmp)?")


def write_report(run: RunDir, html: Path | None = None, *, trained_in: Path | None = None) -> Report:
    """Write the pages of the report, by default into the run.

    `trained_in` is the folder of the training if it is not the run. Pages contain text of the sessions, so the run
    records the location of pages outside of it.
    """
    html = html or run.path("report_html")
    if html.suffix.lower() not in (".html", ".htm") or html.is_dir():
        got = f"{html}, a folder" if html.is_dir() else html
        raise InputError(explain("the report's file", got=got, expected="a name that ends with .html"))
    html.parent.mkdir(parents=True, exist_ok=True)
    record_outside_copy(run, "report", html)
    done = build_report(run, html, trained_in=trained_in or run.root)
    _remove_older_pages(done)
    return done


def _remove_older_pages(done: Report) -> None:
    """Delete session pages left over from an earlier report with more sessions, or from a report that was killed."""
    folder = folder_of(done.html)
    if not folder.is_dir():
        return
    num_pages = done.num_sessions if done.folder is not None else 0
    for path in folder.iterdir():
        match = _SESSION_PAGE.fullmatch(path.name)
        if match and (match[2] or int(match[1]) > num_pages):
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
