"""Which link of a Claude Code log is believed: what hangs from a wrong one would take whole stretches with it.

A record whose parent is not the record before it leaves a stretch behind. That is right for parallel calls, whose
records and results are siblings, and for a rewind: a user's message that takes the place of another one, or follows one
in its answer's place. In the middle of a turn nobody rewinds; such a link is damage, and the record is attached to the
one before it, by guess, and counted as that. A message that looks like a rewind is none where the log's own clock or
token counts say that the session went on.
"""

from __future__ import annotations

from typing import Any

from composer_replication.ingestion.formats.claude_code.ancestry import (
    ContextLengths,
    Place,
    Verdict,
    is_too_soon,
    place_of,
)
from composer_replication.ingestion.formats.claude_code.record import Entry, Messages, Node
from composer_replication.ingestion.formats.claude_code.sidechains import Chain, Sidechains
from composer_replication.ingestion.reading.source import IngestReport

ORPHAN = "orphan attached to the record before it"
NO_PARENT = "no parent: attached by guess to the record before it"
GUESSED = "wrong parent: attached by guess to the record before it"
NO_BOUNDARY = "no boundary before a compaction's summary: the context before it closed by guess"
GUESSED_END = "wrong end of a compacted context: the record before it taken by guess"
# What is left beside the thread are the records of one message or two; more is a stretch that is left behind.
_MAX_BESIDE = 64


