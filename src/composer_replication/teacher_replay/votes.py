"""Count teachers' votes for equal actions, and decide when further votes cannot change the preference pair.

The class of equal actions with the most votes wins if it reaches the threshold; a tie is no consensus. A teacher that
failed has no vote. The chosen text of the pair comes from the first teacher of the winning class, in the order of
asking. Once a class is certain to win, one of its teachers has already answered and precedes all teachers that have not
been asked yet, so the chosen text cannot change either.
"""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

from composer_replication.action_text import parse_reply, text_of
from composer_replication.errors import InputError, explain
from composer_replication.messages import content_text, message_calls
from composer_replication.sites.actions.equality import ActionContext, Tools, tool_schemas
from composer_replication.sites.actions.session_state import SessionState
from composer_replication.sites.actions.tools import normal_path
from composer_replication.sites.classify import classify
from composer_replication.types import Action, TeacherCallResult, ToolCall, TraceState


class _TeacherVote(NamedTuple):
    """The action that a teacher voted for. If it is None, `reason` says why: "error", "unreadable" or "empty"."""

    action: Action | None
    reason: str = ""


def is_unsent(result: TeacherCallResult) -> bool:
    """Whether a call was never sent, because of the cap, a stop, or a secret in the request."""
    return result["error"] is not None and result.get("attempts") == 0


def read_vote(result: TeacherCallResult) -> _TeacherVote:
    """Read a teacher's action from its structured message, or from its text if there is none."""
    if result["error"] is not None:
        return _TeacherVote(None, "error")
    message = cast("Mapping[str, Any]", result).get("message")
    try:
        action = parse_reply(message if isinstance(message, Mapping) else result["response_text"] or "")
    except InputError:
        return _TeacherVote(None, "unreadable")
    return _TeacherVote(action) if action.calls or action.text.strip() else _TeacherVote(None, "empty")


def answer_text(result: TeacherCallResult, action: Action) -> str:
    """Return a teacher's text, followed by calls that only its structured message contains."""
    text = result["response_text"] or ""
    if not action.calls or len(parse_reply(text).calls) == len(action.calls):
        return text or action.text
    return text_of(action)


Reason = Literal["consensus", "tie", "below_threshold", "no_votes"]


