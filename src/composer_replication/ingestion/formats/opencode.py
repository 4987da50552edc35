"""OpenCode exports: {info, messages: [{info, parts}]}, where a tool part holds the call and what came back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from composer_replication.ingestion.reading.documents import head_values, read_lines_or_document
from composer_replication.ingestion.reading.source import (
    IMAGE,
    TOO_DEEP,
    IngestReport,
    Record,
    SourceFile,
    as_text,
    is_image,
)
from composer_replication.ingestion.reading.turn_list import (
    NO_OBJECT,
    as_list,
    as_record,
    as_string,
    kept_fields,
    parse_call,
    usage_of,
)
from composer_replication.types import Conversation, Link, Origin, Provenance, ToolCall, ToolResult, Turn

FORMAT = "opencode"

# Bookkeeping of the agent, no part of what was said.
_IGNORED_PARTS = {"step-finish", "snapshot", "patch", "agent", "retry", "compaction", "subtask"}
_TOKENS = ("input", "output reasoning", "cache.read", "cache.write")


def sniff(head: bytes, path: Path) -> bool:  # noqa: ARG001 (the content says it all)
    return any(isinstance(value, dict) and _is_export(cast("Record", value)) for value in head_values(head))


def _is_export(value: Record) -> bool:
    info, messages = value.get("info"), value.get("messages")
    if not isinstance(info, dict) or not isinstance(messages, list):
        return False
    if not messages:
        return (as_string(info.get("id")) or "").startswith("ses")
    first = cast("list[Any]", messages)[0]
    return isinstance(first, dict) and isinstance(first.get("info"), dict)


def read(source: SourceFile, report: IngestReport) -> Iterator[Conversation]:
    """The session as one conversation, or several where a summary took the place of what was said before."""
    values = (value for _, value in read_lines_or_document(source, report))
    for number, value in enumerate(values):
        if isinstance(value, dict) and isinstance(value.get("messages"), list):
            yield from _session(cast("Record", value), number, source, report)
        else:
            report.skip("no messages", source.name)


def _session(record: Record, number: int, source: SourceFile, report: IngestReport) -> Iterator[Conversation]:
    info = kept_fields(as_record(record.get("info")), source.name, 0, report)
    stem = Path(source.name).stem
    session_id = as_string(info.get("id")) or (f"{stem}:{number}" if number else stem)
    owner = as_string(info.get("parentID"))
    parent = Link(kind="subagent", conversation_id=owner) if owner else None
    part, turns = 0, list[Turn]()
    for position, message in enumerate(cast("list[Any]", record["messages"]), start=1):
        if not isinstance(message, dict):
            report.skip(NO_OBJECT, source.name, position)
            continue
        if turns and _is_summary(message):
            done = _conversation(info, session_id, part, turns, parent)
            yield done
            parent = Link(kind="compaction", conversation_id=done.id, turn_id=turns[-1].id)
            part, turns = part + 1, []
        turns.extend(_Message(message=message, position=position, source=source, report=report).turns())
    if turns:
        yield _conversation(info, session_id, part, turns, parent)


def _conversation(info: Record, session_id: str, part: int, turns: list[Turn], parent: Link | None) -> Conversation:
    kept = ("id", "title", "directory", "version")
    return Conversation(
        id=f"{session_id}:{part}" if part else session_id,
        format=FORMAT,
        turns=tuple(turns),
        parent=parent,
        session_id=session_id,
        title=as_string(info.get("title")),
        cwd=as_string(info.get("directory")),
        agent_version=as_string(info.get("version")),
        extra={key: value for key, value in info.items() if key not in kept},
    )


def _is_summary(message: Record) -> bool:
    info = as_record(message.get("info"))
    return info.get("role") == "assistant" and info.get("summary") is True


@dataclass(slots=True)
class _Step:
    """What one answer of the model holds: a message has several where the model was asked again after its calls."""

    texts: list[str] = field(default_factory=list[str])
    thoughts: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    results: list[ToolResult] = field(default_factory=list[ToolResult])
    order: list[str] = field(default_factory=list[str])
    images: int = 0

    @property
    def extra(self) -> Record:
        """The order of the blocks where it is not thinking, text, calls; and how many images the calls brought."""
        plain = ("thinking", "text", "call")
        if self.order == sorted(self.order, key=plain.index):
            return {}
        # Thoughts are joined by an empty line: the first newline of it is the end of the thought before.
        last = len(self.thoughts) - 1
        sizes = {
            "thinking": iter([len(each) + (number < last) for number, each in enumerate(self.thoughts)]),
            "text": iter(map(len, self.texts)),
            "call": iter(range(len(self.calls))),
        }
        return {"blocks": [[kind, next(sizes[kind])] for kind in self.order]}

    @property
    def is_empty(self) -> bool:
        return not (self.texts or self.thoughts or self.calls)


@dataclass(slots=True, kw_only=True)
class _Message:
    """One message of the export and its place."""

    message: Record
    position: int
    source: SourceFile
    report: IngestReport

    @property
    def info(self) -> Record:
        return as_record(self.message.get("info"))

    @property
    def id(self) -> str:
        return as_string(self.info.get("id")) or f"message-{self.position}"

    @property
    def where(self) -> Provenance:
        return Provenance(file=self.source.name, lines=(self.position,))

    @property
    def timestamp(self) -> str | None:
        created = as_record(self.info.get("time")).get("created")
        return None if created is None else str(created)

    def turns(self) -> list[Turn]:
        try:
            return list(self._turns())
        except RecursionError:
            self.report.skip(TOO_DEEP, self.source.name, self.position)
            return []

    def _turns(self) -> Iterator[Turn]:
        role = self.info.get("role")
        if role == "user":
            yield from self._user()
        elif role == "assistant":
            yield from self._assistant()
        else:
            self.report.skip(f"unknown role {role}", self.source.name, self.position)

    def _parts(self) -> Iterator[Record]:
        for part in as_list(self.message.get("parts")):
            if isinstance(part, dict):
                yield cast("Record", part)
            else:
                self.report.skip("part is no object", self.source.name, self.position)

    def _user(self) -> Iterator[Turn]:
        texts: list[str] = []
        origin: Origin = "meta"
        images = 0
        for part in self._parts():
            kind = as_string(part.get("type"))
            if kind == "text" and part.get("ignored"):
                self.report.counts["ignored opencode text"] += 1
            elif kind == "text":
                texts.append(as_text(part.get("text")))
                # Text the agent put in for the user (a file's content, a reminder) is marked as synthetic.
                origin = origin if part.get("synthetic") else "human"
            elif kind == "file":
                images += is_image(part)
                name = part.get("filename") or part.get("url") or ""
                texts.append(IMAGE if is_image(part) else f"[file {name}]")
                origin = "human"
            else:
                self._count_other(kind)
        if texts:
            yield Turn(
                id=self.id,
                role="user",
                origin=origin,
                text="\n".join(texts),
                timestamp=self.timestamp,
                provenance=self.where,
                extra={"images": images} if images else {},
            )

    def _assistant(self) -> Iterator[Turn]:
        steps = [step for step in self._steps() if not step.is_empty]
        failed = {} if self.info.get("error") is None else {"error": self.info["error"]}
        failed = kept_fields(failed, self.source.name, self.position, self.report)
        if not steps and failed:
            steps = [_Step()]
        for number, step in enumerate(steps):
            turn_id = f"{self.id}#{number + 1}" if number else self.id
            last = number == len(steps) - 1
            yield Turn(
                id=turn_id,
                role="assistant",
                origin="summary" if _is_summary(self.message) else "model",
                text="\n".join(step.texts),
                thinking="\n\n".join(step.thoughts),
                calls=tuple(step.calls),
                parent_id=as_string(self.info.get("parentID")),
                model=as_string(self.info.get("modelID")),
                usage=usage_of(self.info.get("tokens"), *_TOKENS, is_disjoint=True) if last else None,
                timestamp=self.timestamp,
                provenance=self.where,
                extra=step.extra | (failed if last else {}),
            )
            if step.results:
                yield Turn(
                    id=f"{turn_id}:results",
                    role="tool",
                    origin="tool",
                    results=tuple(step.results),
                    provenance=self.where,
                    extra={"images": step.images} if step.images else {},
                )

    def _steps(self) -> list[_Step]:
        steps = [_Step()]
        for index, part in enumerate(self._parts()):
            kind = as_string(part.get("type"))
            if kind == "step-start":
                steps.append(_Step())
            elif kind == "text":
                steps[-1].texts.append(as_text(part.get("text")))
                steps[-1].order.append("text")
            elif kind == "reasoning":
                steps[-1].thoughts.append(as_text(part.get("text")))
                steps[-1].order.append("thinking")
            elif kind == "tool":
                self._add_tool(part, index, steps[-1])
            else:
                self._count_other(kind)
        return steps

    def _add_tool(self, part: Record, index: int, step: _Step) -> None:
        state = as_record(part.get("state"))
        call_id = as_string(part.get("callID")) or f"{self.id}:call-{index}"
        step.calls.append(parse_call(call_id, part.get("tool"), state.get("input")))
        step.order.append("call")
        step.images += sum(is_image(each) for each in as_list(state.get("attachments")))
        status = state.get("status")
        if status == "completed":
            step.results.append(ToolResult(call_id=call_id, text=as_text(state.get("output")), is_error=False))
        elif status == "error":
            text = as_text(state.get("error", state.get("output")))
            step.results.append(ToolResult(call_id=call_id, text=text, is_error=True))
        elif status not in ("pending", "running"):
            self.report.skip(f"unknown tool status {status}", self.source.name, self.position)

    def _count_other(self, kind: str | None) -> None:
        if kind in _IGNORED_PARTS:
            self.report.counts[f"ignored opencode {kind}"] += 1
        else:
            self.report.skip(f"unknown record type part/{kind}", self.source.name, self.position)
