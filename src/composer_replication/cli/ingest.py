"""`crf ingest PATH... -o RUN`: read session logs of any known agent into a run directory, and redact secrets.

Writes  conversations.jsonl, tools.jsonl and session_sources.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

from composer_replication.cli.console import (
    add_config_arguments,
    add_config_flag,
    config_from_args,
    log,
    print_json,
    show,
    table,
)
from composer_replication.config import IngestConfig
from composer_replication.ingestion.ingest_run import IngestSummary, ingest_into
from composer_replication.ingestion.scrubbing import ScrubSettings
from composer_replication.ingestion.states import load_tool_schemas
from composer_replication.privacy import secret_looking_environment
from composer_replication.runs import RunDir

# The columns of the table, and the field of a format's counts that each one shows.
_COLUMNS = {
    name: name
    for name in ("format", "files", "sessions", "contexts", "turns", "calls", "results", "errors", "secrets", "names")
} | {"contexts": "conversations"}
_CAPTION = (
    "A context is what a model saw at once: a session, a part of one after a compaction, or a sub-agent.\n"
    "Errors are results that the log marks as failed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_flag(parser, "paths", key="ingest.paths", nargs="*", metavar="PATH")
    parser.add_argument(
        "-o", "--output", required=True, metavar="RUN", help="run directory; an existing one is updated"
    )
    add_config_flag(parser, "--exclude", key="ingest.exclude", metavar="PATTERN")
    add_config_flag(parser, "--follow-links", key="ingest.follow_links", value=True)
    add_config_flag(parser, "--tools", key="ingest.tools", metavar="FILE")
    add_config_flag(parser, "--workers", key="ingest.workers")
    add_config_flag(parser, "--kingfisher", key="ingest.kingfisher", value=True)
    add_config_flag(parser, "--people", key="ingest.people", value=True)
    add_config_arguments(parser, "ingest")
    parser.add_argument("--reread", action="store_true", help="read everything again, not only what is new")
    parser.add_argument(
        "--no-scrub", action="store_true", help="do not redact secrets and names; the sidecar records it"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(args: argparse.Namespace) -> int:
    from composer_replication.cli.progress import byte_progress
    from composer_replication.errors import InputError, explain

    section = config_from_args(args).ingest
    if not section.paths:
        expected = "a log or a folder with logs: `crf ingest PATH... -o RUN`, or ingest.paths of --config"
        raise InputError(explain("PATH", got="none", expected=expected))
    if args.no_scrub:
        log("crf ingest: --no-scrub: secrets and names are not redacted; the sidecar records it")
    with run_directory(Path(args.output)) as run_dir, byte_progress("reading sessions", quiet=args.json) as progress:
        summary = ingest(section, run_dir, no_scrub=args.no_scrub, reread=args.reread, progress=progress)
    for remark in summary.remarks:
        log(f"crf ingest: {remark}")
    _show(summary, run_dir, as_json=args.json)
    return 0


def _show(summary: IngestSummary, run: RunDir, *, as_json: bool) -> None:
    if as_json:
        print_json({"run": str(run.root), **summary.to_dict()})
        return
    formats = [*summary.formats, *([summary.total] if len(summary.formats) > 1 else [])]
    is_sum = len(summary.formats) > 1
    rows = [[getattr(row, field) for field in _COLUMNS.values()] for row in formats]
    tables: list[Any] = [table("Sessions", list(_COLUMNS), rows, last_is_total=is_sum, caption=_CAPTION)]
    if summary.unplaced:
        missing = [(orphan.format, orphan.what, orphan.number) for orphan in summary.unplaced]
        tables.append(table("Calls and results without a counterpart", ("format", "what", "times"), missing))
    if summary.beside:
        tables.append(table("Beside the messages", ("what", "times"), list(summary.beside.items())))
    if summary.redactions:
        tables.append(table("Redacted", ("kind", "times"), list(summary.redactions.items())))
    if summary.skipped:
        omissions = [(omission.reason, omission.number, omission.first) for omission in summary.skipped]
        tables.append(table("Left out or repaired", ("why", "times", "first at"), omissions))
    show(*tables)
    read = f"{summary.num_read} files read" + (f", {summary.num_reused} unchanged" if summary.num_reused else "")
    log(f"{run.path('conversations')}: conversations: {summary.total.conversations:,} ({read})")


def ingest(
    section: IngestConfig,
    run: RunDir,
    *,
    no_scrub: bool = False,
    reread: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> IngestSummary:
    """Read new and changed logs from the paths in `section` into the run.

    Args:
        section: The options of `[ingest]`.
        run: The run to update.
        no_scrub: Do not redact secrets.
        reread: Read all logs, not only the new ones.
        progress: Called with the number of bytes read so far and the total number of bytes.
    """
    return ingest_into(
        run,
        [str(Path(path).expanduser()) for path in section.paths],
        scrub=None if no_scrub else _scrub_settings(section, os.environ),
        exclude=section.exclude,
        num_workers=section.workers,
        tools=None if section.tools is None else load_tool_schemas(Path(section.tools)),
        reread=reread,
        follow_links=section.follow_links,
        progress=progress,
    )


@contextlib.contextmanager
def run_directory(path: Path) -> Generator[RunDir, None, None]:
    """Context manager that yields the run at `path` and creates it if necessary.

    A new run is removed if nothing is ingested.
    """
    has_files = path.is_dir() and any(path.iterdir())
    run = RunDir.open(path) if has_files else RunDir.create(path)
    try:
        yield run
    finally:
        if not has_files and not run.path("conversations").exists():
            for file in run.root.iterdir():
                file.unlink()
            run.root.rmdir()


def _scrub_settings(section: IngestConfig, environment: Mapping[str, str]) -> ScrubSettings:
    """Return what to redact besides known patterns.

    This covers the values of environment variables that look secret, home folders, and user names.
    """
    homes = {environment.get(name, "") for name in ("HOME", "USERPROFILE")}
    names = {environment.get(name, "") for name in ("USER", "USERNAME", "LOGNAME")}
    return ScrubSettings(
        env_values=secret_looking_environment(environment),
        # Not "/", which is the home folder in some containers, nor "root", which is an ordinary word.
        home_dirs=tuple(sorted(home for home in homes if len(home) > 1)),
        user_names=tuple(sorted(name for name in names if name and name != "root")),
        kingfisher=section.kingfisher,
        people=section.people,
    )
