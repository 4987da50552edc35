"""Read Codex CLI rollouts: a JSONL file whose records have the keys `timestamp`, `type` and `payload`.

How records become turns:

    session_meta                      the conversation's id, `cwd` and agent version
    turn_context                      the model of the following assistant turns
    response_item message             a system, user or assistant turn
    response_item reasoning           the thinking of the assistant turn under construction
    response_item function_call       a call in this turn
    response_item function_call_output  a result, in a tool turn after it
    event_msg token_count             the usage of the last assistant turn
    compacted                         the end of this conversation; the next one begins with the new history

`TurnList` collects the turns. It makes ids unique, puts the results for one assistant turn into one tool turn, and
counts results without a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from composer_replication.ingestion.json_documents import head_values
from composer_replication.ingestion.source_files import (
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
    make_call,
    read_usage,
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
    """Return whether a record in `head`, the first bytes of a file, has a payload and a type that this format uses."""
    return any(
        isinstance(value, dict)
        and as_string(value.get("type")) in _LINE_TYPES
        and isinstance(value.get("payload"), dict)
        for value in head_values(head)
    )


def read(source: SourceFile, report: IngestReport) -> Iterator[Conversation]:
    """Yield the session as one conversation, or as several if it was compacted.

    Each later conversation is linked to the previous one.
    """
    draft = _ConversationDraft(source, report)
    for line, record in read_records(source, report):
        kind, payload = as_string(record.get("type")), record.get("payload")
        if kind is None or kind not in _LINE_TYPES:
            _count_ignored_record(kind, source, report, line)
        elif not isinstance(payload, dict):
            report.skip(f"{kind} without a payload", source.name, line)
        elif kind == "compacted":
            yield from draft.conversation()
            draft = draft.after_compaction(_ResponseItem(payload, line, record.get("timestamp")))
        else:
            draft.add_record(kind, _ResponseItem(payload, line, record.get("timestamp")))
    yield from draft.conversation()


def _count_ignored_record(kind: str | None, source: SourceFile, report: IngestReport, line: int) -> None:
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
        self._parent = None if before is None else before._make_compaction_link()
        self._origin: Origin | None = None  # "copied" while the history from before a compaction is added

    @property
    def session_id(self) -> str:
        """The session id, or the file name."""
        return as_string((self._meta or {}).get("id")) or Path(self._source.name).stem

    @property
    def id(self) -> str:
        """The session id. All parts of the session but the first also have their part number in it."""
        return f"{self.session_id}:{self._number}" if self._number else self.session_id

    def add_record(self, kind: str, item: _ResponseItem) -> None:
        if kind == "session_meta":
            # A forked session has its own session record first, followed by the record of the original session.
            self._meta = self._meta or self.turns.storable_fields(item.payload, item.line)
        elif kind == "turn_context":
            self._model = as_string(item.payload.get("model")) or self._model
        elif kind == "event_msg":
            self._report.counts["ignored event_msg"] += 1
            # All other events repeat response items for the screen.
            if item.kind == "token_count":
                self._add_usage(item.payload.get("info"))
        else:
            self.add_item(item)

    def add_item(self, item: _ResponseItem) -> None:
        try:
            self._add_item_unchecked(item)
        except RecursionError:
            self.turns.skip(TOO_DEEP, item.line)

    def _add_item_unchecked(self, item: _ResponseItem) -> None:
        kind = item.kind
        if kind == "message":
            self._add_message(item)
        elif kind == "reasoning":
            self._extend_assistant_turn(item, thinking=as_text(item.payload.get("summary")))
        elif kind in _CALL_ITEMS:
            self._extend_assistant_turn(item, calls=(_read_call(item),))
        elif kind in _RESULT_ITEMS:
            self._add_result(item)
        elif kind in _IGNORED_ITEMS:
            self._report.counts[f"ignored {kind}"] += 1
        else:
            self.turns.skip(f"unknown record type response_item/{kind}", item.line)

    def _add_message(self, item: _ResponseItem) -> None:
        role, text = item.payload.get("role"), as_text(item.payload.get("content"))
        images = image_count(item.payload.get("content"))
        if role == "assistant":
            self._extend_assistant_turn(item, text=text)
        elif role in ("system", "developer"):
            self._add_turn(item, "system", "meta", text=text, extra=images)
        elif role == "user":
            origin: Origin = "meta" if text.lstrip().startswith(_NOTE_PREFIXES) else self._origin or "human"
            self._add_turn(item, "user", origin, text=text, extra=images)
        else:
            self.turns.skip(f"unknown role {role}", item.line)

    def _extend_assistant_turn(
        self, item: _ResponseItem, *, text: str = "", thinking: str = "", calls: tuple[ToolCall, ...] = ()
    ) -> None:
        """Add an item to the assistant turn under construction. A second text, or text after calls, begins a new turn.

        Codex logs the reasoning, the text and each call of a response as separate items.
        """
        is_message, origin = item.kind == "message", self._origin or "model"
        last = self.turns.turns[-1] if self.turns.turns else None
        is_open = last is not None and last.role == "assistant" and last.origin == origin
        if last is None or not is_open or (is_message and (last.text or last.calls)):
            self._add_turn(item, "assistant", origin, text=text, thinking=thinking, calls=calls, model=self._model)
            return
        thoughts = "\n\n".join(part for part in (last.thinking, thinking) if part)
        turn_id = item.item_id if is_message else None
        self.turns.extend_last(item.line, id=turn_id, text=last.text or text, thinking=thoughts)
        self.turns.add_calls(len(self.turns.turns) - 1, calls)

    def _add_result(self, item: _ResponseItem) -> None:
        output = item.payload.get("output")
        text, is_error = _read_output(output)
        self.turns.add_result(
            as_string(item.payload.get("call_id")) or "",
            text,
            is_error,
            id=item.item_id,
            line=item.line,
            extra=image_count(output.get("content") if isinstance(output, dict) else output),
            origin=self._origin or "tool",
            timestamp=as_string(item.timestamp),
        )

    def _add_turn(self, item: _ResponseItem, role: Role, origin: Origin, **content: Any) -> None:
        self.turns.add_turn(item.item_id, role, origin, item.line, timestamp=as_string(item.timestamp), **content)

    def _add_usage(self, info: Any) -> None:
        """Add token counts. Logs repeat them, so only the first counts after an assistant message are used."""
        last_usage, turns = as_record(info).get("last_token_usage"), self.turns.turns
        index = next((n for n in reversed(range(len(turns))) if turns[n].origin == "model"), None)
        if index is not None and turns[index].usage is None:
            usage = read_usage(last_usage, "input_tokens", "output_tokens", "cached_input_tokens")
            turns[index] = replace(turns[index], usage=usage)

    def _make_compaction_link(self) -> Link | None:
        """Return the link with which the part after a compaction refers to this part."""
        turns = self.turns.turns
        return Link(kind="compaction", conversation_id=self.id, turn_id=turns[-1].id) if turns else self._parent

    def after_compaction(self, item: _ResponseItem) -> _ConversationDraft:
        """Return the draft for the context after a compaction.

        It begins with the history that replaced the old one; if the log has none, it begins with the summary alone.
        """
        draft = _ConversationDraft(self._source, self._report, before=self)
        draft._origin = "copied"
        for index, payload in enumerate(as_list(item.payload.get("replacement_history"))):
            if isinstance(payload, dict):
                draft.add_item(_ResponseItem(payload, item.line, item.timestamp, index))
            else:
                self.turns.skip(NO_OBJECT, item.line)
        draft._origin = None
        draft._mark_summary(item, as_string(item.payload.get("message")) or "")
        return draft

    def _mark_summary(self, item: _ResponseItem, summary: str) -> None:
        """Mark the user turn that ends with the summary, or add the summary if there are no turns."""
        turns = self.turns.turns
        indices = (index for index, turn in enumerate(turns) if turn.role == "user" and turn.text.endswith(summary))
        index = next(indices, None) if summary else None
        if index is not None:
            turns[index] = replace(turns[index], origin="summary")
        elif summary and not turns:
            self._add_turn(item, "user", "summary", text=summary)

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
class _ResponseItem:
    """The payload of a `response_item` record, with its location in the file."""

    payload: Record
    line: int
    timestamp: Any
    index: int | None = None

    @property
    def kind(self) -> str:
        return as_string(self.payload.get("type")) or ("message" if "role" in self.payload else "")

    @property
    def item_id(self) -> str:
        """The id of the item, or its location if it has none."""
        position = f"line-{self.line}" if self.index is None else f"line-{self.line}.{self.index}"
        return as_string(self.payload.get("id")) or position

    @property
    def call_id(self) -> str:
        return as_string(self.payload.get("call_id")) or self.item_id


def _read_call(item: _ResponseItem) -> ToolCall:
    payload = item.payload
    if item.kind == "custom_tool_call":
        text = payload.get("input")
        return make_call(item.call_id, payload.get("name"), {"input": text} if isinstance(text, str) else text)
    if item.kind == "function_call":
        return make_call(item.call_id, payload.get("name"), payload.get("arguments"))
    # Server-side tools have no name; `action` holds their arguments.
    return make_call(item.call_id, item.kind.removesuffix("_call"), payload.get("action"))


def _read_output(output: Any) -> tuple[str, bool | None]:
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
