"""`crf judge`: the tables on the example logs, as JSON, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from crf import crf, must

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "sessions"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judged")
    must("ingest", EXAMPLES, "-o", "run", cwd=folder)
    return folder / "run"


def judged(run, *words):
    return json.loads(must("judge", run, "--json", *words, cwd=run.parent))


def test_it_counts_by_rule_and_kind_and_in_all(run):
    said = judged(run)
    rules = {row["rule"]: row for row in said["rules"]}
    assert {name for name, row in rules.items() if row["says"] == "fails"} == {"no_match", "not_read", "same_again"}
    assert all(row["said"] == row["failed"] for row in rules.values() if row["says"] == "fails")
    assert said["in_all"]["failures"] == sum(row["failures"] for row in said["kinds"])
    assert said["in_all"]["predicted"] == 3
    assert said["in_all"]["precision"] == 1.0
    assert judged(run, "--no-earlier")["in_all"]["calls"] == said["in_all"]["calls"]


def test_it_writes_nothing(run):
    before = {path.name: path.stat().st_mtime_ns for path in run.iterdir()}
    judged(run)
    assert {path.name: path.stat().st_mtime_ns for path in run.iterdir()} == before


def test_a_folder_that_is_no_repository_is_refused(run, tmp_path):
    done = crf("judge", run, "--repo", tmp_path, cwd=tmp_path)
    assert done.returncode == 1
    assert "--repo" in done.stderr


@pytest.mark.parametrize("words", [("--repo",), ("--kind", "x")])
def test_what_is_not_understood_is_said(run, words, tmp_path):
    assert crf("judge", run, *words, cwd=tmp_path).returncode == 2
