"""What the channels are told inside verl: the key `composer` under `actor_rollout_ref` in its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from composer_replication.errors import ConfigError, InputError, explain
from composer_replication.loss.rows import check_positive, check_unit_interval
from composer_replication.objective.knobs import Anneal, LossKnobs, annealed, check_anneal

KEY = "composer"


@dataclass(frozen=True, kw_only=True)
class EngineChannels(LossKnobs):
    """The knobs of channels 2 and 3, by the names that `compose_loss` has for them, and what an engine needs besides.

    `live_share` of the teacher's logits are the policy's own as it is, the rest the reference worker's: a trust region.
    0 is the frozen reference, 1 the live policy. `teacher_top_k` keeps that many of the teacher's entries for each
    token and puts everything else into one tail bucket; None is the whole vocabulary. `teacher_batch` hinted contexts
    are one pass. `sdpo_is_clip` weighs a token that older weights sampled by min(clip, p now / p then). `pair_batch`
    pairs are one pass. With `anneal="linear"` channel 2's weight goes from `alpha_sdpo` at the first step of the
    learning-rate schedule to `alpha_sdpo * anneal_end` at its last.
    """

    live_share: float = 0.01
    teacher_top_k: int | None = None
    teacher_batch: int = 8
    sdpo_is_clip: float | None = None
    pair_batch: int = 2
    anneal: Anneal = "none"
    anneal_end: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sdpo_wrapper != "none":
            fix = "TAID's schedule has no place in verl's checkpoints, and the entropy gate needs the whole vocabulary."
            raise InputError(explain("sdpo_wrapper in verl", got=repr(self.sdpo_wrapper), expected="'none'", fix=fix))
        check_unit_interval(self.live_share, "live_share")
        check_anneal(self.anneal, self.anneal_end)
        for name in ("teacher_top_k", "sdpo_is_clip"):
            if getattr(self, name) is not None:
                check_positive(getattr(self, name), name)
        for name in ("teacher_batch", "pair_batch"):
            if getattr(self, name) < 1:
                raise InputError(explain(name, got=getattr(self, name), expected="1 or more"))

    def alpha_at(self, step: int, total_steps: int) -> float:
        """Channel 2's weight at the step that follows `step` finished ones."""
        if self.anneal != "none" and total_steps < 1:
            fix = "verl's trainer sets actor.optim.total_training_steps; without it, use anneal: none."
            raise InputError(explain("total_training_steps", got=total_steps, expected="1 or more", fix=fix))
        return annealed(self.alpha_sdpo, self.anneal, step=step, total_steps=total_steps, end=self.anneal_end)


def settings_of(actor_rollout_ref: Mapping[str, Any]) -> EngineChannels:
    """The settings of a config; a name that is none of ours is an error, and so is a config without them."""
    options = actor_rollout_ref.get(KEY)
    if options is None:
        expected = f"a mapping under actor_rollout_ref.{KEY}"
        raise ConfigError(explain(f"actor_rollout_ref.{KEY}", got=None, expected=expected))
    known_names = {field.name for field in fields(EngineChannels)}
    unknown = sorted(set(options) - known_names)
    if unknown:
        raise ConfigError(explain(f"actor_rollout_ref.{KEY}", got=unknown, expected=sorted(known_names)))
    return EngineChannels(**{str(name): value for name, value in options.items()})
