"""Read OpenCode exports: {info, messages: [{info, parts}]}, where a tool part holds both the call and its result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from composer_replication.ingestion.json_documents import head_values, read_lines_or_document
from composer_replication.ingestion.source_files import (
    IMAGE,
    TOO_DEEP,
    IngestReport,
    Record,
    SourceFile,
    as_text,
    is_image,
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
from composer_replication.types import Conversation, Link, Origin, ToolCall, ToolResult

FORMAT = "opencode"

# Bookkeeping by the agent, not part of the conversation.
_IGNORED_PARTS = {"step-finish", "snapshot", "patch", "agent", "retry", "compaction", "subtask"}
_TOKENS = ("input", "output reasoning", "cache.read", "cache.write")


def sniff(head: bytes, path: Path) -> bool:  # noqa: ARG001 (the content says it all)
    """Return whether a value in `head`, the first bytes of a file, is an OpenCode export."""
    return any(isinstance(value, dict) and _is_export(cast("Record", value)) for value in head_values(head))


def _is_export(value: Record) -> bool:
    info, messages = value.get("info"), value.get("messages")
    if not isinstance(info, dict) or not isinstance(messages, list):
        return False
    # An empty export is recognized by the prefix of its session id.
    if not messages:
        return (as_string(info.get("id")) or "").startswith("ses")
    first = cast("list[Any]", messages)[0]
    return isinstance(first, dict) and isinstance(first.get("info"), dict)


def read(source: SourceFile, report: IngestReport) -> Iterator[Conversation]:
    """Yield the session as one conversation, or as several if a summary replaced the earlier messages."""
    values = (value for _, value in read_lines_or_document(source, report))
    for number, value in enumerate(values):
        if isinstance(value, dict) and isinstance(value.get("messages"), list):
            yield from _session(cast("Record", value), number, source, report)
        else:
            report.skip("no messages", source.name)


def _session(record: Record, number: int, source: SourceFile, report: IngestReport) -> Iterator[Conversation]:
    """Yield the conversations in one export; every summary begins a new one."""
    turns = TurnList(source.name, report)
    info, stem = turns.storable_fields(as_record(record.get("info"))), Path(source.name).stem
    session_id = as_string(info.get("id")) or (f"{stem}:{number}" if number else stem)
    owner, part = as_string(info.get("parentID")), 0
    parent = Link(kind="subagent", conversation_id=owner) if owner else None
    for position, message in enumerate(cast("list[Any]", record["messages"]), start=1):
        if not isinstance(message, dict):
            turns.skip(NO_OBJECT, position)
            continue
        # A summary begins a new context, which continues the previous one.
        if turns.turns and _is_summary(message):
            (earlier_part,) = _conversation(turns, info, session_id, part, parent)
            yield earlier_part
            parent = Link(kind="compaction", conversation_id=earlier_part.id, turn_id=turns.turns[-1].id)
            part, turns = part + 1, TurnList(source.name, report)
        _ExportedMessage(message, position, turns).add()
    yield from _conversation(turns, info, session_id, part, parent)


def _conversation(
    turns: TurnList, info: Record, session_id: str, part: int, parent: Link | None
) -> Iterator[Conversation]:
    handled_keys = ("id", "title", "directory", "version")
    return turns.conversation(
        f"{session_id}:{part}" if part else session_id,
        FORMAT,
        parent=parent,
        session_id=session_id,
        title=as_string(info.get("title")),
        cwd=as_string(info.get("directory")),
        agent_version=as_string(info.get("version")),
        extra={key: value for key, value in info.items() if key not in handled_keys},
    )


def _is_summary(message: Record) -> bool:
    info = as_record(message.get("info"))
    return info.get("role") == "assistant" and info.get("summary") is True


@dataclass(slots=True)
class _ModelAnswer:
    """One answer from the model. A message has several if the model was called again after its tool calls."""

    texts: list[str] = field(default_factory=list[str])
    thoughts: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    results: list[ToolResult] = field(default_factory=list[ToolResult])
    order: list[str] = field(default_factory=list[str])
    images: int = 0

    @property
    def extra(self) -> Record:
        """The block order for `Turn.extra`, if it differs from the default order."""
        plain = ("thinking", "text", "call")
        if self.order == sorted(self.order, key=plain.index):
            return {}
        # Thoughts are joined by two newlines, blocks by one. The additional newline counts as part of the preceding
        # thought.
        last = len(self.thoughts) - 1
        sizes = {
            "thinking": iter([len(thought) + (number < last) for number, thought in enumerate(self.thoughts)]),
            "text": iter(map(len, self.texts)),
            "call": iter(range(len(self.calls))),
        }
        return {"blocks": [[kind, next(sizes[kind])] for kind in self.order]}

    @property
    def is_empty(self) -> bool:
        return not (self.texts or self.thoughts or self.calls)


class _ExportedMessage:
    """One message in the export, its position, and the turns to which it is added."""

    def __init__(self, message: Record, position: int, turns: TurnList) -> None:
        self._message, self._position, self._turns = message, position, turns
        self._info = as_record(message.get("info"))
        self._id = as_string(self._info.get("id")) or f"message-{position}"

    @property
    def _timestamp(self) -> str | None:
        created = as_record(self._info.get("time")).get("created")
        return None if created is None else str(created)

    def add(self) -> None:
        """Add the turns for this message."""
        role = self._info.get("role")
        try:
            if role == "user":
                self._add_user()
            elif role == "assistant":
                self._add_assistant()
            else:
                self._turns.skip(f"unknown role {role}", self._position)
        except RecursionError:
            self._turns.skip(TOO_DEEP, self._position)

    def _parts(self) -> Iterator[Record]:
        for part in as_list(self._message.get("parts")):
            if isinstance(part, dict):
                yield cast("Record", part)
            else:
                self._turns.skip("part is no object", self._position)

    def _add_user(self) -> None:
        texts: list[str] = []
        origin: Origin = "meta"
        images = 0
        for part in self._parts():
            kind = as_string(part.get("type"))
            if kind == "text" and part.get("ignored"):
                self._turns.report.counts["ignored opencode text"] += 1
            elif kind == "text":
                texts.append(as_text(part.get("text")))
                # Text inserted by the agent (the content of a file, a reminder) is marked as synthetic.
                origin = origin if part.get("synthetic") else "human"
            elif kind == "file":
                images += is_image(part)
                name = part.get("filename") or part.get("url") or ""
                texts.append(IMAGE if is_image(part) else f"[file {name}]")
                origin = "human"
            else:
                self._count_other(kind)
        if texts:
            extra = {"images": images} if images else {}
            text, when = "\n".join(texts), self._timestamp
            self._turns.add_turn(self._id, "user", origin, self._position, text, timestamp=when, extra=extra)

    def _add_assistant(self) -> None:
        answers = [answer for answer in self._answers() if not answer.is_empty]
        error_fields = {} if self._info.get("error") is None else {"error": self._info["error"]}
        error_fields = self._turns.storable_fields(error_fields, self._position)
        # An answer that failed before its first word is a turn as well.
        if not answers and error_fields:
            answers = [_ModelAnswer()]
        for number, answer in enumerate(answers):
            turn_id = f"{self._id}#{number + 1}" if number else self._id
            is_last = number == len(answers) - 1
            self._turns.add_turn(
                turn_id,
                "assistant",
                "summary" if _is_summary(self._message) else "model",
                self._position,
                "\n".join(answer.texts),
                thinking="\n\n".join(answer.thoughts),
                calls=tuple(answer.calls),
                parent_id=as_string(self._info.get("parentID")),
                model=as_string(self._info.get("modelID")),
                usage=read_usage(self._info.get("tokens"), *_TOKENS, is_disjoint=True) if is_last else None,
                timestamp=self._timestamp,
                extra=answer.extra | (error_fields if is_last else {}),
            )
            if answer.results:
                results, extra = tuple(answer.results), {"images": answer.images} if answer.images else {}
                self._turns.add_turn(f"{turn_id}:results", "tool", "tool", self._position, results=results, extra=extra)

    def _answers(self) -> list[_ModelAnswer]:
        """Return the answers in the message, which are separated by `step-start` parts."""
        answers = [_ModelAnswer()]
        for index, part in enumerate(self._parts()):
            kind = as_string(part.get("type"))
            if kind == "step-start":
                answers.append(_ModelAnswer())
            elif kind == "text":
                answers[-1].texts.append(as_text(part.get("text")))
                answers[-1].order.append("text")
            elif kind == "reasoning":
                answers[-1].thoughts.append(as_text(part.get("text")))
                answers[-1].order.append("thinking")
            elif kind == "tool":
                self._add_tool(part, index, answers[-1])
            else:
                self._count_other(kind)
        return answers

    def _add_tool(self, part: Record, index: int, answer: _ModelAnswer) -> None:
        state = as_record(part.get("state"))
        call_id = as_string(part.get("callID")) or f"{self._id}:call-{index}"
        answer.calls.append(make_call(call_id, part.get("tool"), state.get("input")))
        answer.order.append("call")
        answer.images += sum(is_image(attachment) for attachment in as_list(state.get("attachments")))
        status = state.get("status")
        if status == "completed":
            answer.results.append(ToolResult(call_id=call_id, text=as_text(state.get("output")), is_error=False))
        elif status == "error":
            text = as_text(state.get("error", state.get("output")))
            answer.results.append(ToolResult(call_id=call_id, text=text, is_error=True))
        # A call without a final state has no result yet.
        elif status not in ("pending", "running"):
            self._turns.skip(f"unknown tool status {status}", self._position)

    def _count_other(self, kind: str | None) -> None:
        if kind in _IGNORED_PARTS:
            self._turns.report.counts[f"ignored opencode {kind}"] += 1
        else:
            self._turns.skip(f"unknown record type part/{kind}", self._position)
