"""Whether another teacher is worth asking: exactly (its vote can still change the pair), or by a rule of thumb."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from composer_replication.actions.arguments import Tools
from composer_replication.actions.equality import ActionContext, action_key
from composer_replication.actions.reply import parse_reply
from composer_replication.errors import InputError
from composer_replication.teacher_replay.votes.consensus import can_still_change, voter_of
from composer_replication.teacher_replay.votes.context import StateContexts
from composer_replication.types import TeacherCallResult, TraceState


class StateVotes:
    """What the answers to a state so far decide, read as `extract_pairs` reads them: what it says the pairs will be.

    What an earlier state of a session has shown is not read again for a later one: states come in order, or are read
    ahead in order and then come in any.
    """

    def __init__(self, *, cwd: str | None = None, tools: Tools | None = None) -> None:
        self._contexts = StateContexts(cwd=cwd, tools=tools)
        self._ahead: dict[str, ActionContext] = {}

    def read_ahead(self, states: Sequence[TraceState]) -> None:
        """What each state of a session has shown, kept until that state is done with."""
        for state in states:
            self._ahead[state["state_id"]] = self._context(state)

    def is_done_with(self, state: TraceState) -> None:
        self._ahead.pop(state["state_id"], None)

    def agrees_with_student(self, state: TraceState, answer: TeacherCallResult) -> bool:
        """Whether a teacher did what the student did."""
        action = voter_of(answer).action
        if action is None:
            return False
        context = self._context(state)
        return action_key(action, context) == self._student_key(state, context)

    def can_change(
        self, state: TraceState, answers: Sequence[TeacherCallResult], *, threshold: int, num_teachers: int
    ) -> bool:
        """Whether the teachers not yet asked can change the pair; `answers` are those of the first ones in order."""
        actions = [voter_of(answer).action for answer in answers]
        if not any(actions):  # nobody has voted yet: whom the votes will be compared to does not matter
            return can_still_change([], "", threshold, num_teachers - len(answers))
        context = self._context(state)
        student = self._student_key(state, context)
        if student is None:
            return False  # what the student did cannot be read: no pair, whatever the teachers say
        votes = [None if action is None else action_key(action, context) for action in actions]
        return can_still_change(votes, student, threshold, num_teachers - len(answers))

    def _student_key(self, state: TraceState, context: ActionContext) -> str | None:
        try:
            return action_key(parse_reply(state["student_action"]), context)
        except InputError:
            return None

    def _context(self, state: TraceState) -> ActionContext:
        ahead = self._ahead.get(state["state_id"])
        return self._contexts.at(state) if ahead is None else ahead


class Gate:
    """Count what it saved, and for a rule of thumb the pairs it may have lost.

    A call is saved where the answers so far decide the pair, not where an earlier teacher could not be asked.
    """

    def __init__(self, kind: Literal["exact", "agree"], threshold: int, num_teachers: int, votes: StateVotes) -> None:
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
        if not worth and all(answer["error"] is None for answer in answers):
            self.counts["calls saved"] += self._num_teachers - len(answers)
        return worth


def gate_of(kind: Literal["exact", "agree"] | None, threshold: int, num_teachers: int) -> Gate | None:
    return None if kind is None else Gate(kind, threshold, num_teachers, StateVotes())
