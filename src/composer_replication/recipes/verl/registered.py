"""Register losses and an advantage estimator with verl. Add this module to VERL_USE_EXTERNAL_MODULES.

    algorithm.adv_estimator: composer_group                  reward minus the mean of its group
    actor.policy_loss.loss_mode: composer_grpo               GRPO's clipped objective, without a third clip
    distillation.distillation_loss.loss_mode:
        composer_kl_ts      KL(teacher || student) on the teacher's top-k entries and a tail bucket
        composer_kl_st      KL(student || teacher) from the sampled token only

The two distillation losses are for verl's own teacher servers (`agent_loop`), which return entries only for the tokens
of erring turns. verl normalizes them as set by `loss_agg_mode`: "token-mean" divides by the number of all response
tokens in the batch, not only those of erring turns.

Shape suffixes: B rollouts, T tokens.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from composer_replication.errors import ConfigError, InputError, explain
from composer_replication.loss.grpo import clipped_terms, group_advantages
from composer_replication.loss.rows import check_finite_rows
from composer_replication.loss.sdpo import sampled_token_values
from composer_replication.optional import importing

with importing("verl", extra="verl"):
    from verl.trainer.distillation.losses import DistillationLossSettings, register_distillation_loss
    from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss
    from verl.utils.metric import Metric
    from verl.workers.utils.padding import no_padding_2_padding

ADVANTAGE, POLICY_LOSS = "composer_group", "composer_grpo"
KL_TEACHER_STUDENT, KL_STUDENT_TEACHER = "composer_kl_ts", "composer_kl_st"
NO_TEACHER = -1e4
"""The log-prob at positions without a teacher: below any real log-prob, but finite, so that 0 times it is 0."""
_LARGEST_MASS = 1.0 - 1e-7
"""The maximum mass of k entries, so that the logarithm of the tail stays finite."""


@register_adv_est(ADVANTAGE)
def _group_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any = None, config: Any = None, **_unused: Any
) -> tuple[Tensor, Tensor]:
    """Return each rollout's summed reward minus the mean of its group, repeated for all its tokens.

    With `algorithm.norm_adv_by_std_in_grpo`, it is divided by the standard deviation of the group. A single rollout, or
    a group with equal rewards, has advantage 0.
    """
    if index is None:
        fix = "Pass the column uid as `index`, as verl's trainer does."
        raise InputError(explain("groups of rollouts", got=None, expected="one id per rollout", fix=fix))
    scale = "group" if config is None or config.get("norm_adv_by_std_in_grpo", True) else "none"
    # verl puts the reward of a rollout on its last token.
    rewards = token_level_rewards.sum(-1)
    members: dict[Any, list[int]] = {}
    for row, group_id in enumerate(index):
        members.setdefault(group_id, []).append(row)
    advantages = torch.zeros_like(rewards)
    for rows in members.values():
        advantages[rows] = group_advantages(rewards[rows], len(rows), scale)
    # A warning, not an error: a single batch without a signal is normal.
    if not bool(advantages.any()):
        message = f"rewards are equal within each of the {len(members)} groups: all advantages of this batch are 0"
        warnings.warn(message, UserWarning, stacklevel=2)
    advantages_BT = advantages[:, None] * response_mask
    return advantages_BT, advantages_BT  # verl wants advantages and returns; without a critic they are the same


@register_policy_loss(POLICY_LOSS)
def _clipped_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Return the clipped loss -min(r A, clip(r) A), aggregated over tokens as set by `loss_agg_mode`, and its metrics.

    r is the importance ratio of a token, and A is its advantage. verl's own "vanilla" loss has a third clip, at
    `clip_ratio_c`, for A < 0. "seq-mean-token-sum-norm", with `loss_scale_factor` set to the longest response,
    corresponds to TRL's dr_grpo, and "token-mean" to its dapo.
    """
    if config is None:
        raise ConfigError(explain("config of the policy loss", got=None, expected="verl's ActorConfig"))
    mask = response_mask.bool()
    # As in verl, bounds that are not set fall back to `clip_ratio`.
    epsilon_low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    epsilon_high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    # Masked tokens may have any value; replaced by 0 they cannot reach the loss or its gradient.
    new_logprobs, old_logprobs = torch.where(mask, log_prob.float(), 0.0), torch.where(mask, old_log_prob.float(), 0.0)
    terms, is_clipped = clipped_terms(
        new_logprobs, old_logprobs, advantages.float(), epsilon=epsilon_low, epsilon_high=epsilon_high
    )
    terms = torch.where(mask, terms, 0.0)
    if rollout_is_weights is not None:
        terms = terms * rollout_is_weights
    check_finite_rows(terms.flatten(), "policy loss")
    loss = agg_loss(loss_mat=terms, loss_mask=mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
    num_tokens = mask.sum().clamp(min=1)
    return loss, {
        "actor/pg_clipfrac": ((is_clipped & mask).sum() / num_tokens).item(),
        "actor/ppo_kl": ((old_logprobs - new_logprobs).detach().sum() / num_tokens).item(),
    }


@register_distillation_loss(DistillationLossSettings(names=[KL_TEACHER_STUDENT], use_topk=True))
def _kl_teacher_student(
    config: Any, distillation_config: Any, model_output: dict[str, Any], data: Any
) -> tuple[Tensor, dict[str, Any]]:
    """Return a (B, T) tensor of KL(teacher || student) per token. It adds one entry for the tail to the sum over k
    entries that verl's top-k kernel computes:

        sum_k p_T log(p_T / p_S) + (1 - m_T) log((1 - m_T) / (1 - m_S)),   m: mass of the k entries

    verl's own loss has only the first sum, which can be negative, and clamps it at zero together with its gradient.

    verl's kernel returns only the masses, and in fp32 the error of 1 - m is up to 2e-6. If the student's tail has a
    mass of 1e-5, the gradient can therefore be wrong by a fifth; if it has 1e-6, by any factor. `ChannelEngine` uses
    complete rows and has no such limit.
    """
    del config
    if distillation_config.distillation_loss.log_prob_min_clamp is not None:
        got = distillation_config.distillation_loss.log_prob_min_clamp
        fix = "Set it to null: clamped log-probs are not a distribution."
        raise ConfigError(explain("distillation_loss.log_prob_min_clamp", got=got, expected=None, fix=fix))
    listed_sum, mass_s, mass_t = (
        no_padding_2_padding(model_output[name], data).float()
        for name in ("distillation_losses", "student_mass", "teacher_mass")
    )
    # Positions without a teacher hold `NO_TEACHER`, whose mass is 0.
    has_teacher = (mass_t > 0) & _response_mask(data)
    tail_s, tail_t = (1.0 - mass.clamp(max=_LARGEST_MASS) for mass in (mass_s, mass_t))
    values = torch.where(has_teacher, listed_sum + tail_t * (tail_t.log() - tail_s.log()), 0.0)
    check_finite_rows(values.flatten(), KL_TEACHER_STUDENT)
    return values, _token_count(has_teacher)


@register_distillation_loss(DistillationLossSettings(names=[KL_STUDENT_TEACHER], use_estimator=True))
def _kl_student_teacher(
    config: Any, distillation_config: Any, model_output: dict[str, Any], data: Any
) -> tuple[Tensor, dict[str, Any]]:
    """Return a (B, T) tensor of sg(log p_S - log p_T) log p_S, where sg stops the gradient. Its expected gradient is
    that of KL(student || teacher).

    The values themselves are not a divergence; the metric `composer/log_ratio` estimates the divergence.
    """
    del config
    if distillation_config.distillation_loss.use_policy_gradient:
        fix = "Set it to false: the gradient already goes through the log-prob."
        name = "distillation_loss.use_policy_gradient"
        raise ConfigError(explain(name, got=True, expected=False, fix=fix))
    student = no_padding_2_padding(model_output["log_probs"], data).float()
    teacher = no_padding_2_padding(data["teacher_logprobs"], data).squeeze(-1).float()
    # Half of it, so that rounding in lower precision does not matter.
    has_teacher = (teacher > NO_TEACHER / 2) & _response_mask(data)
    values = torch.where(has_teacher, sampled_token_values(student, teacher), 0.0)
    ratio = torch.where(has_teacher, (student - teacher).detach(), 0.0).sum() / has_teacher.sum().clamp(min=1)
    return values, _token_count(has_teacher) | {"composer/log_ratio": ratio.item()}


def _response_mask(data: Any) -> Tensor:
    mask = data["response_mask"]
    return mask.bool().to_padded_tensor(False) if mask.is_nested else mask.bool()


def _token_count(has_teacher: Tensor) -> dict[str, Any]:
    return {"composer/taught_tokens": Metric("sum", float(has_teacher.sum()))}
