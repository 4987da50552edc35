"""Votes over classes, and gating that is exact: no completion of the votes gives another pair once it says stop."""

from __future__ import annotations

from itertools import product

import pytest
from action_forms import bash, key, said
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.errors import InputError
from composer_replication.teacher_replay.votes import can_outcome_change, count_votes
from refusals import refusal

STUDENT = "s"


def outcome(keys, threshold):
    """The pair that votes in the order of asking give: class, place of the teacher whose text is chosen, count."""
    result = count_votes({str(number): each for number, each in enumerate(keys)}, threshold)
    if result.winner is None or result.winner.key == STUDENT:
        return None
    return result.winner.key, int(result.winner.teachers[0]), len(result.winner.teachers)


def without_count(pair):
    return None if pair is None else pair[:2]


def options_for(seen):
    """What a teacher may still do: vote for a class there is, for the student's, for a new one, or fail."""
    return [*sorted({each for each in seen if each} | {STUDENT}), f"new{len(seen)}", None]


def completions(seen, num_remaining):
    if not num_remaining:
        yield seen
        return
    for each in options_for(seen):
        yield from completions((*seen, each), num_remaining - 1)


@pytest.mark.parametrize("num_teachers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("threshold", [1, 2, 3])
@pytest.mark.parametrize("count_matters", [False, True])
def test_gating_is_exact_over_all_completions(num_teachers, threshold, count_matters):
    compare = (lambda pair: pair) if count_matters else without_count
    for num_seen in range(num_teachers + 1):
        for seen in completions((), num_seen):
            left = num_teachers - num_seen
            reachable = {compare(outcome(each, threshold)) for each in completions(seen, left)}
            changes = can_outcome_change(seen, STUDENT, threshold, left, count_matters=count_matters)
            assert changes == (len(reachable) > 1), (seen, reachable)


@pytest.mark.parametrize("threshold", [1, 2, 3, 4])
def test_pairs_of_gated_asking_are_those_of_asking_everyone(threshold, note):
    asked = total = 0
    for votes in product(["a", "b", "c", STUDENT, None], repeat=4):
        gated = []
        while can_outcome_change(gated, STUDENT, threshold, 4 - len(gated)):
            gated.append(votes[len(gated)])
        assert without_count(outcome(gated, threshold)) == without_count(outcome(votes, threshold))
        asked, total = asked + len(gated), total + 4
    note(f"exact gating, 4 teachers voting evenly, threshold {threshold}: {asked / total:.0%} of the calls")


@pytest.mark.parametrize(
    ("votes", "threshold", "winner", "reason"),
    [
        (["a", "a", "b"], 2, ("a", ("0", "1")), "consensus"),
        (["b", "a", "a"], 2, ("a", ("1", "2")), "consensus"),
        (["a", "b", "c"], 2, None, "below_threshold"),
        (["a", "a", "b", "b"], 2, None, "tie"),
        (["a", "b"], 1, None, "tie"),
        (["a", None, None], 1, ("a", ("0",)), "consensus"),
        ([None, None], 1, None, "no_votes"),
        ([], 2, None, "no_votes"),
    ],
)
def test_who_wins(votes, threshold, winner, reason):
    result = count_votes({str(number): each for number, each in enumerate(votes)}, threshold)
    found = None if result.winner is None else (result.winner.key, result.winner.teachers)
    assert (found, result.reason) == (winner, reason)
    assert result.num_votes == sum(each is not None for each in votes)


def test_a_vote_compares_actions_by_meaning():
    actions = {"x": bash("ls -la"), "y": bash("ls -al"), "z": said("hi")}
    result = count_votes({name: key(action) for name, action in actions.items()} | {"w": None})
    assert result.winner is not None
    assert result.winner.teachers == ("x", "y")
    assert result.num_agreeing_pairs == 1
    assert [each.teachers for each in result.classes] == [("x", "y"), ("z",)]


@given(st.lists(st.sampled_from(["a", "b", STUDENT, None]), max_size=8), st.integers(1, 5))
def test_nothing_changes_where_nobody_is_left(votes, threshold):
    assert not can_outcome_change(votes, STUDENT, threshold, 0)


@pytest.mark.parametrize("threshold", [0, -1, 1.5, True, "2"])
def test_a_threshold_that_is_no_count_is_an_error(threshold):
    with refusal(InputError, what="threshold", got=repr(threshold), expected="1"):
        count_votes({}, threshold)
    with refusal(InputError, what="threshold", got=repr(threshold), expected="1"):
        can_outcome_change([], STUDENT, threshold, 1)
