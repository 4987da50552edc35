"""Read OpenHands output: JSONL with a `history` of events, or a saved trajectory, which is a bare list of events.

Older files hold [action, observation] pairs, or events without ids and call metadata; both are supported. The error
flag of a result comes from the format (`success`, an exit code, `extras.error`, or an error observation); otherwise it
is None.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_replication.ingestion.json_documents import read_lines_or_document
from composer_replication.ingestion.source_files import IMAGE, TOO_DEEP, IngestReport, Record, SourceFile, as_text
from composer_replication.ingestion.turn_list import (
    TurnList,
    as_list,
    as_record,
    as_string,
    key_paths,
    make_call,
    make_unique,
    read_openai_usage,
    session_name,
)
from composer_replication.types import Conversation, Origin, Role, ToolCall

FORMAT = "openhands"


def _words(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Harness events that no model wrote or saw.
_HARNESS_EVENTS = _words(
    "null change_agent_state agent_state_changed recall initialize start pause resume stop close condensation_request"
    " add_task modify_task loop_recovery"
)
_ORIGINS: dict[str, Origin] = {"system": "meta", "user": "human", "summary": "summary", "meta": "meta"}
_OBSERVATIONS = _words(
    "run run_ipython read write edit browse browse_interactive think delegate error mcp success user_rejected"
    " task_tracking chat"
)
# Arguments that the harness added to those in the model's call.
_NOT_ARGUMENTS = _words(
    "thought blocking is_static cwd hidden confirmation_state security_risk is_confirmed keep_prompt timeout"
)


def sniff(head: bytes, path: Path) -> bool:
    """Return whether `head`, the first bytes of a file, has a history of events, or the keys of an OpenHands output
    file.
    """
    keys = key_paths(head)
    # SWE-agent files have actions and observations, too.
    if path.suffix == ".traj" or "trajectory" in keys or "history[].role" in keys:
        return False
    for event in ("history[]", "history[][]", "[]", "[][]"):
        inside = {key.removeprefix(f"{event}.") for key in keys if key.startswith(f"{event}.")}
        if inside & {"action", "observation"} and inside & {"args", "extras", "source", "content"}:
            return "role" not in inside
    # A large patch may fill the head before the history begins; then the keys of the output file decide.
    return {"instance_id", "test_result"} <= keys or {"instance_id", "metadata.agent_class"} <= keys


def read(source: SourceFile, report: IngestReport) -> Iterator[Conversation]:
    """Yield one conversation per history."""
    taken_ids: set[str] = set()
    in_lines = source.path.suffix == ".jsonl"
    for index, (line, value) in enumerate(read_lines_or_document(source, report)):
        record = {"history": value} if isinstance(value, list) else value
        name = f"{session_name(source.name)}:{index}" if in_lines else session_name(source.name)
        yield from _conversation(as_record(record), name, line if in_lines else 0, source.name, report, taken_ids)


def _conversation(
    record: Record, name: str, line: int, file: str, report: IngestReport, taken_ids: set[str]
) -> Iterator[Conversation]:
    history = record.get("history")
    if not isinstance(history, list):
        report.skip("no history", file, line)
        return
    reader = _History(file, line, report)
    for index, entry in enumerate(history, start=1):
        # In a pair, the observation is the result of the action next to it.
        for event in entry if isinstance(entry, list) else [entry]:
            try:
                reader.add(event, index)
            except RecursionError:
                report.skip(TOO_DEEP, file, line or index)
    metadata = as_record(record.get("metadata"))
    extra = {key: record[key] for key in ("instance_id", "error", "test_result") if record.get(key) is not None}
    extra |= {"tools": reader.tools} if reader.tools else {}
    yield from reader.turns.conversation(
        make_unique(as_string(record.get("instance_id")) or name, taken_ids),
        FORMAT,
        agent_version=reader.version or as_string(metadata.get("git_commit")),
        extra=reader.turns.storable_fields(extra, line),
    )


@dataclass(slots=True)
class _History:
    """Converts events to turns: calls in one model response share a turn, and observations follow their call."""

    file: str
    line: int
    report: IngestReport
    version: str | None = None
    tools: list[Any] = field(default_factory=list[Any])
    turns: TurnList = field(init=False)
    _response_at: dict[str, int] = field(default_factory=dict[str, int])
    _call_of_event: dict[int, str] = field(default_factory=dict[int, str])

    def __post_init__(self) -> None:
        self.turns = TurnList(self.file, self.report)

    def add(self, event: Any, index: int) -> None:
        """Add the turn for one event."""
        line = self.line or index
        if not isinstance(event, dict):
            if event is not None:  # null stands for a missing observation in a pair
                self.report.skip("event is not an object", self.file, line)
        elif isinstance(event.get("action"), str):
            self._add_action(event, event["action"], index, line)
        elif isinstance(event.get("observation"), str):
            self._add_observation(event, event["observation"], index, line)
        else:
            self.report.skip("unknown record type event", self.file, line)

    def _add_action(self, event: Record, action: str, index: int, line: int) -> None:
        args = as_record(event.get("args"))
        text = as_text(args.get("content", event.get("message")))
        if action == "system":
            self.tools = self.tools or as_list(args.get("tools"))
            self.version = self.version or as_string(args.get("openhands_version"))
            self._say(event, "system", text, index, line)
        elif action == "condensation":
            # From here on the model sees fewer turns than the history has: the summary replaced them.
            self.report.skip("condensed history is kept unfolded", self.file, line)
            if args.get("summary"):
                self._say(event, "summary", as_text(args["summary"]), index, line)
        elif action in _HARNESS_EVENTS:
            self.report.counts["openhands harness events"] += 1
        elif event.get("source") == "user":
            self._say(event, "user", text, index, line)
        elif action == "message":
            self._add_assistant(event, text, (), index, line)
        else:
            self._add_calls(event, action, args, index, line)

    def _say(self, event: Record, kind: str, text: str, index: int, line: int) -> None:
        role: Role = "system" if kind == "system" else "user"
        text, extra = _with_images(text, event.get("args"))
        when = as_string(event.get("timestamp"))
        self.turns.add_turn(_event_id(event, index), role, _ORIGINS[kind], line, text, timestamp=when, extra=extra)

    def _add_calls(self, event: Record, action: str, args: Record, index: int, line: int) -> None:
        """Add the call in an action to the turn of its model response, or as the first call in a new turn."""
        metadata = as_record(event.get("tool_call_metadata"))
        response = as_record(metadata.get("model_response"))
        calls = self.turns.read_calls(_message(response), line)
        call_id = as_string(metadata.get("tool_call_id")) or f"event-{_event_id(event, index)}"
        # An observation names its cause by event id.
        if isinstance(event.get("id"), int):
            self._call_of_event[event["id"]] = call_id
        # A response with several calls is logged as one event per call, each with the whole response.
        at = self._response_at.get(as_string(response.get("id")) or "")
        if at is not None:  # another call in an earlier response
            if all(call.id != call_id for call in self.turns.turns[at].calls):
                self.turns.add_calls(at, (_call_of_action(call_id, metadata, action, args),))
            return
        if all(call.id != call_id for call in calls):
            calls = (*calls, _call_of_action(call_id, metadata, action, args))
        content = _message(response).get("content")
        text = as_text(content if content is not None else args.get("thought"))
        self._add_assistant(event, text, calls, index, line)

    def _add_assistant(self, event: Record, text: str, calls: tuple[ToolCall, ...], index: int, line: int) -> None:
        response = as_record(as_record(event.get("tool_call_metadata")).get("model_response"))
        if response_id := as_string(response.get("id")):
            self._response_at[response_id] = len(self.turns.turns)
        self.turns.add_turn(
            _event_id(event, index),
            "assistant",
            "model",
            line,
            text,
            thinking=as_text(_message(response).get("reasoning_content")),
            calls=calls,
            model=as_string(response.get("model")),
            usage=read_openai_usage(response.get("usage")),
            timestamp=as_string(event.get("timestamp")),
            extra={"response_id": response_id} if response_id else {},
        )

    def _add_observation(self, event: Record, kind: str, index: int, line: int) -> None:
        """Add an observation as the result of its call. The call is found by the most reliable link in the event."""
        if kind == "recall" and (knowledge := _knowledge(event)):
            self._say(event, "meta", knowledge, index, line)
            return
        cause, waiting = event.get("cause"), self.turns.unanswered_calls()
        call_id = as_string(as_record(event.get("tool_call_metadata")).get("tool_call_id"))
        if call_id is None and isinstance(cause, int):
            call_id = self._call_of_event.get(cause)
        if call_id is None and kind in _OBSERVATIONS and "id" not in event and waiting:
            call_id = waiting[0].id  # events without ids come in the order of their calls
        if call_id is None and kind not in _OBSERVATIONS:
            if kind in _HARNESS_EVENTS:
                self.report.counts["openhands harness events"] += 1
            else:
                self.report.skip(f"unknown record type {kind!r}", self.file, line)
            return
        text, extra = _with_images(as_text(event.get("content")), event.get("extras"))
        when, id = as_string(event.get("timestamp")), _event_id(event, index)
        is_error = _is_error(event, kind)
        self.turns.add_result(call_id or "", text, is_error, id=id, line=line, extra=extra, timestamp=when)


def _with_images(text: str, fields: Any) -> tuple[str, Record]:
    """Return the text with a marker for every image shown with it, and the number of images as `extra`."""
    number = len(as_list(as_record(fields).get("image_urls")))
    return "\n".join([text, *[IMAGE] * number]), {"images": number} if number else {}


def _event_id(event: Record, index: int) -> str:
    event_id = event.get("id")
    generated_id = f"{'o' if 'observation' in event else 'a'}{index}"
    return str(event_id) if isinstance(event_id, int | str) and event_id != "" else generated_id


def _message(response: Record) -> Record:
    choices = as_list(response.get("choices"))
    return as_record(as_record(choices[0]).get("message")) if choices else {}


def _call_of_action(call_id: str, metadata: Record, action: str, args: Record) -> ToolCall:
    """Return the call that an action describes, for events that lack the model's original response."""
    arguments = {key: value for key, value in args.items() if action == "think" or key not in _NOT_ARGUMENTS}
    return make_call(call_id, as_string(metadata.get("function_name")) or action, arguments)


def _knowledge(event: Record) -> str:
    """Return the instructions and notes that a recall event shows to the model, as one text."""
    extras = as_record(event.get("extras"))
    notes = [as_record(entry).get("content") for entry in as_list(extras.get("microagent_knowledge"))]
    parts = [extras.get("repo_instructions"), extras.get("additional_agent_instructions"), *notes]
    return "\n\n".join(as_text(part) for part in parts if part)


def _is_error(event: Record, kind: str) -> bool | None:
    extras = as_record(event.get("extras"))
    # The exit code is in `extras` or in its metadata.
    exit_code = extras.get("exit_code", as_record(extras.get("metadata")).get("exit_code"))
    if kind == "error":
        return True
    if isinstance(event.get("success"), bool):
        return not event["success"]
    if isinstance(exit_code, int):
        return exit_code != 0
    error = extras.get("error")
    return error if isinstance(error, bool) else None
