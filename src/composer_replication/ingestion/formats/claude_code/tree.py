"""A Claude Code log as a tree of records, and the paths in it that the model really saw.

Records link to their parent by uuid. Most parents are records without a message (progress, hooks), an assistant message
is split over several records, results of parallel calls are siblings, a rewind leaves a dead branch, and a compaction
starts a new tree that is connected to the old one only by a logical link. Therefore the path from the last record to
the root is not everything that the model saw: the whole tree is built first, and dead branches are dropped afterwards.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import islice

from composer_replication.ingestion.formats.claude_code.links import RecordLinks, SubagentChain
from composer_replication.ingestion.formats.claude_code.record import (
    Attachment,
    Entry,
    Node,
    attachment_kind,
    attachment_of,
    node_of,
)
from composer_replication.ingestion.source_files import TOO_DEEP, IngestReport, Record

_MESSAGE_TYPES = frozenset({"user", "assistant"})
# Known record types without a message. Any other type is reported as unknown.
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
    """All records of one log as a tree. `nodes` has the records with content; `nearest` also covers records without
    a message.
    """

    file: str
    report: IngestReport
    is_agent: bool = False
    """Whether the log is a subagent's own file."""
    nodes: dict[str, Node] = field(default_factory=dict[str, Node])
    nearest: dict[str, str | None] = field(default_factory=dict[str, "str | None"])
    """Any record -> the nearest node at or above it."""
    chain_of: dict[str, SubagentChain] = field(default_factory=dict[str, SubagentChain])
    """Any sidechain record -> its inline subagent."""
    title: str | None = None
    num_records: int = 0
    num_silent: int = 0
    """Records with a known type but no message."""
    attachments: list[Record] = field(default_factory=list[Record])
    queue_operations: list[tuple[int, Record]] = field(default_factory=list[tuple[int, Record]])
    ended_at: dict[str, str] = field(default_factory=dict[str, str])
    """Start of a context (a boundary, or a summary that lost its boundary) -> last record of the previous context."""
    begins_inside: bool = False
    """Whether the first record has a parent that is not in the log: the session began in another file."""
    _entries: list[Entry] = field(default_factory=list[Entry])

    def add(self, line: int, record: Record) -> None:
        """Add a record; `build` resolves its parent once all records are known."""
        kind = record.get("type")
        kind = kind if isinstance(kind, str) else type(kind).__name__
        self.num_records += 1
        holds_message = kind in _MESSAGE_TYPES
        attachment = self._attachment(record, line) if kind == "attachment" else None
        is_boundary = not holds_message and self._is_boundary(kind, record, line)
        uuid = record.get("uuid")
        if not isinstance(uuid, str):
            # No record can have it as its parent, so it matters only if it has content.
            if not holds_message and attachment is None:
                return
            uuid = f"line-{line}"
        # In a subagent's own file, every record is marked as a sidechain but belongs to the main thread of the file.
        is_sidechain = record.get("isSidechain") is True and not self.is_agent
        is_node = holds_message or is_boundary or attachment is not None
        node = node_of(uuid, kind, line, record, is_sidechain, attachment) if is_node else None
        parent, time = record.get("parentUuid"), record.get("timestamp")
        agent = record.get("agentId") if is_sidechain else None
        agent = agent if isinstance(agent, str) else None
        self._entries.append(Entry(line, uuid, parent, is_sidechain, time, node, agent))

    def build(self) -> None:
        """Remove copies, put moved records back in order, and resolve the parents. Must be called once, after all
        records were added.
        """
        unique_entries = _without_copies(self._entries, self.file, self.report)
        links = RecordLinks(self.file, self.report)
        links.resolve(_in_link_order(unique_entries))
        self.nodes, self.nearest, self.ended_at = links.nodes, links.nearest, links.ended_at
        self.chain_of = links.chain_of
        # A resumed session may begin in another file, which then contains the parent of its first record.
        first = next((entry for entry in self._entries if not entry.is_sidechain), None)
        parent = None if first is None else first.parent
        self.begins_inside = isinstance(parent, str) and all(entry.uuid != parent for entry in self._entries)
        self._entries = []

    def _is_boundary(self, kind: str, record: Record, line: int) -> bool:
        """Return whether a record without a message is a compaction boundary. Other records are only counted."""
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
        """Return the part of a record that the model saw. Attachments that no model saw are counted by kind."""
        self.attachments.append(record)
        try:
            attachment = attachment_of(record)
        except RecursionError:
            self.report.skip(TOO_DEEP, self.file, line)
            return None
        if attachment is None:
            self.num_silent += 1
            self.report.counts[f"attachments not shown: {attachment_kind(record)}"] += 1
        return attachment

    def ancestor(self, uuid: str | None) -> str | None:
        """Return the uuid of the node `uuid` itself if it has content, otherwise of its nearest ancestor that has."""
        return None if uuid is None else self.nearest.get(uuid)

    def path_to_root(self, uuid: str | None) -> list[Node]:
        """Return the path from `uuid`, or its nearest ancestor with content, up to the root or the start of its
        context, inclusive.
        """
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
        """Return whether a context begins at this node after a compaction."""
        return node.is_boundary or node.uuid in self.ended_at


