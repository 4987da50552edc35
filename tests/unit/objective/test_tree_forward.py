"""Rows and gradients of a tree in one pass equal those of its sequences one by one."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from composer_replication import compose_loss
from composer_replication.batch.tree import build_tree, pack_trees
from composer_replication.batch.tree_batch import SessionTargets
from composer_replication.errors import UnsupportedModelError
from composer_replication.trainer.objective.attention.attend import use_tree_attention
from composer_replication.trainer.objective.attention.forward import _why_flat, tree_hidden_states
from composer_replication.trainer.objective.model_head import hidden_states
from model_families import LEAK
from refusals import refusal

SIZE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES = {
    "qwen2": Qwen2Config(**SIZE),
    "qwen3": Qwen3Config(**SIZE, head_dim=8),
    "llama": LlamaConfig(**SIZE),
    "mistral": MistralConfig(**SIZE, sliding_window=None),
    "gemma2": Gemma2Config(**SIZE, head_dim=8, sliding_window=64),
    "gemma3": Gemma3TextConfig(**SIZE, head_dim=8, sliding_window=64),
}
TREE = build_tree([[1, 5, 9, 3, 2, 8, 7], [1, 5, 9, 6, 6, 4], [1, 5, 2], [11, 12, 13, 14]])


def tiny(name, dtype=torch.float64):
    config = FAMILIES[name]
    config._attn_implementation = "eager" if name == "gemma2" else "sdpa"
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def flat_rows(model, tree):
    return [hidden_states(model, tree.input_ids[rows][None], None)[0] for rows in tree.rows]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tree_equals_its_sequences_in_rows_and_gradients(name):
    model = tiny(name)
    weights = torch.randn(len(TREE), 32, dtype=torch.float64)
    got = tree_hidden_states(model, TREE)
    assert got.flat_because is None
    for rows, wanted in zip(TREE.rows, flat_rows(model, TREE), strict=True):
        # The norms of some families round to fp32 inside, whatever the weights are.
        torch.testing.assert_close(got.hidden[rows], wanted, rtol=1e-6, atol=1e-6)
    parameters = [each for each in model.get_decoder().parameters() if each.requires_grad]
    as_tree = torch.autograd.grad((got.hidden * weights).sum(), parameters)
    pairs = zip(TREE.rows, flat_rows(model, TREE), strict=True)
    loss = sum((hidden * weights[rows] / _times(TREE, rows)).sum() for rows, hidden in pairs)
    as_flat = torch.autograd.grad(loss, parameters)
    for ours, theirs in zip(as_tree, as_flat, strict=True):
        assert (ours - theirs).norm() <= 2e-5 * theirs.norm() + 1e-12


def _times(tree, rows):
    """In how many sequences each token is: its weight is shared among them."""
    counts = torch.zeros(len(tree), dtype=torch.float64)
    for each in tree.rows:
        counts[each] += 1
    return counts[rows][:, None]


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=5), st.integers(1, 7))
def test_random_packed_and_padded_trees_equal_their_sequences(several, multiple):
    model = tiny("qwen2", torch.float32)
    tree = pack_trees([build_tree(several), build_tree([[3, 3, 1]])]).padded(multiple)
    with torch.no_grad():
        got = tree_hidden_states(model, tree).hidden
        for rows, wanted in zip(tree.rows, flat_rows(model, tree), strict=True):
            torch.testing.assert_close(got[rows], wanted, rtol=1e-4, atol=1e-5)


def test_a_path_longer_than_a_sliding_window_runs_flat_says_so_and_gives_the_same_numbers():
    config = MistralConfig(**SIZE, sliding_window=4)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    got = tree_hidden_states(model, TREE)
    assert "window" in got.flat_because
    assert re.findall(r"\d+", got.flat_because) == ["7", "4"]  # tokens of the path and of the window
    for rows, wanted in zip(TREE.rows, flat_rows(model, TREE), strict=True):
        torch.testing.assert_close(got.hidden[rows], wanted, rtol=1e-6, atol=1e-6)


def test_gradient_checkpointing_changes_nothing():
    model = tiny("qwen2").train()
    weight = model.model.embed_tokens.weight
    plain = torch.autograd.grad(tree_hidden_states(model, TREE).hidden.square().sum(), weight)[0]
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    saved = torch.autograd.grad(tree_hidden_states(model, TREE).hidden.square().sum(), weight)[0]
    torch.testing.assert_close(plain, saved)


def _blind_attention(module, query, key, value, attention_mask, **options):
    """As a model with another kind of memory does: what the mask says is not asked."""
    key, value = (each.repeat_interleave(2, dim=1) for each in (key, value))
    found = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return found.transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_model_that_does_not_heed_masks_is_found_out_by_experiment(dtype):
    AttentionInterface.register("blind", _blind_attention)
    model = tiny("qwen2", dtype)
    model.config._attn_implementation = "blind"
    got = tree_hidden_states(model, TREE)
    assert got.kind is None
    assert re.search(f"dense: {LEAK}", got.flat_because)
    assert _why_flat(model, TREE) == got.flat_because
    batch = SessionTargets()
    batch.add_response([1, 5, 9, 3, 2], 2, 4)
    batch.add_response([1, 5, 9, 4, 2], 3, 5)
    assert re.match(f"flat: .*dense: {LEAK}", compose_loss(model, batch.build()).ran_as)
    for rows, wanted in zip(TREE.rows, flat_rows(model, TREE), strict=True):
        torch.testing.assert_close(got.hidden[rows], wanted, rtol=2e-2, atol=2e-2)


def test_a_model_that_breaks_on_a_mask_runs_flat():
    def breaks(module, query, key, value, attention_mask, **options):
        assert attention_mask is None or attention_mask.no_such_thing
        return _blind_attention(module, query, key, value, None)

    AttentionInterface.register("breaks", breaks)
    model = tiny("qwen2")
    model.config._attn_implementation = "breaks"
    assert "AttributeError" in tree_hidden_states(model, TREE).flat_because


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_length_are_refused_where_they_change(kind):
    settings = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 8}
    if kind == "longrope":
        settings |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = Qwen2Config(**SIZE, rope_parameters=settings, max_position_embeddings=16)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with refusal(UnsupportedModelError, what="tree", got="9", expected="8") as caught:
        tree_hidden_states(model, build_tree([list(range(9)), [0, 1, 5]]))
    assert kind in caught.value.got
    assert tree_hidden_states(model, TREE).flat_because is None


def test_gpt2_runs_as_the_experiment_says():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)).double().eval()
    got = tree_hidden_states(model, TREE)
    assert (got.kind, got.flat_because) == ("dense", None)
    for rows, wanted in zip(TREE.rows, flat_rows(model, TREE), strict=True):
        torch.testing.assert_close(got.hidden[rows], wanted, rtol=1e-6, atol=1e-6)


def test_tree_attention_leaves_flat_sequences_as_they_were():
    model = tiny("qwen2")
    ids, padding = torch.tensor([[1, 5, 9, 3]]), torch.tensor([[0, 1, 1, 1]])
    before = [model(input_ids=ids).logits, model(input_ids=ids, attention_mask=padding).logits]
    use_tree_attention(model)
    use_tree_attention(model)
    assert model.config._attn_implementation == "composer_tree_sdpa"
    after = [model(input_ids=ids).logits, model(input_ids=ids, attention_mask=padding).logits]
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
