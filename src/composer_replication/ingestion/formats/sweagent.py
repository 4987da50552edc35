"""Read SWE-agent `.traj` files: the message history if there is one, otherwise the steps of the trajectory.

The format has no error flag, so `is_error` is always None.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composer_replication.ingestion.json_documents import read_lines_or_document
from composer_replication.ingestion.source_files import IngestReport, Record, SourceFile, as_text, as_utf8, image_count
from composer_replication.ingestion.turn_list import (
    TurnList,
    as_list,
    as_record,
    as_string,
    key_paths,
    make_unique,
    session_name,
)
from composer_replication.types import Conversation, ToolCall

FORMAT = "sweagent"
# The tool name for an action that was a line for the agent's shell instead of a function call.
SHELL = "bash"
_STEP_KEYS = frozenset({"action", "observation", "response", "thought", "state"})


def sniff(head: bytes, path: Path) -> bool:
    """Return whether `head`, the first bytes of a file, is a document with steps or a history in this format."""
    keys, head = key_paths(head), as_utf8(head)
    if head.lstrip()[:1] != b"{":
        return False
    # Two keys are enough: not every step has all of them.
    steps = len({f"trajectory[].{key}" for key in _STEP_KEYS} & keys)
    history = "history[].role" in keys and bool({"history[].agent", "history[].message_type"} & keys)
    return steps >= 2 or history or (path.suffix == ".traj" and bool({"trajectory", "history", "attempts"} & keys))


def read(source: SourceFile, report: IngestReport) -> Iterator[Conversation]:
    """Yield the conversations in the file."""
    taken_ids: set[str] = set()
    for _, value in read_lines_or_document(source, report):
        document, name = as_record(value), session_name(source.name)
        # A retrying agent stores all attempts, and repeats the best attempt at the top level.
        attempts = [attempt for attempt in as_list(document.get("attempts")) if isinstance(attempt, dict)]
        for index, attempt in enumerate(attempts):
            yield from _conversation(attempt, make_unique(f"{name}:{index}", taken_ids), source.name, report)
        if not attempts:
            yield from _conversation(document, make_unique(name, taken_ids), source.name, report)


def _conversation(document: Record, id: str, file: str, report: IngestReport) -> Iterator[Conversation]:
    history, steps = document.get("history"), document.get("trajectory")
    if not isinstance(history, list) and not isinstance(steps, list):
        report.skip("neither history nor trajectory", file)
        return
    has_answer = any(isinstance(message, dict) and message.get("role") == "assistant" for message in as_list(history))
    turns = TurnList(file, report)
    turns.for_each_object(as_list(history), lambda message, number: _add_message(turns, message, number))
    # A history without an answer is only the prompt; then the steps are the conversation.
    if not has_answer and steps:
        turns.for_each_object(as_list(steps), lambda step, number: _add_step(turns, step, number))
    else:
        _add_last_observation(turns, as_list(steps))
    info = as_record(document.get("info"))
    extra = {key: info[key] for key in ("exit_status", "submission", "model_stats") if key in info}
    if environment := as_string(document.get("environment")):
        extra["environment"] = environment
    version = as_string(info.get("swe_agent_version"))
    yield from turns.conversation(id, FORMAT, agent_version=version, extra=turns.storable_fields(extra))


def _add_message(turns: TurnList, message: Record, number: int) -> None:
    role, content, id = message.get("role"), message.get("content"), str(number)
    waiting = [call.id for call in turns.unanswered_calls()]
    # Demonstrations were shown to the model, but come from another session.
    fields: Record = {"origin": "copied"} if message.get("is_demo") is True else {}
    if role == "tool" or (role == "user" and waiting and _is_observation(message)):
        # An observation answers all calls whose ids it lists, or else the first call without a result.
        ids = [as_text(call_id) for call_id in as_list(message.get("tool_call_ids"))]
        ids = ids or [as_text(message.get("tool_call_id"))] if role == "tool" else ids or waiting[:1]
        for call_id in ids:
            turns.add_result(call_id, as_text(content), None, id=id, line=number, extra=image_count(content))
        return
    fields |= _answer_fields(turns, message, number) if role == "assistant" else {}
    if not turns.add_message(message, id, number, **fields):
        turns.skip(f"unknown record type {role!r}", number)


def _answer_fields(turns: TurnList, message: Record, number: int) -> Record:
    """Return those fields of an assistant turn that are stored under keys specific to this format."""
    content, action = as_text(message.get("content")), as_text(message.get("action"))
    calls, text, extra = turns.read_calls(message, number), content, {}
    if not calls and action.strip():
        calls = (_shell(action, number),)
        text = as_text(message["thought"]) if isinstance(message.get("thought"), str) else content
        extra = {} if text == content else {"content": content}  # the message as the model wrote it
    blocks = [block for block in as_list(message.get("thinking_blocks")) if isinstance(block, dict)]
    thinking = "\n".join(as_text(block.get("thinking")) for block in blocks)
    return {"text": text, "thinking": thinking, "calls": calls, "extra": extra}


def _is_observation(message: Record) -> bool:
    """Return whether a user message is the result of a waiting call; older versions do not mark results."""
    return message.get("message_type") in (None, "observation") and message.get("is_demo") is not True


def _add_last_observation(turns: TurnList, steps: list[Any]) -> None:
    """Add the result of the last action from the last step, because the message history ends with the action."""
    waiting, last = turns.unanswered_calls(), as_record(steps[-1]) if steps else {}
    if len(waiting) != 1 or waiting[0] not in turns.turns[-1].calls or last.get("observation") is None:
        return
    call_input = waiting[0].arguments.get("input")
    if call_input is None or call_input == as_text(last.get("action")):
        line = turns.turns[-1].provenance.lines[-1]
        turns.add_result(waiting[0].id, as_text(last["observation"]), None, id=f"observation-{line}", line=line)


def _add_step(turns: TurnList, step: Record, number: int) -> None:
    """Add turns for the model's answer in a step and for its observation."""
    if not _STEP_KEYS & step.keys():
        turns.skip("unknown record type step", number)
        return
    response, action = as_text(step.get("response")), as_text(step.get("action"))
    text = as_text(step["thought"]) if isinstance(step.get("thought"), str) else response
    calls = (_shell(action, number),) if action.strip() else ()
    extra: dict[str, Any] = {} if response in ("", text) else {"content": response}
    extra |= turns.storable_fields({"state": step["state"]} if "state" in step else {}, number)
    turns.add_turn(f"step-{number}", "assistant", "model", number, text, calls=calls, extra=extra)
    observation, id = step.get("observation"), f"observation-{number}"
    if observation is None:
        return
    if calls:
        turns.add_result(calls[0].id, as_text(observation), None, id=id, line=number)
    else:  # the harness replied to a text without an action
        turns.add_turn(id, "user", "meta", number, as_text(observation))


def _shell(action: str, number: int) -> ToolCall:
    return ToolCall(id=f"action-{number}", name=SHELL, arguments={"input": action})