@dataclass(slots=True)
class ContextSegment:
    """The records of one context in file order, and the node at which it begins (None: the start of the session)."""

    nodes: list[Node]
    boundary: Node | None


def live_parts(tree: RecordTree) -> list[ContextSegment]:
    """Return the main thread at the end of the session, split at compactions, oldest part first."""
    main = _MainThread(tree)
    # The thread at the end of the session is the live one.
    leaf = next((node for node in reversed(main.nodes) if not node.is_boundary and node.attachment is None), None)
    parts: list[ContextSegment] = []
    taken_uuids: set[str] = set()
    while leaf is not None:
        path = tree.path_to_root(leaf.uuid)
        boundary = path[-1] if tree.is_start(path[-1]) else None
        live_nodes = main.with_siblings([node for node in path if not node.is_boundary], taken_uuids)
        taken_uuids |= {node.uuid for node in live_nodes}
        parts.append(ContextSegment(live_nodes, boundary))
        leaf = None if boundary is None else _before_boundary(tree, boundary, taken_uuids)
    return parts[::-1]


class _MainThread:
    """The nodes of the main thread, indexed by message and by the calls that they answer."""

    def __init__(self, tree: RecordTree) -> None:
        self.nodes = [node for node in tree.nodes.values() if not node.is_sidechain]
        self._of_message: dict[str, list[Node]] = {}
        self._answers: dict[str, list[Node]] = {}
        self._leaf_attachments = _leaf_attachments(tree, self.nodes)
        self._context: dict[str, str | None] = {}
        """Uuid -> the start of the context that contains the record."""
        for node in self.nodes:
            above = tree.ancestor(node.parent)
            self._context[node.uuid] = node.uuid if tree.is_start(node) else self._context.get(above or "")
            if node.kind == "assistant":
                self._of_message.setdefault(node.message_key, []).append(node)
            elif node.kind == "user":
                for call_id in node.answered:
                    self._answers.setdefault(call_id, []).append(node)

    def with_siblings(self, path: list[Node], taken_uuids: set[str]) -> list[Node]:
        """Return the records on the path, the other records of their messages, the results of their calls, and the
        attachments.
        """
        keys = {node.message_key: None for node in path if node.kind == "assistant"}
        messages = [node for key in keys for node in self._of_message.get(key, ())]
        calls = {call_id for node in messages for call_id in node.called}
        answers = [node for call_id in calls for node in self._answers.get(call_id, ())]
        context = self._context[path[0].uuid] if path else None
        # A result in another context belongs to that context, even if the call id is the same.
        answers = [node for node in answers if self._context[node.uuid] == context]
        # A record with results for other calls as well belongs to another branch.
        siblings = [node for node in answers if calls.issuperset(node.answered)]
        live_nodes = {node.uuid: node for node in (*path, *messages, *siblings)}
        if self._leaf_attachments:
            live_nodes |= {
                node.uuid: node for uuid in list(live_nodes) for node in self._leaf_attachments.get(uuid, ())
            }
        live_nodes = {
            uuid: node for uuid, node in live_nodes.items() if uuid not in taken_uuids and not node.is_sidechain
        }
        return sorted(live_nodes.values(), key=lambda node: node.index)


