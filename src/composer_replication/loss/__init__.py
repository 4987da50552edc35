"""Losses: rows in, scalars out. One algorithm per file; `linear` computes the same from hidden rows and the LM head.

`compose_loss` and `LossComponents` live in `objective` (they need a model) and are lazy aliases here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from composer_replication.loss.dpo import dpo_loss
from composer_replication.loss.entropy_opd import EntropyGate, entropy_aware_opd_loss, teacher_entropy
from composer_replication.loss.jsd import JSD, generalized_jsd_loss
from composer_replication.loss.lm_ce import lm_cross_entropy
from composer_replication.loss.sdpo import StudentTopK, sdpo_loss
from composer_replication.loss.simpo import avg_sequence_logprob, simpo_loss
from composer_replication.loss.taid import CrossEntropyToTeacher, TAIDScheduler, taid_loss

if TYPE_CHECKING:
    from composer_replication.objective.components import LossComponents
    from composer_replication.objective.compose import compose_loss

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
    "lm_cross_entropy",
    "sdpo_loss",
    "simpo_loss",
    "taid_loss",
    "teacher_entropy",
]

_KNOWN_PATHS = {
    "compose_loss": "composer_replication.objective.compose",
    "LossComponents": "composer_replication.objective.components",
}


def __getattr__(name: str) -> Any:
    if name in _KNOWN_PATHS:
        from importlib import import_module

        return getattr(import_module(_KNOWN_PATHS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
