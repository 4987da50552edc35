"""Whether another teacher is worth asking: exactly (its vote can still change the pair), or by a rule of thumb."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, Protocol

from composer_replication.types import TeacherCallResult, TraceState


class Votes(Protocol):
    """What `pairs` knows of a state's answers so far."""

    def read_ahead(self, states: Sequence[TraceState]) -> None: ...

    def is_done_with(self, state: TraceState) -> None: ...

    def agrees_with_student(self, state: TraceState, answer: TeacherCallResult) -> bool: ...

    def can_change(
        self, state: TraceState, answers: Sequence[TeacherCallResult], *, threshold: int, num_teachers: int
    ) -> bool: ...


class Gate:
    """Counts what it saved, and for a rule of thumb the pairs it may have lost."""

    def __init__(self, kind: Literal["exact", "agree"], threshold: int, num_teachers: int, votes: Votes) -> None:
        self._kind, self._threshold, self._num_teachers, self._votes = kind, threshold, num_teachers, votes
        self.counts: Counter[str] = Counter()

    def read_ahead(self, states: Sequence[TraceState]) -> None:
        """The states of a session in order, before they are asked about in any."""
        self._votes.read_ahead(states)

    def is_done_with(self, state: TraceState) -> None:
        self._votes.is_done_with(state)

    def is_worth_asking(self, state: TraceState, answers: Sequence[TeacherCallResult]) -> bool:
        can_change = self._votes.can_change(state, answers, threshold=self._threshold, num_teachers=self._num_teachers)
        worth = can_change
        if worth and self._kind == "agree" and len(answers) == 1:
            worth = not self._votes.agrees_with_student(state, answers[0])
            self.counts["pairs that may be lost"] += not worth
        if not worth:
            self.counts["calls saved"] += self._num_teachers - len(answers)
        return worth


def gate_of(kind: Literal["exact", "agree"] | None, threshold: int, num_teachers: int) -> Gate | None:
    if kind is None:
        return None
    from composer_replication.pairs.gate_votes import StateVotes

    return Gate(kind, threshold, num_teachers, StateVotes())
