"""A Claude Code log as a tree of records, and the paths through it that were really lived.

Records point to their parent by uuid. Most parents are records that carry no message (progress, hooks), an assistant
message is split over several records, parallel calls make their results siblings, a rewind leaves a dead branch, and a
compaction starts a new tree that only a logical link ties to the old one. So the whole tree is built first, and what is
dropped is dropped afterwards; the path from the last record to the root is not all of what the model saw.
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
from composer_replication.ingestion.source import TOO_DEEP, IngestReport, Record

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
    chain_of: dict[str, SubagentChain] = field(default_factory=dict[str, SubagentChain])
    """Any record of a sidechain -> the inline sub-agent it is of."""
    title: str | None = None
    num_records: int = 0
    num_silent: int = 0
    """Records of a known type that hold no message."""
    attachments: list[Record] = field(default_factory=list[Record])
    queue_operations: list[tuple[int, Record]] = field(default_factory=list[tuple[int, Record]])
    ended_at: dict[str, str] = field(default_factory=dict[str, str])
    """The start of a context (a boundary, or a summary that lost its own) -> where the context before it ended."""
    begins_inside: bool = False
    """Whether its first record follows one that is not there: something came before this log."""
    _entries: list[Entry] = field(default_factory=list[Entry])

    def add(self, line: int, record: Record) -> None:
        """Take a record; what it hangs from is decided by `settle`, when all of them are known."""
        kind = record.get("type")
        kind = kind if isinstance(kind, str) else type(kind).__name__
        self.num_records += 1
        holds_message = kind in _MESSAGE_TYPES
        attachment = self._attachment(record, line) if kind == "attachment" else None
        is_boundary = not holds_message and self._is_boundary(kind, record, line)
        uuid = record.get("uuid")
        if not isinstance(uuid, str):
            if not holds_message and attachment is None:
                return
            uuid = f"line-{line}"
        # In a sub-agent's own file every record is marked as a sidechain; there it is the main thread.
        is_sidechain = record.get("isSidechain") is True and not self.is_agent
        is_node = holds_message or is_boundary or attachment is not None
        node = node_of(uuid, kind, line, record, is_sidechain, attachment) if is_node else None
        parent, time = record.get("parentUuid"), record.get("timestamp")
        agent = record.get("agentId") if is_sidechain else None
        agent = agent if isinstance(agent, str) else None
        self._entries.append(Entry(line, uuid, parent, is_sidechain, time, node, agent))

    def settle(self) -> None:
        """Once all records are there: copies out, each behind its parent, and links that cannot be right replaced."""
        unique_entries = _without_copies(self._entries, self.file, self.report)
        links = RecordLinks(self.file, self.report)
        links.settle(_behind_their_parents(unique_entries))
        self.nodes, self.nearest, self.ended_at = links.nodes, links.nearest, links.ended_at
        self.chain_of = links.chain_of
        first = next((entry for entry in self._entries if not entry.is_sidechain), None)
        parent = None if first is None else first.parent
        self.begins_inside = isinstance(parent, str) and all(entry.uuid != parent for entry in self._entries)
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
            attachment = attachment_of(record)
        except RecursionError:
            self.report.skip(TOO_DEEP, self.file, line)
            return None
        if attachment is None:
            self.num_silent += 1
            self.report.counts[f"attachments not shown: {attachment_kind(record)}"] += 1
        return attachment

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


@dataclass(slots=True)
class ContextPart:
    """The records of one context in file order, and what it began at (None: the start of the session)."""

    nodes: list[Node]
    boundary: Node | None


def live_parts(tree: RecordTree) -> list[ContextPart]:
    """The main thread as it stood at the end, cut at compactions, oldest part first."""
    main = _MainThread(tree)
    leaf = next((node for node in reversed(main.nodes) if not node.is_boundary and node.attachment is None), None)
    parts: list[ContextPart] = []
    taken_uuids: set[str] = set()
    while leaf is not None:
        path = tree.path_to_root(leaf.uuid)
        boundary = path[-1] if tree.is_start(path[-1]) else None
        lived = main.with_siblings([node for node in path if not node.is_boundary], taken_uuids)
        taken_uuids |= {node.uuid for node in lived}
        parts.append(ContextPart(lived, boundary))
        leaf = None if boundary is None else _before_boundary(tree, boundary, taken_uuids)
    return parts[::-1]


class _MainThread:
    """The main thread's nodes, by message and by the calls they answer: each part looks up only what is its own."""

    def __init__(self, tree: RecordTree) -> None:
        self.nodes = [node for node in tree.nodes.values() if not node.is_sidechain]
        self._of_message: dict[str, list[Node]] = {}
        self._answers: dict[str, list[Node]] = {}
        self._hanging = _attachments_without_successor(tree, self.nodes)
        self._context: dict[str, str | None] = {}
        """Node -> the start of the context it is in."""
        for node in self.nodes:
            above = tree.ancestor(node.parent)
            self._context[node.uuid] = node.uuid if tree.is_start(node) else self._context.get(above or "")
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
        context = self._context[path[0].uuid] if path else None
        answers = [node for node in answers if self._context[node.uuid] == context]
        siblings = [node for node in answers if calls.issuperset(node.answered)]
        lived = {node.uuid: node for node in (*path, *messages, *siblings)}
        if self._hanging:
            lived |= {node.uuid: node for uuid in list(lived) for node in self._hanging.get(uuid, ())}
        lived = {uuid: node for uuid, node in lived.items() if uuid not in taken and not node.is_sidechain}
        return sorted(lived.values(), key=lambda node: node.index)


