"""The knobs of compose_loss."""

from __future__ import annotations

from typing import Literal

from composer_replication.config.schema import option, table
from composer_replication.errors import ConfigError, explain


@table("loss")
class LossConfig:
    """The three channels of total = lm_ce + alpha_sdpo * sdpo_jsd + beta_replay * trace_replay_dpo."""

    alpha_sdpo: float = option(0.1, "Weight of the self-distillation channel; 0 turns it off.", at_least=0)
    beta_replay: float = option(0.05, "Weight of the replayed preference channel; 0 turns it off.", at_least=0)
    sdpo_jsd_beta: float = option(
        0.5,
        "Mixture of the Jensen-Shannon divergence: 0 is KL(teacher‖student), 1 is KL(student‖teacher).",
        at_least=0,
        at_most=1,
    )
    sdpo_temperature: float = option(1.0, "Both distributions' logits are divided by this.", above=0)
    sdpo_token_clip: float | None = option(None, "Largest divergence one token may contribute.", above=0)
    replay_dpo_beta: float = option(0.1, "Strength of DPO's pull towards its reference model.", above=0)
    lm_ce_label_smoothing: float = option(
        0.0, "Share of the target's probability that is spread over the vocabulary.", at_least=0, below=1
    )
    dpo_variant: Literal["dpo", "simpo"] = option("dpo", "Preference loss; simpo needs no reference log-probabilities.")
    sdpo_wrapper: Literal["none", "taid", "entropy_opd"] = option(
        "none", "Divergence used in place of the plain one; taid ignores sdpo_jsd_beta and sdpo_temperature."
    )
    taid_t: float | None = option(
        None, "How far TAID's target has moved from the student to the teacher; taid needs it.", at_least=0, at_most=1
    )
    simpo_beta: float = option(2.0, "Scale of SimPO's reward, the mean log-probability per token.", above=0)
    simpo_gamma: float = option(1.0, "Margin by which SimPO wants the chosen answer ahead.", at_least=0)
    entropy_opd_h_max: float | None = option(
        None, "Teacher entropy, in nats, that counts as fully uncertain; unset is the log of the vocabulary.", above=0
    )

    def _check(self) -> None:
        if self.sdpo_wrapper == "taid" and self.taid_t is None:
            raise ConfigError(
                explain('loss.taid_t with loss.sdpo_wrapper = "taid"', got="none", expected="a float in [0, 1]")
            )
