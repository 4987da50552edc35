"""Losses as pure functions of logits or log-probs, one algorithm per file.

    rows         shared by all of them: masks, reductions, the cap per row, checks
    lm_ce        cross-entropy of given tokens
    jsd          the generalized Jensen-Shannon divergence between student and teacher
    sdpo         self-distillation on the student's top-k entries
    taid         a target that moves from the student to the teacher during training
    entropy_opd  a mix of both KL directions that depends on the teacher's entropy
    grpo         group advantages and the clipped policy-gradient objective
    preference   DPO with a reference model, SimPO without
    linear       the same losses, computed in tiles from hidden states and the LM head

`compose_loss` and `LossComponents` need a model, so they live in `trainer.objective` and are lazy aliases here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from composer_replication.loss.entropy_opd import EntropyGate, entropy_aware_opd_loss, teacher_entropy
from composer_replication.loss.grpo import group_advantages, grpo_loss
from composer_replication.loss.jsd import JSD, generalized_jsd_loss
from composer_replication.loss.lm_ce import lm_cross_entropy
from composer_replication.loss.preference import avg_sequence_logprob, dpo_loss, simpo_loss
from composer_replication.loss.sdpo import StudentTopK, sdpo_loss
from composer_replication.loss.taid import CrossEntropyToTeacher, TAIDScheduler, taid_loss

if TYPE_CHECKING:
    from composer_replication.trainer.objective.compose import LossComponents, compose_loss

__all__ = [
    "JSD",
    "CrossEntropyToTeacher",
    "EntropyGate",
    "LossComponents",
    "StudentTopK",
    "TAIDScheduler",
    "avg_sequence_logprob",
    "compose_loss",
    "dpo_loss",
    "entropy_aware_opd_loss",
    "generalized_jsd_loss",
    "group_advantages",
    "grpo_loss",
    "lm_cross_entropy",
    "sdpo_loss",
    "simpo_loss",
    "taid_loss",
    "teacher_entropy",
]

# `trainer` imports this package, so the aliases must not be resolved at import time.
_KNOWN_PATHS = {
    "compose_loss": "composer_replication.trainer.objective.compose",
    "LossComponents": "composer_replication.trainer.objective.compose",
}


def __getattr__(name: str) -> Any:
    if name in _KNOWN_PATHS:
        from importlib import import_module

        return getattr(import_module(_KNOWN_PATHS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
