"""What stands beside the code says the same as the code: the citation, and the files that the top pages name."""

from __future__ import annotations

import re
import tomllib

import pytest
import yaml
from repository import PACKAGE, ROOT

from composer_replication.version import __version__


def test_the_citation_names_this_version_and_this_licence():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert citation["version"] == __version__
    assert citation["license"] == project["license"]
    assert [each["name"] for each in citation["authors"]] == [each["name"] for each in project["authors"]]
    assert citation["title"].startswith(project["name"])
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


# A path in backquotes: a file whose ending says that it is committed, or a folder.
_NAMED_PATH = re.compile(r"`([\w.*/-]+(?:\.(?:py|toml|txt|cff|lock)|\w/))`")
# What commands make.
_NOT_COMMITTED = {"site/", "run/"}


@pytest.mark.parametrize(
    ("page", "at_least"), [("SECURITY.md", 8), ("CONTRIBUTING.md", 15), ("AGENTS.md", 6), ("README.md", 0)]
)
def test_every_file_and_folder_that_a_top_page_names_exists(page, at_least):
    paths = set(_NAMED_PATH.findall((ROOT / page).read_text(encoding="utf-8"))) - _NOT_COMMITTED
    assert len(paths) >= at_least
    assert [
        path for path in sorted(paths) if not any(any(home.glob(path.rstrip("/"))) for home in (PACKAGE, ROOT))
    ] == []


def test_every_table_that_contributing_names_is_in_its_file():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`([A-Z_]{4,})` of `([\w/]+\.py)`", text)
    assert len(named) == 3
    for name, file in named:
        assert re.search(rf"^{name}\b", (PACKAGE / file).read_text(encoding="utf-8"), re.MULTILINE), (name, file)
