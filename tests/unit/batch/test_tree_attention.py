"""Every kind of attention over a tree equals the dense mask, in values and gradients.

Flash kernels run on a GPU (tests/gpu). Here their two functions are replaced by the formulas they compute, so that what
is ours, which queries read which keys and how the parts and their gradients are merged, is held to fp64.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.batch.tree import build_tree, pack_trees
from composer_replication.errors import InputError
from composer_replication.trainer.objective.attention import attend as tree_flash
from composer_replication.trainer.objective.attention.attend import _attend_to_tree, tree_mask
from refusals import refusal

HEADS, KEY_HEADS, DIM = 4, 2, 8
sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=9)


def session_tree():
    """A trunk with branches near and far from each other, one of them on a branch, and one at the very end."""
    trunk = list(range(3, 90))
    turns = [[*trunk[:at], 1, 2, at] for at in (5, 6, 40, 41, 44, 80, 87)]
    return build_tree([trunk, *turns, [*trunk[:40], 1, 9, 9, 9], [*trunk[:40], 1, 9, 8]])


def tensors(tree, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, heads, len(tree), DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in shapes]


def dense(query, key, value, tree, scale):
    key, value = (each.repeat_interleave(HEADS // KEY_HEADS, dim=1) for each in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=tree.dense_mask(), scale=scale)


def spans(lengths):
    """Where each packed sequence's queries and keys lie."""
    q, k = lengths.query_ends.tolist(), lengths.key_ends.tolist()
    return [(slice(*at), slice(*of)) for at, of in zip(itertools.pairwise(q), itertools.pairwise(k), strict=False)]


