"""How long the parts of a run may take here, and what each guess is based on.

Counted in operations, at the speed that this machine multiplies with right now: a weight and a token take 2 to read
them, 6 to learn from them, 8 with a teacher beside it. Drawing is slower than reading, a token at a time.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from composer_replication.config import CrfConfig
from composer_replication.steps.running.learnable import Learnable
from composer_replication.trainer.from_config.plan import Pace, TrainingPlan

_READ, _LEARN = 2, 6
_READINGS_OF_A_PROOF = 5  # no hint, its own, another's, and two of good calls
_SECONDS_A_DRAWN_TOKEN = 0.02  # what a step of drawing takes at least, however small the model is
_DRAWS_SLOWER = 6


class TimeOfPart(NamedTuple):
    """A part of a run, how many seconds it may take, and why."""

    name: str
    seconds: float
    basis: str


def time_of_run(
    config: CrfConfig, there: Learnable, training: TrainingPlan, made: Collection[str]
) -> list[TimeOfPart] | None:
    """The parts of the steps that are `made`; None where nobody can say, as with rollouts."""
    if training.pace is None or training.seconds is None:
        return None
    pace, parts = training.pace, list[TimeOfPart]()
    if "train" in made:
        parts += [*_warm_up(config, training, pace), *_proof(config, training, pace)]
    steps = f"{config.train.optimiser.steps:,} steps of about {pace.tokens_a_step:,.0f} tokens"
    parts += [TimeOfPart("training", training.seconds, steps)] if "train" in made else []
    again = "the same again, with shuffled hints and pairs"
    parts += [TimeOfPart("control", training.seconds, again)] if "control" in made else []
    return [*parts, *([_evaluation(config, there, training, pace)] if "evaluate" in made else [])]


def _warm_up(config: CrfConfig, training: TrainingPlan, pace: Pace) -> list[TimeOfPart]:
    warmup = config.train.warmup
    if warmup.mode == "off" or not training.counts.get("lm_ce"):
        return []
    steps = warmup.most if warmup.mode == "until" else warmup.steps
    why = {
        "auto": "at most, and none if the model knows the logs' tools",
        "until": "at most, until the held-out loss stops falling",
    }
    said = f"{steps:,} steps{', ' + why[warmup.mode] if warmup.mode in why else ''}"
    return [TimeOfPart("warm-up", pace.seconds(_LEARN * pace.tokens_a_step * steps), said)]


def _proof(config: CrfConfig, training: TrainingPlan, pace: Pace) -> list[TimeOfPart]:
    sites = training.counts.get("sites", 0)
    if not (config.train.proof.on and config.loss.alpha_sdpo and sites):
        return []
    basis = f"{sites:,} mistakes, each read with and without hints"
    return [TimeOfPart("hint proof", pace.seconds(_READ * pace.tokens * sites * _READINGS_OF_A_PROOF), basis)]


def _evaluation(config: CrfConfig, there: Learnable, training: TrainingPlan, pace: Pace) -> TimeOfPart:
    """Of each model: mistakes, corrections and good calls are read, token gaps with and without a hint, calls drawn."""
    section, models = config.evaluation, 3 if config.run.control else 2
    context = min(section.context, pace.tokens)
    gaps = min(section.token_gaps, there.test.mistakes + training.counts.get("sites", 0))
    read = there.test.mistakes * (2 + section.good_calls) + section.good_turns + 2 * gaps
    states = 2 * min(section.states, max(there.test.mistakes, 1)) if section.samples else 0
    drawn = section.new_tokens * section.samples
    token = max(_SECONDS_A_DRAWN_TOKEN, pace.seconds(_DRAWS_SLOWER * _READ * section.samples))
    seconds = pace.seconds(_READ * context * (read + states)) + states * section.new_tokens * token
    basis = f"{models} models read {read:,} turns"
    basis += f" and draw {section.samples} calls at {states:,} states, {drawn:,} tokens each at most" if states else ""
    return TimeOfPart("evaluation", models * seconds, basis)
