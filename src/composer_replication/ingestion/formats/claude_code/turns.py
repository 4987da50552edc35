"""Records of one context as turns: split messages merged, results grouped behind the turn that called."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from composer_replication.ingestion.formats.claude_code.attachments import QUEUED, is_notification
from composer_replication.ingestion.formats.claude_code.queue import PLACED, Queued
from composer_replication.ingestion.formats.claude_code.record import CALL_BLOCKS, Node
from composer_replication.ingestion.reading.source import MAX_COUNT, IngestReport, Record, as_text, images_in
from composer_replication.ingestion.reading.turn_list import logged_call
from composer_replication.types import Origin, Provenance, Role, ToolCall, ToolResult, Turn, Usage

_PLAIN_ORDER = ("thinking", "text", "call")
_USAGE = {
    "input_tokens": "input_tokens",
    "output_tokens": "output_tokens",
    "cache_read_input_tokens": "cache_read_tokens",
    "cache_creation_input_tokens": "cache_creation_tokens",
}


@dataclass(slots=True)
class _Draft:
    """A turn that may still grow."""

    id: str
    role: Role
    origin: Origin
    node: Node
    # Bare `list` and `dict`: calling `list[str]` takes five times as long, and there is one draft per message.
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    results: list[ToolResult] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    agents: dict[str, str] = field(default_factory=dict)
    beside: str | None = None
    """The kind of attachment it is, or that it came through the queue."""
    images: int = 0
    unseen: tuple[str, ...] = ()

    def freeze(self, file: str) -> Turn:
        record, message = self.node.record, self.node.message
        model, parent, timestamp = message.get("model"), record.get("parentUuid"), record.get("timestamp")
        extra: dict[str, Any] = {"agents": self.agents} if self.agents else {}
        if self.role == "assistant" and not self._is_plain():
            extra["blocks"] = self._block_lengths()
        if self.beside is not None:
            extra["attachment"] = self.beside
        if self.images:
            extra["images"] = self.images
        if self.unseen:
            extra["unseen_context"] = list(self.unseen)
        return Turn(
            id=self.id,
            role=self.role,
            origin=self.origin,
            text="\n".join(self.texts),
            thinking="\n".join(self.thoughts),
            calls=tuple(self.calls),
            results=tuple(self.results),
            parent_id=parent if isinstance(parent, str) else None,
            model=model if self.role == "assistant" and isinstance(model, str) else None,
            usage=Usage(**self.usage) if self.usage else None,
            timestamp=timestamp if isinstance(timestamp, str) else None,
            provenance=Provenance(file=file, lines=tuple(self.lines)),
            extra=extra,
        )

    def _is_plain(self) -> bool:
        """Thinking, then text, then calls is what nearly every message holds; only other orders need to be kept."""
        if len(self.texts) > 1 or len(self.thoughts) > 1:
            return False
        return len(self.order) == 1 or self.order == sorted(self.order, key=_PLAIN_ORDER.index)

    def _block_lengths(self) -> list[list[Any]]:
        lengths = {
            "thinking": map(len, self.thoughts),
            "text": map(len, self.texts),
            "call": iter(range(len(self.calls))),
        }
        return [[kind, next(lengths[kind])] for kind in self.order]


class TurnBuilder:
    """Takes the nodes of one context in file order."""

    def __init__(self, file: str, report: IngestReport) -> None:
        self._file, self._report = file, report
        self._drafts: list[_Draft] = []
        self._assistants: dict[str, _Draft] = {}
        self._caller_of: dict[str, _Draft] = {}
        self._unseen: dict[str, None] = {}  # kinds of what the model saw before this and nobody can show

    def add(self, node: Node) -> None:
        if node.kind == "assistant":
            self._add_assistant(node)
        elif node.attachment is not None:
            self._add_attachment(node)
        else:
            self._add_user(node)

    def add_queued(self, said: Queued) -> None:
        """A message that no record holds but those of the queue."""
        origin: Origin = "meta" if is_notification(said.text) else "human"
        record: Record = {"timestamp": said.timestamp or None}
        name = f"queued-line-{said.lines[0]}"
        node = Node(0, said.lines[0], name, record, None, False, "user", {}, name, [], None)
        draft = _Draft(name, "user", origin, node, texts=[said.text], lines=list(said.lines), beside=QUEUED)
        self._drafts.append(draft)

    def _add_attachment(self, node: Node) -> None:
        attachment = node.attachment
        assert attachment is not None
        if not attachment.is_known:
            self._report.skip(f"unknown attachment type {attachment.kind!r}", self._file, node.line)
        if attachment.text is None:
            self._unseen[attachment.kind] = None
            if attachment.is_known:
                self._report.counts[f"attachments without text: {attachment.kind}"] += 1
            return
        self._report.counts[PLACED if attachment.kind == QUEUED else f"attachments placed: {attachment.kind}"] += 1
        draft = _Draft(
            node.uuid,
            "user",
            attachment.origin,
            node,
            texts=[attachment.text],
            lines=[node.line],
            beside=attachment.kind,
        )
        draft.images = attachment.images
        self._drafts.append(draft)

    def turns(self) -> tuple[Turn, ...]:
        return tuple(draft.freeze(self._file) for draft in self._drafts)

    def _add_assistant(self, node: Node) -> None:
        draft = self._assistants.get(node.message_key)
        if draft is None:
            draft = _Draft(node.message_key, "assistant", "meta" if node.is_harness else "model", node)
            self._assistants[node.message_key] = draft
            self._drafts.append(draft)
            draft.unseen = tuple(self._unseen)
        draft.lines.append(node.line)
        _raise_usage(draft.usage, node.message.get("usage"))
        for block in node.blocks:
            self._add_block(draft, block, node)

    def _add_block(self, draft: _Draft, block: Record, node: Node) -> None:
        kind = block.get("type")
        if kind == "text":
            draft.texts.append(as_text(block.get("text")))
            draft.order.append("text")
        elif kind in ("thinking", "redacted_thinking"):
            draft.thoughts.append(as_text(block.get("thinking", "")))
            draft.order.append("thinking")
        elif kind in CALL_BLOCKS:
            call = logged_call(block.get("id"), block.get("name"), block.get("input"))
            draft.calls.append(call)
            draft.order.append("call")
            self._caller_of[call.id] = draft
        else:
            self._report.skip(f"unknown block type {kind!r}", self._file, node.line)

    def _add_user(self, node: Node) -> None:
        content = node.blocks
        results = [block for block in content if block.get("type") == "tool_result"]
        if results:
            self._add_results(node, results)
        texts = [as_text(block) for block in content if block.get("type") != "tool_result"]
        if texts or not content:
            draft = _Draft(node.uuid, "user", _origin(node), node, texts=texts, lines=[node.line])
            draft.order = ["text"] * len(texts)
            if len(content) > 1 or not isinstance(content[0].get("text") if content else "", str):
                draft.images = images_in([block for block in content if block.get("type") != "tool_result"])
            self._drafts.append(draft)

    def _add_results(self, node: Node, results: list[Record]) -> None:
        answers = [_tool_result(block) for block in results]
        caller = self._caller_of.get(answers[0].call_id)
        for result in answers:
            if result.call_id not in self._caller_of:
                self._report.skip("tool result without its call", self._file, node.line)
        # What hooks say about one of several parallel calls stands between their results, and was shown after them.
        last = self._drafts[-1] if self._drafts else None
        if last is not None and last.beside is not None:
            last = next((draft for draft in reversed(self._drafts) if draft.beside is None), None)
        same_caller = last is not None and last.results and self._caller_of.get(last.results[0].call_id) is caller
        if last is None or not same_caller or caller is None:
            last = _Draft(node.uuid, "tool", "tool", node)
            self._drafts.append(last)
        last.results += answers
        last.lines.append(node.line)
        for content in (block.get("content") for block in results):
            if not isinstance(content, str):
                last.images += images_in(content)
        if node.agent is not None:
            last.agents[answers[0].call_id] = node.agent


def _origin(node: Node) -> Origin:
    if node.record.get("isCompactSummary") is True:
        return "summary"
    if node.record.get("isMeta") is True:
        return "meta"
    text = node.blocks[0].get("text") if node.blocks else None
    return "meta" if isinstance(text, str) and is_notification(text) else "human"


def _tool_result(block: Record) -> ToolResult:
    flag = block.get("is_error")
    # The format leaves the flag out where nothing went wrong.
    return ToolResult(
        call_id=str(block.get("tool_use_id", "")), text=as_text(block.get("content")), is_error=flag is True
    )


def _raise_usage(usage: dict[str, int], record_usage: Any) -> None:
    """The maximum over the records of one message: later ones repeat and complete earlier ones, a sum counts twice."""
    if isinstance(record_usage, dict):
        for theirs, ours in _USAGE.items():
            value = record_usage.get(theirs)
            if type(value) is int and usage.get(ours, -1) < value <= MAX_COUNT:
                usage[ours] = value
