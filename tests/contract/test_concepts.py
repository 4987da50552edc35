"""The concept pages name real things: each hop of a walk, each artefact, each file to look at, each config key."""

from __future__ import annotations

import ast
import re

import pytest
from markdown_pages import blocks
from repository import PACKAGE, ROOT, relative

FOLDER = ROOT / "docs" / "concepts"
PAGES = sorted(FOLDER.glob("*.md"))
PIPELINE = FOLDER / "pipeline.md"
# `file.py:function` or `file.py:Class.method`, from the package's folder.
HOP = re.compile(r"`(?P<file>[\w/]+\.py):(?P<name>[\w.]+)`")
PATH = re.compile(r"`(?P<path>[\w./-]+(?:\.(?:py|toml|txt|yaml|md)|/))`")
KEY = re.compile(r"`(?P<key>(?:ingest|replay|loss|render|split|train)\.[\w.]+)`")


def text_of(path) -> str:
    return path.read_text(encoding="utf-8")


def part(text: str, title: str) -> str:
    """What stands below a heading of the second level."""
    found = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert found, f"there is no part {title!r}"
    return found


def names_in(source: str) -> set[str]:
    """Functions and classes of a module, and the methods of its classes as Class.method."""
    names: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            inside = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {f"{node.name}.{each.name}" for each in inside}
    return names


def missing_hops(text: str) -> list[str]:
    hops = [(match["file"], match["name"]) for match in HOP.finditer(text)]
    known = {file: names_in(text_of(PACKAGE / file)) if (PACKAGE / file).is_file() else set() for file in dict(hops)}
    return [f"{file}:{name}" for file, name in hops if name not in known[file]]


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_function_that_a_page_names_exists(page):
    assert missing_hops(text_of(page)) == []


@pytest.mark.parametrize(
    ("title", "first", "last"),
    [
        (
            "The walk of a Claude Code session",
            "cli/ingest.py:ingest",
            "trainer/checkpoints/manifest.py:write_manifest",
        ),
        (
            "The walk of a TRL rollout",
            "trainer/from_config/grpo.py:prepare_grpo",
            "loss/linear/weighted.py:linear_divergence",
        ),
    ],
)
def test_a_walk_is_a_list_of_hops_from_its_first_to_its_last(title, first, last):
    lines = [line for line in part(text_of(PIPELINE), title).splitlines() if re.match(r"\d+\. ", line)]
    hops = [[f"{match['file']}:{match['name']}" for match in HOP.finditer(line)] for line in lines]
    assert [int(line.partition(".")[0]) for line in lines] == list(range(1, len(lines) + 1))
    assert [line for line, found in zip(lines, hops, strict=True) if len(found) != 1] == []  # one hop a line
    assert (hops[0], hops[-1]) == ([first], [last])
    assert len(hops) == len({tuple(each) for each in hops})


def test_the_diagram_shows_every_artefact_that_a_verb_writes():
    from composer_replication.cli.main import VERBS
    from composer_replication.runs import ARTEFACTS

    diagram = blocks(text_of(PIPELINE))[0].code
    written = {each.file_name for each in ARTEFACTS.values() if each.command.removeprefix("crf ") in VERBS}
    names = "report_sessions|checkpoints|adapter|control|earlier|model"
    files = rf"[a-z_.]+\.(?:jsonl|json|html|md|sqlite|safetensors|toml)|{names}"
    shown = set(re.findall(files, diagram))
    assert shown - {"model"} == written - {"model"}
    assert set(re.findall(r"crf (\w+)", diagram)) == set(VERBS)


def test_everything_to_look_at_is_there():
    table = part(text_of(PIPELINE), "To change X, look at Y")
    paths = [match["path"] for match in PATH.finditer(table)]
    assert len(paths) > 20
    assert [path for path in paths if not (PACKAGE / path).exists() and not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_config_key_that_a_page_names_exists(page):
    from composer_replication.config import CrfConfig, describe

    known = {each.path for each in describe(CrfConfig)}
    assert sorted({match["key"] for match in KEY.finditer(text_of(page))} - known) == []


def test_the_failing_call_of_the_channels_page_is_one_that_the_guide_to_hints_prints():
    quoted = [line.strip() for line in blocks(text_of(FOLDER / "channels.md"))[0].code.splitlines()]
    guide = text_of(ROOT / "docs" / "guides" / "hints.md")
    said = [line.partition(":: ")[2] for line in quoted if ":: " in line]
    assert len(said) == 3
    assert [line for line in said if line not in guide] == []


def test_the_glossary_is_in_order_and_says_each_word_once():
    words = re.findall(r"^\*\*(.+?)\*\*", text_of(FOLDER / "glossary.md"), re.MULTILINE)
    assert len(words) > 25
    assert words == sorted(set(words), key=str.lower)


def test_a_planted_hop_that_leads_nowhere_is_found():
    good = "`loss/jsd.py:JSD.check` and `loss/jsd.py:generalized_jsd_loss`"
    assert missing_hops(good) == []
    assert missing_hops(f"{good} `loss/jsd.py:JSD.gone` `loss/none.py:f`") == ["loss/jsd.py:JSD.gone", "loss/none.py:f"]
