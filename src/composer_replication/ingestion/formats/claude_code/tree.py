"""A Claude Code log as a tree of records, and the paths through it that were really lived.

Records point to their parent by uuid. Most parents are records that carry no message (progress, hooks), an assistant
message is split over several records, parallel calls make their results siblings, a rewind leaves a dead branch, and a
compaction starts a new tree that only a logical link ties to the old one. So the whole tree is built first, and what is
dropped is dropped afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from composer_replication.ingestion.formats.claude_code.attachments import Attachment, attachment_kind, attachment_of
from composer_replication.ingestion.formats.claude_code.links import Links
from composer_replication.ingestion.formats.claude_code.order import behind_their_parents, without_copies
from composer_replication.ingestion.formats.claude_code.record import Entry, Node, node_of
from composer_replication.ingestion.formats.claude_code.sidechains import Chain
from composer_replication.ingestion.reading.source import TOO_DEEP, IngestReport, Record

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
class RecordTree:
    """All records of one log; `nearest` knows those without a message too."""

    file: str
    report: IngestReport
    is_agent: bool = False
    """Whether it is a sub-agent's own file."""
    nodes: dict[str, Node] = field(default_factory=dict[str, Node])
    nearest: dict[str, str | None] = field(default_factory=dict[str, "str | None"])
    """Any record -> the nearest node at or above it."""
    chain_of: dict[str, Chain] = field(default_factory=dict[str, Chain])
    """Any record of a sidechain -> the inline sub-agent it is of."""
    title: str | None = None
    num_records: int = 0
    num_silent: int = 0
    """Records of a known type that hold no message."""
    attachments: list[Record] = field(default_factory=list[Record])
    queue_operations: list[tuple[int, Record]] = field(default_factory=list[tuple[int, Record]])
    ended_at: dict[str, str] = field(default_factory=dict[str, str])
    """The start of a context (a boundary, or a summary that lost its own) -> where the context before it ended."""
    _entries: list[Entry] = field(default_factory=list[Entry])

    def add(self, line: int, record: Record) -> None:
        """Take a record; what it hangs from is decided by `settle`, when all of them are known."""
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
        # In a sub-agent's own file every record is marked as a sidechain; there it is the main thread.
        is_sidechain = record.get("isSidechain") is True and not self.is_agent
        is_node = holds_message or is_boundary or shown is not None
        node = node_of(uuid, kind, line, record, is_sidechain, shown) if is_node else None
        parent, time = record.get("parentUuid"), record.get("timestamp")
        agent = record.get("agentId") if is_sidechain else None
        agent = agent if isinstance(agent, str) else None
        self._entries.append(Entry(line, uuid, parent, is_sidechain, time, node, agent))

    def settle(self) -> None:
        """Once all records are there: copies out, each behind its parent, and links that cannot be right replaced."""
        kept = without_copies(self._entries, self.file, self.report)
        links = Links(self.file, self.report)
        links.settle(behind_their_parents(kept))
        self.nodes, self.nearest, self.ended_at = links.nodes, links.nearest, links.ended_at
        self.chain_of = links.chain_of
        self._entries = []

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

    def ancestor(self, uuid: str | None) -> str | None:
        """The nearest record at or above `uuid` that is a node."""
        return None if uuid is None else self.nearest.get(uuid)

    def path_to_root(self, uuid: str | None) -> list[Node]:
        """From the node at or above `uuid` up to its root or to the start of its context, which is included."""
        path: list[Node] = []
        node_id = self.ancestor(uuid)
        while node_id is not None:
            node = self.nodes[node_id]
            path.append(node)
            if self.is_start(node):
                break
            node_id = self.ancestor(node.parent)
        return path

    def is_start(self, node: Node) -> bool:
        """Whether a compaction begins a context here."""
        return node.is_boundary or node.uuid in self.ended_at
