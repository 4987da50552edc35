"""A Claude Code log as a tree of records, and the paths through it that were really lived.

Records point to their parent by uuid. Most parents are records that carry no message (progress, hooks), an assistant
message is split over several records, parallel calls make their results siblings, a rewind leaves a dead branch, and a
compaction starts a new tree that only a logical link ties to the old one. So the whole tree is built first, and what is
dropped is dropped afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from composer_replication.ingestion.claude_attachments import Attachment, attachment_kind, attachment_of
from composer_replication.ingestion.source import TOO_DEEP, IngestReport, Record

# The service runs the second kind itself; their results come back under the call's id all the same.
CALL_BLOCKS = ("tool_use", "server_tool_use")
_MESSAGE_TYPES = frozenset({"user", "assistant"})
# Known records that hold no message. Anything else is counted under its own name.
_SILENT_TYPES = frozenset(
    {
        "progress",
        "system",
        "file-history-snapshot",
        "queue-operation",
        "summary",
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
    """A record that holds a message, an attachment that the model saw, or a compaction boundary."""

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
    agent: str | None
    """The sub-agent whose work came back as a result here."""
    attachment: Attachment | None = None

    @property
    def is_boundary(self) -> bool:
        return self.kind == "system"

    @property
    def called(self) -> list[str]:
        return [_name(block.get("id")) for block in self.blocks if block.get("type") in CALL_BLOCKS]

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
    num_records: int = 0
    num_silent: int = 0
    """Records of a known type that hold no message."""
    attachments: list[Record] = field(default_factory=list[Record])
    queue_operations: list[tuple[int, Record]] = field(default_factory=list[tuple[int, Record]])
    _last_uuid: dict[bool, str | None] = field(default_factory=lambda: {False: None, True: None})

    def add(self, line: int, record: Record) -> None:
        kind = record.get("type")
        kind = kind if isinstance(kind, str) else type(kind).__name__
        self.num_records += 1
        holds_message = kind in _MESSAGE_TYPES
        shown = self._attachment(record, line) if kind == "attachment" else None
        is_boundary = not holds_message and self._is_boundary(kind, record, line)
        uuid = record.get("uuid")
        if not isinstance(uuid, str):
            if not holds_message and shown is None:
                return
            uuid = f"line-{line}"
        if uuid in self.parents:
            self.report.skip("duplicate uuid", self.file, line)
            if not holds_message or self._is_known(uuid, record):
                return
            uuid = f"line-{line}"  # another record under a name that is taken: damage there must not cost this one
        is_sidechain = record.get("isSidechain") is True
        parent = record.get("parentUuid")
        if not isinstance(parent, str) or parent not in self.parents:
            parent = self._parent_instead(parent, line, is_sidechain, is_boundary)
        self.parents[uuid] = parent
        self._last_uuid[is_sidechain] = uuid
        if holds_message or is_boundary or shown is not None:
            self._add_node(uuid, kind, line, record, parent, is_sidechain, shown)

    def _is_boundary(self, kind: str, record: Record, line: int) -> bool:
        """Whether a record without a message is a compaction's boundary; all others are only counted."""
        if kind == "system" and record.get("subtype") == "compact_boundary":
            return True
        if kind in _SILENT_TYPES:
            self.num_silent += 1
            if kind == "queue-operation":
                self.queue_operations.append((line, record))
        elif kind != "attachment":
            self.report.skip(f"unknown record type {kind!r}", self.file, line)
        if kind == "summary":
            self.report.counts["summaries"] += 1
            self.title = record["summary"] if isinstance(record.get("summary"), str) else self.title
        return False

    def _attachment(self, record: Record, line: int) -> Attachment | None:
        """What the model was shown; what it never was is counted by its kind."""
        self.attachments.append(record)
        try:
            shown = attachment_of(record)
        except RecursionError:
            self.report.skip(TOO_DEEP, self.file, line)
            return None
        if shown is None:
            self.num_silent += 1
            self.report.counts[f"attachments not shown: {attachment_kind(record)}"] += 1
        return shown

    def _add_node(
        self,
        uuid: str,
        kind: str,
        line: int,
        record: Record,
        parent: str | None,
        is_sidechain: bool,
        shown: Attachment | None,
    ) -> None:
        message = record.get("message")
        if not isinstance(message, dict):
            message = {}
        name = message.get("id")
        key = name if isinstance(name, str) and name else uuid
        # It repeats the result, often a whole file, in a shape nobody reads; without it there is half as much to hold.
        details = record.pop("toolUseResult", None)
        agent = details.get("agentId") if isinstance(details, dict) else None
        agent = agent if isinstance(agent, str) else None
        index, parts = len(self.nodes), _blocks(message)
        self.nodes[uuid] = Node(
            index, line, uuid, record, parent, is_sidechain, kind, message, key, parts, agent, shown
        )

    def _is_known(self, uuid: str, record: Record) -> bool:
        known = self.nodes.get(uuid)
        return known is not None and known.record.get("message") == record.get("message")

    def _parent_instead(self, parent: Any, line: int, is_sidechain: bool, is_boundary: bool) -> str | None:
        """For a parent that is not in the file, and for a second root of the main thread, the record before them:
        upstream loses links, and a log without any links is still one conversation."""
        previous = self._last_uuid[is_sidechain]
        if isinstance(parent, str):
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


def _blocks(message: Record) -> list[Record]:
    """The content blocks of a message; a plain string is one text block, and so is a bare string in the list."""
    content: Any = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        return []
    if len(content) == 1 and isinstance(content[0], dict):  # nearly all of them
        return content
    return [
        each if isinstance(each, dict) else {"type": "text", "text": each}
        for each in cast("list[Any]", content)
        if isinstance(each, (dict, str))
    ]
