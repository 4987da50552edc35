"""`crf report`: a run as `report.html` and `report.md`, from its files alone."""

from __future__ import annotations

from pathlib import Path

from composer_replication.errors import InputError, explain
from composer_replication.report.build import Report, build_report
from composer_replication.runs import RunDir
from composer_replication.runs.elsewhere import note_elsewhere


def write_report(run: RunDir, html: Path | None = None, *, trained_in: Path | None = None) -> Report:
    """Write the pages, into the run unless `html` says where. `trained_in` is where `crf train` wrote, if elsewhere.

    What is written outside of the run holds text of its sessions, so the run remembers it.
    """
    html = html or run.path("report_html")
    if html.suffix.lower() not in (".html", ".htm"):
        raise InputError(explain("the report's file", got=str(html), expected="a name that ends with .html"))
    if html.is_dir():
        raise InputError(explain("the report's file", got=f"{html}, a folder", expected="a file in it"))
    html.parent.mkdir(parents=True, exist_ok=True)
    note_elsewhere(run, "report", html)
    return build_report(run, html, trained_in=trained_in)