def _attachments_without_successor(tree: RecordTree, nodes: list[Node]) -> dict[str, list[Node]]:
    """Message -> attachments below it that no message goes on from: those of parallel calls, and at the end."""
    attachments = [node for node in nodes if node.attachment is not None]
    if not attachments:
        return {}
    carrying: set[str] = set()
    for node in nodes:
        above = tree.ancestor(node.parent) if node.attachment is None else None
        while above is not None and tree.nodes[above].attachment is not None and above not in carrying:
            carrying.add(above)
            above = tree.ancestor(tree.nodes[above].parent)
    hanging: dict[str, list[Node]] = {}
    message_above: dict[str, str] = {}  # of each attachment, so that a row of them is walked once
    for node in attachments:
        above = tree.ancestor(node.parent) or ""
        message_above[node.uuid] = above = message_above.get(above, above)
        if node.uuid not in carrying:
            hanging.setdefault(above, []).append(node)
    return hanging


def _before_boundary(tree: RecordTree, boundary: Node | None, taken_uuids: set[str]) -> Node | None:
    """Where the context before a compaction ended; what another context took already is no end of this one."""
    while boundary is not None:
        path = tree.path_to_root(tree.ended_at.get(boundary.uuid))
        for node in path:
            if node.uuid not in taken_uuids and not node.is_boundary:
                return node
        boundary = path[-1] if path and tree.is_start(path[-1]) else None
    return None


def sidechains(tree: RecordTree) -> list[list[Node]]:
    """The inline sub-agents, each with its records in file order."""
    groups: dict[str, list[Node]] = {}
    for node in tree.nodes.values():
        if node.is_sidechain and not node.is_boundary:
            groups.setdefault(tree.chain_of[node.uuid].name, []).append(node)
    return list(groups.values())


def groups_apart(tree: RecordTree, nodes: list[Node]) -> list[list[Node]]:
    """Nodes that hang together by parent links among themselves, each group in file order."""
    group_of: dict[str, list[Node]] = {}
    groups: list[list[Node]] = []
    for node in nodes:
        parent = tree.ancestor(node.parent)
        key = f"message {node.message_key}" if node.kind == "assistant" else ""
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


# Records of a Claude Code log put where they belong: one of several copies, and each behind the record it follows.
#
# A log is written in the order of its links. Where a file is not, a record was copied or moved; the records around it
# are well, and what they name says where it stood.

_BEFORE, _ITSELF, _BEHIND = range(3)


def _without_copies(entries: list[Entry], file: str, report: IngestReport) -> list[Entry]:
    """Every uuid once: of several records with one name that which fits its neighbours best keeps it.

    Copies of its message are left out and counted; another message under a name that is taken gets a name of its own.
    """
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
        holder = entries[_best_place(entries, same, first)]
        for at in same:
            if (duplicate := entries[at]) is not holder:
                report.skip("duplicate uuid", file, duplicate.line)
                if not _has_own_message(duplicate, holder):
                    left_out.add(at)
    return [entry for at, entry in enumerate(entries) if at not in left_out]


