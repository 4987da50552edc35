"""Windows, packs and lengths against the rules said again by brute force, and against trees that are really built."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations, count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.batch.tree import build_tree, pack_trees
from composer_replication.batch.windows import Branch, Target, Window, padded_length, plan_packs, plan_windows
from composer_replication.errors import InputError
from cpu_time import least_cpu_seconds

LENGTH = 60


@st.composite
def a_target(draw):
    first = draw(st.integers(0, LENGTH - 1))
    end = draw(st.integers(first + 1, min(LENGTH, first + 14)))
    branches = []
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, end))
        branches.append(Branch(at, draw(st.integers(max(1, first - at), max(1, first - at) + 12))))
    return Target(first, end, tuple(branches))


targets_of = st.lists(a_target(), max_size=10)
limits = st.fixed_dictionaries(
    {
        "budget": st.integers(1, 120),
        "overlap": st.integers(0, 40),
        "cuts": st.lists(st.integers(0, LENGTH), max_size=8),
        "max_length": st.none() | st.integers(1, 90),
    }
)


def built(targets, begin):
    """The tree that a window makes of these targets, on a trunk and branches of which no two tokens are equal."""
    fresh = count(1000)
    sequences = []
    for target in targets:
        sequences.append(list(range(begin, target.end)))
        for at, length in target.branches:
            own = [next(fresh) for _ in range(length)]
            sequences.append([*range(begin, at), *own[max(0, begin - at) :]])
    return build_tree([each for each in sequences if each])


def fits(targets, begin, budget, max_length):
    tree = built(targets, begin)
    return len(tree) <= budget and (max_length is None or int(tree.position_ids.max()) < max_length)


def begins_that_fit(target, given_limits):
    budget, max_length = given_limits["budget"], given_limits["max_length"]
    return [begin for begin in range(target.first + 1) if fits([target], begin, budget, max_length)]


def wanted(target, given_limits):
    return max(0, target.first - given_limits["overlap"])


def own_begin(target, given_limits):
    """Where a window of its own begins: the rule, by trying everything."""
    cuts = {0, *given_limits["cuts"]}
    can = begins_that_fit(target, given_limits)
    keeping = max(cut for cut in cuts if cut <= wanted(target, given_limits))
    if keeping in can:
        return keeping
    shorter = [cut for cut in cuts if cut < target.first and cut in can]
    return min(shorter) if shorter else max(can[0], wanted(target, given_limits))


@given(targets_of, limits)
def test_every_target_is_once_in_a_window_whole_or_dropped_because_it_fits_in_none(targets, given_limits):
    plan = plan_windows(targets, **given_limits)
    placed = [index for window in plan.windows for index in window.targets]
    assert sorted([*placed, *plan.dropped]) == list(range(len(targets)))
    for window in plan.windows:
        members = [targets[index] for index in window.targets]
        assert members
        assert all(window.first <= each.first for each in members)
        assert window.end == max(each.end for each in members)
    for index, target in enumerate(targets):
        alone = begins_that_fit(target, given_limits)
        assert (index in plan.dropped) == (not alone)
        assert alone == list(range(target.first + 1))[-len(alone) :] or not alone  # less context never costs more


@given(targets_of, limits)
def test_budget_and_path_length_hold_on_the_tree_itself(targets, given_limits):
    for window in plan_windows(targets, **given_limits).windows:
        members = [targets[index] for index in window.targets]
        assert fits(members, window.first, given_limits["budget"], given_limits["max_length"])
        # The trunk of a window is all there: its last target ends it.
        assert len(built(members, window.first)) == window.tokens


@given(targets_of, limits)
def test_a_window_begins_where_the_rules_say(targets, given_limits):
    for number, window in enumerate(plan_windows(targets, **given_limits).windows):
        opener = targets[window.targets[0]]
        from_the_start = number == 0 and 0 in begins_that_fit(opener, given_limits)
        assert window.first == (0 if from_the_start else own_begin(opener, given_limits))


@given(targets_of, limits)
def test_short_context_is_counted_and_no_more_was_to_be_had(targets, given_limits):
    plan = plan_windows(targets, **given_limits)
    placed = [(window, targets[index]) for window in plan.windows for index in window.targets]
    short = [(window, target) for window, target in placed if window.first > wanted(target, given_limits)]
    inside = [window for window in plan.windows if window.first not in {0, *given_limits["cuts"]}]
    found = {"longer_than_window": len(plan.dropped), "short_context": len(short), "cut_in_message": len(inside)}
    assert plan.counts == {name: number for name, number in found.items() if number}
    assert all(window.first <= own_begin(target, given_limits) for window, target in short)


@given(targets_of, limits)
def test_a_target_opens_a_window_only_if_the_one_before_had_no_room_or_too_little_context(targets, given_limits):
    windows = plan_windows(targets, **given_limits).windows
    for before, after in pairwise(windows):
        opener = targets[after.targets[0]]
        together = [*(targets[index] for index in before.targets), opener]
        room = before.first <= opener.first and fits(
            together, before.first, given_limits["budget"], given_limits["max_length"]
        )
        assert not room or (before.first > wanted(opener, given_limits) and after.first < before.first)


@given(targets_of, limits, st.integers(1, 50))
def test_a_larger_budget_never_drops_more(targets, given_limits, more):
    larger = given_limits | {"budget": given_limits["budget"] + more}
    assert set(plan_windows(targets, **larger).dropped) <= set(plan_windows(targets, **given_limits).dropped)


def test_a_session_by_hand():
    """Turns of 10 tokens every 30, the second with a branch of 12: budget 70, 20 tokens of context."""
    turns = [Target(20, 30), Target(50, 60), Target(50, 60, (Branch(50, 12),)), Target(80, 90), Target(110, 120)]
    plan = plan_windows(turns, budget=70, overlap=20, cuts=[turn.first for turn in turns])
    assert plan.windows == (
        Window(0, 60, (0, 1), 60),
        Window(20, 60, (2,), 52),  # 60 + 12 are too many; with the next turn, 70 + 12
        Window(50, 120, (3, 4), 70),
    )
    assert (plan.dropped, plan.counts) == ({}, {})


def test_a_long_message_before_a_turn_is_cut_inside_and_a_long_turn_is_dropped():
    turns = [Target(0, 10), Target(500, 520), Target(530, 800)]
    plan = plan_windows(turns, budget=100, overlap=40, cuts=[turn.first for turn in turns])
    assert plan.windows == (Window(0, 10, (0,), 10), Window(460, 520, (1,), 60))
    assert plan.dropped == {2: "longer_than_window"}
    assert plan.counts == {"longer_than_window": 1, "cut_in_message": 1}


def test_less_context_where_the_target_would_not_fit_with_all_of_it():
    turn = Target(200, 260)
    whole = plan_windows([turn], budget=300, overlap=10, cuts=[170])  # the first window leaves nothing out if it can
    assert whole.windows == (Window(0, 260, (0,), 260),)
    plan = plan_windows([turn], budget=100, overlap=150, cuts=[100, 170, 190])
    assert (plan.windows, plan.counts) == ((Window(170, 260, (0,), 90),), {"short_context": 1})
    at_the_edge = plan_windows([turn], budget=60, overlap=150, cuts=[100, 170, 190])
    assert at_the_edge.windows == (Window(200, 260, (0,), 60),)


def test_a_hinted_copy_of_the_whole_context_shrinks_with_the_window():
    copied = Target(900, 1000, (Branch(5, 1020),))
    plan = plan_windows([copied], budget=500, overlap=100, cuts=[800, 900])
    assert plan.windows == (Window(800, 1000, (0,), 200 + 1020 - 795),)


def test_twenty_thousand_targets_are_planned_in_well_under_a_second(note):
    draw = random.Random(0)
    turns, end = [], 0
    for number in range(20_000):
        first = end + draw.randint(0, 200)
        end = first + draw.randint(1, 300)
        turns.append(Target(first, end, (Branch(first, end - first + 40),) if number % 3 == 0 else ()))
    cuts = [turn.first for turn in turns]
    for budget, overlap in ((16_384, 4_096), (400, 300)):  # the second leaves most targets short of context
        seconds = least_cpu_seconds(
            lambda budget=budget, overlap=overlap: plan_windows(turns, budget=budget, overlap=overlap, cuts=cuts),
            enough=0.8,
        )
        note(f"windows: 20,000 targets, budget {budget}: {seconds:.2f} s")
        assert seconds < 0.8
    sizes = [draw.randint(1, 4_000) for _ in range(20_000)]
    assert least_cpu_seconds(lambda: plan_packs(sizes, 16_384), enough=0.5) < 0.5


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(50, 90))
def test_packs_hold_every_item_once_and_no_two_of_them_would_fit_into_one(sizes, budget):
    packs = plan_packs(sizes, budget)
    assert sorted(number for pack in packs for number in pack) == list(range(len(sizes)))
    loads = [sum(sizes[number] for number in pack) for pack in packs]
    assert all(load <= budget for load in loads)
    assert all(one + other > budget for one, other in combinations(loads, 2))
    assert packs == plan_packs(sizes, budget) == sorted(sorted(pack) for pack in packs)


@given(targets_of, limits, st.integers(0, 60))
def test_windows_packed_into_rows_keep_the_budget_and_see_only_themselves(targets, given_limits, more):
    windows = plan_windows(targets, **given_limits).windows
    trees = [built([targets[index] for index in window.targets], window.first) for window in windows]
    for pack in plan_packs([len(tree) for tree in trees], given_limits["budget"] + more):
        row = pack_trees([trees[number] for number in pack])
        assert len(row) <= given_limits["budget"] + more
        padded = row.padded(padded_length(len(row)))
        assert len(padded) == padded_length(len(row))
        mask = padded.dense_mask()
        seen = Counter(mask.sum(1).tolist())
        alone = Counter(depth + 1 for number in pack for depth in trees[number].position_ids.tolist())
        assert seen == alone + Counter({1: len(padded) - len(row)})


@given(st.integers(1, 1 << 24))
def test_padding_is_small_and_lengths_are_few(length):
    padded = padded_length(length)
    assert padded >= length
    assert padded % 128 == 0
    assert padded_length(padded) == padded
    assert padded - length < 128 if length < 1024 else padded <= length * 1.125


def test_there_are_eight_lengths_for_each_doubling():
    assert sorted({padded_length(length) for length in range(1, 1025)}) == list(range(128, 1025, 128))
    for octave in (1024, 2048, 65_536):
        assert len({padded_length(length) for length in range(octave + 1, 2 * octave + 1)}) == 8
    assert [padded_length(length) for length in (1, 1024, 1025, 2049, 131_073)] == [128, 1024, 1152, 2304, 147_456]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: plan_windows([], budget=0), "budget"),
        (lambda: plan_windows([], budget=9, overlap=-1), "overlap"),
        (lambda: plan_windows([], budget=9, max_length=0), "max_length"),
        (lambda: plan_windows([], budget=9, cuts=[-1]), "cut"),
        (lambda: plan_windows([Target(3, 3)], budget=9), "target 0"),
        (lambda: plan_windows([Target(-1, 3)], budget=9), "target 0"),
        (lambda: plan_windows([Target(0, 3, (Branch(4, 1),))], budget=9), "branch"),
        (lambda: plan_windows([Target(2, 3, (Branch(0, 1),))], budget=9), "branch"),
        (lambda: plan_windows([Target(2, 3, (Branch(2, 0),))], budget=9), "branch"),
        (lambda: plan_packs([3, 10], 9), "item 1"),
        (lambda: plan_packs([0], 9), "item 0"),
        (lambda: padded_length(0), "length"),
    ],
)
def test_what_is_no_plan_is_refused(call, match):
    with pytest.raises(InputError, match=match):
        call()


def test_no_targets_make_no_windows():
    assert plan_windows([], budget=9).windows == ()
    assert plan_packs([], 9) == []
