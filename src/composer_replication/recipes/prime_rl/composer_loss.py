"""Compute PRIME-RL's policy loss for one sample plus channel 2 (hint distillation), as a function for PRIME-RL's
custom-loss hook.

lt, li and lr are the log-probs of the sampled tokens under the trainer, the inference engine and the reference; A are
the advantages; r = exp(lt - li), d = exp(lt) - exp(li). A token is dropped when its probability has already moved far
in the direction of its advantage:

    dropped = (A > 0 and d > mask_high) or (A <= 0 and d < -mask_low)
    loss    = sum((-keep * adv_tau * A * r + kl_tau * mask * (lt - li)^2) * weights)
    ref_kl  = sum((-keep_ref * sg(lr - lt) * r + 1e-3 * mask * (lt - li)^2) * weights),  keep_ref drops d < -0.2

`alpha_sdpo` adds alpha * ref_kl, a sampled-token kl_st whose `ref_logprobs` were computed with the hint in the context.
Tokens that were not scored have a reference of exactly 0; they are excluded from ref_kl, which would otherwise pull
them towards probability 1. The engine divides this loss by all rl tokens of the step. `hinted_turns` uses the engine's
own ref_kl component instead, whose mean is over the erring tokens. Use one of the two, not both.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from composer_replication.errors import InputError, ShapeError, explain
from composer_replication.loss.rows import check_at_least_zero, check_finite_rows, in_compute_dtype, to_boolean_mask

# Constants of the engine's own ref_kl component.
_REF_MASK_LOW = 0.2
_REF_KL_TAU = 1e-3


class LossInputs(Protocol):
    """The fields that the engine passes for one sample; every tensor is 1-D over its tokens."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None


@dataclass(frozen=True, eq=False)
class LossOutputs:
    """The fields of the result that the engine reads."""

    loss: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class _LossSample:
    trainer: Tensor
    inference: Tensor
    reference: Tensor | None
    advantages: Tensor
    mask: Tensor  # bool
    weights: Tensor

    @property
    def log_ratio(self) -> Tensor:
        return self.trainer - self.inference

    @property
    def probability_change(self) -> Tensor:
        """How much the probability of each token has changed since it was sampled, without gradient."""
        return (self.trainer.exp() - self.inference.exp()).detach()

    def total(
        self, keep: Tensor, coefficient: Tensor, kl_tau: float, what: str, *, drift_mask: Tensor | None = None
    ) -> Tensor:
        """Return the sum of one loss component over all tokens.

        `keep` selects the tokens of the policy term, and `drift_mask` those of the squared log-ratio. A `drift_mask` of
        None selects all tokens.
        """
        # Dropped tokens can have any log-ratio. It is set to 0 before exp: inf * 0 would put NaN into the gradient.
        ratio = torch.where(keep, self.log_ratio, 0.0).exp()
        policy = torch.where(keep, -coefficient * ratio, 0.0)
        drift = self.log_ratio if drift_mask is None else torch.where(drift_mask, self.log_ratio, 0.0)
        per_token = (policy + kl_tau * drift.square()) * self.weights
        check_finite_rows(per_token, what)
        return per_token.sum()


_KNOBS = ("alpha_sdpo", "beta_dpo", "dppo_mask_high", "dppo_mask_low", "adv_tau", "kl_tau")


