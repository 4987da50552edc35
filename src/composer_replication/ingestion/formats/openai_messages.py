"""OpenAI chat messages: {messages: []}, tau-bench {traj: []}, as JSONL, in an array or alone, or one message a line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

from composer_replication.ingestion.reading.documents import head_values, read_lines_or_document
from composer_replication.ingestion.reading.source import (
    TOO_DEEP,
    IngestReport,
    Record,
    SourceFile,
    as_text,
    image_count,
)
from composer_replication.ingestion.reading.turn_list import (
    ORPHAN,
    as_list,
    as_string,
    kept_fields,
    openai_usage,
    parse_call,
    unique,
    with_images,
)
from composer_replication.types import Conversation, Origin, Provenance, Role, ToolCall, ToolResult, Turn

FORMAT = "openai_messages"

_LISTS = ("messages", "traj")
# tau-bench's few-shot examples are what a reader was shown: the calls are gone and roles are only the start of a line.
_DISPLAY = "messages_display"
DISPLAY_ONLY = "messages as display text only, without their calls"
_ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
_WRITERS: dict[str, tuple[Role, Origin]] = {
    "system": ("system", "meta"),
    "developer": ("system", "meta"),
    "user": ("user", "human"),
    "assistant": ("assistant", "model"),
}


def sniff(head: bytes, path: Path) -> bool:
    values = head_values(head)
    if len(values) == 1 and isinstance(values[0], list):
        values = cast("list[Any]", values[0])
        # A bare list of messages in a trajectory file is mini-swe-agent's.
        if ".traj" in path.name and not any(_is_record(value) for value in values):
            return False
    return any(_is_record(value) for value in values) or (bool(values) and all(_is_message(value) for value in values))


def _is_record(value: Any) -> bool:
    if not isinstance(value, dict) or "trajectory_format" in value:
        return False
    if isinstance(value.get(_DISPLAY), str):
        return True
    messages = _messages_of(cast("Record", value))
    return bool(messages) and _is_message(messages[0])


def _is_message(value: Any) -> bool:
    """Whether it has a role and nothing of the other formats' records around it."""
    return isinstance(value, dict) and as_string(value.get("role")) in _ROLES and not {"type", "parts"} & value.keys()


def _messages_of(record: Record) -> list[Any] | None:
    return next((cast("list[Any]", record[key]) for key in _LISTS if isinstance(record.get(key), list)), None)


@dataclass(frozen=True, slots=True)
class _Found:
    """One conversation as it lies in the file: what stands around its messages, and (line or position, message)."""

    line: int
    around: Record
    messages: list[tuple[int, Any]]


def read(source: SourceFile, report: IngestReport) -> Iterator[Conversation]:
    """Every conversation of the file; they are numbered if there are several."""
    found = _find(source, report)
    ahead = [each for each in (next(found, None), next(found, None)) if each is not None]
    stem = Path(source.name).stem
    for index, each in enumerate(chain(ahead, found)):
        session_id = as_string(each.around.get("session_id")) or as_string(each.around.get("id"))
        conversation_id = f"{stem}:{index}" if len(ahead) > 1 else session_id or stem
        thread = _Thread(source=source, report=report, conversation_id=conversation_id)
        for position, (line, message) in enumerate(each.messages, start=1):
            try:
                thread.take(message, line, position)
            except RecursionError:
                report.skip(TOO_DEEP, source.name, line)
        if not thread.turns:
            report.skip("no messages", source.name, each.line)
            continue
        around = {key: value for key, value in each.around.items() if key not in _LISTS}
        extra = kept_fields(around, source.name, each.line, report)
        yield Conversation(
            id=conversation_id, format=FORMAT, turns=tuple(thread.turns), session_id=session_id, extra=extra
        )


def _find(source: SourceFile, report: IngestReport) -> Iterator[_Found]:
    loose: list[tuple[int, Any]] = []
    for line, value in _values(source, report):
        messages = _messages_of(cast("Record", value)) if isinstance(value, dict) else None
        if messages is not None:
            numbered = [(line or position, message) for position, message in enumerate(messages, start=1)]
            yield _Found(line, cast("Record", value), numbered)
        elif isinstance(value, dict) and "role" in value:
            loose.append((line or len(loose) + 1, value))
        elif isinstance(value, dict) and isinstance(value.get(_DISPLAY), str):
            report.skip(DISPLAY_ONLY, source.name, line)
        else:
            report.skip("no messages", source.name, line)
    if loose:
        yield _Found(loose[0][0], {}, loose)


