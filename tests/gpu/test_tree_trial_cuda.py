"""The experiment on a CUDA device: flash and FlexAttention keep bits where they should, and hybrids are found."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3MoeConfig

from composer_replication.batch.tree import build_tree
from composer_replication.trainer.objective.attention import forward
from composer_replication.trainer.objective.attention import forward as tree_trial
from composer_replication.trainer.objective.attention.forward import _why_flat, tree_hidden_states
from model_families import FAMILIES, LEAK, build

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SIZE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "qwen2": Qwen2Config(**SIZE),
    "llama": LlamaConfig(**SIZE),
    "qwen3 moe": Qwen3MoeConfig(**SIZE, head_dim=64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64),
}
KINDS = {torch.bfloat16: ("flash", "flex", "paths"), torch.float32: ("flex", "paths")}


def some(number, seed, vocab=512):
    return torch.randint(3, vocab, (number,), generator=torch.Generator().manual_seed(seed)).tolist()


def session(length, vocab=512):
    trunk = some(length, 0, vocab)
    branches = [trunk[:at] + some(40 + at % 7, at, vocab) for at in range(60, length, 260)]
    return build_tree([trunk, *branches, branches[0][:-3] + some(9, 7, vocab)]).to("cuda")


def model_of(name, dtype):
    config = MODELS[name]
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to("cuda", dtype).eval()


@pytest.mark.parametrize("length", [300, 3000])
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_every_kind_passes_the_experiment_at_any_size(monkeypatch, name, dtype, length):
    for kind in KINDS[dtype]:
        monkeypatch.setattr(forward, "_candidate_kinds", lambda *_, only=kind: (only,))
        got = tree_hidden_states(model_of(name, dtype), session(length))
        assert (got.kind, got.flat_because) == (kind, None)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_bits_of_a_path_stay_when_branches_change(name, dtype):
    """What the experiment rests on, said of the kernels alone: equal passes, and passes with other tokens beside."""
    model, tree = model_of(name, dtype), session(3000)
    body = model
    kept = tree_trial._every_second_path(tree)
    ids = torch.where(kept, tree.input_ids, (tree.input_ids + 1) % 512)
    with torch.no_grad():
        for kind in KINDS[dtype]:
            given = tree_trial._mask_tree(body, tree, kind)
            padded_ids = given.tree.input_ids.clone()
            padded_ids[: len(tree)] = ids
            first, second = (tree_trial._run_tree(body, given) for _ in range(2))
            assert torch.equal(first, second)
            other = tree_trial._run_tree(body, given, input_ids=padded_ids)
            assert torch.equal(first[kept], other[kept])
            assert not torch.equal(first[~kept], other[~kept])


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("name", ["Falcon-H1", "LFM2", "Jamba"])
def test_hybrids_are_rejected_with_and_without_their_config(monkeypatch, name, dtype):
    model, tree = build(name, dtype).to("cuda"), session(300, vocab=96)
    assert re.search(FAMILIES[name].because, _why_flat(model, tree))
    monkeypatch.setattr(forward, "why_no_tree", lambda _config: None)
    monkeypatch.setattr(tree_trial, "_find_changed_masks", lambda *_: None)
    because = _why_flat(model, tree)
    assert re.search(LEAK, because) or "Error" in because
    assert tree_hidden_states(model, tree).kind is None


def test_a_deep_model_in_half_precision_keeps_the_fastest_kernels():
    """Two dozen layers add up to more rounding in branches than in a trunk that runs by the sequence's own kernel."""
    config = Qwen2Config(**SIZE | {"num_hidden_layers": 24, "hidden_size": 512, "intermediate_size": 1024})
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to("cuda", torch.bfloat16).eval()
    got = tree_hidden_states(model, session(3000))
    assert (got.kind, got.flat_because) == ("flash", None)
