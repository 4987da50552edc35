"""Records of one context as turns: split messages merged, results grouped behind the turn that called."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from composer_replication.ingestion.claude_tree import Node, blocks
from composer_replication.ingestion.source import IngestReport, Record, as_text, check_depth
from composer_replication.types import Origin, Provenance, Role, ToolCall, ToolResult, Turn, Usage

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
    texts: list[str] = field(default_factory=list[str])
    thoughts: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    results: list[ToolResult] = field(default_factory=list[ToolResult])
    lines: list[int] = field(default_factory=list[int])
    usage: dict[str, int] = field(default_factory=dict[str, int])
    order: list[str] = field(default_factory=list[str])
    agents: dict[str, str] = field(default_factory=dict[str, str])

    def freeze(self, file: str) -> Turn:
        record, message = self.node.record, self.node.message
        model, parent, timestamp = message.get("model"), record.get("parentUuid"), record.get("timestamp")
        # Thinking, then text, then calls is what nearly every message holds; only other orders need to be kept.
        plain = sorted(self.order, key=["thinking", "text", "call"].index)
        extra: dict[str, Any] = {"agents": self.agents} if self.agents else {}
        if self.role == "assistant" and (self.order != plain or len(self.texts) > 1 or len(self.thoughts) > 1):
            extra["blocks"] = self._block_lengths()
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

    def add(self, node: Node) -> None:
        if node.record.get("type") == "assistant":
            self._add_assistant(node)
        else:
            self._add_user(node)

    def turns(self) -> tuple[Turn, ...]:
        return tuple(draft.freeze(self._file) for draft in self._drafts)

    def _add_assistant(self, node: Node) -> None:
        draft = self._assistants.get(node.message_key)
        if draft is None:
            draft = _Draft(node.message_key, "assistant", "model", node)
            self._assistants[node.message_key] = draft
            self._drafts.append(draft)
        draft.lines.append(node.line)
        _raise_usage(draft.usage, node.message.get("usage"))
        for block in blocks(node):
            self._add_block(draft, block, node)

    def _add_block(self, draft: _Draft, block: Record, node: Node) -> None:
        kind = block.get("type")
        if kind == "text":
            draft.texts.append(as_text(block.get("text")))
            draft.order.append("text")
        elif kind in ("thinking", "redacted_thinking"):
            draft.thoughts.append(as_text(block.get("thinking", "")))
            draft.order.append("thinking")
        elif kind in ("tool_use", "server_tool_use"):
            call = _tool_call(block)
            draft.calls.append(call)
            draft.order.append("call")
            self._caller_of[call.id] = draft
        else:
            self._report.skip(f"unknown block type {kind!r}"[:80], self._file, node.line)

    def _add_user(self, node: Node) -> None:
        content = blocks(node)
        results = [block for block in content if block.get("type") == "tool_result"]
        if results:
            self._add_results(node, results)
        texts = [as_text(block) for block in content if block.get("type") != "tool_result"]
        if texts or not content:
            draft = _Draft(node.uuid, "user", _origin(node), node, texts=texts, lines=[node.line])
            draft.order = ["text"] * len(texts)
            self._drafts.append(draft)

    def _add_results(self, node: Node, results: list[Record]) -> None:
        found = [_tool_result(block) for block in results]
        caller = self._caller_of.get(found[0].call_id)
        for result in found:
            if result.call_id not in self._caller_of:
                self._report.skip("tool result without its call", self._file, node.line)
        last = self._drafts[-1] if self._drafts else None
        same_caller = last is not None and last.results and self._caller_of.get(last.results[0].call_id) is caller
        if last is None or not same_caller or caller is None:
            last = _Draft(node.uuid, "tool", "tool", node)
            self._drafts.append(last)
        last.results += found
        last.lines.append(node.line)
        details = node.record.get("toolUseResult")
        agent = cast("Record", details).get("agentId") if isinstance(details, dict) else None
        if isinstance(agent, str):
            last.agents[found[0].call_id] = agent


def _origin(node: Node) -> Origin:
    if node.record.get("isCompactSummary") is True:
        return "summary"
    return "meta" if node.record.get("isMeta") is True else "human"


def _tool_call(block: Record) -> ToolCall:
    arguments = block.get("input")
    is_object = isinstance(arguments, dict)
    check_depth(arguments)
    return ToolCall(
        id=str(block.get("id", "")),
        name=str(block.get("name", "")),
        arguments=cast("Record", arguments) if is_object else {},
        raw_arguments=None if is_object or arguments is None else as_text(arguments),
    )


def _tool_result(block: Record) -> ToolResult:
    flag = block.get("is_error")
    # The format leaves the flag out where nothing went wrong.
    return ToolResult(
        call_id=str(block.get("tool_use_id", "")), text=as_text(block.get("content")), is_error=flag is True
    )


def _raise_usage(usage: dict[str, int], given: Any) -> None:
    """The maximum over the records of one message: later ones repeat and complete earlier ones, a sum counts twice."""
    if isinstance(given, dict):
        for theirs, ours in _USAGE.items():
            value = cast("Record", given).get(theirs)
            if type(value) is int and value > usage.get(ours, -1):
                usage[ours] = value
