"""Losses and gradients of a session's windows: those of the flat sequences, one by one, added up, and packed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from window_checks import HINT, asked, flat_of, losses, model_for

from composer_replication.batch.tree_batch import denominators_of, pack_batches
from composer_replication.batch.windows import plan_packs

PARTS = ("lm_ce", "sdpo_jsd", "trace_replay_dpo", "total")
TOLERANCE = {torch.float64: (1e-10, 1e-10), torch.float32: (1e-5, 2e-5)}  # values, gradients (relative L2)


def assert_same(ours, theirs, dtype=torch.float64):
    (our_parts, our_grad), (their_parts, their_grad) = ours, theirs
    values, grads = TOLERANCE[dtype]
    assert our_parts.counts == their_parts.counts
    for name in PARTS:
        torch.testing.assert_close(getattr(our_parts, name), getattr(their_parts, name), rtol=values, atol=values)
    assert (our_grad - their_grad).norm() <= grads * their_grad.norm()


def added(model, batches):
    """The losses of several batches, each divided by what all hold together."""
    denominators = denominators_of(batches)
    found = [losses(model, batch, denominators=denominators) for batch in batches]
    parts = {name: sum(getattr(each, name).detach() for each, _ in found) for name in PARTS}
    counts = {name: sum(each.counts[name] for each, _ in found) for name in found[0][0].counts}
    return parts, counts, sum(grad for _, grad in found)


def assert_adds_up(model, batches, whole):
    parts, counts, grad = added(model, batches)
    components, whole_grad = losses(model, whole)
    assert counts == components.counts == denominators_of(batches)
    for name, value in parts.items():
        torch.testing.assert_close(value, getattr(components, name).detach(), rtol=1e-10, atol=1e-10)
    assert (grad - whole_grad).norm() <= 1e-10 * whole_grad.norm()


@pytest.mark.parametrize("placement", ["before_turn", "in_last_message", "head"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize(
    ("family", "model_family"), [("llama3", "qwen2-tied"), ("gemma", "llama-untied"), ("mistral_tools", "qwen2-untied")]
)
def test_windows_equal_the_flat_sequences_cut_where_they_begin(family, model_family, checkpointing, placement):
    session = asked(family, seed=3, num_turns=6)
    model = model_for(session.renderer, model_family, checkpointing=checkpointing)
    made = session.batches(budget=240, overlap=40, placement=placement)
    assert len(made.windows) > 1
    assert any(window.first > 0 for window in made.windows)
    assert all(denominators_of(made.batches).values())
    for window in made.windows:
        ours, theirs = losses(model, window.batch), losses(model, flat_of(session, window, placement))
        assert_same(ours, theirs)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_windows_equal_the_flat_sequences_in_single_precision(checkpointing):
    session = asked("llama3", seed=5, num_turns=6)
    model = model_for(session.renderer, dtype=torch.float32, checkpointing=checkpointing)
    for window in session.batches(budget=240, overlap=40).windows:
        ours, theirs = losses(model, window.batch), losses(model, flat_of(session, window))
        assert_same(ours, theirs, torch.float32)


@pytest.mark.parametrize("family", ["llama3", "gemma", "qwen2_5"])
def test_windows_add_up_to_one_flat_computation_where_no_context_is_cut(family):
    session = asked(family, seed=2, num_turns=3, num_sites=4, num_pairs=3)
    (whole,) = session.batches(budget=100_000).windows
    assert (whole.first, whole.end) == (0, len(session.rendered.ids))
    budget = len(whole.batch.tree) * 3 // 4
    made = session.batches(budget=budget, overlap=budget)
    assert len(made.windows) > 1
    assert {window.first for window in made.windows} == {0}
    assert not {"short_context", "cut_in_message", "longer_than_window"} & set(made.counts)
    model = model_for(session.renderer)
    assert_adds_up(model, made.batches, flat_of(session, whole))


def test_packing_several_sessions_equals_doing_them_one_by_one():
    sessions = [asked("llama3", seed, num_turns=2, num_sites=seed % 3, num_pairs=(seed + 1) % 3) for seed in range(4)]
    batches = [batch for each in sessions for batch in each.batches(budget=200, overlap=40).batches]
    assert any(batch.pairs is None for batch in batches)
    packed = pack_batches(batches)
    assert len(packed.tree) == sum(len(batch.tree) for batch in batches)
    model = model_for(sessions[0].renderer)
    assert_adds_up(model, batches, packed)
    padded = type(packed)(
        packed.response, packed.student_rows, packed.teacher_rows, packed.pairs, tree=packed.tree.padded(128)
    )
    assert_same(losses(model, padded), losses(model, packed))


@settings(max_examples=max(5, settings.default.max_examples // 20))  # each is a few passes of a model
@given(st.integers(0, 10_000), st.integers(150, 500), st.integers(0, 80))
def test_random_sessions_in_windows_in_packs(seed, budget, overlap):
    sessions = [asked("gemma", seed + number, num_turns=2, num_sites=2, num_pairs=1) for number in range(2)]
    batches = [batch for each in sessions for batch in each.batches(budget=budget, overlap=overlap).batches]
    packs = plan_packs([len(batch.tree) for batch in batches], budget)
    rows = [pack_batches([batches[number] for number in pack]) for pack in packs]
    assert all(len(row.tree) <= budget for row in rows)
    assert denominators_of(rows) == denominators_of(batches)
    if batches:
        model = model_for(sessions[0].renderer)
        assert_adds_up(model, rows, pack_batches(batches))


@pytest.mark.parametrize("family", ["llama3", "gemma", "mistral_tools"])
def test_an_empty_hint_with_a_live_teacher_has_no_loss_and_no_gradient(family):
    found = []
    for hint in ("", HINT):
        session = asked(family, num_turns=3, num_sites=3, num_pairs=0, hint=hint)
        made = session.batches(budget=300, overlap=100, responses=[])
        model = model_for(session.renderer)
        denominators = denominators_of(made.batches)
        each = [losses(model, batch, denominators=denominators) for batch in made.batches]
        found.append((sum(one.detached()["sdpo_jsd"] for one, _ in each), float(sum(grad for _, grad in each).norm())))
        assert denominators["sdpo_jsd"] == sum(site.span.end - site.span.start for site in session.sites)
    (empty_loss, empty_norm), (loss, norm) = found
    assert abs(empty_loss) < 1e-6
    assert empty_norm < 1e-5 * norm
    assert loss > 1e-4
