"""The PRIME-RL loss against the slow reference."""

from types import SimpleNamespace

import pytest
import reference
import torch
from batches import DTYPES, logprobs
from closeness import assert_gradient, assert_value, value_and_gradients

from composer_replication.recipes.prime_rl.composer_loss import loss_fn

NUM_TOKENS = 48


def tokens(seed, dtype, weighted):
    """Inputs in which every branch of the mask is taken."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "trainer_logprobs": logprobs(seed + 1, NUM_TOKENS, dtype=dtype),
        "inference_logprobs": logprobs(seed + 2, NUM_TOKENS, dtype=dtype),
        "ref_logprobs": logprobs(seed + 3, NUM_TOKENS, dtype=dtype),
        "advantages": torch.randn(NUM_TOKENS, generator=generator, dtype=torch.float64).to(dtype),
        "loss_mask": torch.rand(NUM_TOKENS, generator=generator) < 0.8,
        "loss_weights": torch.rand(NUM_TOKENS, generator=generator, dtype=torch.float64).to(dtype)
        if weighted
        else None,
    }


def check(inputs, dtype, *, alpha=0.0, **knobs):
    short = {{"dppo_mask_high": "high", "dppo_mask_low": "low"}.get(name, name): v for name, v in knobs.items()}

    def ours(trainer):
        return loss_fn(SimpleNamespace(**inputs | {"trainer_logprobs": trainer}), alpha_sdpo=alpha, **knobs).loss

    def theirs(trainer):
        mask, weights = inputs["loss_mask"], inputs["loss_weights"]
        inference = inputs["inference_logprobs"]
        loss = reference.prime_rl_default(trainer, inference, inputs["advantages"], mask, weights, **short)
        return loss + alpha * reference.prime_rl_ref_kl(trainer, inference, inputs["ref_logprobs"], mask, weights)

    value, (gradient,) = value_and_gradients(ours, inputs["trainer_logprobs"])
    expected, (expected_gradient,) = value_and_gradients(theirs, inputs["trainer_logprobs"])
    assert_value(value, expected, dtype)
    assert_gradient(gradient, expected_gradient, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"dppo_mask_high": 0.05, "dppo_mask_low": 0.4},
        {"adv_tau": 0.3, "kl_tau": 0.5},
        {"adv_tau": 0.0, "kl_tau": 0.0},
    ],
    ids=str,
)
def test_the_prime_rl_loss_is_the_reference(knobs, weighted, dtype):
    check(tokens(0, dtype, weighted), dtype, **knobs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_alpha_sdpo_adds_alpha_times_the_ref_kl_reference(alpha, weighted, dtype):
    check(tokens(10, dtype, weighted), dtype, alpha=alpha)


def test_the_constants_of_ref_kl_do_not_follow_the_knobs_of_the_default_loss():
    check(
        tokens(20, torch.float64, True), torch.float64, alpha=1.0, kl_tau=0.5, dppo_mask_low=0.01, dppo_mask_high=0.01
    )


def test_these_cases_take_every_branch_of_the_mask():
    inputs = tokens(0, torch.float64, False)
    d = inputs["trainer_logprobs"].exp() - inputs["inference_logprobs"].exp()
    positive = inputs["advantages"] > 0
    for branch in (positive & (d > 0.2), positive & (d < -0.2), ~positive & (d < -0.2), ~positive & (d > 0.2)):
        assert bool((branch & inputs["loss_mask"]).any())


def test_an_absent_weight_is_a_weight_of_one():
    inputs = tokens(30, torch.float64, False)
    ones = inputs | {"loss_weights": torch.ones(NUM_TOKENS, dtype=torch.float64)}
    assert float(loss_fn(SimpleNamespace(**inputs)).loss) == float(loss_fn(SimpleNamespace(**ones)).loss)


def test_masked_tokens_receive_exactly_no_gradient():
    inputs = tokens(40, torch.float64, True)
    inputs["trainer_logprobs"].requires_grad_(True)
    loss_fn(SimpleNamespace(**inputs), alpha_sdpo=0.5).loss.backward()
    gradient = inputs["trainer_logprobs"].grad
    assert int(torch.count_nonzero(gradient[~inputs["loss_mask"]])) == 0
    assert float(gradient[inputs["loss_mask"]].norm()) > 0


def test_the_metrics_are_named_and_carry_no_graph():
    inputs = tokens(50, torch.float64, False)
    inputs["trainer_logprobs"].requires_grad_(True)
    metrics = loss_fn(SimpleNamespace(**inputs), alpha_sdpo=0.5).metrics
    assert metrics
    assert all(isinstance(name, str) for name in metrics)
    assert not any(getattr(value, "requires_grad", False) for value in metrics.values())
