"""A Claude Code log as a tree of records, and the paths through it that were really lived.

Records point to their parent by uuid. Most parents are records that carry no message (progress, hooks), an assistant
message is split over several records, parallel calls make their results siblings, a rewind leaves a dead branch, and a
compaction starts a new tree that only a logical link ties to the old one. So the whole tree is built first, and what is
dropped is dropped afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from composer_replication.ingestion.source import IngestReport, Record

_MESSAGE_TYPES = frozenset({"user", "assistant"})
# Known records that hold no message. Anything else is counted under its own name.
_SILENT_TYPES = frozenset(
    {
        "progress",
        "system",
        "file-history-snapshot",
        "queue-operation",
        "summary",
        "attachment",
        "permission-mode",
        "ai-title",
        "agent-setting",
        "bridge-session",
        "worktree-state",
        "pr-link",
        "agent-name",
        "custom-title",
        "last-prompt",
    }
)


@dataclass(slots=True)
class Node:
    """A record that holds a message, or a compaction boundary."""

    index: int
    line: int
    uuid: str
    record: Record
    parent: str | None
    is_sidechain: bool
    kind: str
    message: Record
    message_key: str
    """What the records of one assistant message share; the uuid stands in where the id is missing."""
    blocks: list[Record]

    @property
    def is_boundary(self) -> bool:
        return self.kind == "system"

    @property
    def called(self) -> list[str]:
        return [_name(block.get("id")) for block in self.blocks if block.get("type") == "tool_use"]

    @property
    def answered(self) -> list[str]:
        return [_name(block.get("tool_use_id")) for block in self.blocks if block.get("type") == "tool_result"]


def _name(value: Any) -> str:
    return value if isinstance(value, str) else ""


@dataclass(slots=True)
class RecordTree:
    """All records of one log; `parents` knows those without a message too."""

    file: str
    report: IngestReport
    nodes: dict[str, Node] = field(default_factory=dict[str, Node])
    parents: dict[str, str | None] = field(default_factory=dict[str, "str | None"])
    title: str | None = None
    _last_uuid: dict[bool, str | None] = field(default_factory=lambda: {False: None, True: None})

    def add(self, line: int, record: Record) -> None:
        kind = record.get("type")
        kind = kind if isinstance(kind, str) else type(kind).__name__
        self.report.counts["records"] += 1
        is_boundary = kind == "system" and record.get("subtype") == "compact_boundary"
        if kind == "summary":
            self.report.counts["summaries"] += 1
            self.title = record["summary"] if isinstance(record.get("summary"), str) else self.title
        if kind in _SILENT_TYPES and not is_boundary:
            self.report.counts["records without a message"] += 1
        if kind not in _MESSAGE_TYPES and kind not in _SILENT_TYPES:
            self.report.skip(f"unknown record type {kind!r}"[:80], self.file, line)
        uuid = record.get("uuid")
        if not isinstance(uuid, str):
            if kind not in _MESSAGE_TYPES:
                return
            uuid = f"line-{line}"
        if uuid in self.parents:
            self.report.skip("duplicate uuid", self.file, line)
            if kind not in _MESSAGE_TYPES or self._is_known(uuid, record):
                return
            uuid = f"line-{line}"  # another record under a name that is taken: damage there must not cost this one
        is_sidechain = record.get("isSidechain") is True
        parent = self._parent_of(record, line, is_sidechain, is_boundary)
        self.parents[uuid] = parent
        self._last_uuid[is_sidechain] = uuid
        if kind in _MESSAGE_TYPES or is_boundary:
            message = record.get("message")
            message = cast("Record", message) if isinstance(message, dict) else {}
            name = message.get("id")
            key = name if isinstance(name, str) and name else uuid
            parts = _blocks(message)
            self.nodes[uuid] = Node(
                len(self.nodes), line, uuid, record, parent, is_sidechain, kind, message, key, parts
            )

    def _is_known(self, uuid: str, record: Record) -> bool:
        known = self.nodes.get(uuid)
        return known is not None and known.record.get("message") == record.get("message")

    def _parent_of(self, record: Record, line: int, is_sidechain: bool, is_boundary: bool) -> str | None:
        """The recorded parent. A parent that is not in the file, and a second root of the main thread, are attached to
        the record before them: upstream loses links, and a log without any links is still one conversation."""
        parent = record.get("parentUuid")
        previous = self._last_uuid[is_sidechain]
        if isinstance(parent, str):
            if parent in self.parents:
                return parent
            self.report.skip("orphan attached to the record before it", self.file, line)
            return previous
        return None if is_boundary or is_sidechain else previous

    def ancestor(self, uuid: str | None) -> str | None:
        """The nearest record at or above `uuid` that is a node; parents always stand earlier, so this ends."""
        while uuid is not None and uuid not in self.nodes:
            uuid = self.parents.get(uuid)
        return uuid

    def path_to_root(self, uuid: str | None) -> list[Node]:
        """From the node at or above `uuid` up to its root or to a compaction boundary, which is included."""
        path: list[Node] = []
        node_id = self.ancestor(uuid)
        while node_id is not None:
            node = self.nodes[node_id]
            path.append(node)
            if node.is_boundary:
                break
            node_id = self.ancestor(node.parent)
        return path


@dataclass(slots=True)
class Part:
    """The records of one context in file order, and the boundary it began at (None: the start of the session)."""

    nodes: list[Node]
    boundary: Node | None


def live_parts(tree: RecordTree) -> list[Part]:
    """The main thread as it stood at the end, cut at compactions, oldest part first."""
    main = _MainThread(tree)
    leaf = next((node for node in reversed(main.nodes) if not node.is_boundary), None)
    parts: list[Part] = []
    taken: set[str] = set()
    while leaf is not None:
        path = tree.path_to_root(leaf.uuid)
        boundary = path[-1] if path[-1].is_boundary else None
        lived = main.with_siblings([node for node in path if not node.is_boundary], taken)
        taken |= {node.uuid for node in lived}
        parts.append(Part(lived, boundary))
        leaf = None if boundary is None else _before_boundary(tree, boundary, taken)
    return parts[::-1]


class _MainThread:
    """The main thread's nodes, by message and by the calls they answer: each part looks up only what is its own."""

    def __init__(self, tree: RecordTree) -> None:
        self.nodes = [node for node in tree.nodes.values() if not node.is_sidechain]
        self._of_message: dict[str, list[Node]] = {}
        self._answers: dict[str, list[Node]] = {}
        for node in self.nodes:
            if node.kind == "assistant":
                self._of_message.setdefault(node.message_key, []).append(node)
            elif node.kind == "user":
                for call_id in node.answered:
                    self._answers.setdefault(call_id, []).append(node)

    def with_siblings(self, path: list[Node], taken: set[str]) -> list[Node]:
        """The path plus what belongs to it sideways: other records of its messages, and the results of its calls."""
        keys = {node.message_key: None for node in path if node.kind == "assistant"}
        messages = [node for key in keys for node in self._of_message.get(key, ())]
        calls = {call_id for node in messages for call_id in node.called}
        answers = [node for call_id in calls for node in self._answers.get(call_id, ())]
        siblings = [node for node in answers if calls.issuperset(node.answered)]
        lived = {node.uuid: node for node in (*path, *messages, *siblings)}
        lived = {uuid: node for uuid, node in lived.items() if uuid not in taken and not node.is_sidechain}
        return sorted(lived.values(), key=lambda node: node.index)