def scores(query, key, is_causal, scale):
    """(heads, queries, keys), the last query seeing the last key."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    found = torch.einsum("qhd,khd->hqk", query, key) * scale
    if is_causal:
        num_queries, num_keys = found.shape[1:]
        hidden = torch.arange(num_keys)[None] > torch.arange(num_queries)[:, None] + num_keys - num_queries
        found = found.masked_fill(hidden, -torch.inf)
    return found


def formula_forward(query, key, value, lengths, is_causal, scale):
    assert (lengths.max_queries, lengths.max_keys) == tuple(
        int(each.diff().max()) for each in (lengths.query_ends, lengths.key_ends)
    )
    outs, sums = [], []
    for at, of in spans(lengths):
        found = scores(query[at], key[of], is_causal, scale)
        values = value[of].repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        outs.append(torch.einsum("hqk,khd->qhd", found.softmax(-1), values))
        sums.append(found.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, dim=1)


def formula_backward(grad, query, key, value, out, lse, lengths, is_causal, scale):
    """As the kernels do it: probabilities from the given log-sum-exp, row sums from the given output."""
    grads = [torch.zeros_like(each) for each in (query, key, value)]
    groups = query.shape[1] // key.shape[1]
    for at, of in spans(lengths):
        chance = (scores(query[at], key[of], is_causal, scale) - lse[:, at, None]).exp()
        keys, values = (each[of].repeat_interleave(groups, dim=1) for each in (key, value))
        inner = torch.einsum("qhd,khd->hqk", grad[at], values) - (grad[at] * out[at]).sum(-1).T[..., None]
        moved = chance * inner * scale
        grads[0][at] += torch.einsum("hqk,khd->qhd", moved, keys)
        by_head = torch.einsum("hqk,qhd->khd", moved, query[at]), torch.einsum("hqk,qhd->khd", chance, grad[at])
        for total, each in zip(grads[1:], by_head, strict=True):
            total[of] += each.unflatten(1, (-1, groups)).sum(2)
    return tuple(grads)


@pytest.fixture
def formulas(monkeypatch):
    monkeypatch.setattr(tree_flash, "_flash_forward", formula_forward)
    monkeypatch.setattr(tree_flash, "_flash_backward", formula_backward)
    monkeypatch.setattr(tree_flash, "_SUMS", torch.float64)


def assert_equals_dense(tree, kind, scale=0.3):
    inputs = tensors(tree)
    weights = torch.randn(1, HEADS, len(tree), DIM, dtype=torch.float64)
    got = _attend_to_tree(*inputs, tree_mask(tree, kind), scaling=scale).transpose(1, 2)
    wanted = dense(*inputs, tree, scale)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    pairs = (torch.autograd.grad((each * weights).sum(), inputs) for each in (got, wanted))
    for ours, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["flash", "paths"])
def test_a_session_equals_the_dense_mask(formulas, kind):
    assert_equals_dense(session_tree(), kind)
    assert_equals_dense(pack_trees([session_tree(), build_tree([[5]]), session_tree()]).padded(64), kind)


@pytest.mark.parametrize("spread", [1, 4, 50])
def test_how_branches_are_read_together_changes_nothing(formulas, monkeypatch, spread):
    monkeypatch.setattr(tree_flash, "_MIN_SPREAD", spread)
    monkeypatch.setattr(tree_flash, "_SPREAD", 0.0)
    branches = tree_flash._plan_branches(session_tree()).branches
    assert branches is not None
    assert len(branches.trunk_part.lengths.query_ends) - 1 == {1: 4, 4: 3, 50: 2}[spread]
    assert_equals_dense(session_tree(), "flash")


@given(st.lists(sequences, min_size=1, max_size=3), st.sampled_from(["flash", "paths"]), st.integers(1, 9))
def test_random_trees_equal_the_dense_mask(several, kind, multiple):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_flash, "_flash_forward", formula_forward)
        patch.setattr(tree_flash, "_flash_backward", formula_backward)
        patch.setattr(tree_flash, "_MIN_SPREAD", 1)
        patch.setattr(tree_flash, "_SUMS", torch.float64)
        assert_equals_dense(pack_trees([build_tree(each) for each in several]).padded(multiple), kind)


@pytest.mark.parametrize("kind", ["flash", "paths"])
def test_what_is_broken_in_a_branch_stays_there(formulas, kind):
    tree = session_tree()
    query, key, value = tensors(tree)
    with torch.no_grad():
        value[:, :, -1], key[:, :, -1] = torch.inf, torch.nan
    got = _attend_to_tree(query, key, value, tree_mask(tree, kind)).transpose(1, 2)
    assert torch.isfinite(got[:, :, :90]).all()  # the trunk


def test_blocks_of_a_flex_mask_hold_every_pair_that_is_seen():
    tree = pack_trees([session_tree(), session_tree()]).padded(128)
    mask = tree_mask(tree, "flex").blocks
    assert mask is not None
    index = torch.arange(len(tree))
    by_rule = mask.mask_mod(torch.zeros(()), torch.zeros(()), index[:, None], index[None])
    assert torch.equal(by_rule, tree.dense_mask())
    seen = tree.dense_mask().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    listed = mask.to_dense()[0, 0].bool()
    assert bool((listed | ~seen.any(1).any(-1)).all())
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    for row, count in enumerate(mask.full_kv_num_blocks[0, 0].tolist()):
        for column in mask.full_kv_indices[0, 0, row, :count].tolist():
            assert bool(seen[row, :, column].all())


def test_what_a_kind_cannot_do_is_refused():
    tree = session_tree()
    with refusal(InputError, got="30.0"):
        _attend_to_tree(*tensors(tree), tree_mask(tree, "paths"), softcap=30.0)
    for option in ({"dropout": 0.1}, {"s_aux": torch.zeros(HEADS)}, {"position_bias": torch.zeros(1)}):
        with refusal(InputError, what="tree", got=str(list(option))):
            _attend_to_tree(*tensors(tree), tree_mask(tree, "paths"), **option)
    with refusal(InputError, what="tree", got="112", expected="128"):
        tree_mask(tree, "flex")
