"""compose_loss against full logits and written-out formulas: values and the gradient of every parameter."""

from __future__ import annotations

import dense_reference as dense
import pytest
import torch

from composer_replication import compose_loss
from tiny_models import FAMILIES, build, random_batch

WEIGHTS = {"alpha_sdpo": 0.7, "beta_replay": 0.3}


# What a body rounds to fp32 inside even when it is fp64: RMS norms (gradients), Gemma-2's attention (values too).
# GPT-2 rounds nothing, so it is the one that shows 1e-10 throughout; the heads' gradients do in every family.
def body_tolerance(family):
    return {"gpt2": (1e-10, 1e-10), "gemma2": (1e-6, 2e-6)}.get(family.split("-")[0], (1e-10, 2e-6))


def assert_values_and_gradients(model, components, wanted, *, tolerance, grad_tolerance=None):
    grad_tolerance = grad_tolerance or 2 * tolerance
    names = ("lm_ce", "sdpo_jsd", "trace_replay_dpo")
    for name, want in zip(names, wanted, strict=True):
        assert getattr(components, name).item() == pytest.approx(want.item(), abs=tolerance, rel=tolerance), name
    total = wanted[0] + WEIGHTS["alpha_sdpo"] * wanted[1] + WEIGHTS["beta_replay"] * wanted[2]
    assert components.total.item() == pytest.approx(total.item(), abs=tolerance, rel=tolerance)
    got, want = dense.gradients(model, components.total), dense.gradients(model, total)
    # Keys' biases have a gradient of exactly zero in theory; such tensors are compared on the scale of the others.
    scale = max(w.norm() for w in want).item()
    for (name, _), ours, theirs in zip(model.named_parameters(), got, want, strict=True):
        allowed = grad_tolerance * max(theirs.norm().item(), 1e-3 * scale)
        assert (ours - theirs).norm().item() <= allowed, name


@pytest.mark.parametrize("family", FAMILIES)
def test_all_three_channels_equal_full_logits_in_fp64(family):
    model, batch = build(family).double(), random_batch()
    components = compose_loss(model, batch, **WEIGHTS)
    wanted = dense.cross_entropy(model, batch), dense.jsd(model, batch), dense.dpo(model, batch)
    values, gradients = body_tolerance(family)
    assert_values_and_gradients(model, components, wanted, tolerance=values, grad_tolerance=gradients)
    assert components.active == ("lm_ce", "sdpo_jsd", "trace_replay_dpo")
    assert dict(components.counts) == {"lm_ce": 12, "sdpo_jsd": 10, "trace_replay_dpo": 2}


@pytest.mark.parametrize("family", FAMILIES)
def test_all_three_channels_equal_full_logits_in_fp32(family):
    model, batch = build(family), random_batch(3)
    components = compose_loss(model, batch, **WEIGHTS)
    wanted = dense.cross_entropy(model, batch), dense.jsd(model, batch), dense.dpo(model, batch)
    assert_values_and_gradients(model, components, wanted, tolerance=1e-5)


@pytest.mark.parametrize("family", ["qwen2-untied", "llama-untied", "granite"])
def test_an_untied_heads_gradient_is_exact_in_fp64(family):
    model, batch = build(family).double(), random_batch(8)
    head = model.get_output_embeddings().weight
    components = compose_loss(model, batch, **WEIGHTS)
    total = dense.cross_entropy(model, batch) + 0.7 * dense.jsd(model, batch) + 0.3 * dense.dpo(model, batch)
    (got,), (want,) = torch.autograd.grad(components.total, head), torch.autograd.grad(total, head)
    assert (got - want).norm() <= 1e-10 * want.norm()


def test_the_taid_wrapper_equals_its_formula():
    model, batch = build("gpt2").double(), random_batch(1)
    for t in (0.0, 0.3, 1.0):
        components = compose_loss(model, batch, **WEIGHTS, sdpo_wrapper="taid", taid_t=t)
        wanted = dense.cross_entropy(model, batch), dense.taid(model, batch, t), dense.dpo(model, batch)
        assert_values_and_gradients(model, components, wanted, tolerance=1e-10)


def test_the_entropy_wrapper_and_simpo_equal_their_formulas():
    model, batch = build("gpt2").double(), random_batch(2)
    components = compose_loss(model, batch, **WEIGHTS, sdpo_wrapper="entropy_opd", dpo_variant="simpo")
    wanted = dense.cross_entropy(model, batch), dense.entropy_opd(model, batch), dense.simpo(model, batch)
    assert_values_and_gradients(model, components, wanted, tolerance=1e-10)


def test_the_plain_knobs_reach_their_formulas():
    model, batch = build("gpt2").double(), random_batch(4)
    knobs = {"sdpo_jsd_beta": 0.2, "replay_dpo_beta": 0.4}
    components = compose_loss(model, batch, **WEIGHTS, **knobs)
    wanted = dense.cross_entropy(model, batch), dense.jsd(model, batch, 0.2), dense.dpo(model, batch, 0.4)
    assert_values_and_gradients(model, components, wanted, tolerance=1e-10)


def test_label_smoothing_and_the_token_cap_change_just_their_channel():
    model, batch = build("qwen2-tied").double(), random_batch(5)
    plain = compose_loss(model, batch).detached()
    smooth = compose_loss(model, batch, lm_ce_label_smoothing=0.2).detached()
    capped = compose_loss(model, batch, sdpo_token_clip=0.01).detached()
    logp = dense.log_probs(model, batch["input_ids"])
    rows = [(b, t - 1, batch["input_ids"][b, t]) for b, t in batch["response_mask"].nonzero().tolist()]
    want = torch.stack([-(0.8 * logp[b, t, y] + 0.2 * logp[b, t].mean()) for b, t, y in rows]).mean().item()
    assert smooth["lm_ce"] == pytest.approx(want, abs=1e-10)
    assert smooth["sdpo_jsd"] == plain["sdpo_jsd"]
    assert capped["sdpo_jsd"] == pytest.approx(0.01, abs=1e-12)  # every token of this batch is above the cap
    assert capped["lm_ce"] == plain["lm_ce"]


def test_bf16_models_stay_close_to_fp32():
    reference, batch = build("qwen2-untied"), random_batch(6)
    half = build("qwen2-untied").bfloat16()
    want, got = compose_loss(reference, batch).detached(), compose_loss(half, batch).detached()
    for name in ("lm_ce", "sdpo_jsd"):
        assert got[name] == pytest.approx(want[name], rel=0.1), name
    assert compose_loss(half, batch).total.dtype == torch.float32
