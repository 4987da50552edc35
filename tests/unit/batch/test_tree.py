"""The token tree: equal prefixes are stored once, every sequence is found again, each token sees exactly its past."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.batch.tree import build_tree, pack_trees
from composer_replication.errors import InputError

sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8)


def past_of(tree, row):
    """The tokens that a row of the tree sees, by the rule, in order."""
    number = tree.enter[row]
    seen = [kv for kv in range(row + 1) if tree.enter[kv] <= number < tree.leave[kv]]
    return [int(tree.input_ids[kv]) for kv in seen]


def test_a_small_tree_by_hand():
    tree = build_tree([[1, 2, 3, 4], [1, 2, 9], [1, 2, 3], [5]])
    assert tree.input_ids.tolist() == [1, 2, 3, 4, 9, 5]
    assert tree.position_ids.tolist() == [0, 1, 2, 3, 2, 0]
    assert tree.enter.tolist() == [0, 1, 2, 3, 4, 5]
    assert tree.leave.tolist() == [5, 5, 4, 4, 5, 6]
    assert [row.tolist() for row in tree.rows] == [[0, 1, 2, 3], [0, 1, 4], [0, 1, 2], [5]]
    assert tree.num_flat_tokens == 11
    assert [tuple(each) for each in tree.stretches] == [(0, 4, ()), (4, 5, ((0, 2),)), (5, 6, ())]


def test_the_longest_path_lies_first_and_the_others_follow_by_how_far_they_share_it():
    tree = build_tree([[1, 9], [1, 2, 3, 7, 7], [1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [1, 2, 8]])
    assert tree.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 9, 8, 7, 7, 8]
    contexts = [each.context for each in tree.stretches]
    assert contexts == [(), ((0, 1),), ((0, 2),), ((0, 3),), ((0, 3), (8, 9))]


@given(sequences)
def test_stretches_cover_every_row_once_and_continue_what_lies_before_them(flat):
    tree = build_tree(flat)
    assert [each.start for each in tree.stretches[1:]] == [each.end for each in tree.stretches[:-1]]
    assert (tree.stretches[0].start, tree.stretches[-1].end) == (0, len(tree))
    mask = tree.dense_mask()
    for start, end, context in tree.stretches:
        before = [row for first, last in context for row in range(first, last)]
        for row in range(start, end):
            assert mask[row].nonzero().flatten().tolist() == [*before, *range(start, row + 1)]


@given(sequences)
def test_every_token_sees_exactly_the_sequence_before_it(flat):
    tree = build_tree(flat)
    for sequence, rows in zip(flat, tree.rows, strict=True):
        assert tree.input_ids[rows].tolist() == sequence
        assert tree.position_ids[rows].tolist() == list(range(len(sequence)))
        for length, row in enumerate(rows.tolist(), start=1):
            assert past_of(tree, row) == sequence[:length]


@given(sequences)
def test_no_prefix_is_stored_twice(flat):
    prefixes = {tuple(sequence[:length]) for sequence in flat for length in range(1, len(sequence) + 1)}
    assert len(build_tree(flat)) == len(prefixes)


@given(st.lists(sequences, min_size=1, max_size=4), st.integers(1, 16))
def test_packed_and_padded_trees_do_not_see_each_other(several, multiple):
    trees = [build_tree(each) for each in several]
    packed = pack_trees(trees).padded(multiple)
    assert len(packed) % multiple == 0
    flat = [sequence for each in several for sequence in each]
    for sequence, rows in zip(flat, packed.rows, strict=True):
        assert past_of(packed, int(rows[-1])) == sequence
    for row in range(sum(map(len, trees)), len(packed)):
        assert packed.dense_mask()[row].nonzero().flatten().tolist() == [row]


def test_the_dense_mask_is_the_rule():
    tree = build_tree([[1, 2, 3, 4], [1, 2, 9]])
    wanted = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]
    assert tree.dense_mask().int().tolist() == wanted


def test_a_session_of_many_forks_is_built_without_recursion_and_fast():
    generator = torch.Generator().manual_seed(0)
    trunk = torch.randint(0, 150_000, (20_000,), generator=generator).tolist()
    branches = [trunk[:at] + [7] * 20 for at in range(10, 20_000, 10)]
    tree = build_tree([trunk, *branches])
    assert len(tree) == 20_000 + 20 * len(branches)


@pytest.mark.parametrize("wrong", [[[]], [[1], []], [[[1], [2]]]])
def test_what_is_no_sequence_is_refused(wrong):
    with pytest.raises(InputError, match="sequence"):
        build_tree(wrong)
    with pytest.raises(InputError, match="trees"):
        pack_trees([])
    with pytest.raises(InputError, match="multiple"):
        build_tree([[1]]).padded(0)