def loss_fn(
    inputs: LossInputs,
    *,
    alpha_sdpo: float = 0.0,
    beta_dpo: float = 0.0,
    dppo_mask_high: float = 0.2,
    dppo_mask_low: float = 0.2,
    adv_tau: float = 1.0,
    kl_tau: float = 1e-3,
) -> LossOutputs:
    """Return the engine's default loss plus alpha_sdpo * ref_kl, with the formulas of the module docstring.

    `beta_dpo` has no effect, because the engine's samples carry no pairs; a value other than 0 gives a warning.
    """
    # Read before any other local exists, so that it contains exactly the arguments.
    knobs = locals()
    for name in _KNOBS:
        check_at_least_zero(knobs[name], name)
    if beta_dpo:
        warnings.warn(
            "beta_dpo has no effect in PRIME-RL: its samples carry no preference pairs. Set it to 0.",
            UserWarning,
            stacklevel=2,
        )
    sample = _read_sample(inputs)
    too_far_up = (sample.advantages > 0) & (sample.probability_change > dppo_mask_high)
    too_far_down = (sample.advantages <= 0) & (sample.probability_change < -dppo_mask_low)
    keep = sample.mask & ~too_far_up & ~too_far_down
    policy = sample.total(keep, adv_tau * sample.advantages, kl_tau, "PRIME-RL policy loss")
    metrics = _metrics(sample, keep, policy)
    if not alpha_sdpo:
        return LossOutputs(policy, metrics)
    ref_kl, num_scored = _ref_kl(sample)
    metrics |= {"loss/sdpo_kl": ref_kl.detach(), "sdpo_tokens": num_scored}
    return LossOutputs(policy + alpha_sdpo * ref_kl, metrics)


def _ref_kl(sample: _LossSample) -> tuple[Tensor, Tensor]:
    """Return the engine's `ref_kl` loss with log-probs from the hinted context as the reference, and the number of
    scored tokens.
    """
    if sample.reference is None:
        raise InputError(
            explain("alpha_sdpo > 0", got="ref_logprobs=None", expected="log-probs under the hinted context")
        )
    # Exactly 0 marks a token that was not scored.
    scored = sample.mask & (sample.reference != 0.0)
    keep = scored & ~(sample.probability_change < -_REF_MASK_LOW)
    coefficient = (sample.reference - sample.trainer).detach()
    total = sample.total(keep, coefficient, _REF_KL_TAU, "PRIME-RL ref_kl", drift_mask=scored)
    return total, scored.sum().to(sample.trainer)


_REQUIRED = ("trainer_logprobs", "inference_logprobs", "advantages", "loss_mask")
_OPTIONAL = ("ref_logprobs", "loss_weights")


def _read_sample(inputs: LossInputs) -> _LossSample:
    tensors: dict[str, Tensor] = {}
    for name in (*_REQUIRED, *_OPTIONAL):
        tensor = getattr(inputs, name, None)
        if tensor is None and name in _REQUIRED:
            raise InputError(explain(f"inputs.{name}", got=None, expected="a 1-D tensor"))
        if tensor is None:
            continue
        if tensor.dim() != 1:
            raise ShapeError(
                explain(f"inputs.{name} shape", got=tuple(tensor.shape), expected="1-D, one value per token")
            )
        tensors[name] = tensor
    # All tensors run over the same tokens.
    lengths = {name: tensor.shape[0] for name, tensor in tensors.items()}
    if len(set(lengths.values())) > 1:
        raise ShapeError(explain("inputs lengths", got=lengths, expected="the same length for all"))
    mask = to_boolean_mask(tensors.pop("loss_mask"), tensors["trainer_logprobs"][:, None], "inputs.loss_mask")
    assert mask is not None
    # Values at masked tokens may be anything, even NaN. Replacing them by 0 keeps them out of every gradient.
    clean = {name: torch.where(mask, in_compute_dtype(tensor), 0.0) for name, tensor in tensors.items()}
    return _LossSample(
        trainer=clean["trainer_logprobs"],
        inference=clean["inference_logprobs"],
        reference=clean.get("ref_logprobs"),
        advantages=clean["advantages"],
        mask=mask,
        weights=clean.get("loss_weights", torch.ones_like(clean["trainer_logprobs"])),
    )


def _metrics(sample: _LossSample, keep: Tensor, policy: Tensor) -> dict[str, Tensor]:
    num_tokens = sample.mask.sum().clamp_min(1)
    log_ratio = sample.log_ratio.detach()
    # r - log(r) - 1 estimates KL(inference || trainer) from the sampled tokens, and is never negative.
    mismatch = torch.where(sample.mask, log_ratio.exp() - log_ratio - 1.0, 0.0)
    return {
        "loss/policy": policy.detach(),
        "masked_fraction": ((sample.mask & ~keep).sum() / num_tokens).detach(),
        "mismatch_kl": (mismatch.sum() / num_tokens).detach(),
    }
