"""The site that `make docs` builds asks no other host for anything, and has every page of docs/."""

from __future__ import annotations

import importlib.util

import pytest
import yaml
from repository import ROOT


@pytest.fixture(scope="module")
def site():
    spec = importlib.util.spec_from_file_location("site_requests", ROOT / ".ci" / "site_requests.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CLEAN = """<html><head><link rel="stylesheet" href="assets/a.css"><script src="../b.js"></script></head>
<body style="background: url(c.png)"><a href="https://example.org">to follow</a><img src="d.svg"></body></html>"""


def test_a_page_that_loads_only_its_own_files_passes(site, tmp_path):
    (tmp_path / "index.html").write_text(CLEAN)
    (tmp_path / "a.css").write_text("@font-face { src: url(fonts/e.woff2) }")
    assert site.main(tmp_path) == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.html", '<script src="https://cdn.example/x.js"></script>'),
        ("a.html", '<link rel="stylesheet" href="//fonts.example/css">'),
        ("a.html", '<link rel="preconnect" href="https://fonts.example">'),
        ("a.html", '<img src="http://example.org/badge.svg">'),
        ("a.html", "<style>body { background: url('https://example.org/x.png') }</style>"),
        ("a.html", '<pre class="mermaid">graph LR</pre>'),
        ("a.css", '@import "https://fonts.example/css";'),
        ("a.css", "a { src: url(https://fonts.example/f.woff2) }"),
    ],
)
def test_a_planted_request_is_found(site, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert len(site.requests_of(tmp_path / name)) == 1
    assert site.main(tmp_path) == 1


def test_an_empty_site_is_not_a_clean_one(site, tmp_path):
    assert site.main(tmp_path) == 1


def test_the_theme_is_told_to_fetch_no_fonts():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert config["theme"]["font"] is False
    assert "nav" not in config  # the folders are the navigation: no page can be forgotten
