"""SWE-agent `.traj` files: the history of messages where there is one, else the steps of the trajectory.

The format has no error flag: `is_error` is always None.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composer_replication.ingestion.reading.documents import read_lines_or_document
from composer_replication.ingestion.reading.json_text import as_utf8
from composer_replication.ingestion.reading.source import (
    TOO_DEEP,
    IngestReport,
    Record,
    SourceFile,
    as_text,
    image_count,
)
from composer_replication.ingestion.reading.turn_list import (
    TurnList,
    as_list,
    as_record,
    as_string,
    kept_fields,
    openai_calls,
    outline,
    stem,
    unique,
)
from composer_replication.types import Conversation, Origin, Provenance, Role, ToolCall, ToolResult, Turn

FORMAT = "sweagent"
# An action that was no function call is a line for the agent's shell.
SHELL = "bash"
_STEP_KEYS = frozenset({"action", "observation", "response", "thought", "state"})


def sniff(head: bytes, path: Path) -> bool:
    keys, head = outline(head), as_utf8(head)
    if head.lstrip()[:1] != b"{":
        return False
    steps = len({f"trajectory[].{key}" for key in _STEP_KEYS} & keys)
    history = "history[].role" in keys and bool({"history[].agent", "history[].message_type"} & keys)
    return steps >= 2 or history or (path.suffix == ".traj" and bool({"trajectory", "history", "attempts"} & keys))


def read(source: SourceFile, report: IngestReport) -> Iterator[Conversation]:
    taken: set[str] = set()
    for _, value in read_lines_or_document(source, report):
        document, name = as_record(value), stem(source.name)
        # An agent that retries keeps all attempts, and a copy of the best one at the top.
        attempts = [each for each in as_list(document.get("attempts")) if isinstance(each, dict)]
        for index, attempt in enumerate(attempts):
            yield from _conversation(attempt, unique(f"{name}:{index}", taken), source.name, report)
        if not attempts:
            yield from _conversation(document, unique(name, taken), source.name, report)


def _conversation(document: Record, id: str, file: str, report: IngestReport) -> Iterator[Conversation]:
    history, steps = document.get("history"), document.get("trajectory")
    if not isinstance(history, list) and not isinstance(steps, list):
        report.skip("neither history nor trajectory", file)
        return
    spoken = any(isinstance(each, dict) and each.get("role") == "assistant" for each in as_list(history))
    turns = TurnList(file, report)
    if not spoken and steps:
        _each(turns, as_list(history), _add_message, file, report)
        _each(turns, as_list(steps), _add_step, file, report)
    else:
        _each(turns, as_list(history), _add_message, file, report)
        _add_last_observation(turns, as_list(steps))
    if not turns.turns:
        return
    info = as_record(document.get("info"))
    extra = {key: info[key] for key in ("exit_status", "submission", "model_stats") if key in info}
    if environment := as_string(document.get("environment")):
        extra["environment"] = environment
    yield Conversation(
        id=id,
        format=FORMAT,
        turns=tuple(turns.turns),
        agent_version=as_string(info.get("swe_agent_version")),
        extra=kept_fields(extra, file, 0, report),
    )


def _each(turns: TurnList, items: list[Any], add: Any, file: str, report: IngestReport) -> None:
    for number, item in enumerate(items, start=1):
        if not isinstance(item, dict):
            report.skip("message is not an object", file, number)
            continue
        try:
            add(turns, item, number, file, report)
        except RecursionError:
            report.skip(TOO_DEEP, file, number)


def _add_message(turns: TurnList, message: Record, number: int, file: str, report: IngestReport) -> None:
    role, text = message.get("role"), as_text(message.get("content"))
    waiting = turns.open_calls()
    if role == "assistant":
        _add_assistant(turns, message, number, file, report)
    elif role == "tool" or (role == "user" and waiting and _is_observation(message)):
        # One observation answers all calls it names; without names it answers the first that waits.
        ids = [as_text(each) for each in as_list(message.get("tool_call_ids"))]
        ids = ids or [as_text(message.get("tool_call_id"))] if role == "tool" else ids or waiting[:1]
        for id in ids:
            result = ToolResult(call_id=id, text=text, is_error=None)
            turns.add_result(result, id=str(number), line=number, extra=image_count(message.get("content")))
    elif role in ("system", "user"):
        said: Role = "system" if role == "system" else "user"
        origin: Origin = _origin(message, "meta" if role == "system" else "human")
        where = Provenance(file=file, lines=(number,))
        images = image_count(message.get("content"))
        turns.add(Turn(id=str(number), role=said, origin=origin, text=text, provenance=where, extra=images))
    else:
        report.skip(f"unknown record type {role!r}", file, number)


def _is_observation(message: Record) -> bool:
    """Whether a user's message, while a call waits, is what came back: older versions do not say what a message is."""
    return message.get("message_type") in (None, "observation") and message.get("is_demo") is not True


