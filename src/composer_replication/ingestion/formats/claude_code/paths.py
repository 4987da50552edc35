"""The paths through a Claude Code log that were lived: the contexts between compactions, and what hangs together.

An assistant message is split over several records, parallel calls make their results siblings, and a rewind leaves a
dead branch: the path from the last record to the root is not all of what the model saw.
"""

from __future__ import annotations

from dataclasses import dataclass

from composer_replication.ingestion.formats.claude_code.record import Node
from composer_replication.ingestion.formats.claude_code.tree import RecordTree


@dataclass(slots=True)
class Part:
    """The records of one context in file order, and what it began at (None: the start of the session)."""

    nodes: list[Node]
    boundary: Node | None


def live_parts(tree: RecordTree) -> list[Part]:
    """The main thread as it stood at the end, cut at compactions, oldest part first."""
    main = _MainThread(tree)
    leaf = next((node for node in reversed(main.nodes) if not node.is_boundary and node.attachment is None), None)
    parts: list[Part] = []
    taken: set[str] = set()
    while leaf is not None:
        path = tree.path_to_root(leaf.uuid)
        boundary = path[-1] if tree.is_start(path[-1]) else None
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
            lived |= {each.uuid: each for uuid in list(lived) for each in self._hanging.get(uuid, ())}
        lived = {uuid: node for uuid, node in lived.items() if uuid not in taken and not node.is_sidechain}
        return sorted(lived.values(), key=lambda node: node.index)


def _attachments_without_successor(tree: RecordTree, nodes: list[Node]) -> dict[str, list[Node]]:
    """Message -> attachments below it that no message goes on from: those of parallel calls, and at the end."""
    shown = [node for node in nodes if node.attachment is not None]
    if not shown:
        return {}
    carrying: set[str] = set()
    for node in nodes:
        above = tree.ancestor(node.parent) if node.attachment is None else None
        while above is not None and tree.nodes[above].attachment is not None and above not in carrying:
            carrying.add(above)
            above = tree.ancestor(tree.nodes[above].parent)
    hanging: dict[str, list[Node]] = {}
    message_above: dict[str, str] = {}  # of each attachment, so that a row of them is walked once
    for node in shown:
        above = tree.ancestor(node.parent) or ""
        message_above[node.uuid] = above = message_above.get(above, above)
        if node.uuid not in carrying:
            hanging.setdefault(above, []).append(node)
    return hanging


def _before_boundary(tree: RecordTree, boundary: Node | None, taken: set[str]) -> Node | None:
    """Where the context before a compaction ended; what another context took already is no end of this one."""
    while boundary is not None:
        path = tree.path_to_root(tree.ended_at.get(boundary.uuid))
        for node in path:
            if node.uuid not in taken and not node.is_boundary:
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
