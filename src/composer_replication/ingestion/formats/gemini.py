"""Read Gemini CLI chats: one JSON document or, in later versions, a JSONL log that is replayed first.

In a log, a message with a known id replaces the earlier version, `$set` changes fields of the chat, and `$rewindTo`
removes messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import orjson

from composer_replication.ingestion.json_documents import head_values, read_lines_or_document
from composer_replication.ingestion.source_files import (
    TOO_DEEP,
    IngestReport,
    Record,
    SourceFile,
    as_text,
    check_depth,
    image_count,
)
from composer_replication.ingestion.turn_list import (
    NO_CALL,
    as_list,
    as_record,
    as_string,
    make_call,
    read_usage,
    storable_fields,
)
from composer_replication.types import Conversation, Link, Origin, Provenance, ToolCall, ToolResult, Turn

FORMAT = "gemini"

# Message types.
_TYPES = {"user", "gemini", "info", "error", "warning"}
# Printed on the screen, but not shown to the model.
_SCREEN_ONLY = {"info", "error", "warning"}
# Final states of a call. In any other state the call has no result yet.
_IS_ERROR = {"success": False, "error": True, "cancelled": True}


def sniff(head: bytes, path: Path) -> bool:  # noqa: ARG001 (the content says it all)
    """Return whether a value in `head`, the first bytes of a file, is a chat or a message."""
    return any(isinstance(value, dict) and _is_chat(cast("Record", value)) for value in head_values(head))


def _is_chat(value: Record) -> bool:
    # Claude Code records have session ids as well, but also a message and a uuid.
    if as_string(value.get("sessionId")) and ("projectHash" in value or "startTime" in value):
        return "message" not in value and "uuid" not in value
    return value.get("type") == "gemini" and "id" in value


def read(source: SourceFile, report: IngestReport) -> Iterator[Conversation]:
    """Yield the chat as one conversation, or as several if a summary replaced the context."""
    log = _ChatLog(source=source, report=report)
    for line, value in read_lines_or_document(source, report):
        if isinstance(value, dict):
            log.apply(cast("Record", value), line)
        else:
            report.skip("not a JSON object", source.name, line)
    yield from log.conversations()


@dataclass(slots=True)
class _Entry:
    """The latest version of a message, and every line where it was written."""

    message: Record
    lines: tuple[int, ...]
    is_copied: bool = False


@dataclass(slots=True, kw_only=True)
class _ChatLog:
    """The state of a chat after its log has been replayed; `before` has the contexts that a summary replaced."""

    source: SourceFile
    report: IngestReport
    meta: Record = field(default_factory=dict[str, Any])
    entries: dict[str, _Entry] = field(default_factory=dict[str, _Entry])
    before: list[dict[str, _Entry]] = field(default_factory=list[dict[str, _Entry]])

    def apply(self, record: Record, line: int) -> None:
        """Apply one record of the log, or a whole JSON document, to the state of the chat."""
        if "$rewindTo" in record:
            self._rewind(as_string(record["$rewindTo"]), line)
        elif "$set" in record or "sessionId" in record or isinstance(record.get("messages"), list):
            change = record.get("$set", record)
            if not isinstance(change, dict):
                self.report.skip("unknown record type $set", self.source.name, line)
                return
            messages = change.get("messages")
            if isinstance(messages, list):
                self._replace(cast("list[Any]", messages), line)
            fields = {key: value for key, value in change.items() if key != "messages"}
            self.meta.update(storable_fields(fields, self.source.name, line, self.report))
        else:
            self._put(self.entries, record, line, line)

    def _put(self, entries: dict[str, _Entry], message: Any, line: int, position: int) -> None:
        kind = as_string(message.get("type")) if isinstance(message, dict) else None
        if kind not in _TYPES:
            self.report.skip(f"unknown record type {kind}", self.source.name, line or position)
            return
        key = as_string(message.get("id")) or f"message-{position}"
        if line == 0:
            # In a document, unlike in a log, two messages with the same id are different messages.
            key = key if key not in entries else f"{key}#{position}"
        earlier_entry = entries.get(key) or self.entries.get(key)
        lines = earlier_entry.lines if earlier_entry else ()
        line_number = line or position
        entries[key] = _Entry(message, lines if line_number in lines else (*lines, line_number))

    def _rewind(self, target: str | None, line: int) -> None:
        """Remove the message with the id `target` and everything after it. An unknown id removes everything."""
        ids = list(self.entries)
        if target not in self.entries:
            self.report.skip("rewind to an unknown message", self.source.name, line)
        removed_ids = ids[ids.index(target) :] if target in self.entries else ids
        for key in removed_ids:
            del self.entries[key]
        self.report.counts["rewound messages"] += len(removed_ids)

    def _replace(self, messages: list[Any], line: int) -> None:
        """Replace the list of messages.

        If the new list has new messages but lacks some answers, a summary replaced them, and a new context begins. Any
        other list only corrects the current context.
        """
        entries: dict[str, _Entry] = {}
        for position, message in enumerate(messages, start=1):
            self._put(entries, message, line, position)
        missing_answers = [
            key for key, entry in self.entries.items() if key not in entries and entry.message["type"] == "gemini"
        ]
        if missing_answers and entries.keys() - self.entries.keys():
            self.before.append(self.entries)
            for key in entries.keys() & self.entries.keys():
                entries[key].is_copied = True
        self.entries = entries

    def conversations(self) -> Iterator[Conversation]:
        """Yield one conversation per context, in order, each linked to the previous one."""
        session_id = as_string(self.meta.get("sessionId")) or Path(self.source.name).stem
        parent: Link | None = None
        for number, entries in enumerate([*self.before, self.entries]):
            turns = tuple(turn for key, entry in entries.items() for turn in self._whole_turns(key, entry))
            if not turns:
                continue
            conversation_id = f"{session_id}:{number}" if number else session_id
            directories = self.meta.get("directories")
            yield Conversation(
                id=conversation_id,
                format=FORMAT,
                turns=turns,
                parent=parent,
                session_id=session_id,
                title=as_string(self.meta.get("summary")),
                cwd=as_string(directories[0]) if isinstance(directories, list) and directories else None,
                extra={key: value for key, value in self.meta.items() if key not in ("sessionId", "summary")},
            )
            parent = Link(kind="compaction", conversation_id=conversation_id, turn_id=turns[-1].id)

    def _whole_turns(self, key: str, entry: _Entry) -> list[Turn]:
        try:
            return list(self._turns(key, entry))
        except RecursionError:
            self.report.skip(TOO_DEEP, self.source.name, entry.lines[-1])
            return []

    def _turns(self, key: str, entry: _Entry) -> Iterator[Turn]:
        """Yield the turn for a message and, if its calls have results, a turn with the results."""
        message = entry.message
        kind = message["type"]
        if kind in _SCREEN_ONLY:
            self.report.counts[f"ignored gemini {kind}"] += 1
            return
        where = Provenance(file=self.source.name, lines=entry.lines)
        # A context after a summary repeats messages from the previous context.
        copied = ("copied", "copied", "copied")
        origins: tuple[Origin, Origin, Origin] = copied if entry.is_copied else ("human", "model", "tool")
        text, timestamp = _parts_text(message.get("content")), as_string(message.get("timestamp"))
        if kind == "user":
            images = image_count(message.get("content"))
            yield Turn(
                id=key, role="user", origin=origins[0], text=text, timestamp=timestamp, provenance=where, extra=images
            )
            return
        calls, results = self._calls(message.get("toolCalls"), key, entry.lines[-1])
        yield Turn(
            id=key,
            role="assistant",
            origin=origins[1],
            text=text,
            thinking=_thinking(message.get("thoughts")),
            calls=calls,
            model=as_string(message.get("model")),
            usage=read_usage(message.get("tokens"), "input", "output thoughts", "cached"),
            timestamp=timestamp,
            provenance=where,
        )
        if results:
            result_images = image_count(*(as_record(call).get("result") for call in as_list(message.get("toolCalls"))))
            yield Turn(
                id=f"{key}:results",
                role="tool",
                origin=origins[2],
                results=results,
                provenance=where,
                extra=result_images,
            )

    def _calls(self, entries: Any, key: str, line: int) -> tuple[tuple[ToolCall, ...], tuple[ToolResult, ...]]:
        calls: list[ToolCall] = []
        results: list[ToolResult] = []
        for index, call in enumerate(as_list(entries)):
            if not isinstance(call, dict):
                self.report.skip(NO_CALL, self.source.name, line)
                continue
            call_id = as_string(call.get("id")) or f"{key}:call-{index}"
            calls.append(make_call(call_id, call.get("name"), call.get("args")))
            is_error = _IS_ERROR.get(as_string(call.get("status")) or "")
            if call.get("result") is not None or is_error is not None:
                # Some calls have only a result for display.
                text = _parts_text(call.get("result")) or as_text(call.get("resultDisplay"))
                results.append(ToolResult(call_id=call_id, text=text, is_error=is_error))
        return tuple(calls), tuple(results)


def _parts_text(content: Any) -> str:
    """Return the text in a list of parts.

    A part is either text or the response of a tool. From a response, the output is used, or else the error, or else the
    whole response as JSON.
    """
    if isinstance(content, list):
        return "\n".join(_parts_text(part) for part in cast("list[Any]", content))
    answer = content.get("functionResponse") if isinstance(content, dict) else None
    if not isinstance(answer, dict):
        return as_text(content)
    response = answer.get("response")
    if not isinstance(response, dict):
        return as_text(response)
    output = response.get("output", response.get("error"))
    if output is not None:
        return as_text(output)
    # orjson writes at most 254 levels.
    check_depth(response)
    return orjson.dumps(response).decode()


def _thinking(thoughts: Any) -> str:
    thought_records = [thought for thought in as_list(thoughts) if isinstance(thought, dict)]
    pairs = [(as_text(thought.get("subject")), as_text(thought.get("description"))) for thought in thought_records]
    return "\n\n".join(": ".join(part for part in pair if part) for pair in pairs if any(pair))