def _leaf_attachments(tree: RecordTree, nodes: list[Node]) -> dict[str, list[Node]]:
    """Return a dict that maps each message to the attachments below it that no message follows.

    These are attachments of parallel calls, and attachments at the end of a log.
    """
    attachments = [node for node in nodes if node.attachment is not None]
    if not attachments:
        return {}
    # Walk up from every message: attachments on the way have a successor.
    inner_attachments: set[str] = set()
    for node in nodes:
        above = tree.ancestor(node.parent) if node.attachment is None else None
        while above is not None and tree.nodes[above].attachment is not None and above not in inner_attachments:
            inner_attachments.add(above)
            above = tree.ancestor(tree.nodes[above].parent)
    leaves: dict[str, list[Node]] = {}
    message_above: dict[str, str] = {}  # for each attachment, so that a chain of attachments is walked only once
    for node in attachments:
        above = tree.ancestor(node.parent) or ""
        message_above[node.uuid] = above = message_above.get(above, above)
        if node.uuid not in inner_attachments:
            leaves.setdefault(above, []).append(node)
    return leaves


def _before_boundary(tree: RecordTree, boundary: Node | None, taken_uuids: set[str]) -> Node | None:
    """Return the last record before a compaction that no other context contains, or None."""
    while boundary is not None:
        path = tree.path_to_root(tree.ended_at.get(boundary.uuid))
        for node in path:
            if node.uuid not in taken_uuids and not node.is_boundary:
                return node
        boundary = path[-1] if path and tree.is_start(path[-1]) else None
    return None


def sidechains(tree: RecordTree) -> list[list[Node]]:
    """Return the records of every inline subagent, in file order."""
    groups: dict[str, list[Node]] = {}
    for node in tree.nodes.values():
        if node.is_sidechain and not node.is_boundary:
            groups.setdefault(tree.chain_of[node.uuid].name, []).append(node)
    return list(groups.values())


def connected_groups(tree: RecordTree, nodes: list[Node]) -> list[list[Node]]:
    """Group nodes that are connected by parent links, keeping the file order within each group."""
    group_of: dict[str, list[Node]] = {}
    groups: list[list[Node]] = []
    for node in nodes:
        parent = tree.ancestor(node.parent)
        key = f"message {node.message_key}" if node.kind == "assistant" else ""
        # A message is not split, whatever the parents of its records are.
        group = group_of.get(key) or group_of.get(parent or "")
        if group is None:
            group = []
            groups.append(group)
        group.append(node)
        group_of[node.uuid] = group
        if key:
            group_of[key] = group
    return groups


# Logs are written in the order of their links. If a link points to a later record, a record was copied or moved; the
# records around it are intact, and their parents show where it was.

# Sort keys relative to a position.
_BEFORE, _ITSELF, _AFTER = range(3)
# The distance for finding the neighbors of a record. It is more than one because sidechains interleave.
_MAX_DISTANCE = 40


def _without_copies(entries: list[Entry], file: str, report: IngestReport) -> list[Entry]:
    """Return the entries with unique uuids. If several records have the same uuid, the one that best fits its neighbors
    keeps it.

    Other records with the same message are dropped as copies and counted. A record with a different message gets a new
    uuid.
    """
    # Most logs have no duplicates.
    number_of = Counter(entry.uuid for entry in entries)
    if len(number_of) == len(entries):
        return entries
    first = {entry.uuid: at for at, entry in reversed(list(enumerate(entries)))}
    positions: dict[str, list[int]] = {}
    for at, entry in enumerate(entries):
        if number_of[entry.uuid] > 1:
            positions.setdefault(entry.uuid, []).append(at)
    left_out: set[int] = set()
    for same in positions.values():
        holder = entries[_best_position(entries, same, first)]
        for at in same:
            if (duplicate := entries[at]) is not holder:
                report.skip("duplicate uuid", file, duplicate.line)
                if not _keeps_message(duplicate, holder):
                    left_out.add(at)
    return [entry for at, entry in enumerate(entries) if at not in left_out]


def _best_position(entries: list[Entry], same: list[int], first: dict[str, int]) -> int:
    """Return the position at which a record with a duplicate uuid fits best, or the first of several such positions.

    If the messages differ, a tie goes to the record that is closer to its child.
    """
    fits = {at: _fit(entries, at, first) for at in same}
    messages = [None if (node := entries[at].node) is None else node.message for at in same]
    if all(message == messages[0] for message in messages):
        return max(same, key=lambda at: (fits[at][0], -at))
    return max(same, key=lambda at: (fits[at], -at))


def _keeps_message(entry: Entry, holder: Entry) -> bool:
    """Return whether a record with a duplicate uuid has a message of its own. If so, give the record a new uuid."""
    node = entry.node
    if node is None or not node.is_message:
        return False
    if holder.node is not None and holder.node.message == node.message:
        return False
    entry.uuid = f"line-{entry.line}"
    node.rename(entry.uuid)
    return True


