"""Trees with adapters, checkpointing, autocast, in every kind of attention that runs here: as flat sequences are."""

from __future__ import annotations

import pytest
import torch
import wrapped_worker as worker
from hypothesis import given
from hypothesis import strategies as st

from composer_replication import compose_loss
from composer_replication.batch.tree import build_tree, pack_trees
from composer_replication.trainer.objective.attention import forward
from composer_replication.trainer.objective.attention.forward import _run_sequences, tree_hidden_states
from composer_replication.trainer.objective.model_head import hidden_states

TREES = st.lists(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=5), min_size=1, max_size=3
)


def losses_and_gradients(model, batch):
    model.zero_grad(set_to_none=True)
    components = compose_loss(model, batch, **worker.OPTIONS)
    assert components.active == ("lm_ce", "sdpo_jsd", "trace_replay_dpo")
    components.total.backward()
    grads = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return components.detached(), grads


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["dense", "paths"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_every_setting_gives_the_losses_and_gradients_of_flat_sequences(monkeypatch, dtype, kind, checkpointing, lora):
    monkeypatch.setattr(forward, "_candidate_kinds", lambda *_: (kind,))
    model = worker.build(lora).to(dtype)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    model.train()
    assert tree_hidden_states(model, worker.session(0).tree).kind == kind
    got, grads = losses_and_gradients(model, worker.session(0))
    want, flat_grads = losses_and_gradients(model, worker.flat(0))
    assert got == pytest.approx(want, rel=1e-5, abs=1e-6)
    assert set(grads) == set(flat_grads)
    for name, grad in grads.items():
        assert (grad - flat_grads[name]).norm() <= 2e-5 * flat_grads[name].norm() + 1e-9, name


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_under_autocast_a_tree_is_as_near_to_the_exact_rows_as_flat_sequences_are(lora, attention):
    model = worker.build(lora).float().eval()
    causal_lm = model.get_base_model() if lora else model
    causal_lm.set_attn_implementation(attention)
    tree = worker.session(0).tree
    exact = tree_hidden_states(model, tree).hidden
    with torch.autocast("cpu", torch.bfloat16):
        half = tree_hidden_states(model, tree)
        flat = _run_sequences(model, tree)
    assert half.flat_because is None
    gaps = [(each.float() - exact).norm() / exact.norm() for each in (half.hidden, flat)]
    assert 1e-4 < gaps[0] < 2 * gaps[1]


@given(TREES, st.sampled_from(["dense", "paths"]), st.integers(1, 7), st.booleans())
def test_random_packed_trees_give_the_rows_and_gradients_of_their_sequences(several, kind, multiple, lora):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "_candidate_kinds", lambda *_: (kind,))
        model = worker.build(lora).eval()
        tree = pack_trees([build_tree(each) for each in several]).padded(multiple)
        torch.manual_seed(1)
        weights = torch.randn(len(tree), 32, dtype=torch.float64)
        got = tree_hidden_states(model, tree)
        assert got.kind == (kind if len(tree.stretches) > 1 else None)
        taken = torch.zeros(len(tree), dtype=torch.bool)
        loss = torch.zeros((), dtype=torch.float64)
        for rows in tree.rows:
            flat = hidden_states(model, tree.input_ids[rows][None], None)[0]
            torch.testing.assert_close(got.hidden[rows], flat, rtol=1e-6, atol=1e-6)
            new = ~taken[rows]
            loss = loss + (flat[new] * weights[rows[new]]).sum()
            taken[rows] = True
        parameters = [each for each in model.parameters() if each.requires_grad]
        ours = torch.autograd.grad((got.hidden * weights * taken[:, None]).sum(), parameters)
        theirs = torch.autograd.grad(loss, parameters)
        for mine, other in zip(ours, theirs, strict=True):
            assert (mine - other).norm() <= 2e-5 * other.norm() + 1e-9
