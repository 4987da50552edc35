"""What lets a model run trees: rows depend on their paths alone, at the tree's own size, bit for bit."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, Qwen2Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from composer_replication.batch.tree import build_tree, pack_trees
from composer_replication.trainer.objective.attention import forward
from composer_replication.trainer.objective.attention import forward as tree_trial
from composer_replication.trainer.objective.attention.forward import _why_flat, tree_hidden_states
from composer_replication.trainer.objective.model_head import hidden_states
from model_families import FAMILIES, LEAK, UNSEEN, build

HALF, SINGLE = torch.bfloat16, torch.float32
HYBRIDS = ("Falcon-H1", "LFM2", "Jamba", "Bamba", "Qwen3-Next", "Granite-4 hybrid", "Nemotron-H", "MiniMax")
MIXTURES = ("DeepSeek-V3", "Qwen2-MoE", "Qwen3-MoE", "Mixtral", "OLMoE", "gpt-oss", "GraniteMoE")


def some(number, seed, vocab=64):
    return torch.randint(3, vocab, (number,), generator=torch.Generator().manual_seed(seed)).tolist()


def session(length, seed=0):
    """A trunk with branches along it, and a branch of a branch."""
    trunk = some(length, seed)
    branches = [trunk[:at] + some(length // 4, seed + at) for at in range(length // 4, length, length // 4)]
    return build_tree([trunk, *branches, branches[0][:-2] + some(5, seed + 99)])


def qwen2(dtype=SINGLE, attention="sdpa"):
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    config._attn_implementation = attention
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def registered(name, also):
    """The usual attention, and what `also` makes of it."""

    def attend(module, query, key, value, attention_mask, **options):
        found, weights = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return also(found, query, key, value), weights

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def assert_as_flat(model, tree, got):
    for rows in tree.rows:
        flat = hidden_states(model, tree.input_ids[rows][None], None)[0]
        torch.testing.assert_close(got.hidden[rows], flat, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("name", HYBRIDS)
def test_the_experiment_alone_finds_hybrids_however_weak_and_in_any_precision(monkeypatch, name, scale, dtype):
    """Neither the config nor the masks are asked: other tokens in a branch are enough."""
    monkeypatch.setattr(forward, "why_no_tree", lambda _config: None)
    monkeypatch.setattr(tree_trial, "_find_changed_masks", lambda *_: None)
    because = _why_flat(build(name, dtype, scale=scale), session(80))
    assert re.search(LEAK, because)
    assert because.count("dense: ") == 1


@pytest.mark.parametrize("name", ["MiniMax-M3", "DeepSeek-V3.2", "Doge", "GPT-Neo"])
def test_layers_that_choose_by_themselves_are_found_without_the_config(monkeypatch, name):
    monkeypatch.setattr(forward, "why_no_tree", lambda _config: None)
    monkeypatch.setattr(forward, "_check_positions", lambda *_: None)
    model, tree = build(name), session(80)
    usual = model.config._attn_implementation
    flat = [hidden_states(model, tree.input_ids[rows][None], None)[0] for rows in tree.rows]
    because = _why_flat(model, tree)
    assert re.search(rf"dense: ([^;]*\w+Attention\b|{UNSEEN})", because)  # whose mask is another, or how many have none
    # What was tried on the model is gone: MiniMax-M3 leaves its selection out where its attention has another name.
    assert model.config._attn_implementation == usual
    for rows, wanted in zip(tree.rows, flat, strict=True):
        assert torch.equal(hidden_states(model, tree.input_ids[rows][None], None)[0], wanted)


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_of_experts_pass_although_their_products_change_size(name, dtype):
    assert _why_flat(build(name, dtype), session(80)) is None


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_a_leak_of_a_thousandth_is_a_leak(dtype):
    """Far below any tolerance on rows in half precision, and as wrong as any other in a loss of small differences."""

    def also(found, _query, _key, value):
        return found + 1e-3 * value.cumsum(2).mean(1)[:, :, None] / value.shape[2]

    model = qwen2(dtype, registered("leaking", also))
    assert re.search(LEAK, _why_flat(model, session(80)))


def test_what_begins_beyond_a_length_is_found_when_a_tree_has_it_and_the_numbers_stay_right():
    def also(found, _query, _key, value):
        if value.shape[2] <= 150:
            return found
        return found + value.mean(1).cumsum(1)[:, :, None] / value.shape[2]

    model = qwen2(attention=registered("late leak", also))
    short, long = session(60), session(120)
    assert len(short) < 150 < len(long)
    assert max(len(rows) for rows in long.rows) <= 150
    for tree, kind in ((short, "dense"), (long, None), (short, None)):
        got = tree_hidden_states(model, tree)
        assert got.kind == kind
        assert_as_flat(model, tree, got)


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_a_bias_by_slots_is_found_though_no_branch_leaks(dtype):
    def also(found, _query, _key, value):
        return found * (1 + torch.arange(value.shape[2], dtype=found.dtype)[None, :, None, None] / 100)

    model = qwen2(dtype, registered("by slot", also))
    because = _why_flat(model, session(80))
    assert "branch" in because
    assert len(re.findall(r"\d\.\de[-+]\d\d", because)) == 2  # by how much rows of a branch differ, and of the trunk
    assert not re.search(LEAK, because)


def test_a_model_that_ignores_positions_runs_flat():
    model = qwen2()
    model.model.rotary_emb.register_forward_hook(lambda _m, _i, out: tuple(torch.ones_like(each) for each in out))
    assert "position" in _why_flat(model, session(80))


def test_a_window_that_only_a_layer_knows_of_counts_for_longer_paths_alone():
    model = qwen2()
    model.model.layers[1].self_attn.sliding_window = 50
    short, long = session(40), session(80)
    assert _why_flat(model, short) is None
    because = _why_flat(model, long)
    assert "window" in because
    assert re.findall(r"\d+", because) == [str(long.longest_path), "50"]
    assert _why_flat(model, short) is None


def test_the_experiment_is_made_again_for_larger_trees_only(monkeypatch):
    made, try_tree = [], forward._try_tree

    def counted(model, tree, kinds, longest):
        made.append((len(tree), longest))
        return try_tree(model, tree, kinds, longest)

    monkeypatch.setattr(forward, "_try_tree", counted)
    model = qwen2()
    middle, small, large = session(60), session(40), session(100)
    for tree in (middle, small, middle, large, middle, large, small):
        assert tree_hidden_states(model, tree).kind == "dense"
    assert made == [(len(middle), middle.longest_path), (len(large), large.longest_path)]
    wide = pack_trees([large, small])
    assert tree_hidden_states(model, wide).kind == "dense"
    assert made[2:] == [(len(wide), large.longest_path)]


def test_a_failure_is_not_forgotten_and_costs_nothing_more(monkeypatch):
    monkeypatch.setattr(forward, "why_no_tree", lambda _config: None)
    model = build("LFM2")
    first = _why_flat(model, session(80))
    monkeypatch.setattr(forward, "_try_tree", None)
    assert _why_flat(model, session(120)) == first


def test_one_sequence_is_no_tree():
    got = tree_hidden_states(qwen2(), build_tree([some(20, 0), some(20, 0)[:9]]))
    assert got.kind is None
    assert "branch" in got.flat_because
    assert "dense" not in got.flat_because  # nothing was tried


def test_an_experiment_leaves_the_model_and_the_attention_functions_as_they_were():
    model = qwen2().train()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    state = torch.random.get_rng_state()
    functions = dict(AttentionInterface._global_mapping)
    assert _why_flat(model, session(60)) is None
    assert all(module.training for module in model.modules())
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert functions == {name: AttentionInterface._global_mapping[name] for name in functions}
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.becomes != "refused"])
def test_padding_on_either_side_leaves_the_rows_of_a_sequence_as_they_are(name):
    """Recurrent states, convolutions and blocks by slot take padding before a token for tokens, mask or not."""
    model = build(name)
    short, long = some(21, 1), some(40, 2)
    ids = torch.tensor([[7] * 12 + short + [9] * 7, long])
    mask = torch.tensor([[0] * 12 + [1] * 21 + [0] * 7, [1] * 40])
    with torch.no_grad():
        got = hidden_states(model, ids, mask)
        alone = [hidden_states(model, torch.tensor([each]), None)[0] for each in (short, long)]
    for ours, theirs in zip((got[0, 12:33], got[1]), alone, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
