"""The reference pages are what the code says: made by one script, compared here, and true of what the steps write."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest
from repository import ROOT

FOLDER = ROOT / "docs" / "reference"


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("reference_generator", FOLDER / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_what_the_script_makes(generator):
    made = generator.pages()
    assert sorted(path.name for path in FOLDER.glob("*.md")) == sorted(made)
    old = [name for name, text in made.items() if (FOLDER / name).read_text(encoding="utf-8") != text]
    assert old == [], f"docs/reference differs from the code: run `{generator.COMMAND}` and commit the pages"


def test_the_pages_name_every_verb_with_its_options_and_every_key(generator):
    from composer_replication.cli.main import VERBS
    from composer_replication.config import CrfConfig, describe

    made = generator.pages()
    assert re.findall(r"^## crf (\w+)$", made["cli.md"], re.MULTILINE) == list(VERBS)
    for verb, option in (("ingest", "--no-scrub"), ("replay", "--max-usd USD"), ("train", "--set A.B=C")):
        part = made["cli.md"].partition(f"## crf {verb}\n")[2].partition("\n## ")[0]
        assert f"`{option}`" in part
    sections = re.split(r"^## \[(.+)\]$", made["config.md"], flags=re.MULTILINE)[1:]
    keys = {
        f"{section}.{key}"
        for section, text in zip(sections[::2], sections[1::2], strict=True)
        for key in re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    }
    assert keys == {each.path for each in describe(CrfConfig)}


def test_the_columns_of_a_table_are_as_many_in_every_row(generator):
    for name, text in generator.pages().items():
        for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
            widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
            assert len(widths) == 1, f"{name}: {block.splitlines()[0]}"


def test_rows_that_the_steps_write_have_the_fields_that_the_page_names(generator, tmp_path, capsys):
    from composer_replication.cli.main import main
    from fault_server import FaultServer

    run, teachers = str(tmp_path / "run"), str(tmp_path / "teachers.json")
    assert main(["ingest", str(ROOT / "examples" / "sessions"), "-o", run, "--workers", "1"]) == 0
    assert main(["sites", run]) == 0
    with FaultServer(seed=1, agreement=0.7) as server:
        slugs = ("openai/gpt-5", "deepseek/deepseek-v4-pro", "anthropic/claude-opus-4.7")
        asked = [word for slug in slugs for word in ("--slug", slug)]
        assert main(["teachers", *asked, "--base-url", server.base_url, "-o", teachers]) == 0
        assert main(["replay", run, "--teachers", teachers, "--failed"]) == 0
    assert main(["pairs", run, "--no-filter"]) == 0
    for name in ("conversations", "session_sources", "tools", "sites", "teacher_calls", "pairs"):
        meta = json.loads((tmp_path / "run" / f"{name}.meta.json").read_text())
        record = generator.sentences.RECORDS[name]
        assert meta["rows"] > 0, name
        assert (meta["schema"], meta["version"]) == (record.schema, record.version)
        assert meta["keys"] == sorted(field for field, _ in generator.record_fields(name)), name
