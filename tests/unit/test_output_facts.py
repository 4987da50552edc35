"""The helper that finds facts in printed lines: a fact is whole, and all of them stand in one line."""

from __future__ import annotations

import pytest

from output_facts import lines_with

TEXT = "--replicas: got 10, expected 1 to 1,000\ntrain.batch.budget: 0.5 of runs/first/a.json. Set checkpoint-2."


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        (["--replicas", 10, 1], 0),
        (["1,000"], 0),
        (["train.batch.budget", 0.5, "runs/first"], 1),
        (["a.json", "checkpoint-2"], 1),
    ],
)
def test_whole_facts_are_found_in_any_order(facts, line):
    assert lines_with(TEXT, *reversed(facts)) == [TEXT.splitlines()[line]]


@pytest.mark.parametrize("facts", [[0], [5], [1000], ["train.batch"], ["check"], [2], ["a"], [10, 0.5]])
def test_parts_of_words_and_numbers_and_facts_of_two_lines_are_not(facts):
    assert lines_with(TEXT, *facts) == []
