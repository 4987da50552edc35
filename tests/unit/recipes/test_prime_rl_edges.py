"""PRIME-RL's loss at the edges: what it drops cannot poison the gradient, and what it keeps must be finite."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from composer_replication.errors import InputError, NonFiniteError
from composer_replication.recipes.prime_rl.composer_loss import loss_fn


def sample(**changes):
    torch.manual_seed(0)
    trainer = (-torch.rand(5)).requires_grad_()
    fields = {
        "trainer_logprobs": trainer,
        "inference_logprobs": trainer.detach() + 0.05,
        "ref_logprobs": trainer.detach() - 0.1,
        "advantages": torch.tensor([1.0, -1.0, 0.5, 0.3, -0.2]),
        "loss_mask": torch.tensor([1, 1, 1, 0, 1]),
        "loss_weights": torch.ones(5),
    }
    return SimpleNamespace(**{**fields, **changes})


def test_a_dropped_token_far_from_its_sampling_policy_gets_only_its_drift_gradient():
    inputs = sample()
    inputs.inference_logprobs[0] = -100.0  # moved up by far more than mask_high, with a positive advantage: dropped
    outputs = loss_fn(inputs)
    (grad,) = torch.autograd.grad(outputs.loss, inputs.trainer_logprobs)
    drift = 2 * 1e-3 * (inputs.trainer_logprobs[0].item() + 100.0)
    assert grad[0].item() == pytest.approx(drift, rel=1e-5)
    assert outputs.metrics["masked_fraction"].item() == pytest.approx(0.25)


@pytest.mark.parametrize(
    "name", ["trainer_logprobs", "inference_logprobs", "ref_logprobs", "advantages", "loss_weights"]
)
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_nan_at_a_counted_token_raises_and_at_a_masked_one_does_not_matter(name, alpha):
    clean = sample()
    want = loss_fn(clean, alpha_sdpo=alpha).loss.item()
    for position, is_counted in ((3, False), (1, True)):
        poisoned = getattr(clean, name).detach().clone()
        poisoned[position] = float("nan")
        inputs = sample(**{name: poisoned})
        if is_counted and not (name == "ref_logprobs" and alpha == 0.0):
            with pytest.raises(NonFiniteError, match="PRIME-RL"):
                loss_fn(inputs, alpha_sdpo=alpha)
        else:
            assert loss_fn(inputs, alpha_sdpo=alpha).loss.item() == pytest.approx(want, abs=1e-6)


def test_half_precision_inputs_are_computed_in_fp32():
    inputs = sample()
    half = {name: getattr(inputs, name).detach().bfloat16() for name in ("trainer_logprobs", "inference_logprobs")}
    wide = {name: tensor.float() for name, tensor in half.items()}
    got, want = loss_fn(sample(**half)).loss, loss_fn(sample(**wide)).loss
    assert got.dtype == torch.float32
    assert got.item() == want.item()


def test_a_mask_of_labels_is_refused():
    with pytest.raises(InputError, match="loss_mask"):
        loss_fn(sample(loss_mask=torch.tensor([1, 1, -100, 0, -100])))