def _fit(entries: list[Entry], at: int, first: dict[str, int]) -> tuple[int, int]:
    """Score how well a record fits: its parent should come earlier, ideally just before it, and its child just after
    it.
    """
    entry = entries[at]
    follows = entry.follows
    # An adjacent parent has more weight than a parent that is merely earlier, and an adjacent child has the most.
    fit = int(follows is None or first.get(follows, at) < at)
    if any(before.uuid == follows for before in _neighbors(entries, at, -1)):
        fit += 2
    for distance, later in enumerate(_neighbors(entries, at, 1)):
        if later.follows == entry.uuid:
            return fit + 4, -distance
    return fit, 0


def _neighbors(entries: list[Entry], at: int, step: int) -> list[Entry]:
    """Return the nearest record of the main thread, or all nearby sidechain records, because sidechains interleave."""
    center = entries[at]
    around = range(at + step, min(max(at + _MAX_DISTANCE * step, -1), len(entries)), step)
    neighbors = (entries[index] for index in around if entries[index].is_sidechain == center.is_sidechain)
    near = (entry for entry in neighbors if entry.uuid != center.uuid)
    return list(near if center.is_sidechain else islice(near, 1))


def _in_link_order(entries: list[Entry]) -> list[Entry]:
    """Return the records in file order, with moved records put back after their parents.

    A link to a later record alone is considered an error, and the record keeps its position unless something else
    indicates a move.
    """
    moved = _moved_positions(entries)
    if not moved:
        return entries
    order = sorted(range(len(entries)), key=lambda at: moved.get(at, (at, _ITSELF)))
    return [entries[at] for at in order]


def _moved_positions(entries: list[Entry]) -> dict[int, tuple[int, int]]:
    """Return a dict that maps the index of each moved record to a sort key just before or just after another index."""
    index_of = {entry.uuid: at for at, entry in enumerate(entries)}
    forward = {
        at: index_of[name] for at, entry in enumerate(entries) if index_of.get(name := entry.follows or "", at) > at
    }
    if not forward:
        return {}
    # Either the record was moved up or its parent was moved down; the records that follow show which.
    names = {entries[at].uuid for at in forward}
    first_child: dict[str, int] = {}
    for at, entry in enumerate(entries):
        if entry.follows in names:
            first_child.setdefault(entry.follows, at)
    moved: dict[int, tuple[int, int]] = {}
    threads = _threads(entries)
    for at, parent_at in forward.items():
        child_at = first_child.get(entries[at].uuid, len(entries))
        if parent_at in moved or not _may_follow(entries[at], entries[parent_at]):
            continue  # the parent was already put back, or the link is wrong
        if _is_just_before(entries[parent_at].follows, entries, at, moved, threads):
            moved[parent_at] = at, _BEFORE  # the parent was moved down: it belongs here
        elif child_at == len(entries):
            moved[at] = parent_at, _AFTER
        elif child_at > parent_at:  # the record was moved up
            moved[at] = child_at, _BEFORE
    return moved


def _may_follow(entry: Entry, parent: Entry) -> bool:
    """Return whether a record's link to a parent can be correct.

    Links to another thread are always wrong. In sidechains, which interleave, calls and results must match as well.
    """
    if entry.is_sidechain != parent.is_sidechain or entry.agent != parent.agent:
        return False
    node, above = entry.node, parent.node
    if not entry.is_sidechain or node is None or above is None or node.begins_turn:
        return True
    if node.kind == "assistant":
        return above.kind != "assistant" or above.message_key == node.message_key
    return not set(node.answered).isdisjoint(above.called)


def _threads(entries: list[Entry]) -> dict[str, str]:
    """Return a dict that maps each record to its thread: "" for the main thread, or the uuid of the first record of
    a sidechain.
    """
    thread_of: dict[str, str] = {}
    for entry in entries:
        thread_of[entry.uuid] = thread_of.get(entry.follows or "", entry.uuid) if entry.is_sidechain else ""
    return thread_of


def _is_just_before(
    name: str | None, entries: list[Entry], at: int, moved: dict[int, tuple[int, int]], threads: dict[str, str]
) -> bool:
    """Return whether `name` is the last record of its thread before position `at`; records of other threads may come
    in between.
    """
    thread = threads.get(name or "")
    around = range(at - 1, max(at - _MAX_DISTANCE, -1), -1)
    names = (entries[index].uuid for index in around if index not in moved)
    return thread is not None and next((uuid for uuid in names if threads[uuid] == thread), None) == name
