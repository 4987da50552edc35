"""What stands beside the code says the same as the code: the citation, and the tables of CONTRIBUTING."""

from __future__ import annotations

import re
import tomllib

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


def test_every_place_that_contributing_names_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"`([\w.*/-]+(?:\.(?:py|toml)|/))`", text)
    assert len(paths) >= 15
    assert [
        path for path in paths if not any(PACKAGE.glob(path.rstrip("/"))) and not any(ROOT.glob(path.rstrip("/")))
    ] == []
    named = re.findall(r"`([A-Z_]{4,})` of `([\w/]+\.py)`", text)
    assert len(named) == 3
    for name, file in named:
        assert re.search(rf"^{name}\b", (PACKAGE / file).read_text(encoding="utf-8"), re.MULTILINE), (name, file)
