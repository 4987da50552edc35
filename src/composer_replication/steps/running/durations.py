"""How long the parts of a run may take here, and what each guess is based on.

Counted in operations, at the speed that this machine multiplies with right now: a weight and a token take 2 to read
them, 6 to learn from them, 8 with a teacher beside it. Drawing is slower than reading, a token at a time.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from composer_replication.config import CrfConfig
from composer_replication.runs.evaluation import controls_among
from composer_replication.trainer.from_config.plan import Pace, TrainingPlan

if TYPE_CHECKING:
    from composer_replication.evaluation.evaluate import Measurable

_READ, _LEARN = 2, 6
_READINGS_OF_A_PROOF = 2  # with and without hints; what contexts share is read once
_SECONDS_A_DRAWN_TOKEN = 0.02  # what a step of drawing takes at least, however small the model is
_DRAWS_SLOWER = 6
_SHARE_DRAWN = 0.5  # of the most tokens of a call, those it has before it ends
_GOOD_TURNS_A_SESSION = 4


class TimeOfPart(NamedTuple):
    """A part of a run, how many seconds it may take, and why."""

    name: str
    seconds: float
    basis: str


def time_of_run(
    config: CrfConfig, judged: Measurable, training: TrainingPlan, made: Collection[str]
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
    parts += [TimeOfPart(name, training.seconds, again) for name in controls_among(made)]
    return [*parts, *([_evaluation(config, judged, training, pace)] if "evaluate" in made else [])]


def _warm_up(config: CrfConfig, training: TrainingPlan, pace: Pace) -> list[TimeOfPart]:
    warmup = config.train.warmup
    if warmup.mode == "off" or not training.counts.get("lm_ce"):
        return []
    steps = warmup.most if warmup.mode == "until" else warmup.steps
    why = {
        "auto": "at most, and none if the model knows the logs' tools",
        "until": "at most, until the held-out loss stops falling",
    }
    basis = f"{steps:,} steps{', ' + why[warmup.mode] if warmup.mode in why else ''}"
    return [TimeOfPart("warm-up", pace.seconds(_LEARN * pace.tokens_a_step * steps), basis)]


def _proof(config: CrfConfig, training: TrainingPlan, pace: Pace) -> list[TimeOfPart]:
    sites = training.counts.get("sites", 0)
    if not (config.train.proof.on and config.loss.alpha_sdpo and sites):
        return []
    basis = f"{sites:,} mistakes, each read with and without hints"
    return [TimeOfPart("hint proof", pace.seconds(_READ * pace.tokens * sites * _READINGS_OF_A_PROOF), basis)]


def _evaluation(config: CrfConfig, judged: Measurable, training: TrainingPlan, pace: Pace) -> TimeOfPart:
    """Each model reads mistakes, corrections and good turns and draws calls; two of them read sites for token gaps."""
    section, models = config.evaluation, 2 + (config.run.shuffles if config.run.control else 0)
    context = min(section.context, pace.tokens)
    good = min(section.good_turns, _GOOD_TURNS_A_SESSION * judged.sessions)
    gaps = min(section.token_gaps, judged.values + training.counts.get("sites", 0))
    turns = models * (judged.values * (2 + section.good_calls) + good) + 2 * 2 * gaps
    states = 2 * min(section.states, max(judged.values, 1)) if section.samples else 0
    token = max(_SECONDS_A_DRAWN_TOKEN, pace.seconds(_DRAWS_SLOWER * _READ * section.samples))
    drawing = models * states * section.new_tokens * _SHARE_DRAWN * token
    basis = f"{models} models read {turns:,} turns"
    if states:
        basis += f" and draw {section.samples} calls of up to {section.new_tokens:,} tokens at {states:,} states each"
    return TimeOfPart("evaluation", pace.seconds(_READ * context * (turns + models * states)) + drawing, basis)
