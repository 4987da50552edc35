"""The report as a reader opens it: from a file, in light and dark, with keys alone, on a phone, on paper."""

from __future__ import annotations

import re
import time

import pytest

from composer_replication.cli.report import write_report
from report_runs import make_run

pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore")]
SECTIONS = 10


def test_it_opens_offline_with_nothing_on_the_console(open_page, report):
    opened = open_page(report, offline=True)
    assert opened.page.locator("main section").count() == SECTIONS
    assert opened.page.locator(".verdict .word.better").count() == 1
    assert opened.page.locator("figure svg").count() == 6
    assert (opened.wrong, opened.requests) == ([], [report.as_uri()])


def test_markup_in_every_field_of_a_log_is_text(open_page, hostile):
    for path in hostile:
        opened = open_page(path)
        opened.page.evaluate("() => document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        opened.page.wait_for_timeout(50)
        assert opened.page.evaluate("() => typeof window.hacked") == "undefined"
        assert opened.page.locator("script").count() == 1
        assert opened.page.locator("img, iframe, object, main script").count() == 0
        assert "onerror=" in opened.page.locator("body").inner_text()
        assert (opened.wrong, opened.requests) == ([], [path.as_uri()])


def test_the_theme_goes_round_and_is_remembered(open_page, report):
    page = open_page(report, theme="dark").page
    button = page.locator("button#theme")
    colours = {}
    for _ in range(3):
        theme = button.inner_text().split()[-1]
        colours[theme] = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        button.click()
    assert colours["auto"] == colours["dark"] == "rgb(18, 20, 23)"
    assert colours["light"] == "rgb(245, 244, 240)"
    button.click()
    page.reload()
    assert button.inner_text().split()[-1] == "light"


def test_a_session_opens_by_click_and_shows_its_turns(open_page, report):
    page = open_page(report).page
    last = page.locator(".sessions details[id]").last
    assert not last.locator(".card").first.is_visible()
    last.locator("summary").first.click()
    card = last.locator(".card").first
    assert card.is_visible()
    assert card.locator(".tokens").count() == 2
    assert card.locator(".tokens span.d4").count() > 0
    assert card.locator("blockquote").count() == 1


def test_a_link_to_a_failure_opens_its_session(open_page, report):
    page = open_page(report).page
    link = page.locator("#failures tbody a[href^='#site-']").first
    target = page.locator(link.get_attribute("href"))
    assert not target.is_visible()
    link.click()
    page.wait_for_timeout(50)
    assert target.is_visible()
    again = open_page(report, fragment=link.get_attribute("href")).page
    assert again.locator(link.get_attribute("href")).is_visible()


def test_sessions_are_filtered_by_words_kind_and_side(open_page, report):
    page = open_page(report).page
    shown, counted = page.locator(".sessions > li:visible"), page.locator("#num-shown")
    assert (shown.count(), re.findall(r"\d+", counted.inner_text())) == (12, ["12", "12"])
    page.locator("#filters label [name='side']").select_option("test")
    assert shown.count() == 3
    page.locator("#filters label [name='words']").fill("LEDGER part")
    assert shown.count() == 1
    page.locator("#filters label [name='words']").fill("no such words")
    assert re.findall(r"\d+", counted.inner_text()) == ["0", "12"]


def test_keys_alone_are_enough(open_page, report):
    page = open_page(report).page
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.className") == "skip"
    assert page.locator(".skip").bounding_box()["x"] >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("() => document.activeElement.id") == "main"
    page.locator(".sessions summary").first.focus()
    page.keyboard.press("Enter")
    assert page.locator(".sessions details[id]").first.get_attribute("open") is not None
    page.keyboard.press("Tab")
    inside = "() => document.querySelector('.sessions details[open]').contains(document.activeElement)"
    assert page.evaluate(inside)
    outline = page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


@pytest.mark.parametrize("width", [320, 390, 768, 1280, 1920])
def test_nothing_is_wider_than_the_screen(open_page, report, hostile, width):
    for path in (report, hostile[-1]):
        page = open_page(path, width=width).page
        page.evaluate("() => document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width


def test_it_prints_without_its_controls(open_page, report):
    page = open_page(report, theme="dark").page
    page.evaluate("() => { document.documentElement.dataset.theme = 'dark'; }")
    page.emulate_media(media="print")
    assert not page.locator(".toc").is_visible()
    assert not page.locator("#theme").is_visible()
    assert page.evaluate("() => getComputedStyle(document.body).color") == "rgb(29, 31, 35)"
    assert len(page.pdf()) > 20_000


def test_without_scripts_all_of_it_can_be_read(open_page, report):
    page = open_page(report, java_script_enabled=False).page
    assert page.locator("main section").count() == SECTIONS
    page.locator(".sessions summary").first.click()
    assert page.locator(".sessions details[open] .turn").first.is_visible()
    assert not page.locator("#filters").is_visible()


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)])
def test_axe_finds_nothing_serious(open_page, report, hostile, theme, width):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    for path in (report, hostile[-1]):
        page = open_page(path, theme=theme, width=width, bypass_csp=True).page
        page.evaluate("() => document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        found = axe.run(page).response["violations"]
        grave = [
            (each["id"], node["html"][:120], node["failureSummary"][:200])
            for each in found
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"][:3]
        ]
        assert grave == []


def test_a_thousand_sessions_build_and_paint_in_time(open_page, tmp_path):
    run = make_run(tmp_path / "run", 1000)
    began = time.process_time()
    done = write_report(run)
    assert time.process_time() - began < 60
    assert done.folder is not None
    assert done.html.stat().st_size < 25_000_000
    page = open_page(done.html).page
    paint = (
        "() => performance.getEntriesByType('paint').find((each) => each.name === 'first-contentful-paint').startTime"
    )
    assert page.evaluate(paint) < 2000
    page.locator("#filters label [name='words']").fill("part 1000")
    assert page.locator(".sessions > li:visible").count() == 1
    page.locator(".sessions > li:visible a").click()
    assert page.locator("h1").inner_text().endswith("(part 1000).")
    page.locator(".bar a[href$='#sessions']").click()
    page.locator("#num-shown", has_text=re.compile(r"1000\D+1000")).wait_for()
    assert page.locator(".sessions > li:visible").count() == 1000
