"""Read OpenAI chat messages, bare or in {messages: []}, and tau-bench's {traj: []}, in JSON or JSON lines."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

from composer_replication.ingestion.json_documents import head_values, read_lines_or_document
from composer_replication.ingestion.source_files import TOO_DEEP, IngestReport, Record, SourceFile, as_text, image_count
from composer_replication.ingestion.turn_list import NO_OBJECT, TurnList, as_string, read_openai_usage
from composer_replication.types import Conversation, ToolCall

FORMAT = "openai_messages"

_LISTS = ("messages", "traj")
# The few-shot examples of tau-bench are rendered for human readers: without calls, and with roles as line prefixes.
_DISPLAY = "messages_display"
DISPLAY_ONLY = "messages as display text only, without their calls"
# "function" is OpenAI's older name for "tool".
_ROLES = {"system", "developer", "user", "assistant", "tool", "function"}


def sniff(head: bytes, path: Path) -> bool:
    """Return whether the values in `head`, the first bytes of a file, are messages, or records with messages."""
    values = head_values(head)
    if len(values) == 1 and isinstance(values[0], list):
        values = cast("list[Any]", values[0])
        # In a trajectory file, a bare list of messages was written by mini-swe-agent.
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
    """Return whether a value has a role and no keys from other formats."""
    return isinstance(value, dict) and as_string(value.get("role")) in _ROLES and not {"type", "parts"} & value.keys()


def _messages_of(record: Record) -> list[Any] | None:
    return next((cast("list[Any]", record[key]) for key in _LISTS if isinstance(record.get(key), list)), None)


class _StoredConversation(NamedTuple):
    """One conversation in the file: the record that contains its messages, and pairs of (line or position, message)."""

    line: int
    record: Record
    messages: list[tuple[int, Any]]


def read(source: SourceFile, report: IngestReport) -> Iterator[Conversation]:
    """Yield every conversation in the file. If there are several, their ids are numbered."""
    # Two conversations are read ahead to find out whether there are several.
    conversations = _find(source, report)
    ahead = [
        conversation
        for conversation in (next(conversations, None), next(conversations, None))
        if conversation is not None
    ]
    stem = Path(source.name).stem
    for index, (line, around, messages) in enumerate(chain(ahead, conversations)):
        session_id = as_string(around.get("session_id")) or as_string(around.get("id"))
        conversation_id = f"{stem}:{index}" if len(ahead) > 1 else session_id or stem
        thread = _Thread(TurnList(source.name, report), conversation_id)
        for position, (at, message) in enumerate(messages, start=1):
            thread.take(message, at, position)
        if not thread.turns.turns:
            report.skip("no messages", source.name, line)
        extra = thread.turns.storable_fields({key: value for key, value in around.items() if key not in _LISTS}, line)
        yield from thread.turns.conversation(conversation_id, FORMAT, session_id=session_id, extra=extra)


def _find(source: SourceFile, report: IngestReport) -> Iterator[_StoredConversation]:
    loose: list[tuple[int, Any]] = []
    for line, value in _values(source, report):
        messages = _messages_of(cast("Record", value)) if isinstance(value, dict) else None
        if messages is not None:
            numbered = [(line or position, message) for position, message in enumerate(messages, start=1)]
            yield _StoredConversation(line, cast("Record", value), numbered)
        elif isinstance(value, dict) and "role" in value:
            loose.append((line or len(loose) + 1, value))
        elif isinstance(value, dict) and isinstance(value.get(_DISPLAY), str):
            report.skip(DISPLAY_ONLY, source.name, line)
        else:
            report.skip("no messages", source.name, line)
    if loose:
        yield _StoredConversation(loose[0][0], {}, loose)


def _values(source: SourceFile, report: IngestReport) -> Iterator[tuple[int, Any]]:
    for line, value in read_lines_or_document(source, report):
        if isinstance(value, list):
            yield from ((0, document) for document in cast("list[Any]", value))
        else:
            yield line, value


class _Thread:
    """One conversation under construction; `waiting` has the calls without a result."""

    def __init__(self, turns: TurnList, conversation_id: str) -> None:
        self.turns, self._id = turns, conversation_id
        self._waiting: list[ToolCall] = []

    def take(self, value: Any, line: int, position: int) -> None:
        """Add a message, which was read from this line and position."""
        if not isinstance(value, dict):
            self.turns.skip(NO_OBJECT, line)
            return
        message = cast("Record", value)
        turn_id = as_string(message.get("id")) or f"{self._id}:{position}"
        try:
            if message.get("role") in ("tool", "function"):
                self._add_result(message, turn_id, line)
            elif not self._add_message(message, turn_id, line):
                self.turns.skip(f"unknown role {as_string(message.get('role'))}", line)
        except RecursionError:
            self.turns.skip(TOO_DEEP, line)

    def _add_message(self, message: Record, turn_id: str, line: int) -> bool:
        calls = self.turns.read_calls(message, line, f"{turn_id}:call-") if message.get("role") == "assistant" else ()
        self._waiting.extend(calls)
        return self.turns.add_message(
            message,
            turn_id,
            line,
            calls=calls,
            text=as_text(message.get("content")) or as_string(message.get("refusal")) or "",
            model=as_string(message.get("model")),
            usage=read_openai_usage(message.get("usage")),
            timestamp=as_string(message.get("timestamp")),
        )

    def _add_result(self, message: Record, turn_id: str, line: int) -> None:
        name = as_string(message.get("name"))
        # Results without an id come in order: each one belongs to the oldest waiting call (with its tool name, if it
        # has one).
        oldest = next((call.id for call in self._waiting if name is None or call.name == name), "")
        call_id = as_string(message.get("tool_call_id")) or oldest
        self._waiting = [call for call in self._waiting if call.id != call_id]
        content, written = message.get("content"), as_string(message.get("timestamp"))
        self.turns.add_result(
            call_id, as_text(content), None, id=turn_id, line=line, extra=image_count(content), timestamp=written
        )
