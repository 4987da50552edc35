"""Trees on a CUDA device: every kind of attention against the dense mask, and whole models against flat sequences."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from composer_replication import compose_loss
from composer_replication.batch.tree import build_tree, pack_trees
from composer_replication.batch.tree_batch import SessionTargets
from composer_replication.trainer.objective.attention.attend import _attend_to_tree, tree_mask
from composer_replication.trainer.objective.attention.forward import tree_hidden_states
from composer_replication.trainer.objective.model_head import hidden_states

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SIZE = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3}
MODELS = {
    "qwen2": Qwen2Config(**SIZE, num_attention_heads=4, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SIZE, num_attention_heads=4, num_key_value_heads=2, head_dim=64),
    "llama, 7 heads a key": LlamaConfig(**SIZE | {"hidden_size": 448}, num_attention_heads=14, num_key_value_heads=2),
    "gemma2": Gemma2Config(
        **SIZE, num_attention_heads=4, num_key_value_heads=2, head_dim=64, sliding_window=4096, query_pre_attn_scalar=64
    ),
}


def some(number, seed):
    return torch.randint(0, 512, (number,), generator=torch.Generator().manual_seed(seed)).tolist()


def session(length=3000, seed=0):
    """A trunk, branches all along it, some on the same turn, and one on another branch."""
    trunk = some(length, seed)
    branches = [trunk[:at] + some(40 + at % 7, at) for at in range(60, length, 260)]
    more = [branch[: 60 + 260 * k + 9] + some(21, 1000 + k) for k, branch in enumerate(branches)]
    return [trunk, *branches, *more]


def model_of(name, dtype):
    config = MODELS[name]
    config._attn_implementation = "eager" if is_eager(name) else "sdpa"
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to("cuda", dtype).eval()


def is_eager(name):
    """Newer transformers refuse Gemma-2 on SDPA, which has no soft-cap."""
    return name == "gemma2" and not Gemma2ForCausalLM._supports_sdpa


def gap(got, want):
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("shape", [(4, 4, 64), (14, 2, 64), (12, 2, 128)])
@pytest.mark.parametrize("kind", ["flash", "flex", "paths"])
def test_attention_in_bf16_is_as_near_to_the_formula_as_a_flat_kernel_is(kind, shape):
    heads, key_heads, dim = shape
    tree = pack_trees([build_tree(session()), build_tree(session(900, 5))]).padded(1024).to("cuda")
    torch.manual_seed(1)
    inputs = [
        torch.randn(1, len(tree), number, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for number in (heads, key_heads, key_heads)
    ]
    weights = torch.randn(1, heads, len(tree), dim, device="cuda", dtype=torch.bfloat16)
    got = _attend_to_tree(*inputs, tree_mask(tree, kind)).transpose(1, 2)
    grads = torch.autograd.grad((got * weights).sum(), inputs)
    wide = [each.detach().double().requires_grad_() for each in inputs]
    key, value = (each.repeat_interleave(heads // key_heads, dim=1) for each in wide[1:])
    wanted = F.scaled_dot_product_attention(wide[0], key, value, attn_mask=tree.dense_mask())
    exact = torch.autograd.grad((wanted * weights.double()).sum(), wide)
    assert gap(got, wanted) < 4e-3  # one rounding to bf16 is 2e-3
    for ours, theirs in zip(grads, exact, strict=True):
        assert gap(ours, theirs) < 6e-3


@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_fp32_gives_the_rows_and_gradients_of_its_sequences(name):
    model = model_of(name, torch.float32)
    tree = build_tree(session(1500)).to("cuda")
    got = tree_hidden_states(model, tree)
    assert got.kind == ("dense" if is_eager(name) else "flex")
    assert got.flat_because is None
    weights = torch.randn_like(got.hidden)
    parameters = [each for each in model.get_decoder().parameters() if each.requires_grad]
    as_tree = torch.autograd.grad((got.hidden * weights).sum(), parameters)
    loss, taken = 0.0, torch.zeros(len(tree), dtype=torch.bool, device="cuda")
    for rows in sorted(tree.rows, key=lambda each: -each.numel()):
        flat = hidden_states(model, tree.input_ids[rows][None], None)[0]
        assert gap(got.hidden[rows], flat) < 1e-4
        new = ~taken[rows]
        loss = loss + (flat[new] * weights[rows[new]]).sum()
        taken[rows] = True
    for ours, theirs in zip(as_tree, torch.autograd.grad(loss, parameters), strict=True):
        assert gap(ours, theirs) < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_in_half_precision_the_flash_kernels_are_chosen_where_they_fit(name):
    model = model_of(name, torch.bfloat16)
    tree = build_tree(session(1500)).to("cuda")
    got = tree_hidden_states(model, tree)
    slow = "dense" if is_eager(name) else "flex"
    assert got.kind == (slow if name == "gemma2" else "flash")  # a soft-cap is none of theirs
    exact = model_of(name, torch.float32)
    for rows in tree.rows:
        flat = hidden_states(model, tree.input_ids[rows][None], None)[0]
        wanted = hidden_states(exact, tree.input_ids[rows][None], None)[0]
        assert gap(got.hidden[rows], wanted) < 1.3 * gap(flat, wanted) + 1e-3


def test_checkpointing_autocast_and_varying_lengths_change_nothing():
    model = model_of("qwen2", torch.float32).train()
    for length in (700, 1500, 900):
        targets = SessionTargets()
        trunk, *branches = session(length)
        targets.add_response(trunk, 100, 400)
        for branch in branches[:3]:
            targets.add_pair(branch, len(branch) - 20, trunk[: len(branch)], len(branch) - 20, references=(-3.0, -3.0))
        batch = targets.build("cuda")
        found = []
        for checkpointing in (False, True):
            if checkpointing:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            else:
                model.gradient_checkpointing_disable()
            model.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16):
                assert tree_hidden_states(model, batch.tree).kind == "flash"
                components = compose_loss(model, batch)
            components.total.backward()
            found.append((components.total.detach(), model.model.layers[0].mlp.up_proj.weight.grad))
        torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=0)
        assert gap(found[0][1], found[1][1]) < 5e-3  # the kernels add in another order each time