def _before_boundary(tree: RecordTree, boundary: Node, taken: set[str]) -> Node | None:
    """Where the context before a compaction ended."""
    logical = boundary.record.get("logicalParentUuid")
    named = tree.nodes.get(tree.ancestor(logical if isinstance(logical, str) else None) or "")
    # Only what stands earlier, or a boundary that names itself or its own children would go round for ever.
    if named is None or named.index >= boundary.index or named.is_sidechain or named.is_boundary:
        earlier = [n for n in tree.nodes.values() if n.index < boundary.index and not n.is_sidechain]
        named = next((n for n in reversed(earlier) if not n.is_boundary), None)
    return None if named is None or named.uuid in taken else named


def groups_apart(tree: RecordTree, nodes: list[Node]) -> list[list[Node]]:
    """Nodes that hang together by parent links among themselves, each group in file order."""
    group_of: dict[str, list[Node]] = {}
    groups: list[list[Node]] = []
    for node in nodes:
        parent = tree.ancestor(node.parent)
        key = f"message {node.message_key}" if node.record.get("type") == "assistant" else ""
        # A message stays whole, wherever the parents of its records lie.
        group = group_of.get(key) or group_of.get(parent or "")
        if group is None:
            group = []
            groups.append(group)
        group.append(node)
        group_of[node.uuid] = group
        if key:
            group_of[key] = group
    return groups


def blocks(node: Node) -> list[Record]:
    return node.blocks


def _blocks(message: Record) -> list[Record]:
    """The content blocks of a message; a plain string is one text block, and so is a bare string in the list."""
    content: Any = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        return []
    return [
        each if isinstance(each, dict) else {"type": "text", "text": each}
        for each in cast("list[Any]", content)
        if isinstance(each, (dict, str))
    ]
