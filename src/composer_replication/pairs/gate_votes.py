"""What the answers to a state so far decide, for whoever asks whether another teacher is worth the money."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, cast

from composer_replication.errors import InputError
from composer_replication.pairs.answers import voter_of
from composer_replication.pairs.consensus import can_still_change
from composer_replication.pairs.context import ActionContext, ContextAlong, Tools
from composer_replication.pairs.equality import action_key
from composer_replication.pairs.parse_reply import parse_reply
from composer_replication.types import TeacherCallResult, TraceState

_MAX_SESSIONS = 64  # as many as are asked about at one time


class StateVotes:
    """Reads states and answers as `extract_pairs` does, so that what it decides is what the pairs will be.

    What an earlier state of a session has shown is not read again for a later one: states come in order, or are read
    ahead in order and then come in any.
    """

    def __init__(self, *, cwd: str | None = None, tools: Tools | None = None) -> None:
        self._cwd, self._tools = cwd, tools
        self._sessions: OrderedDict[str, tuple[object, object, ContextAlong]] = OrderedDict()
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
        if ahead is not None:
            return ahead
        own = cast("Mapping[str, Any]", state)
        cwd, tools = own.get("cwd", self._cwd), own.get("tools", self._tools)
        session = state["state_id"].rpartition("::")[0]
        held = self._sessions.pop(session, None)
        if held is None or held[0] != cwd or held[1] != tools:
            held = (cwd, tools, ContextAlong(cwd=cwd, tools=tools))
        self._sessions[session] = held
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return held[2].at(state["messages"])
