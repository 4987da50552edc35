"""Pairs of actions labelled by someone who had not seen the rules: same or different, decided without a mistake.

First run, before the rules had seen them: 466 of 475 and 129 of 136, every mistake a same called different. The rules
were completed on the first file's mistakes and on all but one of the second's since, so the first run is the honest
guess for other logs.
"""

from __future__ import annotations

import pytest

from action_pairs import FILES, is_called_same, rows

# `create` of an editor that may refuse a file that is there: whether it writes is not known.
KNOWN_MISSES = {"held-edit_vs_write-02"}


@pytest.mark.parametrize("name", FILES)
def test_no_pair_is_decided_wrongly(name, note):
    wrong, merged, number = set(), [], 0
    for row in rows(name):
        number += 1
        if (got := is_called_same(row)) is not row["same"]:
            wrong.add(row["id"])
            merged += [row["id"]] if got else []
    note(f"{name}: {number - len(wrong)} of {number} pairs of actions decided as labelled")
    assert number >= 120
    assert merged == []
    assert wrong - KNOWN_MISSES == set()


@pytest.mark.parametrize("name", FILES)
def test_both_labels_are_there_in_every_group(name):
    labels = {}
    for row in rows(name):
        labels.setdefault(row["group"], set()).add(row["same"])
    assert all(found <= {True, False} for found in labels.values())
    assert sum(found == {True, False} for found in labels.values()) >= 30