def _values(source: SourceFile, report: IngestReport) -> Iterator[tuple[int, Any]]:
    for line, value in read_lines_or_document(source, report):
        if isinstance(value, list):
            yield from ((0, each) for each in cast("list[Any]", value))
        else:
            yield line, value


@dataclass(slots=True, kw_only=True)
class _Thread:
    """One conversation in the making; `waiting` are the calls nothing has come back for."""

    source: SourceFile
    report: IngestReport
    conversation_id: str
    turns: list[Turn] = field(default_factory=list[Turn])
    turn_ids: set[str] = field(default_factory=set[str])
    call_ids: set[str] = field(default_factory=set[str])
    waiting: list[ToolCall] = field(default_factory=list[ToolCall])

    def take(self, value: Any, line: int, position: int) -> None:
        if not isinstance(value, dict):
            self.report.skip("message is no object", self.source.name, line)
            return
        message = cast("Record", value)
        role = as_string(message.get("role"))
        turn_id = unique(as_string(message.get("id")) or f"{self.conversation_id}:{position}", self.turn_ids)
        if role in ("tool", "function"):
            self._add_result(message, turn_id, line)
        elif role in _WRITERS:
            self._add_message(message, role, turn_id, line)
        else:
            self.report.skip(f"unknown role {role}", self.source.name, line)

    def _add_message(self, message: Record, role: str, turn_id: str, line: int) -> None:
        calls = self._calls(message, turn_id, line) if role == "assistant" else ()
        self.call_ids.update(call.id for call in calls)
        self.waiting.extend(calls)
        thinking = (as_string(message.get(key)) for key in ("reasoning_content", "reasoning", "thinking"))
        self.turns.append(
            Turn(
                id=turn_id,
                role=_WRITERS[role][0],
                origin=_WRITERS[role][1],
                text=as_text(message.get("content")) or as_string(message.get("refusal")) or "",
                thinking=next((text for text in thinking if text), "") if role == "assistant" else "",
                calls=calls,
                model=as_string(message.get("model")),
                usage=openai_usage(message.get("usage")),
                timestamp=as_string(message.get("timestamp")),
                provenance=Provenance(file=self.source.name, lines=(line,)),
                extra=image_count(message.get("content")),
            )
        )

    def _calls(self, message: Record, turn_id: str, line: int) -> tuple[ToolCall, ...]:
        calls = [*as_list(message.get("tool_calls"))]
        if isinstance(message.get("function_call"), dict):  # before there were tools: one call, without an id
            calls.append({"function": message["function_call"]})
        kept: list[ToolCall] = []
        for index, call in enumerate(calls):
            call_id = (as_string(call.get("id")) if isinstance(call, dict) else None) or f"{turn_id}:call-{index}"
            function = call.get("function") if isinstance(call, dict) else None
            custom = call.get("custom") if isinstance(call, dict) else None
            if isinstance(function, dict):
                kept.append(parse_call(call_id, function.get("name"), function.get("arguments")))
            elif isinstance(custom, dict):
                kept.append(parse_call(call_id, custom.get("name"), {"input": as_text(custom.get("input"))}))
            else:
                self.report.skip("tool call of unknown shape", self.source.name, line)
        return tuple(kept)

    def _add_result(self, message: Record, turn_id: str, line: int) -> None:
        call_id = as_string(message.get("tool_call_id")) or self._waiting_for(as_string(message.get("name")))
        if call_id not in self.call_ids:
            self.report.skip(ORPHAN, self.source.name, line)
        self.waiting = [call for call in self.waiting if call.id != call_id]
        result = ToolResult(call_id=call_id, text=as_text(message.get("content")), is_error=None)
        images = image_count(message.get("content"))
        last = self.turns[-1] if self.turns else None
        if last is not None and last.role == "tool":
            lines = last.provenance.lines if line in last.provenance.lines else (*last.provenance.lines, line)
            where = Provenance(file=self.source.name, lines=lines)
            self.turns[-1] = replace(
                last, results=(*last.results, result), provenance=where, extra=with_images(last.extra, images)
            )
            return
        where = Provenance(file=self.source.name, lines=(line,))
        written = as_string(message.get("timestamp"))
        self.turns.append(
            Turn(
                id=turn_id,
                role="tool",
                origin="tool",
                results=(result,),
                timestamp=written,
                provenance=where,
                extra=images,
            )
        )

    def _waiting_for(self, name: str | None) -> str:
        """The oldest call still waiting, of that name if the result says one: results without an id come in order."""
        return next((call.id for call in self.waiting if name is None or call.name == name), "")
