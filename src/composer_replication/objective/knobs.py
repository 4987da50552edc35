"""The knobs of channels 2 and 3, by the names that `compose_loss`, its config section and the trainers use for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from composer_replication.errors import InputError, explain
from composer_replication.loss.entropy_opd import EntropyGate
from composer_replication.loss.jsd import JSD
from composer_replication.loss.rows import (
    Divergence,
    check_at_least_zero,
    check_choice,
    check_positive,
    check_unit_interval,
)
from composer_replication.loss.taid import CrossEntropyToTeacher

DPO_VARIANTS = ("dpo", "simpo")
SDPO_WRAPPERS = ("none", "taid", "entropy_opd")
Anneal = Literal["none", "linear"]
"""How channel 2's weight changes over a run."""


def annealed(weight: float, anneal: Anneal, *, step: int, total_steps: int, end: float = 0.0) -> float:
    """The weight at the optimiser step that follows `step` finished ones.

    With "linear" it goes from `weight` at the first of `total_steps` to `weight * end` at the last, and stays there.
    """
    if anneal == "none" or total_steps <= 1:
        return weight
    progress = min(max(step / (total_steps - 1), 0.0), 1.0)
    return weight * (1.0 - progress * (1.0 - end))


def check_anneal(anneal: str, end: float = 0.0) -> None:
    """Raise unless `annealed` knows the one and can end at the other."""
    check_choice(anneal, get_args(Anneal), "anneal")
    check_unit_interval(end, "anneal_end")


class Preference(NamedTuple):
    """DPO's or SimPO's knobs; only DPO has a reference."""

    needs_reference: bool
    beta: float
    gamma: float


@dataclass(frozen=True, kw_only=True)
class LossKnobs:
    """Weights, and what the two channels measure. All are checked, also those of a variant that is not chosen."""

    alpha_sdpo: float = 0.1
    beta_replay: float = 0.05
    sdpo_jsd_beta: float = 0.5
    sdpo_temperature: float = 1.0
    sdpo_token_clip: float | None = None
    replay_dpo_beta: float = 0.1
    dpo_variant: Literal["dpo", "simpo"] = "dpo"
    sdpo_wrapper: Literal["none", "taid", "entropy_opd"] = "none"
    simpo_beta: float = 2.0
    simpo_gamma: float = 1.0
    entropy_opd_h_max: float | None = None

    def __post_init__(self) -> None:
        for name in ("alpha_sdpo", "beta_replay", "simpo_gamma"):
            check_at_least_zero(getattr(self, name), name)
        for name in ("sdpo_temperature", "sdpo_token_clip", "replay_dpo_beta", "simpo_beta", "entropy_opd_h_max"):
            if getattr(self, name) is not None:
                check_positive(getattr(self, name), name)
        check_unit_interval(self.sdpo_jsd_beta, "sdpo_jsd_beta")
        check_choice(self.dpo_variant, DPO_VARIANTS, "dpo_variant")
        check_choice(self.sdpo_wrapper, SDPO_WRAPPERS, "sdpo_wrapper")

    def divergence(self, taid_t: float | None) -> Divergence:
        """What channel 2 measures; `taid_t` is how far TAID's target has moved."""
        if taid_t is not None:
            check_unit_interval(taid_t, "taid_t")
        if self.sdpo_wrapper == "taid":
            if taid_t is None:
                raise InputError(explain('sdpo_wrapper="taid"', got="taid_t=None", expected="taid_t in [0, 1]"))
            return CrossEntropyToTeacher()
        if self.sdpo_wrapper == "entropy_opd":
            return EntropyGate(h_max=self.entropy_opd_h_max, temperature=self.sdpo_temperature)
        return JSD(beta=self.sdpo_jsd_beta, temperature=self.sdpo_temperature)

    @property
    def preference(self) -> Preference:
        """What channel 3 measures."""
        if self.dpo_variant == "dpo":
            return Preference(True, self.replay_dpo_beta, 0.0)
        return Preference(False, self.simpo_beta, self.simpo_gamma)
