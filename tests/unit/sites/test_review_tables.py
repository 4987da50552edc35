"""The tables in tests/data/site_rules_review.md are what the rules say now."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from data import agent_results
from data.fixture_review import review_rows
from data.labelled import confusion, rows, table

PAGE = (Path(__file__).parents[2] / "data" / "site_rules_review.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["labelled", "held out"])
def test_the_confusion_table_of_the_page_is_the_one_that_the_rules_give(name):
    assert "\n".join(table(confusion(rows(name)))) in PAGE


def test_the_table_of_other_agents_is_the_one_that_the_rules_give():
    assert "\n".join(agent_results.table()) in PAGE


def test_every_site_of_the_fixture_sessions_was_reviewed_and_none_that_is_wrong_is_taught(shared_dir):
    reviewed = re.findall(r"^(\| \d+ \| .*? \|) ([^|]+) \|$", PAGE, re.MULTILINE)
    assert [row for row, _ in reviewed] == review_rows(shared_dir / "fixtures" / "sessions")
    assert {review.split(":")[0].split(",")[0].split(" by")[0] for _, review in reviewed} <= {"right", "miss"}
    assert not [row for row, review in reviewed if review.startswith("miss") and "| kept |" in row]
