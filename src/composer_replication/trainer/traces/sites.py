"""Marked errors of a trace: which assistant turn made them, of what kind, and what a hint may be made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from composer_replication.batch.trace_messages import caller_of
from composer_replication.errors import InputError, explain
from composer_replication.hint_generator import HINT_TEMPLATES
from composer_replication.hint_generator.parameters import is_json_error
from composer_replication.sites import KINDS, classify
from composer_replication.types import ToolCall, ToolResult, Turn

_SAYS_LITTLE = ("other", "nonzero_exit")


class MarkedError(NamedTuple):
    """The assistant turn that erred, by number, and what the hint generator is asked with."""

    turn: int
    kind: str
    meta: Mapping[str, Any]


def marked_errors(
    messages: Sequence[Mapping[str, Any]], turns: Sequence[Turn], counts: Counter[str]
) -> Iterator[MarkedError]:
    """Every message with a `tool_error`, at the assistant turn it is about; what is about none is counted.

    The kind is `error_meta["error_kind"]`. Without it, `tool_error` itself where that names a kind, or else what the
    rules of `sites` make of the call and its result (arguments that are no JSON: json_decode; other arguments that do
    not fit: type_error), and runtime_error where no rule knows. Without an `error_meta`, the generator gets what the
    trace shows: tool_name and error_message.
    """
    for index, message in enumerate(messages):
        error = message.get("tool_error")
        if not error:
            continue
        role = turns[index].role
        caller = index if role == "assistant" else caller_of(turns, index) if role == "tool" else None
        if caller is None:
            counts["error_without_assistant_turn"] += 1
            continue
        call, result = _call_and_result(turns, caller, index)
        text = result.text if result is not None else error if isinstance(error, str) else ""
        meta = _meta_of(message, turns[index].id)
        kind = meta.get("error_kind")
        if kind is None:
            kind = error if isinstance(error, str) and (error in KINDS or error in HINT_TEMPLATES) else None
        if kind is None:
            kind = _kind_of(call, text)
        if not isinstance(kind, str):
            where = f"error_kind of {turns[index].id}"
            raise InputError(explain(where, got=type(kind).__name__, expected="the name of a kind"))
        yield MarkedError(caller, kind, meta or _shown(call, text))


def _meta_of(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    meta = message.get("error_meta")
    if meta is not None and not isinstance(meta, Mapping):
        raise InputError(explain(f"error_meta of {where}", got=type(meta).__name__, expected="a mapping"))
    return dict(cast("Mapping[str, Any]", meta or {}))


def _call_and_result(turns: Sequence[Turn], caller: int, marked: int) -> tuple[ToolCall | None, ToolResult | None]:
    """The call that failed and what came back; an assistant turn's own mark is about its first call."""
    calls = turns[caller].calls
    if marked != caller:
        result = turns[marked].results[0]
        return next((call for call in calls if call.id == result.call_id), None), result
    call = calls[0] if calls else None
    after = (result for turn in turns[caller + 1 :] for result in turn.results)
    return call, next((result for result in after if call is not None and result.call_id == call.id), None)


def _kind_of(call: ToolCall | None, text: str) -> str:
    kind = classify(call.name if call else "", call.arguments if call else {}, text, True).kind
    is_json = is_json_error(call, text)
    if kind == "input_validation":
        return "json_decode" if is_json else "type_error"
    if kind in _SAYS_LITTLE and call is not None and call.raw_arguments is not None:
        return "json_decode"
    return "runtime_error" if kind == "other" else kind


def _shown(call: ToolCall | None, text: str) -> dict[str, Any]:
    facts = {"tool_name": call.name if call else "", "error_message": text}
    return {key: value for key, value in facts.items() if value}