@dataclass(frozen=True, slots=True)
class _VoteClass:
    """The teachers that took equal actions, in the order in which they were asked."""

    key: str
    teachers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Vote:
    """The result of a vote. `classes` are ordered by number of votes, then by the order of asking; `winner` is a
    class, or None if there is no consensus.
    """

    winner: _VoteClass | None
    reason: Reason
    classes: tuple[_VoteClass, ...]

    @property
    def num_votes(self) -> int:
        return sum(len(vote_class.teachers) for vote_class in self.classes)

    @property
    def num_agreeing_pairs(self) -> int:
        """The number of pairs of teachers that agree, out of num_votes * (num_votes - 1) / 2."""
        return sum(len(vote_class.teachers) * (len(vote_class.teachers) - 1) // 2 for vote_class in self.classes)


def count_votes(keys_by_teacher: Mapping[str, str | None], threshold: int = 2) -> Vote:
    """Count votes by the key of each teacher's action; the key is None for a teacher that failed."""
    _check_threshold(threshold)
    teachers: dict[str, list[str]] = {}
    for teacher, key in keys_by_teacher.items():
        if key is not None:
            teachers.setdefault(key, []).append(teacher)
    ordered = sorted(teachers.items(), key=lambda entry: -len(entry[1]))
    classes = tuple(_VoteClass(key, tuple(names)) for key, names in ordered)
    if not ordered:
        return Vote(None, "no_votes", ())
    top = len(ordered[0][1])
    if top < threshold:
        return Vote(None, "below_threshold", classes)
    if len(ordered) > 1 and len(ordered[1][1]) == top:
        return Vote(None, "tie", classes)
    return Vote(classes[0], "consensus", classes)


def can_outcome_change(
    votes: Iterable[str | None],
    student: str,
    threshold: int,
    num_remaining: int,
    *,
    count_matters: bool = False,
) -> bool:
    """Whether the remaining teachers' answers or failures could still change the preference pair.

    `votes` are the action keys of the teachers asked so far (None: failed), and `student` is the key of the student's
    action. Two pairs are equal if neither exists or both choose the same class; with `count_matters`, the number of
    agreeing teachers must be equal, too.
    """
    _check_threshold(threshold)
    counts = Counter(key for key in votes if key is not None)
    ordered = counts.most_common(2)
    top = ordered[0][1] if ordered else 0
    second = ordered[1][1] if len(ordered) > 1 else 0
    if num_remaining <= 0:
        return False
    if top >= threshold and top > second and ordered[0][0] != student:
        # There is a pair. A class that draws level undoes it, even one without votes so far.
        return count_matters or second + num_remaining >= top
    # There is no pair. That changes if a class other than the student's reaches the threshold and beats all others.
    new_class = num_remaining >= threshold and num_remaining > top
    return new_class or any(
        number + num_remaining >= threshold and number + num_remaining > _highest_but(key, counts)
        for key, number in counts.items()
        if key != student
    )


def _highest_but(key: str, counts: Counter[str]) -> int:
    return max((number for other_key, number in counts.items() if other_key != key), default=0)


def _check_threshold(threshold: int) -> None:
    if type(threshold) is not int or threshold < 1:
        raise InputError(explain("agreement threshold", got=repr(threshold), expected="an integer of at least 1"))


# ---- the context of a state: the folder, tool schemas, and files that the messages before it have shown

_MAX_SESSIONS = 64  # the number of sessions that are asked about concurrently


class _SessionContext:
    """The context of the successive states of one session; each message is read only once."""

    def __init__(self, *, cwd: str | None = None, tools: Tools | None = None) -> None:
        self._cwd = normal_path(cwd, None) if cwd else None
        self._tools = tool_schemas(tools)
        self._read: list[Mapping[str, Any]] = []
        self._state_builder = _SessionStateBuilder(self._cwd)

    def at(self, messages: Sequence[Mapping[str, Any]]) -> ActionContext:
        num_read = len(self._read)
        if num_read > len(messages) or list(messages[:num_read]) != self._read:
            self._read, self._state_builder, num_read = [], _SessionStateBuilder(self._cwd), 0
        for message in messages[num_read:]:
            self._state_builder.add(message)
        self._read += messages[num_read:]
        state = self._state_builder.state
        return ActionContext(
            cwd=self._cwd, tools=self._tools, files=dict(state.files), may_have_left_cwd=state.may_have_left_cwd
        )


class StateContexts:
    """The contexts of the states of many sessions; messages that an earlier state contained are not read again."""

    def __init__(self, *, cwd: str | None = None, tools: Tools | None = None) -> None:
        self._cwd, self._tools = cwd, tools
        self._sessions: OrderedDict[str, tuple[object, object, _SessionContext]] = OrderedDict()

    def at(self, state: TraceState) -> ActionContext:
        state_fields = cast("Mapping[str, Any]", state)
        cwd, tools = state_fields.get("cwd", self._cwd), state_fields.get("tools", self._tools)
        session = state["state_id"].rpartition("::")[0]
        held = self._sessions.pop(session, None)
        if held is None or held[0] != cwd or held[1] != tools:
            held = (cwd, tools, _SessionContext(cwd=cwd, tools=tools))
        self._sessions[session] = held
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return held[2].at(state["messages"])


class _SessionStateBuilder:
    """Updates a session's state from its messages."""

    def __init__(self, cwd: str | None) -> None:
        self.state = SessionState(cwd)
        self._calls: dict[str, ToolCall] = {}

    def add(self, message: Mapping[str, Any]) -> None:
        role, content = message.get("role"), message.get("content")
        if role == "assistant":
            with contextlib.suppress(InputError):  # a turn that cannot be parsed changes nothing
                self._calls |= {call.id: call for call in message_calls(message, "a turn")}
        elif role in ("tool", "function"):
            self._result(message.get("tool_call_id"), content, is_error=None)
        elif isinstance(content, list):
            for block in cast("list[object]", content):
                if isinstance(block, Mapping) and block.get("type") == "tool_result":
                    flag = block.get("is_error")
                    self._result(block.get("tool_use_id"), block.get("content"), is_error=True if flag else None)
        if role == "user":
            self.state.add_message(content_text(content))

    def _result(self, call_id: object, content: object, *, is_error: bool | None) -> None:
        call = self._calls.get(call_id) if isinstance(call_id, str) else None
        if call is not None:
            text = content_text(content)
            failed = classify(call.name, call.arguments, text, is_error).is_failure
            self.state.add(call, text, failed=failed)