class Links:
    """Takes the records in order; `nodes`, `parents`, `nearest`, `chain_of` and `ended_at` are a `RecordTree`'s."""

    def __init__(self, file: str, report: IngestReport) -> None:
        self._file, self._report = file, report
        self.nodes: dict[str, Node] = {}
        self.parents: dict[str, str | None] = {}
        self.nearest: dict[str, str | None] = {}
        self.chain_of: dict[str, Chain] = {}
        self.ended_at: dict[str, str] = {}
        self._above: dict[str, Place | None] = {}  # any record -> the message or boundary at or above it
        self._callers: dict[str, Node] = {}
        self._tail: Place | None = None
        """Where the main thread stands: its last message or boundary."""
        self._last_message: Node | None = None
        self._last_main: str | None = None
        self._messages: list[Node] = []
        self._lengths: ContextLengths | None = None
        self._num_before = 0
        self._named: set[str] = set()
        self._answered: set[str] = set()
        self._guessed: set[str] = set()
        self._strayed: dict[str, Any] = {}
        """Silent records that go back, and those that hang from them -> when the first of them was written."""

    def settle(self, entries: list[Entry]) -> None:
        nodes = [entry.node for entry in entries if entry.node is not None]
        self._messages = [node for node in nodes if node.is_main_message]
        self._answered = {call_id for node in self._messages for call_id in node.answered}
        self._named = {name for entry in entries for name in (entry.parent, entry.follows) if isinstance(name, str)}
        sides, messages = Sidechains(entries), Messages(self._file, self._report)
        for entry in entries:
            if entry.is_sidechain:
                self._take_side(entry, sides)
            else:
                self._take(entry, messages)
            if entry.node is not None and entry.is_sidechain:
                messages.take(entry.node, sides.of[entry.uuid].name)
        messages.settle()
        self.chain_of = sides.of

    def _take_side(self, entry: Entry, sides: Sidechains) -> None:
        parent, is_guess = sides.parent_of(entry, self.parents)
        if not isinstance(entry.parent, str):
            self._count(NO_PARENT if is_guess else None, entry)
        else:
            self._count(ORPHAN if entry.parent not in self.parents else GUESSED if is_guess else None, entry)
        self._set(entry, parent)

    def _count(self, what: str | None, record: Entry | Node) -> None:
        if what is not None:
            self._report.skip(what, self._file, record.line)

    def _take(self, entry: Entry, messages: Messages) -> None:
        node, parent = entry.node, entry.parent
        moves_on = True
        if node is not None:
            messages.take(node, "")
        if not isinstance(parent, str) or parent not in self.parents:
            parent = self._instead(entry)
        elif node is not None and node.is_main_message:
            parent, moves_on = self._judged(node, parent)
        else:
            self._note_stray(entry, parent)
        position = self._set(entry, parent)
        self._last_main = entry.uuid
        if node is not None and position is not None:
            self._num_before += node.is_main_message
            if node.is_boundary or moves_on:
                self._tail = position

    def _set(self, entry: Entry, parent: str | None) -> Place | None:
        """Its parent, and where it stands if it is a message or a boundary."""
        node = entry.node
        self.parents[entry.uuid] = parent
        above = None if parent is None else self._above.get(parent)
        self.nearest[entry.uuid] = entry.uuid if node is not None else self.nearest.get(parent or "")
        self._above[entry.uuid] = above
        if node is None:
            return None
        node.index, node.parent = len(self.nodes), parent
        self.nodes[node.uuid] = node
        if node.attachment is not None:
            return None
        if not node.is_sidechain:
            self._note_main(node, above)
        is_start = node.is_boundary or node.uuid in self.ended_at
        self._above[entry.uuid] = position = place_of(node, None if is_start else above, self._owner(node))
        return position

    def _note_main(self, node: Node, above: Place | None) -> None:
        if node.is_boundary:
            self._close_context(node)
            return
        if node.is_summary and above is not None and not above.node.is_boundary:
            self._count(NO_BOUNDARY, node)
            self.ended_at[node.uuid] = above.node.uuid
        if node.kind == "assistant":
            self._callers.update(dict.fromkeys(node.called, node))
        self._last_message = node

    def _instead(self, entry: Entry) -> str | None:
        """For a parent that is not there, and for a second root of the main thread, the record before them:
        upstream loses links, and a log without any links is still one conversation."""
        tail, node = self._tail, entry.node
        is_message = node is not None and node.is_main_message
        if isinstance(entry.parent, str):
            self._count(ORPHAN, entry)
        elif node is not None and (node.is_boundary or self._begins_again(node)):
            return None
        elif self._named and tail is not None and is_message:
            self._count(NO_PARENT, entry)  # a log without any links has none to miss
        previous = self._last_main if tail is None else tail.node.uuid  # a silent record may hang from anywhere
        if previous is not None:
            self._guessed.add(entry.uuid)
        return previous

    def _begins_again(self, node: Node) -> bool:
        """Whether a prompt without a parent took the place of the very first one, as the token counts say."""
        first = None if self._tail is None or node.kind != "user" else self._tail.topmost_after(-1)
        if first is None or not (node.begins_turn and first.node.begins_turn) or first.node.uuid in self.ended_at:
            return False
        return self._verdict(None, node.record.get("timestamp")) == "went back"

    def _judged(self, node: Node, parent: str) -> tuple[str, bool]:
        """The parent of a message of the main thread, and whether the thread goes on from it."""
        tail, target = self._tail, self._above[parent]
        if tail is None or target is tail:
            return parent, True
        if target is None or not target.node.is_sidechain:
            if self._is_beside(tail, node, target):
                return parent, True
            if self._is_late_result(node, target):
                return parent, False
            came = self._strayed.get(parent, node.record.get("timestamp"))
            if self._is_rewind(tail, node, target, came):
                return parent, True
        self._count(GUESSED, node)
        self._guessed.add(node.uuid)
        return tail.node.uuid, True

    def _is_late_result(self, node: Node, target: Place | None) -> bool:
        """Whether it answers calls where it hangs, and the thread goes on elsewhere: nothing hangs from it."""
        is_last = node is self._messages[-1]
        askers = [] if node.kind == "assistant" or is_last or node.uuid in self._named else self._asking(node)
        return bool(askers) and all(_is_above(asker, target) for asker in askers)

    def _note_stray(self, entry: Entry, parent: str) -> None:
        if parent in self._strayed:
            self._strayed[entry.uuid] = self._strayed[parent]
        elif self._tail is not None and self._above[parent] is not self._tail:
            self._strayed[entry.uuid] = entry.time

    def _is_beside(self, tail: Place, node: Node, target: Place | None) -> bool:
        """Whether all that came after `target` is of messages on the way to `node`: their records and results."""
        if target is None:
            return False
        keys = {asker.message_key for asker in self._asking(target.node)}
        if node.kind == "assistant":
            keys.add(node.message_key)
        position: Place | None = tail
        for _ in range(_MAX_BESIDE):
            if position is None or position.node.index <= target.node.index:
                return True
            if position.owner in keys:
                position = position.same_owner.up
            elif self._answers_above(position.node, keys, target):
                position = position.up
            else:
                return False
        return False

    def _answers_above(self, node: Node, keys: set[str], target: Place) -> bool:
        """Whether it holds results, and only of calls of these messages, or of calls at or above `target`."""
        askers = [] if node.kind == "assistant" else self._asking(node)
        return bool(askers) and all(asker.message_key in keys or _is_above(asker, target) for asker in askers)

    def _asking(self, node: Node) -> list[Node]:
        """The assistant's records that a record belongs to: itself, or those whose calls it answers."""
        if node.kind == "assistant":
            return [node]
        return [self._callers[call_id] for call_id in node.answered if call_id in self._callers]

    def _owner(self, node: Node) -> str:
        keys = {asker.message_key for asker in self._asking(node)}
        return keys.pop() if len(keys) == 1 else ""

    def _is_rewind(self, tail: Place, node: Node, target: Place | None, came: Any) -> bool:
        abandoned_top = tail.topmost_after(-1 if target is None else target.node.index)
        if abandoned_top is not None and abandoned_top.node.uuid in self._guessed:
            return False  # it was put there by us: nobody went back from it
        has_met = abandoned_top is not None and abandoned_top.up is target
        if not node.begins_turn:  # an answer again, in the place of an error message
            return has_met and _reaches(tail.harness, abandoned_top)
        if node.kind == "assistant" and has_met and _reaches(tail.prompts, abandoned_top):
            return True  # the harness, when a session goes on, instead of the command that ended it
        verdict = self._verdict(target, came)
        if abandoned_top is None or not has_met:  # back to the end of a branch that was left before
            at = None if target is None else target.node
            return verdict == "went back" and at is not None and not at.called and not at.answered
        is_at_prompt = abandoned_top.node.begins_turn or (target is not None and target.node.begins_turn)
        return (is_at_prompt or self._is_unanswered(tail, abandoned_top)) and verdict != "went on"

    def _is_unanswered(self, tail: Place, abandoned_top: Place) -> bool:
        """Whether only a message is left behind whose calls nobody answered: no session can go on from these."""
        if not _reaches(tail.same_owner, abandoned_top) or tail.owner != abandoned_top.owner:
            return False
        calls = {
            call_id
            for position in tail.near()
            if position.node.index >= abandoned_top.node.index
            for call_id in position.node.called
        }
        return bool(calls) and calls.isdisjoint(self._answered)

    def _verdict(self, target: Place | None, came: Any) -> Verdict | None:
        """What clock and token counts say of a message that may be a rewind, and `came` at this time."""
        tail = self._tail
        assert tail is not None
        times = [
            (self._messages[0] if position is None else position.node).record.get("timestamp")
            for position in (tail, target)
        ]
        if is_too_soon(came, *times):
            return "went on"
        self._lengths = self._lengths or ContextLengths(self._messages)
        return self._lengths.verdict(self._num_before, tail, target)

    def _close_context(self, boundary: Node) -> None:
        """Where the context ended that a compaction closed: where it says, unless that leaves something behind."""
        logical = boundary.record.get("logicalParentUuid")
        last, tail = self._last_message, self._tail
        if last is None:
            return
        self.ended_at[boundary.uuid] = last.uuid
        target = self._above.get(logical) if isinstance(logical, str) else None
        if target is None or target.node.is_sidechain or target.node.is_boundary or tail is None:
            return
        if target is tail or self._is_beside(tail, target.node, target):
            self.ended_at[boundary.uuid] = target.node.uuid
        else:
            self._count(GUESSED_END, boundary)


def _is_above(asker: Node, position: Place | None) -> bool:
    """Whether a message, by this record of it or a later one, is at `position` or above it."""
    if position is None or position.node.index < asker.index:
        return False
    return position.is_below(asker) or any(
        neighbour.node.message_key == asker.message_key and neighbour.node.index >= asker.index
        for neighbour in position.near()
    )


def _reaches(top: Place | None, abandoned_top: Place | None) -> bool:
    """Whether a row of records that begins at `top` has everything in it that was left."""
    return top is not None and abandoned_top is not None and top.node.index <= abandoned_top.node.index
