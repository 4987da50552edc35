"""`crf report`: a run as `report.html` and `report.md`, from its files alone."""

from __future__ import annotations

import re
from pathlib import Path

from composer_replication.errors import InputError, explain
from composer_replication.report.build import Report, build_report, folder_of
from composer_replication.runs import RunDir
from composer_replication.runs.elsewhere import note_elsewhere

_SESSION_PAGE = re.compile(r"\.?(\d{5})\.html(\.tmp)?")


def write_report(run: RunDir, html: Path | None = None, *, trained_in: Path | None = None) -> Report:
    """Write the pages, into the run unless `html` says where. `trained_in` is where `crf train` wrote, if elsewhere.

    What is written outside of the run holds text of its sessions, so the run remembers it.
    """
    html = html or run.path("report_html")
    if html.suffix.lower() not in (".html", ".htm") or html.is_dir():
        got = f"{html}, a folder" if html.is_dir() else html
        raise InputError(explain("the report's file", got=got, expected="a name that ends with .html"))
    html.parent.mkdir(parents=True, exist_ok=True)
    note_elsewhere(run, "report", html)
    done = build_report(run, html, trained_in=trained_in or run.root)
    _remove_older_pages(done)
    return done


def _remove_older_pages(done: Report) -> None:
    """Pages that an earlier report of more sessions left, or one that was killed; files that are not ours stay."""
    folder = folder_of(done.html)
    if not folder.is_dir():
        return
    num_kept = done.num_sessions if done.folder is not None else 0
    for path in folder.iterdir():
        ours = _SESSION_PAGE.fullmatch(path.name)
        if ours and (ours[2] or int(ours[1]) > num_kept):
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
