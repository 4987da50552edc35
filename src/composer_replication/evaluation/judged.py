"""Drawn actions as rows: read as calls, judged by what the session had shown, compared with what was done and right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from composer_replication.actions.equality import ActionContext, action_kind, only_looks_at, same_action
from composer_replication.actions.reply import parse_reply
from composer_replication.errors import InputError
from composer_replication.evaluation.figures import Value
from composer_replication.evaluation.sampling import Drawn, State
from composer_replication.judge.earlier import EarlierSessions
from composer_replication.judge.judge import Judge
from composer_replication.judge.verdict import Judgement
from composer_replication.judge.walk import judged_calls
from composer_replication.runs.tools import ToolTable
from composer_replication.types import Action, Turn

if TYPE_CHECKING:
    from composer_replication.evaluation.held_out import HeldOut, HeldOutSession

Draws = Mapping[str, Sequence[Sequence[Drawn]]]
"""By arm, for each state its draws."""
_CALL_MARKS = ("<tool_call>", "[TOOL_USE]", "<function", "<|python_tag|>")
_WORST_FIRST = ("fails", "risky", "unknown", "ok")
UNPARSED, CUT_OFF, NO_CALL = "unparsed", "cut_off", "no_call"
_UNREADABLE = (UNPARSED, CUT_OFF)
"""A harness cannot run such a call: a model that draws nothing else must not look as if nothing of it failed."""


class _Read(NamedTuple):
    """What a draw says, as far as it can be read; `rule` where it is no call that could be judged."""

    action: Action | None
    rule: str


def sampled_rows(
    held: HeldOut,
    tools: ToolTable,
    states: Sequence[State],
    draws: Draws,
    earlier: EarlierSessions | None = None,
) -> list[dict[str, Any]]:
    """One row a draw, in the order of states, arms and draws; the sessions are walked through once.

    `earlier` is what sessions that had ended when a held-out one began knew of the project. The judge learns nothing,
    so they may be of any side; what came later it does not hear.
    """
    numbers: dict[tuple[str, str], list[int]] = {}
    for number, state in enumerate(states):
        numbers.setdefault((state.conversation_id, state.turn_id), []).append(number)
    conversation_ids = {conversation for conversation, _ in numbers}
    rows: dict[int, list[dict[str, Any]]] = {}
    for session in held.sessions:
        if session.conversation.id not in conversation_ids:
            continue
        for turn, judge in _moments(session, earlier):
            for number in numbers.get((session.conversation.id, turn.id), ()):
                moment = _Moment(session, tools, states[number], turn, judge)
                rows[number] = [
                    moment.row(arm, at, drawn) for arm, every in draws.items() for at, drawn in enumerate(every[number])
                ]
    return [row for number in sorted(rows) for row in rows[number]]


def _moments(session: HeldOutSession, earlier: EarlierSessions | None) -> Iterator[tuple[Turn, Judge]]:
    """Each turn with calls, and what the judge knew when the model decided on them."""
    failures = {site.call_id: site for site, _ in session.logged.sites}
    project, turn_id = None if earlier is None else earlier.before(session.conversation), ""
    for judged in judged_calls(session.conversation, sites=failures, project=project):
        if judged.turn.id != turn_id:
            turn_id = judged.turn.id
            yield judged.turn, judged.judge


class _Moment:
    """One state, with all that a drawn action is compared with."""

    def __init__(self, session: HeldOutSession, tools: ToolTable, state: State, turn: Turn, judge: Judge) -> None:
        conversation = session.conversation
        self._state, self._turn, self._judge = state, turn, judge
        self._schemas = tools.schemas(conversation.format)
        self._context = ActionContext(
            cwd=conversation.cwd,
            tools=self._schemas,
            files=judge.state.files,
            shell_moved=judge.state.shell_moved,
        )
        right = session.logged.corrections.get(state.site_id) if state.sort == "erring" else None
        self._right = None if right is None else Action(text="", calls=(right,))

    def row(self, arm: str, at: int, drawn: Drawn) -> dict[str, Any]:
        action, rule = _read(drawn)
        calls = () if action is None else action.calls
        is_known = all(call.name in self._schemas for call in calls) if self._schemas else True
        judgement = self._said(action, rule, is_known)
        state = self._state
        return {
            "id": f"{state.id}:{arm}:{at}",
            "conversation_id": state.conversation_id,
            "session": state.session,
            "turn": state.turn,
            "turn_id": state.turn_id,
            "site_id": state.site_id,
            "state": state.sort,
            "arm": arm,
            "sample": at,
            "text": drawn.text,
            "action": None if action is None else _plain(action),
            "tool": action_kind(action) if calls and action is not None else None,
            "parsed": action is not None,
            "known_tool": is_known,
            "only_looks": bool(calls) and all(map(only_looks_at, calls)),
            "verdict": judgement.says,
            "rule": judgement.rule,
            "kind": judgement.kind or None,
            "same_as_logged": action is not None and same_action(action, self._turn.action, self._context),
            "same_as_correction": self._is_right(action),
            "tokens": drawn.num_tokens,
        }

    def _said(self, action: Action | None, rule: str, is_known: bool) -> Judgement:
        if action is None or not action.calls:
            return Judgement("unknown", rule)
        if not is_known:
            return Judgement("fails", "unknown_tool", "tool_not_found", "no tool of this name is there")
        verdicts = [self._judge.verdict(call) for call in action.calls]
        return min(verdicts, key=lambda verdict: _WORST_FIRST.index(verdict.says))

    def _is_right(self, action: Action | None) -> bool | None:
        if self._right is None:
            return None
        return action is not None and same_action(action, self._right, self._context)


def _read(drawn: Drawn) -> _Read:
    """A text with the mark of a call and no call that can be read is broken, or was cut off."""
    try:
        action = parse_reply(drawn.text)
    except InputError:
        return _Read(None, UNPARSED)
    if action.calls:
        return _Read(action, "")
    if any(mark in drawn.text for mark in _CALL_MARKS):
        return _Read(None, UNPARSED if drawn.has_ended else CUT_OFF)
    return _Read(action, NO_CALL)


def _plain(action: Action) -> dict[str, Any]:
    calls = [
        {"name": call.name, "arguments": dict(call.arguments), "raw_arguments": call.raw_arguments}
        for call in action.calls
    ]
    return {"text": action.text, "calls": calls}


# ---- figures


def _is(*rules: str) -> Any:
    return lambda row: 1000.0 * (row["rule"] in rules)


_MEASURES: Mapping[str, Any] = {
    "sampled_failures": lambda row: 1000.0 * (row["verdict"] == "fails" or row["rule"] in _UNREADABLE),
    "sampled_unparsed": _is(*_UNREADABLE),
    "sampled_no_call": _is(NO_CALL),
    "sampled_unknown_tool": _is("unknown_tool"),
    "sampled_agreement": lambda row: 1000.0 * row["same_as_logged"] if row["state"] == "good" else None,
    "sampled_corrected": lambda row: None if row["same_as_correction"] is None else 1000.0 * row["same_as_correction"],
    "sampled_looks": lambda row: 1000.0 * row["only_looks"],
    "sampled_length": lambda row: float(row["tokens"]),
}


def sampled_values(rows: Sequence[Mapping[str, Any]], states: Sequence[State]) -> dict[str, list[Value]]:
    """By the figure's name a value a state: the mean of its draws, less that of the draws before."""
    kinds = {(state.conversation_id, state.turn_id, state.sort): state.kind for state in states}
    by_state: dict[tuple[str, str, str], dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        state_key = (row["conversation_id"], row["turn_id"], row["state"])
        by_state.setdefault(state_key, {}).setdefault(row["arm"], []).append(row)
    values: dict[str, list[Value]] = {name: [] for name in _MEASURES}
    for state_key, arms in by_state.items():
        session = arms["before"][0]["session"]
        for name, measure in _MEASURES.items():
            means = {arm: _mean(measure, several) for arm, several in arms.items()}
            if all(mean is not None for mean in means.values()):
                change = {arm: mean - means["before"] for arm, mean in means.items() if arm != "before"}
                values[name].append(Value(session, kinds[state_key], change))
    return values


def _mean(measure: Any, rows: Sequence[Mapping[str, Any]]) -> Any:
    values = [value for value in map(measure, rows) if value is not None]
    return fmean(values) if values else None


def sampled_summary(
    rows: Sequence[Mapping[str, Any]], states: Sequence[State], draws: Draws, section: Any
) -> dict[str, Any]:
    """The record's `sampled`: of each arm its means, what the judge said, and its mix of calls."""
    by_arm = {arm: _of_arm([row for row in rows if row["arm"] == arm]) for arm in draws}
    number = section.samples if section.temperature else min(1, section.samples)
    return {"n_states": len(states), "n_samples": number, "temperature": section.temperature, "by_arm": by_arm}


def _of_arm(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    means = {name.removeprefix("sampled_"): _mean(measure, rows) for name, measure in _MEASURES.items()}
    tools = Counter(row["tool"] or row["rule"] for row in rows)
    return {
        **means,
        "cut_off": _mean(_is(CUT_OFF), rows),
        "verdicts": dict(sorted(Counter(row["verdict"] for row in rows).items())),
        "calls": dict(sorted(tools.items(), key=lambda entry: (-entry[1], entry[0]))),
        "rows": len(rows),
    }
