"""`crf ingest PATH… -o RUN`: session logs of any known agent into a run directory, secrets out."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_replication.ingestion.cache.summary import IngestSummary
    from composer_replication.ingestion.scrub_settings import ScrubSettings
    from composer_replication.runs import RunDir

HELP = "read session logs (Claude Code, Codex, ATIF, ...) into a run directory, secrets out"
_COLUMNS = {
    name: name
    for name in ("format", "files", "sessions", "contexts", "turns", "calls", "results", "errors", "redacted")
} | {"contexts": "conversations", "redacted": "redactions"}
_CAPTION = (
    "A context is what a model saw at once: a session, a part of one after a compaction, or a sub-agent.\n"
    "Errors are results that the log marks as failed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="a log, a project folder, or all of ~/.claude/projects"
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="RUN", help="run directory; an existing one is updated"
    )
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave out files whose path, name or folder matches, as a .crfignore in PATH does; may be repeated",
    )
    parser.add_argument("--follow-links", action="store_true", help="also read what links lead to outside of PATH")
    parser.add_argument("--tools", metavar="FILE", help="JSON list of tool schemas; without it they are inferred")
    parser.add_argument("--workers", type=int, metavar="N", help="processes; default: one per core, at most 8")
    parser.add_argument("--reread", action="store_true", help="read everything again, not only what is new")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("--kingfisher", action="store_true", help="add kingfisher's rules (extra: privacy)")
    parser.add_argument(
        "--people",
        action="store_true",
        help="e-mail addresses, phone numbers and names beside them become USER_n, too",
    )
    parser.add_argument(
        "--no-scrub", action="store_true", help="leave secrets and names in; the artefact's sidecar says so"
    )


def run(args: argparse.Namespace) -> int:
    from composer_replication.cli.console import byte_progress, say
    from composer_replication.ingestion.into_run import ingest_into
    from composer_replication.ingestion.schemas import load_tool_schemas

    tools = None if args.tools is None else load_tool_schemas(Path(args.tools))
    scrub = None if args.no_scrub else settings_from_environment(kingfisher=args.kingfisher, people=args.people)
    if scrub is None:
        say("crf ingest: --no-scrub: secrets and names stay in the artefact, and its sidecar says so")
    with _run_directory(Path(args.output)) as run_dir, byte_progress("reading sessions", quiet=args.json) as progress:
        summary = ingest_into(
            run_dir,
            args.paths,
            scrub=scrub,
            exclude=args.exclude,
            num_workers=_num_workers(args.workers),
            tools=tools,
            reread=args.reread,
            follow_links=args.follow_links,
            progress=progress,
        )
    for remark in summary.remarks:
        say(f"crf ingest: {remark}")
    _show(summary, run_dir, as_json=args.json)
    return 0


def settings_from_environment(*, kingfisher: bool = False, people: bool = False) -> ScrubSettings:
    """What this process knows and logs must not tell: secret-looking variables, the home directory, the user's name."""
    from composer_replication.ingestion.scrub_settings import ScrubSettings
    from composer_replication.privacy import secret_looking_environment

    homes = {os.environ.get(name, "") for name in ("HOME", "USERPROFILE")}
    names = {os.environ.get(name, "") for name in ("USER", "USERNAME", "LOGNAME")}
    return ScrubSettings(
        env_values=secret_looking_environment(os.environ),
        home_dirs=tuple(sorted(home for home in homes if len(home) > 1)),
        user_names=tuple(sorted(name for name in names if name and name != "root")),
        kingfisher=kingfisher,
        people=people,
    )


def _num_workers(asked: int | None) -> int:
    from composer_replication.errors import InputError, explain

    if asked is not None and asked < 1:
        raise InputError(explain("--workers", got=asked, expected="1 or more"))
    return asked or min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@contextlib.contextmanager
def _run_directory(path: Path) -> Generator[RunDir, None, None]:
    """The run at `path`, made if need be; one that nothing was written into does not stay."""
    from composer_replication.runs import RunDir

    has_files = path.is_dir() and any(path.iterdir())
    run = RunDir.open(path) if has_files else RunDir.create(path)
    try:
        yield run
    finally:
        if not has_files and not run.path("conversations").exists():
            for each in run.root.iterdir():
                each.unlink()
            run.root.rmdir()


def _show(summary: IngestSummary, run: RunDir, *, as_json: bool) -> None:
    from composer_replication.cli.console import print_json, say, show, table

    if as_json:
        print_json({"run": str(run.root), **summary.to_dict()})
        return
    formats = [*summary.formats, *([summary.total] if len(summary.formats) > 1 else [])]
    is_sum = len(summary.formats) > 1
    rows = [[getattr(row, field) for field in _COLUMNS.values()] for row in formats]
    tables: list[Any] = [table("Sessions", list(_COLUMNS), rows, last_is_total=is_sum, caption=_CAPTION)]
    if summary.unplaced:
        missing = [(each.format, each.what, each.number) for each in summary.unplaced]
        tables.append(table("Calls and results without a counterpart", ("format", "what", "times"), missing))
    if summary.beside:
        tables.append(table("Beside the messages", ("what", "times"), list(summary.beside.items())))
    if summary.redactions:
        tables.append(table("Redacted", ("kind", "times"), list(summary.redactions.items())))
    if summary.skipped:
        left = [(each.reason, each.number, each.first) for each in summary.skipped]
        tables.append(table("Left out or repaired", ("why", "times", "first at"), left))
    show(*tables)
    read = f"{summary.num_read} files read" + (f", {summary.num_reused} unchanged" if summary.num_reused else "")
    say(f"{run.path('conversations')}: conversations: {summary.total.conversations:,} ({read})")
