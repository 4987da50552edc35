"""Read Codex CLI rollouts: JSONL with {timestamp, type, payload}, where the response items form the conversation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from composer_replication.ingestion.documents import head_values
from composer_replication.ingestion.source import (
    TOO_DEEP,
    IngestReport,
    Record,
    SourceFile,
    as_text,
    image_count,
    read_records,
)
from composer_replication.ingestion.turn_list import (
    NO_OBJECT,
    TurnList,
    as_list,
    as_record,
    as_string,
    logged_call,
    usage_of,
)
from composer_replication.types import Conversation, Link, Origin, Role, ToolCall

FORMAT = "codex"

# Record types that belong to the conversation. All other types are counted and skipped.
_LINE_TYPES = {"session_meta", "turn_context", "response_item", "event_msg", "compacted"}
# Known types that the model neither wrote nor read.
_IGNORED_LINES = {"world_state", "security_risk_score"}
_IGNORED_ITEMS = {"ghost_snapshot", "compaction", "context_compaction"}
_CALL_ITEMS = {"function_call", "custom_tool_call", "web_search_call", "local_shell_call"}
_RESULT_ITEMS = {"function_call_output", "custom_tool_call_output"}
# The harness writes notes in the user's role, which begin like this.
_NOTE_PREFIXES = (
    "<environment_context>",
    "<user_instructions>",
    "# AGENTS.md instructions",
    "<turn_aborted>",
    "<skill>",
)


def sniff(head: bytes, path: Path) -> bool:  # noqa: ARG001 (the content says it all)
    """Return whether a record in the head has a payload and a type of this format."""
    return any(
        isinstance(value, dict)
        and as_string(value.get("type")) in _LINE_TYPES
        and isinstance(value.get("payload"), dict)
        for value in head_values(head)
    )


def read(source: SourceFile, report: IngestReport) -> Iterator[Conversation]:
    """Yield the session as one conversation, or as several if it was compacted.

    Each later part is linked to the previous one.
    """
    part = _ConversationDraft(source, report)
    for line, record in read_records(source, report):
        kind, payload = as_string(record.get("type")), record.get("payload")
        if kind is None or kind not in _LINE_TYPES:
            _count_other(kind, source, report, line)
        elif not isinstance(payload, dict):
            report.skip(f"{kind} without a payload", source.name, line)
        elif kind == "compacted":
            yield from part.conversation()
            part = part.after_compaction(_Item(payload, line, record.get("timestamp")))
        else:
            part.take(kind, _Item(payload, line, record.get("timestamp")))
    yield from part.conversation()


def _count_other(kind: str | None, source: SourceFile, report: IngestReport, line: int) -> None:
    if kind in _IGNORED_LINES:
        report.counts[f"ignored {kind}"] += 1
    else:
        report.skip(f"unknown record type {kind}", source.name, line)


class _ConversationDraft:
    """A conversation under construction: one part of its session."""

    def __init__(self, source: SourceFile, report: IngestReport, before: _ConversationDraft | None = None) -> None:
        self.turns = TurnList(source.name, report)
        self._source, self._report = source, report
        self._meta = None if before is None else before._meta
        self._model = None if before is None else before._model
        self._number = 0 if before is None else before._number + 1
        self._parent = None if before is None else before._link()
        self._origin: Origin | None = None  # "copied" while the history from before a compaction is added

    @property
    def session_id(self) -> str:
        """The session id, or the file name."""
        return as_string((self._meta or {}).get("id")) or Path(self._source.name).stem

    @property
    def id(self) -> str:
        """The session id, with the part number for all parts but the first."""
        return f"{self.session_id}:{self._number}" if self._number else self.session_id

    def take(self, kind: str, item: _Item) -> None:
        if kind == "session_meta":
            # A forked session has its own session record first, followed by the record of the original session.
            self._meta = self._meta or self.turns.safe_fields(item.payload, item.line)
        elif kind == "turn_context":
            self._model = as_string(item.payload.get("model")) or self._model
        elif kind == "event_msg":
            self._report.counts["ignored event_msg"] += 1
            # All other events repeat response items for the screen.
            if item.kind == "token_count":
                self._add_usage(item.payload.get("info"))
        else:
            self._add_item_safely(item)

    def _add_item_safely(self, item: _Item) -> None:
        try:
            self._add_item(item)
        except RecursionError:
            self.turns.skip(TOO_DEEP, item.line)

    def _add_item(self, item: _Item) -> None:
        kind = item.kind
        if kind == "message":
            self._add_message(item)
        elif kind == "reasoning":
            self._extend(item, thinking=as_text(item.payload.get("summary")))
        elif kind in _CALL_ITEMS:
            self._extend(item, calls=(_call_of(item),))
        elif kind in _RESULT_ITEMS:
            self._add_result(item)
        elif kind in _IGNORED_ITEMS:
            self._report.counts[f"ignored {kind}"] += 1
        else:
            self.turns.skip(f"unknown record type response_item/{kind}", item.line)

    def _add_message(self, item: _Item) -> None:
        role, text = item.payload.get("role"), as_text(item.payload.get("content"))
        images = image_count(item.payload.get("content"))
        if role == "assistant":
            self._extend(item, text=text, begins=True)
        elif role in ("system", "developer"):
            self._add(item, "system", "meta", text=text, extra=images)
        elif role == "user":
            origin: Origin = "meta" if text.lstrip().startswith(_NOTE_PREFIXES) else self._origin or "human"
            self._add(item, "user", origin, text=text, extra=images)
        else:
            self.turns.skip(f"unknown role {role}", item.line)

    def _extend(
        self, item: _Item, *, text: str = "", thinking: str = "", calls: tuple[ToolCall, ...] = (), begins: bool = False
    ) -> None:
        """Add to the assistant message under construction. A second text, or text after calls, begins a new message."""
        origin: Origin = self._origin or "model"
        last = self.turns.turns[-1] if self.turns.turns else None
        if last is None or last.role != "assistant" or last.origin != origin or (begins and (last.text or last.calls)):
            self._add(item, "assistant", origin, text=text, thinking=thinking, calls=calls, model=self._model)
            return
        # The reasoning summaries of one response come in several items.
        thoughts = "\n\n".join(part for part in (last.thinking, thinking) if part)
        self.turns.grow(item.line, id=item.name if begins else None, text=last.text or text, thinking=thoughts)
        self.turns.add_calls(len(self.turns.turns) - 1, calls)

    def _add_result(self, item: _Item) -> None:
        output = item.payload.get("output")
        text, is_error = _text_and_flag(output)
        self.turns.answer(
            as_string(item.payload.get("call_id")) or "",
            text,
            is_error,
            id=item.name,
            line=item.line,
            extra=image_count(output.get("content") if isinstance(output, dict) else output),
            origin=self._origin or "tool",
            timestamp=as_string(item.timestamp),
        )

    def _add(self, item: _Item, role: Role, origin: Origin, **content: Any) -> None:
        self.turns.say(item.name, role, origin, item.line, timestamp=as_string(item.timestamp), **content)

    def _add_usage(self, info: Any) -> None:
        """Add token counts. Logs repeat them, so only the first after an assistant message counts."""
        last_usage, turns = as_record(info).get("last_token_usage"), self.turns.turns
        index = next((n for n in reversed(range(len(turns))) if turns[n].origin == "model"), None)
        if index is not None and turns[index].usage is None:
            usage = usage_of(last_usage, "input_tokens", "output_tokens", "cached_input_tokens")
            turns[index] = replace(turns[index], usage=usage)

    def _link(self) -> Link | None:
        """Return the link for the part after a compaction."""
        turns = self.turns.turns
        return Link(kind="compaction", conversation_id=self.id, turn_id=turns[-1].id) if turns else self._parent

    def after_compaction(self, item: _Item) -> _ConversationDraft:
        """Return the draft for the context after a compaction.

        It begins with the history that replaced the old one, or else with the summary alone.
        """
        draft = _ConversationDraft(self._source, self._report, before=self)
        draft._origin = "copied"
        for index, payload in enumerate(as_list(item.payload.get("replacement_history"))):
            if isinstance(payload, dict):
                draft._add_item_safely(_Item(payload, item.line, item.timestamp, index))
            else:
                self.turns.skip(NO_OBJECT, item.line)
        draft._origin = None
        draft._mark_summary(item, as_string(item.payload.get("message")) or "")
        return draft

    def _mark_summary(self, item: _Item, summary: str) -> None:
        """Mark the user turn that ends with the summary, or add the summary if there are no turns."""
        turns = self.turns.turns
        indices = (index for index, turn in enumerate(turns) if turn.role == "user" and turn.text.endswith(summary))
        index = next(indices, None) if summary else None
        if index is not None:
            turns[index] = replace(turns[index], origin="summary")
        elif summary and not turns:
            self._add(item, "user", "summary", text=summary)

    def conversation(self) -> Iterator[Conversation]:
        """Yield the conversation, unless it has no turns."""
        meta = self._meta or {}
        return self.turns.conversation(
            self.id,
            FORMAT,
            parent=self._parent,
            session_id=self.session_id,
            cwd=as_string(meta.get("cwd")),
            agent_version=as_string(meta.get("cli_version")),
            extra={key: value for key, value in meta.items() if key not in ("id", "cwd", "cli_version")},
        )


@dataclass(frozen=True, slots=True)
class _Item:
    """A payload with its location in the file."""

    payload: Record
    line: int
    timestamp: Any
    index: int | None = None

    @property
    def kind(self) -> str:
        return as_string(self.payload.get("type")) or ("message" if "role" in self.payload else "")

    @property
    def name(self) -> str:
        """The id of the item, or its location if it has none."""
        position = f"line-{self.line}" if self.index is None else f"line-{self.line}.{self.index}"
        return as_string(self.payload.get("id")) or position

    @property
    def call_id(self) -> str:
        return as_string(self.payload.get("call_id")) or self.name


def _call_of(item: _Item) -> ToolCall:
    payload = item.payload
    if item.kind == "custom_tool_call":
        text = payload.get("input")
        return logged_call(item.call_id, payload.get("name"), {"input": text} if isinstance(text, str) else text)
    if item.kind == "function_call":
        return logged_call(item.call_id, payload.get("name"), payload.get("arguments"))
    # Server-side tools have no name; `action` holds their arguments.
    return logged_call(item.call_id, item.kind.removesuffix("_call"), payload.get("action"))


def _text_and_flag(output: Any) -> tuple[str, bool | None]:
    """Return the text and the error flag of an output.

    An output is a string (in older versions JSON with an exit code), a list of blocks, or {content, success}.
    """
    if isinstance(output, dict):
        success = output.get("success")
        return as_text(output.get("content")), not success if isinstance(success, bool) else None
    if not isinstance(output, str) or not output.startswith("{"):
        return as_text(output), None
    try:
        inner = orjson.loads(output)
    except orjson.JSONDecodeError:
        return output, None
    metadata = inner.get("metadata")
    code = metadata.get("exit_code") if isinstance(metadata, dict) else None
    # Other JSON output, for example from `cat package.json`, has different keys.
    if set(inner) == {"output", "metadata"} and isinstance(code, int):
        return as_text(inner["output"]), code != 0
    return output, None
