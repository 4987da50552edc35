"""Measure whether the policy reacts to what a hint says, and keep channel 2 off until it does.

Channel 2 distills the policy's behavior *after a hint* into its behavior without a hint. That helps only if the policy
reacts to what the hint says. Any text in front of a turn changes the turn a little, and a long or stern text changes it
more: Qwen2.5-Coder-0.5B reacted to unrelated hints about as strongly as to the right hints, and training on the right
hints cost it 22 points of success (docs/decisions/0025). So every erring turn is scored three times: without a hint,
after its own hint, and after a hint about another kind of error. Only the difference between the two hints counts.

    e(t, h)   = [log p(t | no hint) - log p(t | h)] / (tokens in t)        positive: the hint makes the error rarer
    d(A, B)   = mean over erring turns of kind A of  e(t, hint of kind A) - e(t, hint of kind B)
    effect    = sum of w(A, B) * [d(A, B) + d(B, A)] / 2  over pairs of kinds,  divided by the sum of w(A, B)
    w(A, B)   = 1 / (1 / n(A, B) + 1 / n(B, A))
    z         = effect / its standard error

    t         an erring turn in a rollout; its kind is the kind of its error, such as `file_not_found`
    n(A, B)   the number of turns of kind A that were scored with a hint of kind B
    nats      the unit of e, d and effect: natural-log probability per token

The hint check (`objective.hint_proof`) asks the same question about logged sessions, and tests it in another way. It
scores every site once, before training, also compares with good calls, and counts the sites that pass both comparisons.
The gate has to decide during training from the few erring turns of each step, so it estimates a mean effect instead.

Adding d(A, B) and d(B, A) makes the measurement fair: any effect that a hint of kind A has on every turn, regardless of
its meaning, enters the two terms with opposite signs and cancels.

    gate = HintGate(enabled=True, has_contrast=False)
    gate.add(comparisons)                  # after every micro-step, on every rank
    message = gate.after_step(step)        # after every optimizer step, on every rank; a string if the gate changed
    if gate.is_open: ...                   # channel 2 is on in the next step
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_replication.loss.linear import TeacherTerm
from composer_replication.loss.linear.logprobs import linear_row_stats
from composer_replication.trainer.objective.row_weighting import Contrast, TeacherRows

# ---- When is a model considered to react to hints? -------------------------------------------------------------------
# Every threshold is a pair: one value to open the gate and a lower value to keep it open. With a single threshold, a
# model close to it would switch channel 2 on and off from step to step.

_MIN_COMPARISONS = 20
"""With fewer comparisons the gate does not decide. A choice, not a measurement."""
_ENOUGH_COMPARISONS = 100
"""With this many comparisons, a missing effect closes the gate, and comparing every tenth step is enough."""
_MIN_PER_DIRECTION = 3
"""A pair of kinds needs this many comparisons in each direction; with fewer, its variance cannot be estimated."""

_Z_TO_OPEN, _Z_TO_STAY_OPEN = 2.5, 1.5
"""The test is repeated after every step, so the usual z = 2 is too lax: in simulations of a model that ignores hints,
one run in ten passed z = 2 at some point, one in thirty passed 2.5 (docs/decisions/0025)."""
_Z_TO_REJECT, _Z_TO_REJECT_WHEN_ENOUGH = 0.5, 1.0
"""Below this z-score the effect counts as absent; between the thresholds the data is inconclusive. A choice, not a
measurement."""

_MIN_RATIO, _MIN_RATIO_TO_STAY_OPEN = 5.0, 3.0
"""Minimum ratio of the right hint's effect to an unrelated hint's effect."""
_MIN_EFFECT_NATS, _MIN_EFFECT_NATS_TO_STAY_OPEN = 0.1, 0.05
"""Minimum decrease in an erring turn's log-probability per token by the right hint. Measured in eleven runs
(docs/decisions/0025): the embedded student, which learns from channel 2, has a ratio of at least 6.8 and 0.27 nats per
token; Qwen2.5-Coder 0.5B and 1.5B, which got worse, at most 3.2 and 0.084. The bounds were set after those runs, and no
other model has tested them."""

_STEPS_BETWEEN_COMPARISONS = 10
"""Scoring a turn after another hint costs a teacher pass, so a well-measured model is compared less often."""

# Names in metrics.jsonl. They must not change, since reports and checkpoints from earlier runs contain them.
COMPARED, DEVIATIONS = "hints/compared", "hints/deviations"
OWN_DROP, OTHER_DROP, GATE, CONTRAST = "hints/own_drop", "hints/other_drop", "hints/gate", "hints/contrast"


class HintGate:
    """A gate that decides after every step whether channel 2 is on in the next step.

    The gate starts closed. An earlier version started open and closed too late: the first steps of channel 2 had
    already done the damage (docs/decisions/0025). While the evidence is inconclusive, the gate does not change.

    Args:
        enabled: If false, channel 2 is always on and the gate only reports metrics.
        has_contrast: An unrelated hint's effect is subtracted from the teacher (`train.switches.contrast`). A
            significant difference between the hints is then enough. Without a contrast, the unspecific part of the
            effect would be learned too, so the right hint's effect must also be large (`HintEffect.is_large`).
        gather: Concatenates a list over all ranks, so that every rank makes the same decision.
    """

    def __init__(
        self,
        *,
        enabled: bool,
        has_contrast: bool,
        gather: Callable[[list[HintComparison]], list[HintComparison]] = list,
    ) -> None:
        self.enabled = enabled
        self.has_contrast = has_contrast
        self.estimator = _HintEffectEstimator()
        self.is_open = not enabled
        self._gather = gather
        self._pending: list[HintComparison] = []
        self._last_compared_step = -_STEPS_BETWEEN_COMPARISONS
        self._was_open_in_last_step = self.is_open
        self._last_announced: bool | None = None

    def wants_comparisons(self, step: int, *, is_training: bool = True) -> bool:
        """Return whether this step's rollouts should also be scored after a hint for another kind of error."""
        if self.has_contrast:
            # The loss itself needs the unrelated hint.
            return True
        is_due = (
            self.estimator.estimate().num_comparisons < _ENOUGH_COMPARISONS
            or step - self._last_compared_step >= _STEPS_BETWEEN_COMPARISONS
        )
        return is_training and is_due

    def add(self, comparisons: Sequence[HintComparison]) -> None:
        """Add this rank's comparisons from one micro-step. They count from the next call of `after_step`."""
        self._pending.extend(comparisons)

    def after_step(self, num_finished_steps: int, *, is_generation_complete: bool = True) -> str | None:
        """Decide whether channel 2 is on in the next step. Every rank must call this.

        Args:
            num_finished_steps: Optimizer steps finished so far.
            is_generation_complete: Whether all rollouts in the generation have been trained on. Until then comparisons
                are held back: a prompt's rollouts may be spread over several steps, and would count once per step.

        Returns:
            A message for the log if the gate has opened or closed since the last message, otherwise None.
        """
        if is_generation_complete:
            comparisons = self._gather(self._pending)
            self.estimator.add(comparisons)
            self._pending = []
            # A step without comparisons measured nothing, so a comparison is still due.
            if comparisons:
                self._last_compared_step = num_finished_steps

        effect = self.estimator.estimate()
        decision = self._decide(effect) if self.enabled else None
        self._was_open_in_last_step = self.is_open
        if decision is None:
            return None
        self.is_open = decision
        if decision == self._last_announced:
            return None
        self._last_announced = decision
        if decision:
            return f"channel 2 is on for rollouts from the next step: the model reacts to hints ({effect})"
        return (
            f"channel 2 is off for rollouts: the model does not react enough to hints ({effect}). Channel 2 "
            "is switched on once that changes. Set train.grpo.heed_gate = false to train on hints regardless"
        )

    def _decide(self, effect: HintEffect) -> bool | None:
        """Return True to open the gate, False to close it, or None to leave it unchanged."""
        if effect.num_comparisons < _MIN_COMPARISONS:
            return None
        is_significant = effect.is_still_significant if self.is_open else effect.is_significant
        is_large = True if self.has_contrast else effect.is_large
        if is_significant is False or is_large is False:
            return False
        # A gate that is open while 1.5 < z < 2.5 stays open, but that is not a new decision to announce.
        return True if effect.is_significant and is_large else None

    def metrics(self) -> dict[str, float]:
        """Return the metrics: the effect of hints measured so far, and whether channel 2 was on in the last step."""
        effect = self.estimator.estimate()
        metrics = {
            COMPARED: float(effect.num_comparisons),
            DEVIATIONS: effect.z_score,
            OWN_DROP: effect.own_hint_nats,
            OTHER_DROP: effect.other_hint_nats,
        }
        if self.has_contrast:
            metrics[CONTRAST] = 1.0
        if self.enabled:
            metrics[GATE] = float(self._was_open_in_last_step)
        return metrics

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint. The keys must not change, because earlier checkpoints use them too."""
        return {
            "heeding": self.estimator.state(),
            "waiting": [list(comparison) for comparison in self._pending],
            "last": self._last_compared_step,
            "gates": self.enabled,
            "is_open": self.is_open,
            "told": self._last_announced,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint, even one saved without a gate or by an older version."""
        self.estimator.load_state(state["heeding"])
        self._pending = [HintComparison(*row) for row in state["waiting"]]
        self._last_compared_step = int(state["last"])
        # Without a gate, channel 2 was on by default, not because of evidence, so start closed.
        was_gated = bool(state.get("gates"))
        self.is_open = not self.enabled or (was_gated and bool(state["is_open"]))
        self._last_announced = state["told"] if self.enabled and was_gated else None


