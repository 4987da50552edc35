"""Chromium, and the reports it opens. Without a browser, or Playwright, the tests are skipped with the reason."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from composer_replication.cli.report import write_report
from composer_replication.evaluation.report import build
from report_runs import make_run

_NAMES = ("chromium", "chromium-browser", "google-chrome")


class Opened(NamedTuple):
    """A page, and what went wrong on it: words on the console, exceptions, dialogs, and what it asked for."""

    page: object
    wrong: list[str]
    requests: list[str]


@pytest.fixture(scope="session")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-browser")
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=program, args=["--no-sandbox"])  # a container is its own wall
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium):
    """Opens a file as a reader does, and watches."""
    contexts = []

    def open_file(path: Path, *, width: int = 1280, theme: str = "light", fragment: str = "", **options) -> Opened:
        size = {"width": width, "height": 900}
        context = chromium.new_context(viewport=size, color_scheme=theme, reduced_motion="reduce", **options)
        contexts.append(context)
        page = context.new_page()
        opened = Opened(page, [], [])
        page.on("console", lambda message: opened.wrong.append(message.text))
        page.on("pageerror", lambda error: opened.wrong.append(str(error)))
        page.on("dialog", lambda dialog: (opened.wrong.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: opened.requests.append(request.url))
        page.goto(f"{path.as_uri()}{fragment}")
        return opened

    yield open_file
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def report(tmp_path_factory) -> Path:
    """All of twelve sessions in one file."""
    return write_report(make_run(tmp_path_factory.mktemp("one") / "run", 12)).html


@pytest.fixture(scope="session")
def hostile(tmp_path_factory) -> list[Path]:
    """Markup in every field of the logs and the records: in one file, and in a file a session."""
    run = make_run(tmp_path_factory.mktemp("hostile") / "run", 4, hostile=True)
    one = write_report(run, run.root.parent / "one.html")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "MOST_IN_ONE_FILE", 2)
        several = write_report(run)
    assert several.folder is not None
    return [one.html, several.html, *sorted(several.folder.iterdir())]
