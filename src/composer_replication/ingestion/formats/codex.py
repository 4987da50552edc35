"""Codex CLI rollouts: JSONL of {timestamp, type, payload}, of which only the response items are the conversation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from composer_replication.ingestion.formats.codex_items import Item, call_of, text_and_flag
from composer_replication.ingestion.reading.documents import head_values
from composer_replication.ingestion.reading.source import (
    TOO_DEEP,
    IngestReport,
    Record,
    SourceFile,
    as_text,
    image_count,
    read_records,
)
from composer_replication.ingestion.reading.turn_list import (
    ORPHAN,
    as_list,
    as_string,
    count,
    kept_fields,
    unique,
    with_images,
)
from composer_replication.types import Conversation, Link, Origin, Provenance, Role, ToolCall, ToolResult, Turn, Usage

FORMAT = "codex"

_LINE_TYPES = {"session_meta", "turn_context", "response_item", "event_msg", "compacted"}
# Known and no part of what the model said or read.
_IGNORED_LINES = {"world_state", "security_risk_score"}
_IGNORED_ITEMS = {"ghost_snapshot", "compaction", "context_compaction"}
_CALL_ITEMS = {"function_call", "custom_tool_call", "web_search_call", "local_shell_call"}
_RESULT_ITEMS = {"function_call_output", "custom_tool_call_output"}
# The agent writes its own notes in the user's role; they begin like this.
_NOTES = ("<environment_context>", "<user_instructions>", "# AGENTS.md instructions", "<turn_aborted>", "<skill>")


def sniff(head: bytes, path: Path) -> bool:  # noqa: ARG001 (the content says it all)
    return any(
        isinstance(value, dict)
        and as_string(value.get("type")) in _LINE_TYPES
        and isinstance(value.get("payload"), dict)
        for value in head_values(head)
    )


def read(source: SourceFile, report: IngestReport) -> Iterator[Conversation]:
    """The session as one conversation, or several where it was compacted: later parts hang on the one before."""
    part = _Part(source=source, report=report)
    for line, record in read_records(source, report):
        kind, payload = as_string(record.get("type")), record.get("payload")
        if kind is None or kind not in _LINE_TYPES:
            _count_other(kind, source, report, line)
        elif not isinstance(payload, dict):
            report.skip(f"{kind} without a payload", source.name, line)
        elif kind == "compacted":
            yield from part.conversation()
            part = part.after_compaction(Item(payload, line, record.get("timestamp")))
        else:
            part.take(kind, Item(payload, line, record.get("timestamp")))
    yield from part.conversation()


def _count_other(kind: str | None, source: SourceFile, report: IngestReport, line: int) -> None:
    if kind in _IGNORED_LINES:
        report.counts[f"ignored {kind}"] += 1
    else:
        report.skip(f"unknown record type {kind}", source.name, line)


@dataclass(slots=True, kw_only=True)
class _Part:
    """One conversation in the making."""

    source: SourceFile
    report: IngestReport
    meta: Record | None = None
    number: int = 0
    parent: Link | None = None
    model: str | None = None
    turns: list[Turn] = field(default_factory=list[Turn])
    turn_ids: set[str] = field(default_factory=set[str])
    call_ids: set[str] = field(default_factory=set[str])
    origin: Origin | None = None  # of everything that is only copied from before the compaction

    @property
    def session_id(self) -> str:
        return as_string((self.meta or {}).get("id")) or Path(self.source.name).stem

    @property
    def id(self) -> str:
        return f"{self.session_id}:{self.number}" if self.number else self.session_id

    def take(self, kind: str, item: Item) -> None:
        if kind == "session_meta":
            # A forked session repeats the one it came from after its own.
            self.meta = self.meta or kept_fields(item.payload, self.source.name, item.line, self.report)
        elif kind == "turn_context":
            self.model = as_string(item.payload.get("model")) or self.model
        elif kind == "event_msg":
            self.report.counts["ignored event_msg"] += 1
            if item.kind == "token_count":
                self._add_usage(item.payload.get("info"))
        else:
            self._take_item(item)

    def _take_item(self, item: Item) -> None:
        try:
            self._add_item(item)
        except RecursionError:
            self.report.skip(TOO_DEEP, self.source.name, item.line)

    def _add_item(self, item: Item) -> None:
        kind = item.kind
        if kind == "message":
            self._add_message(item)
        elif kind == "reasoning":
            self._extend(item, thinking=as_text(item.payload.get("summary")))
        elif kind in _CALL_ITEMS:
            call = call_of(item)
            self.call_ids.add(call.id)
            self._extend(item, call=call)
        elif kind in _RESULT_ITEMS:
            self._add_result(item)
        elif kind in _IGNORED_ITEMS:
            self.report.counts[f"ignored {kind}"] += 1
        else:
            self.report.skip(f"unknown record type response_item/{kind}", self.source.name, item.line)

    def _add_message(self, item: Item) -> None:
        role, text = item.payload.get("role"), as_text(item.payload.get("content"))
        images = image_count(item.payload.get("content"))
        if role == "assistant":
            self._extend(item, text=text, begins=True)
        elif role in ("system", "developer"):
            self._add(item, "system", "meta", text=text, extra=images)
        elif role == "user":
            origin: Origin = "meta" if text.lstrip().startswith(_NOTES) else self.origin or "human"
            self._add(item, "user", origin, text=text, extra=images)
        else:
            self.report.skip(f"unknown role {role}", self.source.name, item.line)

    def _extend(
        self, item: Item, *, text: str = "", thinking: str = "", call: ToolCall | None = None, begins: bool = False
    ) -> None:
        """Adds to the assistant message that is being written; a second text, or text after calls, is a new one."""
        origin: Origin = self.origin or "model"
        last = self.turns[-1] if self.turns else None
        calls = () if call is None else (call,)
        if last is None or last.role != "assistant" or last.origin != origin or (begins and (last.text or last.calls)):
            self._add(item, "assistant", origin, text=text, thinking=thinking, calls=calls, model=self.model)
            return
        self.turns[-1] = replace(
            last,
            id=unique(item.name, self.turn_ids) if begins else last.id,
            text=last.text or text,
            thinking="\n\n".join(part for part in (last.thinking, thinking) if part),
            calls=last.calls + calls,
            provenance=self._and_line(last, item.line),
        )

    def _add_result(self, item: Item) -> None:
        call_id = as_string(item.payload.get("call_id")) or ""
        if call_id not in self.call_ids:
            self.report.skip(ORPHAN, self.source.name, item.line)
        output = item.payload.get("output")
        text, is_error = text_and_flag(output)
        images = image_count(output.get("content") if isinstance(output, dict) else output)
        result = ToolResult(call_id=call_id, text=text, is_error=is_error)
        origin: Origin = self.origin or "tool"
        last = self.turns[-1] if self.turns else None
        if last is None or last.role != "tool" or last.origin != origin:
            self._add(item, "tool", origin, results=(result,), extra=images)
        else:
            where = self._and_line(last, item.line)
            extra = with_images(last.extra, images)
            self.turns[-1] = replace(last, results=(*last.results, result), provenance=where, extra=extra)

    def _add(self, item: Item, role: Role, origin: Origin, **content: Any) -> None:
        where = Provenance(file=self.source.name, lines=(item.line,))
        written, turn_id = as_string(item.timestamp), unique(item.name, self.turn_ids)
        self.turns.append(Turn(id=turn_id, role=role, origin=origin, timestamp=written, provenance=where, **content))

    def _and_line(self, turn: Turn, line: int) -> Provenance:
        lines = turn.provenance.lines
        return Provenance(file=self.source.name, lines=lines if line in lines else (*lines, line))

    def _add_usage(self, info: Any) -> None:
        """Token counts are repeated freely, so only the first one after an assistant message is its own."""
        usage = info.get("last_token_usage") if isinstance(info, dict) else None
        place = next((n for n in reversed(range(len(self.turns))) if self.turns[n].origin == "model"), None)
        if not isinstance(usage, dict) or place is None or self.turns[place].usage is not None:
            return
        cached = count(usage.get("cached_input_tokens"))
        self.turns[place] = replace(
            self.turns[place],
            usage=Usage(
                input_tokens=max(count(usage.get("input_tokens")) - cached, 0),
                output_tokens=count(usage.get("output_tokens")),
                cache_read_tokens=cached,
            ),
        )

    def after_compaction(self, item: Item) -> _Part:
        """What the model sees from here on: the history that replaced the old one, or else the summary alone."""
        link = (
            Link(kind="compaction", conversation_id=self.id, turn_id=self.turns[-1].id) if self.turns else self.parent
        )
        after = _Part(
            source=self.source,
            report=self.report,
            meta=self.meta,
            number=self.number + 1,
            parent=link,
            model=self.model,
            origin="copied",
        )
        summary = as_string(item.payload.get("message")) or ""
        for index, payload in enumerate(as_list(item.payload.get("replacement_history"))):
            if isinstance(payload, dict):
                after._take_item(Item(payload, item.line, item.timestamp, index))
            else:
                self.report.skip("message is no object", self.source.name, item.line)
        after.origin = None
        after._mark_summary(item, summary)
        return after

    def _mark_summary(self, item: Item, summary: str) -> None:
        if not summary:
            return
        for place, turn in enumerate(self.turns):
            if turn.role == "user" and turn.text.endswith(summary):
                self.turns[place] = replace(turn, origin="summary")
                return
        if not self.turns:
            self._add(item, "user", "summary", text=summary)

    def conversation(self) -> Iterator[Conversation]:
        if not self.turns:
            return
        meta = self.meta or {}
        yield Conversation(
            id=self.id,
            format=FORMAT,
            turns=tuple(self.turns),
            parent=self.parent,
            session_id=self.session_id,
            cwd=as_string(meta.get("cwd")),
            agent_version=as_string(meta.get("cli_version")),
            extra={key: value for key, value in meta.items() if key not in ("id", "cwd", "cli_version")},
        )
