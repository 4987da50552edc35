"""What the trainers are told about channels 2 and 3, and how a weight changes over a run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from composer_replication.errors import InputError, explain
from composer_replication.loss.taid import TAIDScheduler
from composer_replication.objective.knobs import Anneal, LossKnobs, annealed, check_anneal

NO_PAIR = (
    "channel trace_replay_dpo cannot run: beta_replay is {:g}, and there is no preference pair to learn from;"
    " `crf replay` and `crf pairs` make some in a run, loss.beta_replay = 0 says that none are wanted"
)


@dataclass(frozen=True, kw_only=True)
class ChannelSettings(LossKnobs):
    """The knobs of `compose_loss`, by the same names, and the annealing of channel 2's weight.

    `sdpo_is_clip` weighs a rollout's token that older weights sampled by min(clip, p now / p then), without gradient.
    With `sdpo_wrapper="taid"` t moves from `taid_start` to `taid_end`, as `TAIDScheduler` says.
    With `anneal="linear"` the weight goes from `alpha_sdpo` at the first step to `alpha_sdpo * anneal_end` at the last.
    """

    sdpo_is_clip: float | None = None
    taid_start: float = 0.4
    taid_end: float = 1.0
    taid_rate: float = 5e-4
    taid_momentum: float = 0.99
    anneal: Anneal = "none"
    anneal_end: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sdpo_is_clip is not None and not self.sdpo_is_clip > 0:
            raise InputError(explain("sdpo_is_clip", got=self.sdpo_is_clip, expected="above 0, or None"))
        self.taid_schedule(1)  # raises where its numbers cannot be
        check_anneal(self.anneal, self.anneal_end)

    def alpha_at(self, step: int, total_steps: int) -> float:
        """Channel 2's weight at the optimiser step that follows `step` finished ones."""
        return annealed(self.alpha_sdpo, self.anneal, step=step, total_steps=total_steps, end=self.anneal_end)

    def loss_options(self) -> dict[str, Any]:
        """Keyword arguments of `compose_loss`, without the weights and without TAID's t, which move."""
        names = {field.name for field in fields(LossKnobs)} - {"alpha_sdpo", "beta_replay"}
        return {name: value for name, value in vars(self).items() if name in names}

    def taid_schedule(self, total_steps: int) -> TAIDScheduler:
        """How TAID's t moves over a run of so many steps."""
        return TAIDScheduler(
            max(total_steps, 1),
            t_start=self.taid_start,
            t_end=self.taid_end,
            alpha=self.taid_rate,
            beta=self.taid_momentum,
        )