class HintEffect(NamedTuple):
    """The effect of hints on erring turns, estimated from all comparisons in a run."""

    num_comparisons: float
    """The size of a balanced sample with the same precision: 97 comparisons in one direction and 3 in the other count
    as 11."""
    own_hint_nats: float
    """How much less likely an erring turn becomes after its own hint, in nats per token."""
    other_hint_nats: float
    z_score: float
    """The difference own - other divided by its standard error; 0 if unknown."""

    @property
    def is_significant(self) -> bool | None:
        """Whether a turn's own hint has a larger effect than an unrelated hint; None if the data is inconclusive."""
        if self.num_comparisons < _MIN_COMPARISONS:
            return None
        if self.z_score >= _Z_TO_OPEN:
            return True
        z_to_reject = _Z_TO_REJECT_WHEN_ENOUGH if self.num_comparisons >= _ENOUGH_COMPARISONS else _Z_TO_REJECT
        return False if self.z_score < z_to_reject else None

    @property
    def is_still_significant(self) -> bool:
        """Whether an effect that was significant before is still large enough to keep the gate open."""
        return self.z_score >= _Z_TO_STAY_OPEN

    @property
    def is_large(self) -> bool | None:
        """Whether the effect is mostly due to the hint's meaning; None if it suffices to keep the gate open but not
        to open it.
        """
        if self.own_hint_nats < max(_MIN_EFFECT_NATS_TO_STAY_OPEN, _MIN_RATIO_TO_STAY_OPEN * self.other_hint_nats):
            return False
        return True if self.own_hint_nats >= max(_MIN_EFFECT_NATS, _MIN_RATIO * self.other_hint_nats) else None

    def __str__(self) -> str:
        return (
            f"over {self.num_comparisons:,.0f} comparisons, an erring turn's own hint lowers its log-probability by "
            f"{self.own_hint_nats:+.3f} nats/token, an unrelated hint by {self.other_hint_nats:+.3f}; "
            f"z = {self.z_score:+.1f}"
        )


