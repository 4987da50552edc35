"""What programs say in their own words when they were called wrongly; beside it the same words from inside the work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from composer_replication.sites import classify

ROWS = [json.loads(line) for line in (Path(__file__).parents[2] / "data" / "own_words.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['kind']}, {row['id']}" for row in ROWS])
def test_what_a_program_says_of_its_own_call_is_the_models_and_nothing_else_is(row):
    verdict = classify("Bash", {"command": row["command"]}, f"Exit code 1\n{row['text']}", True)
    blamed = verdict.kind if verdict.blame == "model" else None
    assert blamed == row["kind"]