def _best_place(entries: list[Entry], same: list[int], first: dict[str, int]) -> int:
    """The place that fits best, the first of equal ones; where messages differ, that which is nearer to its child."""
    fits = {at: _fit(entries, at, first) for at in same}
    messages = [None if (node := entries[at].node) is None else node.message for at in same]
    if all(message == messages[0] for message in messages):
        return max(same, key=lambda at: (fits[at][0], -at))
    return max(same, key=lambda at: (fits[at], -at))


def _has_own_message(entry: Entry, holder: Entry) -> bool:
    """Whether damage to a name must not cost this message; it is renamed then."""
    node = entry.node
    if node is None or not node.is_message:
        return False
    if holder.node is not None and holder.node.message == node.message:
        return False
    entry.uuid = f"line-{entry.line}"
    node.rename(entry.uuid)
    return True


def _fit(entries: list[Entry], at: int, first: dict[str, int]) -> tuple[int, int]:
    """How well a record fits its place: what it follows stands earlier, just before it, its child just behind it."""
    entry = entries[at]
    follows = entry.follows
    fit = int(follows is None or first.get(follows, at) < at)
    if any(before.uuid == follows for before in _neighbours(entries, at, -1)):
        fit += 2
    for distance, behind in enumerate(_neighbours(entries, at, 1)):
        if behind.follows == entry.uuid:
            return fit + 4, -distance
    return fit, 0


def _neighbours(entries: list[Entry], at: int, step: int) -> list[Entry]:
    """The next other record of the main thread, not many records away; of sidechains, which interleave, all of them."""
    one = entries[at]
    around = range(at + step, min(max(at + 40 * step, -1), len(entries)), step)
    neighbours = (entries[index] for index in around if entries[index].is_sidechain == one.is_sidechain)
    near = (entry for entry in neighbours if entry.uuid != one.uuid)
    return list(near if one.is_sidechain else islice(near, 1))


def _behind_their_parents(entries: list[Entry]) -> list[Entry]:
    """The records in file order, but those that were moved where they belong, behind what they follow.

    A link to a later record that does not tell of a move is left alone: it is a wrong link, not a wrong place.
    """
    moved = _moved(entries)
    if not moved:
        return entries
    order = sorted(range(len(entries)), key=lambda at: moved.get(at, (at, _ITSELF)))
    return [entries[at] for at in order]


def _moved(entries: list[Entry]) -> dict[int, tuple[int, int]]:
    """Place of a record that was moved -> the place it belongs to: just before or just behind that of another one."""
    place_of = {entry.uuid: at for at, entry in enumerate(entries)}
    forward = {
        at: place_of[name] for at, entry in enumerate(entries) if place_of.get(name := entry.follows or "", at) > at
    }
    if not forward:
        return {}
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
            continue  # it was put where it belongs, or the link is wrong
        if _is_just_before(entries[parent_at].follows, entries, at, moved, threads):
            moved[parent_at] = at, _BEFORE  # the parent was moved down: it fits here
        elif child_at == len(entries):
            moved[at] = parent_at, _BEHIND
        elif child_at > parent_at:  # the record was moved up
            moved[at] = child_at, _BEFORE
    return moved


def _may_follow(entry: Entry, parent: Entry) -> bool:
    """Whether a link may be right: never to another thread, and in sidechains, which interleave, not to any message."""
    if entry.is_sidechain != parent.is_sidechain or entry.agent != parent.agent:
        return False
    node, above = entry.node, parent.node
    if not entry.is_sidechain or node is None or above is None or node.begins_turn:
        return True
    if node.kind == "assistant":
        return above.kind != "assistant" or above.message_key == node.message_key
    return not set(node.answered).isdisjoint(above.called)


def _threads(entries: list[Entry]) -> dict[str, str]:
    """Any record -> the thread it is of by its link: the main one, or a sidechain, by its first record."""
    thread_of: dict[str, str] = {}
    for entry in entries:
        thread_of[entry.uuid] = thread_of.get(entry.follows or "", entry.uuid) if entry.is_sidechain else ""
    return thread_of


def _is_just_before(
    name: str | None, entries: list[Entry], at: int, moved: dict[int, tuple[int, int]], threads: dict[str, str]
) -> bool:
    """Whether this record is the last of its thread before a place; sidechains may interleave."""
    thread = threads.get(name or "")
    around = range(at - 1, max(at - 40, -1), -1)
    names = (entries[index].uuid for index in around if index not in moved)
    return thread is not None and next((uuid for uuid in names if threads[uuid] == thread), None) == name