class HintComparison(NamedTuple):
    """The effects of two hints on an erring turn: its own hint, and a hint for another kind of error."""

    prompt: int
    """Number of the prompt from which the rollout was sampled."""
    own_kind: str
    other_kind: str
    own_hint_nats: float
    """e(turn, own hint) in the formula above."""
    other_hint_nats: float


class _HintEffectEstimator:
    """An estimator of the hints' effect from running sums over all comparisons in a run.

    Older comparisons have less weight, because the policy changes.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], _Sums] = {}

    def add(self, comparisons: Iterable[HintComparison]) -> None:
        """Add the comparisons from one generation, gathered from all ranks.

        Rollouts for the same prompt tend to contain the same error. Comparisons for one prompt and the same two kinds
        are averaged and count once: six copies of an error are not six independent observations.
        """
        by_prompt: dict[tuple[int, str, str], list[HintComparison]] = {}
        finite = (row for row in comparisons if math.isfinite(row.own_hint_nats) and math.isfinite(row.other_hint_nats))
        # Sorted, so that floating-point sums do not depend on how a step was split over ranks.
        for comparison in sorted(finite):
            by_prompt.setdefault(comparison[:3], []).append(comparison)
        for (_, own_kind, other_kind), group in by_prompt.items():
            own_nats = fmean(comparison.own_hint_nats for comparison in group)
            other_nats = fmean(comparison.other_hint_nats for comparison in group)
            sums = self._sums.get((own_kind, other_kind), _Sums())
            self._sums[own_kind, other_kind] = sums.plus(own_nats, other_nats)
        if self.estimate().num_comparisons > 2 * _ENOUGH_COMPARISONS:
            self._sums = {kinds: sums.halved() for kinds, sums in self._sums.items()}

    def estimate(self) -> HintEffect:
        """Return the effect over all comparisons so far, or zeros if no two kinds were compared in both directions."""
        pairs = self._pairs()
        if not pairs:
            return HintEffect(0, 0.0, 0.0, 0.0)
        weights = [1 / (1 / forward.num + 1 / backward.num) for forward, backward in pairs]
        total_weight = math.fsum(weights)

        def weighted_mean(values: list[float]) -> float:
            return math.fsum(weight * value for weight, value in zip(weights, values, strict=True)) / total_weight

        own_nats = weighted_mean([fmean(sums.own_nats / sums.num for sums in pair) for pair in pairs])
        other_nats = weighted_mean([fmean(sums.other_nats / sums.num for sums in pair) for pair in pairs])
        # A rare kind may have a small variance by chance, so use at least the pooled variance for every cell.
        pooled = self._pooled_variance()
        variance = math.fsum(
            weight**2 * math.fsum(max(pooled, sums.squared_error / (sums.num - 1)) / sums.num for sums in pair) / 4
            for weight, pair in zip(weights, pairs, strict=True)
        )
        z_score = (own_nats - other_nats) * total_weight / math.sqrt(variance) if variance else 0.0
        # With n/2 comparisons in each direction, a pair has weight n/4, hence the factor 4.
        return HintEffect(int(4 * total_weight), own_nats, other_nats, z_score)

    def _pairs(self) -> list[tuple[_Sums, _Sums]]:
        """Return the sums in both directions for each pair of kinds that has enough comparisons in each direction."""
        kinds_both_ways = sorted((a, b) for a, b in self._sums if a < b and (b, a) in self._sums)
        pairs = [(self._sums[a, b], self._sums[b, a]) for a, b in kinds_both_ways]
        return [pair for pair in pairs if min(sums.num for sums in pair) >= _MIN_PER_DIRECTION]

    def _pooled_variance(self) -> float:
        """Return the variance of comparisons within a pair of kinds, pooled over all pairs."""
        cells = [sums for sums in self._sums.values() if sums.num > 1]
        degrees_of_freedom = math.fsum(sums.num - 1 for sums in cells)
        return math.fsum(sums.squared_error for sums in cells) / degrees_of_freedom if degrees_of_freedom else 0.0

    def state(self) -> list[list[Any]]:
        """Return a row for each pair of kinds: the turn's kind, the other hint's kind, and the four sums."""
        return [[*kinds, *sums] for kinds, sums in self._sums.items()]

    def load_state(self, rows: Iterable[Iterable[Any]]) -> None:
        """Restore the rows that `state` returned."""
        self._sums = {(own_kind, other_kind): _Sums(*sums) for own_kind, other_kind, *sums in rows}


class _Sums(NamedTuple):
    """Sums over comparisons of turns of one kind with hints for another kind.

    To halve the weight of past comparisons, all sums are halved.
    """

    num: float = 0.0
    own_nats: float = 0.0
    other_nats: float = 0.0
    squared_differences: float = 0.0

    def plus(self, own_nats: float, other_nats: float) -> _Sums:
        return _Sums(
            self.num + 1.0,
            self.own_nats + own_nats,
            self.other_nats + other_nats,
            self.squared_differences + (own_nats - other_nats) ** 2,
        )

    def halved(self) -> _Sums:
        return _Sums(*(value / 2 for value in self))

    @property
    def squared_error(self) -> float:
        """The sum of squared deviations from the mean difference, clamped at 0 against rounding errors."""
        mean_difference = (self.own_nats - self.other_nats) / self.num
        return max(self.squared_differences - self.num * mean_difference**2, 0.0)


def describe_requirement() -> str:
    """Return a text for messages that states the effect required of a model if there is no contrast."""
    return f"{_MIN_RATIO:g} times the effect of an unrelated hint, and at least {_MIN_EFFECT_NATS:g} nats/token"


@torch.no_grad()
def hint_effects(
    teachers: Sequence[TeacherRows], contrast: Contrast, targets_N: Tensor, turn_position_N: Tensor
) -> Tensor:
    """Return the effects of each turn's own hint and of its unrelated hint, as a tensor (T, 2) in nats/token.

    A hint's effect is the mean over a turn's tokens of log p without the hint minus log p with it. Only turns with an
    unrelated hint are included, in order. A row whose `turn_position_N` is 0 begins a turn.
    """
    numbers_M = contrast.numbers_M
    if not numbers_M.numel():
        return torch.zeros(0, 2, device=targets_N.device)
    # The index of the turn that contains each row.
    turn_M = (turn_position_N[numbers_M] == 0).cumsum(0) - 1
    tokens_M = targets_N[numbers_M]
    own_teachers = [teacher._replace(rows_NH=teacher.rows_NH[numbers_M]) for teacher in teachers]
    logprobs = [_logprobs(group, tokens_M).float() for group in (contrast.unhinted, own_teachers, contrast.wrong)]
    effects_M2 = torch.stack([logprobs[0] - logprobs[1], logprobs[0] - logprobs[2]], dim=1)
    num_turns = int(turn_M[-1]) + 1
    length_T = torch.bincount(turn_M, minlength=num_turns)
    return effects_M2.new_zeros(num_turns, 2).index_add_(0, turn_M, effects_M2) / length_T[:, None]


def _logprobs(teachers: Sequence[TeacherRows], tokens_M: Tensor) -> Tensor:
    """Return the log-prob of each token under the teacher's logits, which are a sum over the teacher's models."""
    terms = [TeacherTerm(teacher.rows_NH, teacher.head, teacher.coefficient) for teacher in teachers]
    first = teachers[0]
    return linear_row_stats(first.rows_NH, first.head, terms, tokens_M).teacher_logprobs