def _add_last_observation(turns: TurnList, steps: list[Any]) -> None:
    """The history ends with the last action; what came back for it is in the last step alone."""
    waiting, last = turns.open_calls(), as_record(steps[-1]) if steps else {}
    calls = {call.id: call for turn in turns.turns[-1:] for call in turn.calls}
    if len(waiting) != 1 or waiting[0] not in calls or last.get("observation") is None:
        return
    asked = calls[waiting[0]].arguments.get("input")
    if asked is None or asked == as_text(last.get("action")):
        line = turns.turns[-1].provenance.lines[-1]
        result = ToolResult(call_id=waiting[0], text=as_text(last["observation"]), is_error=None)
        turns.add_result(result, id=f"observation-{line}", line=line)


def _add_assistant(turns: TurnList, message: Record, number: int, file: str, report: IngestReport) -> None:
    content, action = as_text(message.get("content")), as_text(message.get("action"))
    calls, text, extra = openai_calls(message, file, number, report), content, {}
    if not calls and action.strip():
        calls = (_shell(action, number),)
        text = as_text(message["thought"]) if isinstance(message.get("thought"), str) else content
        extra = {} if text == content else {"content": content}  # the message as the model wrote it
    blocks = [each for each in as_list(message.get("thinking_blocks")) if isinstance(each, dict)]
    turns.add(
        Turn(
            id=str(number),
            role="assistant",
            origin=_origin(message, "model"),
            text=text,
            thinking="\n".join(as_text(block.get("thinking")) for block in blocks),
            calls=calls,
            provenance=Provenance(file=file, lines=(number,)),
            extra=extra,
        )
    )


def _add_step(turns: TurnList, step: Record, number: int, file: str, report: IngestReport) -> None:
    if not _STEP_KEYS & step.keys():
        report.skip("unknown record type step", file, number)
        return
    response, action = as_text(step.get("response")), as_text(step.get("action"))
    text = as_text(step["thought"]) if isinstance(step.get("thought"), str) else response
    calls = (_shell(action, number),) if action.strip() else ()
    extra: dict[str, Any] = {} if response in ("", text) else {"content": response}
    if "state" in step:
        extra |= kept_fields({"state": step["state"]}, file, number, report)
    where = Provenance(file=file, lines=(number,))
    turn = Turn(
        id=f"step-{number}", role="assistant", origin="model", text=text, calls=calls, provenance=where, extra=extra
    )
    turns.add(turn)
    if step.get("observation") is None:
        return
    observation = as_text(step["observation"])
    if calls:
        result = ToolResult(call_id=calls[0].id, text=observation, is_error=None)
        turns.add_result(result, id=f"observation-{number}", line=number)
    else:  # the harness answered words that held no action
        turns.add(Turn(id=f"observation-{number}", role="user", origin="meta", text=observation, provenance=where))


def _shell(action: str, number: int) -> ToolCall:
    return ToolCall(id=f"action-{number}", name=SHELL, arguments={"input": action})


def _origin(message: Record, usual: Origin) -> Origin:
    """Demonstrations are shown to the model; nobody in this session wrote them."""
    return "copied" if message.get("is_demo") is True else usual
