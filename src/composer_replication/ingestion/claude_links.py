"""Which link of a Claude Code log is believed: what hangs from a wrong one would take whole stretches with it.

A record whose parent is not the record before it leaves a stretch behind. That is right for parallel calls, whose
records and results are siblings, and for a rewind: a user's message that takes the place of another one, or follows one
in its answer's place. In the middle of a turn nobody rewinds; such a link is damage, and the record is attached to the
one before it, by guess, and counted as that. A message that looks like a rewind is none where the log's own clock or
token counts say that the session went on.
"""

from __future__ import annotations

from typing import Any

from composer_replication.ingestion.claude_context import ContextLengths, Verdict, is_too_soon
from composer_replication.ingestion.claude_record import Entry, Node
from composer_replication.ingestion.source import IngestReport

ORPHAN = "orphan attached to the record before it"
NO_PARENT = "no parent: attached by guess to the record before it"
GUESSED = "wrong parent: attached by guess to the record before it"
GUESSED_END = "wrong end of a compacted context: the record before it taken by guess"


class Links:
    """Takes the records in order; `nodes`, `parents` and `ended_at` are a `RecordTree`'s."""

    def __init__(self, file: str, report: IngestReport) -> None:
        self._file, self._report = file, report
        self.nodes: dict[str, Node] = {}
        self.parents: dict[str, str | None] = {}
        self.ended_at: dict[str, str] = {}
        self._above: dict[str, Node | None] = {}  # any record -> the message or boundary at or above it
        self._callers: dict[str, Node] = {}
        self._tail: Node | None = None
        """Where the main thread stands: its last message or boundary."""
        self._last_message: Node | None = None
        self._last_uuid: dict[bool, str | None] = {False: None, True: None}
        self._messages: list[Node] = []
        self._lengths: ContextLengths | None = None
        self._num_before = 0
        self._named: set[str] = set()
        self._guessed: set[str] = set()
        self._strayed: dict[str, Any] = {}
        """Silent records that go back, and those that hang from them -> when the first of them was written."""

    def settle(self, entries: list[Entry]) -> None:
        nodes = [entry.node for entry in entries if entry.node is not None]
        self._messages = [node for node in nodes if node.is_main_message]
        self._named = {name for entry in entries for name in (entry.parent, entry.follows) if isinstance(name, str)}
        for entry in entries:
            self._take(entry)

    def _take(self, entry: Entry) -> None:
        node, parent = entry.node, entry.parent
        moves_on = True
        if not isinstance(parent, str) or parent not in self.parents:
            parent = self._instead(entry)
        elif node is not None and node.is_main_message:
            parent, moves_on = self._judged(node, parent)
        else:
            self._note_stray(entry, parent)
        self.parents[entry.uuid] = parent
        self._last_uuid[entry.is_sidechain] = entry.uuid
        self._above[entry.uuid] = None if parent is None else self._above.get(parent)
        if node is not None:
            self._add(node, parent)
            self._num_before += node.is_main_message
            if (node.is_boundary and not node.is_sidechain) or (node.is_main_message and moves_on):
                self._tail = node

    def _add(self, node: Node, parent: str | None) -> None:
        node.index, node.parent = len(self.nodes), parent
        self.nodes[node.uuid] = node
        if node.attachment is None:
            self._above[node.uuid] = node
        if node.is_sidechain:
            return
        if node.is_boundary:
            self._close_context(node)
        elif node.kind == "assistant":
            self._callers.update(dict.fromkeys(node.called, node))
        if node.is_message:
            self._last_message = node

    def _instead(self, entry: Entry) -> str | None:
        """For a parent that is not there, and for a second root of the main thread, the record before them:
        upstream loses links, and a log without any links is still one conversation."""
        has_name = isinstance(entry.parent, str)
        if has_name:
            self._report.skip(ORPHAN, self._file, entry.line)
        elif self._named and self._tail is not None and entry.node is not None and entry.node.is_main_message:
            self._report.skip(NO_PARENT, self._file, entry.line)  # a log without any links has none to miss
        self._guessed.add(entry.uuid)
        previous = self._last_uuid[entry.is_sidechain]
        if not entry.is_sidechain and self._tail is not None:
            previous = self._tail.uuid  # a silent record may hang from anywhere
        is_boundary = entry.node is not None and entry.node.is_boundary
        return previous if has_name or not (is_boundary or entry.is_sidechain) else None

    def _judged(self, node: Node, parent: str) -> tuple[str, bool]:
        """The parent of a message of the main thread, and whether the thread goes on from it."""
        tail, target = self._tail, self._above[parent]
        if tail is None or target is tail:
            return parent, True
        if target is None or not target.is_sidechain:
            left = self._left_behind(target)
            if self._is_beside(left, node, target):
                return parent, True
            if self._is_late_result(node, target):
                return parent, False
            came = self._strayed.get(parent, node.record.get("timestamp"))
            if self._is_rewind(node, target, left, came):
                return parent, True
        self._report.skip(GUESSED, self._file, node.line)
        self._guessed.add(node.uuid)
        return tail.uuid, True

    def _is_late_result(self, node: Node, target: Node | None) -> bool:
        """Whether it answers calls where it hangs, and the thread goes on elsewhere: nothing hangs from it."""
        is_last = node is self._messages[-1]
        askers = [] if node.kind == "assistant" or is_last or node.uuid in self._named else self._asking(node)
        return bool(askers) and all(self._is_above(asker, target) for asker in askers)

    def _note_stray(self, entry: Entry, parent: str) -> None:
        if parent in self._strayed:
            self._strayed[entry.uuid] = self._strayed[parent]
        elif not entry.is_sidechain and self._tail is not None and self._above[parent] is not self._tail:
            self._strayed[entry.uuid] = entry.time

    def _up(self, node: Node) -> Node | None:
        """The message or boundary above; nothing above a boundary."""
        return None if node.is_boundary or node.parent is None else self._above[node.parent]

    def _left_behind(self, target: Node | None) -> list[Node]:
        """What of the thread, newest first, came after `target`: it is left behind by whoever goes back there."""
        left: list[Node] = []
        node, oldest = self._tail, -1 if target is None else target.index
        while node is not None and node.index > oldest:
            left.append(node)
            node = self._up(node)
        return left

    def _is_beside(self, left: list[Node], node: Node, target: Node | None) -> bool:
        """Whether all of it is of messages on the way to `node`: other records of theirs, results of their calls."""
        if target is None:
            return not left
        keys = {asker.message_key for asker in self._asking(target)}
        if node.kind == "assistant":
            keys.add(node.message_key)
        for each in left:
            askers = self._asking(each)
            if not askers or each.is_boundary:
                return False
            if not all(asker.message_key in keys or self._is_above(asker, target) for asker in askers):
                return False
        return True

    def _asking(self, node: Node) -> list[Node]:
        """The assistant's records that a record belongs to: itself, or those whose calls it answers."""
        if node.kind == "assistant":
            return [node]
        return [self._callers[call_id] for call_id in node.answered if call_id in self._callers]

    def _is_above(self, asker: Node, node: Node | None) -> bool:
        while node is not None and node.index >= asker.index:
            if node.message_key == asker.message_key:
                return True
            node = self._up(node)
        return False

    def _is_rewind(self, node: Node, target: Node | None, left: list[Node], came: Any) -> bool:
        has_met = self._up(left[-1]) is target if left else False
        if left and left[-1].uuid in self._guessed:
            return False  # it was put there by us: nobody went back from it
        if not _begins_turn(node):  # an answer again, in the place of an error message
            return has_met and all(each.kind == "assistant" and each.is_harness for each in left)
        if node.kind == "assistant" and has_met and all(map(_begins_turn, left)):
            return True  # the harness, when a session goes on, instead of the command that ended it
        verdict = self._verdict(target, came)
        if not has_met:  # back to the end of a branch that was left before
            return verdict == "went back" and target is not None and not target.called and not target.answered
        is_at_prompt = _begins_turn(left[-1]) or (target is not None and _begins_turn(target))
        return is_at_prompt and verdict != "went on"

    def _verdict(self, target: Node | None, came: Any) -> Verdict | None:
        """What clock and token counts say of a message that may be a rewind, and `came` at this time."""
        tail = self._tail
        assert tail is not None
        times = [(each or self._messages[0]).record.get("timestamp") for each in (tail, target)]
        if is_too_soon(came, *times):
            return "went on"
        self._lengths = self._lengths or ContextLengths(self._messages)
        return self._lengths.verdict(self._num_before, tail, target, self._up)

    def _close_context(self, boundary: Node) -> None:
        """Where the context ended that a compaction closed: where it says, unless that leaves something behind."""
        logical = boundary.record.get("logicalParentUuid")
        last = self._last_message
        if last is None:
            return
        self.ended_at[boundary.uuid] = last.uuid
        target = self._above.get(logical) if isinstance(logical, str) else None
        if target is None or target.is_sidechain or target.is_boundary or self._tail is None:
            return
        if target is self._tail or self._is_beside(self._left_behind(target), target, target):
            self.ended_at[boundary.uuid] = target.uuid
        else:
            self._report.skip(GUESSED_END, self._file, boundary.line)


def _begins_turn(node: Node) -> bool:
    """A user's message that answers no call, or what the harness said in the model's place when a session went on."""
    if node.kind == "assistant":
        return node.is_harness
    return node.kind == "user" and not node.answered and node.record.get("isCompactSummary") is not True
