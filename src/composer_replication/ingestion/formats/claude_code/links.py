"""Decide which parent links in a Claude Code log to trust. A wrong link would lose all records below it.

If the parent of a record is not the record before it, the records in between are abandoned. That is correct for
parallel calls, whose records and results are siblings, and for a rewind: the user edits an earlier message, or asks
again after an answer. Nobody rewinds in the middle of a turn, so such a link is damage: the record is attached to the
record before it, and counted as a guess. What looks like a rewind is rejected if the timestamps or token counts in the
log show that the session continued.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import accumulate, islice
from typing import Any, Literal, cast

from composer_replication.ingestion.formats.claude_code.record import Entry, Messages, Node
from composer_replication.ingestion.source_files import IngestReport

# Reasons in the ingest report.
ORPHAN = "orphan attached to the record before it"
NO_PARENT = "no parent: attached by guess to the record before it"
GUESSED = "wrong parent: attached by guess to the record before it"
NO_BOUNDARY = "no boundary before a compaction's summary: the context before it closed by guess"
GUESSED_END = "wrong end of a compacted context: the record before it taken by guess"
# Parallel calls leave the records of one or two messages next to the thread. Anything longer is an abandoned stretch.
_MAX_BESIDE = 64


class RecordLinks:
    """Resolves the parents of a log's records, which are passed in log order.

    The attributes `nodes`, `parents`, `nearest`, `chain_of` and `ended_at` are copied to a `RecordTree`.
    """

    def __init__(self, file: str, report: IngestReport) -> None:
        self._file, self._report = file, report
        self.nodes: dict[str, Node] = {}
        self.parents: dict[str, str | None] = {}
        self.nearest: dict[str, str | None] = {}
        self.chain_of: dict[str, SubagentChain] = {}
        self.ended_at: dict[str, str] = {}
        self._above: dict[str, _LinkedRecord | None] = {}
        """Any record -> the nearest message or boundary, which may be the record itself."""
        self._callers: dict[str, Node] = {}
        self._tail: _LinkedRecord | None = None
        """The last message or boundary on the main thread."""
        self._last_message: Node | None = None
        self._last_main: str | None = None
        self._messages: list[Node] = []
        self._lengths: _ContextLengths | None = None
        self._num_messages = 0
        self._referenced_uuids: set[str] = set()
        self._answered: set[str] = set()
        self._guessed: set[str] = set()
        self._stray_times: dict[str, Any] = {}
        """Records without a message that link back, and their descendants -> timestamp of the first such record."""

    def resolve(self, entries: list[Entry]) -> None:
        """Resolve the parents of all records in a log."""
        nodes = [entry.node for entry in entries if entry.node is not None]
        # Whether a link is a rewind depends on what follows, so the whole log is indexed first.
        self._messages = [node for node in nodes if node.is_main_message]
        self._answered = {call_id for node in self._messages for call_id in node.answered}
        self._referenced_uuids = {
            name for entry in entries for name in (entry.parent, entry.follows) if isinstance(name, str)
        }
        sides, messages = _Sidechains(entries), Messages(self._file, self._report)
        for entry in entries:
            if entry.is_sidechain:
                self._take_side(entry, sides)
            else:
                self._take_main(entry, messages)
            if entry.node is not None and entry.is_sidechain:
                messages.take(entry.node, sides.of[entry.uuid].name)
        messages.assign_ids()
        self.chain_of = sides.of

    def _take_side(self, entry: Entry, sides: _Sidechains) -> None:
        parent, is_guess = sides.parent_of(entry, self.parents)
        # A sidechain begins without a parent, so a missing parent is reported only if it had to be guessed.
        if not isinstance(entry.parent, str):
            self._count(NO_PARENT if is_guess else None, entry)
        else:
            self._count(ORPHAN if entry.parent not in self.parents else GUESSED if is_guess else None, entry)
        self._attach(entry, parent)

    def _count(self, what: str | None, record: Entry | Node) -> None:
        if what is not None:
            self._report.skip(what, self._file, record.line)

    def _take_main(self, entry: Entry, messages: Messages) -> None:
        """Resolve the parent of a record on the main thread."""
        node, parent = entry.node, entry.parent
        moves_tail = True
        if node is not None:
            messages.take(node, "")
        if not isinstance(parent, str) or parent not in self.parents:
            parent = self._guess_parent(entry)
        elif node is not None and node.is_main_message:
            parent, moves_tail = self._checked_parent(node, parent)
        else:
            self._note_stray(entry, parent)
        position = self._attach(entry, parent)
        self._last_main = entry.uuid
        # The next message follows the last message, not an attachment or a record without a message.
        if node is not None and position is not None:
            self._num_messages += node.is_main_message
            if node.is_boundary or moves_tail:
                self._tail = position

    def _attach(self, entry: Entry, parent: str | None) -> _LinkedRecord | None:
        """Attach a record to its parent. Return its position if it is a message or a boundary, otherwise None."""
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
        # Nothing is above the start of a context, so that walking up the links never leaves the context.
        is_start = node.is_boundary or node.uuid in self.ended_at
        self._above[entry.uuid] = position = _linked_record(node, None if is_start else above, self._owner(node))
        return position

    def _note_main(self, node: Node, above: _LinkedRecord | None) -> None:
        if node.is_boundary:
            self._close_context(node)
            return
        # A summary without the boundary that should precede it: the context ended with the previous record.
        if node.is_summary and above is not None and not above.node.is_boundary:
            self._count(NO_BOUNDARY, node)
            self.ended_at[node.uuid] = above.node.uuid
        if node.kind == "assistant":
            self._callers.update(dict.fromkeys(node.called, node))
        self._last_message = node

    def _guess_parent(self, entry: Entry) -> str | None:
        """Return the previous record as a substitute for a missing parent, or None if the record really begins a
        thread.

        Claude Code loses links, and a log without any links is still one conversation.
        """
        tail, node = self._tail, entry.node
        is_message = node is not None and node.is_main_message
        if isinstance(entry.parent, str):
            self._count(ORPHAN, entry)
        elif node is not None and (node.is_boundary or self._replaces_first_prompt(node)):
            return None
        elif self._referenced_uuids and tail is not None and is_message:
            self._count(NO_PARENT, entry)  # not counted in a log without any links
        # Before the first message, a record without a message may be the parent.
        previous = self._last_main if tail is None else tail.node.uuid
        if previous is not None:
            self._guessed.add(entry.uuid)
        return previous

    def _replaces_first_prompt(self, node: Node) -> bool:
        """Return whether the token counts show that a prompt without a parent replaced the very first prompt."""
        first = None if self._tail is None or node.kind != "user" else self._tail.topmost_after(-1)
        if first is None or not (node.begins_turn and first.node.begins_turn) or first.node.uuid in self.ended_at:
            return False
        return self._verdict(None, node.record.get("timestamp")) == "went back"

    def _checked_parent(self, node: Node, parent: str) -> tuple[str, bool]:
        """Return the parent to use for a main-thread message, and whether the thread continues from that message."""
        tail, target = self._tail, self._above[parent]
        if tail is None or target is tail:
            return parent, True
        # The link leads somewhere else. Explanations are tried from the most certain to the least; if none fits, it is
        # damage.
        if target is None or not target.node.is_sidechain:
            if self._is_beside(tail, node, target):
                return parent, True
            if self._is_late_result(node, target):
                return parent, False
            # If hook records precede the message, the user acted when the first of them was written.
            written_at = self._stray_times.get(parent, node.record.get("timestamp"))
            if self._is_rewind(tail, node, target, written_at):
                return parent, True
        self._count(GUESSED, node)
        self._guessed.add(node.uuid)
        return tail.node.uuid, True

    def _is_late_result(self, node: Node, target: _LinkedRecord | None) -> bool:
        """Return whether a record without children answers earlier calls while the thread continues elsewhere."""
        is_last = node is self._messages[-1]
        if node.kind == "assistant" or is_last or node.uuid in self._referenced_uuids:
            return False
        callers = self._owning_assistant_records(node)
        return bool(callers) and all(_is_above(caller, target) for caller in callers)

    def _note_stray(self, entry: Entry, parent: str) -> None:
        if parent in self._stray_times:
            self._stray_times[entry.uuid] = self._stray_times[parent]
        elif self._tail is not None and self._above[parent] is not self._tail:
            self._stray_times[entry.uuid] = entry.time

    def _is_beside(self, tail: _LinkedRecord, node: Node, target: _LinkedRecord | None) -> bool:
        """Return whether all records after `target` belong to the messages that lead to `node`, or hold results of
        their calls.
        """
        if target is None:
            return False
        keys = {caller.message_key for caller in self._owning_assistant_records(target.node)}
        if node.kind == "assistant":
            keys.add(node.message_key)
        position: _LinkedRecord | None = tail
        for _ in range(_MAX_BESIDE):
            if position is None or position.node.index <= target.node.index:
                return True
            if position.owner in keys:
                position = position.same_owner.up  # skips all consecutive records of this message
            elif self._answers_above(position.node, keys, target):
                position = position.up
            else:
                return False
        return False

    def _answers_above(self, node: Node, keys: set[str], target: _LinkedRecord) -> bool:
        """Return whether a record holds only results of calls in the messages `keys`, or at or above `target`."""
        callers = [] if node.kind == "assistant" else self._owning_assistant_records(node)
        return bool(callers) and all(caller.message_key in keys or _is_above(caller, target) for caller in callers)

    def _owning_assistant_records(self, node: Node) -> list[Node]:
        """Return the assistant records that a record belongs to: itself, or those whose calls it answers."""
        if node.kind == "assistant":
            return [node]
        return [self._callers[call_id] for call_id in node.answered if call_id in self._callers]

    def _owner(self, node: Node) -> str:
        keys = {caller.message_key for caller in self._owning_assistant_records(node)}
        return keys.pop() if len(keys) == 1 else ""

    def _is_rewind(self, tail: _LinkedRecord, node: Node, target: _LinkedRecord | None, written_at: Any) -> bool:
        """Return whether a message below `target`, not below the last record `tail`, was written after a rewind."""
        abandoned_top = tail.topmost_after(-1 if target is None else target.node.index)
        if abandoned_top is not None and abandoned_top.node.uuid in self._guessed:
            return False  # the parent of `abandoned_top` was guessed, so its position proves nothing
        is_on_path = abandoned_top is not None and abandoned_top.up is target
        if not node.begins_turn:  # here only an error message from the harness can be replaced
            return is_on_path and _reaches(tail.harness, abandoned_top)
        if node.kind == "assistant" and is_on_path and _reaches(tail.prompts, abandoned_top):
            return True  # a resumed session: harness messages replace the command that ended it
        verdict = self._verdict(target, written_at)
        if abandoned_top is None or not is_on_path:  # back to the end of a branch that was abandoned before
            target_node = None if target is None else target.node
            if target_node is None or target_node.called or target_node.answered:
                return False
            return verdict == "went back"
        # People rewind to one of their prompts. Elsewhere only a message with unanswered calls can be abandoned.
        is_at_prompt = abandoned_top.node.begins_turn or (target is not None and target.node.begins_turn)
        return (is_at_prompt or self._is_unanswered(tail, abandoned_top)) and verdict != "went on"

    def _is_unanswered(self, tail: _LinkedRecord, abandoned_top: _LinkedRecord) -> bool:
        """Return whether only one message with unanswered calls, which no session can continue, is abandoned."""
        if not _reaches(tail.same_owner, abandoned_top) or tail.owner != abandoned_top.owner:
            return False
        # A message may be split over several records, each with some of the calls.
        calls = {
            call_id
            for position in tail.near()
            if position.node.index >= abandoned_top.node.index
            for call_id in position.node.called
        }
        return bool(calls) and calls.isdisjoint(self._answered)

    def _verdict(self, target: _LinkedRecord | None, written_at: Any) -> Verdict | None:
        """Return whether times and token counts show a return to `target`; None if they show nothing."""
        tail = self._tail
        assert tail is not None
        times = [
            (self._messages[0] if position is None else position.node).record.get("timestamp")
            for position in (tail, target)
        ]
        if _is_too_soon_for_rewind(written_at, *times):
            return "went on"
        # Built on demand: most logs have no doubtful link.
        self._lengths = self._lengths or _ContextLengths(self._messages)
        return self._lengths.verdict(self._num_messages, tail, target)

    def _close_context(self, boundary: Node) -> None:
        """Record where the context that a compaction closed has ended.

        The boundary has the id of the context's last record. If ending there would abandon messages, the last message
        is used instead.
        """
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


def _is_above(caller: Node, position: _LinkedRecord | None) -> bool:
    """Return whether the record `caller`, or a later record of the same message, is at or above `position`."""
    if position is None or position.node.index < caller.index:
        return False
    return position.is_below(caller) or any(
        nearby.node.message_key == caller.message_key and nearby.node.index >= caller.index
        for nearby in position.near()
    )


def _reaches(top: _LinkedRecord | None, abandoned_top: _LinkedRecord | None) -> bool:
    """Return whether the consecutive records up to `top` include the topmost abandoned record."""
    return top is not None and abandoned_top is not None and top.node.index <= abandoned_top.node.index


# Ancestry. Any record may link to any other, so walking up the links can take as many steps as the log has records, for
# each record. Therefore each position stores a far ancestor as well as its parent (a skip list), and how far up the
# consecutive records of the same kind reach.
#
# Context length. After a rewind the prompt is as long as it was at the target; after a wrong link it keeps growing from
# the previous record. Time. A person needs a moment for a rewind: a record written within a second of the previous
# record, such as part of a slash command, follows that record.

# How far up to look for the records of a message and the results of its calls.
_NEAR = 256
Verdict = Literal["went on", "went back"]
_PROMPT_FIELDS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
# Rough averages: only differences of many hundreds of tokens matter.
_CHARACTERS_PER_TOKEN = 4
_TOKENS_OF_AN_IMAGE = 1500
# Measured on 854 messages in real logs: the next prompt was 0 to 500 tokens longer than estimated in half of all cases,
# over 1,600 longer in 5%, and 4,000 or more shorter in 10% (old results are dropped after a pause).
_MIN_GAP_TOKENS = 800
_MAX_RELATIVE_DISTANCE = 0.25  # from one of the two expected lengths, as a share of the gap between them
_MIN_REWIND_TIME = timedelta(seconds=1)


@dataclass(slots=True)
class _LinkedRecord:
    """A message or boundary with links to its ancestors. The first record of a context has no ancestors."""

    node: Node
    up: _LinkedRecord | None
    far: _LinkedRecord | None
    """A far ancestor, chosen so that any ancestor is reached in a logarithmic number of steps."""
    depth: int
    owner: str
    """Key of the assistant message that contains the record or whose calls it answers; "" for none or several."""
    same_owner: _LinkedRecord
    """The topmost of the consecutive records from here up with the same owner."""
    prompts: _LinkedRecord | None
    """The topmost of the consecutive turn beginnings from here up; None if this record begins no turn."""
    harness: _LinkedRecord | None
    """The same for harness messages in the model's role."""

    def topmost_after(self, index: int) -> _LinkedRecord | None:
        """Return the oldest record at or above this one whose index is greater than `index`, or None."""
        position = self
        if position.node.index <= index:
            return None
        while position.up is not None and position.up.node.index > index:
            far = position.far
            position = far if far is not None and far.node.index > index else position.up
        return position

    def is_below(self, ancestor: Node) -> bool:
        """Return whether `ancestor` is this record or one of its ancestors."""
        top = self.topmost_after(ancestor.index - 1)
        return top is not None and top.node is ancestor

    def near(self) -> Iterator[_LinkedRecord]:
        """Yield this record and its closest ancestors."""
        return islice(self._upwards(), _NEAR)

    def _upwards(self) -> Iterator[_LinkedRecord]:
        position: _LinkedRecord | None = self
        while position is not None:
            yield position
            position = position.up


def _linked_record(node: Node, up: _LinkedRecord | None, owner: str) -> _LinkedRecord:
    # Not set in the constructor: a run of records may begin with this record, which has to exist first.
    position = _LinkedRecord.__new__(_LinkedRecord)
    position.node, position.up, position.owner = node, up, owner
    position.depth = 0 if up is None else up.depth + 1
    position.far = None if up is None else _far(up)
    position.same_owner = up.same_owner if up is not None and owner and up.owner == owner else position
    position.prompts = ((up.prompts if up is not None else None) or position) if node.begins_turn else None
    is_harness = node.kind == "assistant" and node.is_harness
    position.harness = ((up.harness if up is not None else None) or position) if is_harness else None
    return position


def _far(up: _LinkedRecord) -> _LinkedRecord:
    """Return the far ancestor for a record below `up`: the target of the last two jumps if equally long, else `up`."""
    far = up.far
    # Two equal jumps are merged into a jump twice as long, as in a skew-binary random-access list.
    if far is None or far.far is None or up.depth - far.depth != far.depth - far.far.depth:
        return up
    return far.far


class _ContextLengths:
    """The prompt lengths that answers on the main thread report, and estimates for the messages between them."""

    def __init__(self, messages: list[Node]) -> None:
        self._messages = messages
        self._answer_indices = [at for at, node in enumerate(messages) if _prompt_tokens(node) is not None]
        self._tokens_before = [0.0, *accumulate(map(_tokens, messages))]
        self._length_at: dict[str, float] = {}
        """Uuid -> tokens in the context up to and including this record."""

    def verdict(self, at: int, tail: _LinkedRecord, target: _LinkedRecord | None) -> Verdict | None:
        """Return whether the thread continued from `tail` or went back to `target` before message number `at`.

        A `target` of None is the start of the log. Returns None if the lengths are inconclusive.
        """
        # Only an answer reports the length of its prompt, so the next answer after the message is examined.
        next_answer = bisect_left(self._answer_indices, at)
        if next_answer == len(self._answer_indices):
            return None
        answered_at = self._answer_indices[next_answer]
        tokens_between = self._tokens_before[answered_at] - self._tokens_before[at]
        length = (_prompt_tokens(self._messages[answered_at]) or 0) - tokens_between
        going_on, going_back = self._length_after(tail), self._length_after(target)
        gap = going_on - going_back
        if abs(gap) < _MIN_GAP_TOKENS:
            return None
        # 0: the prompt is as long as after a rewind; 1: as long as if the thread had continued.
        share = (length - going_back) / gap
        if share > 1 - _MAX_RELATIVE_DISTANCE:
            return "went on"
        return "went back" if share < _MAX_RELATIVE_DISTANCE else None

    def _length_after(self, position: _LinkedRecord | None) -> float:
        """Return the number of tokens in the context up to and including `position`. Results are cached."""
        path: list[Node] = []
        while position is not None and position.node.uuid not in self._length_at:
            path.append(position.node)
            if _prompt_tokens(position.node) is not None:
                break
            position = position.up
        total = self._harness_prompt_tokens() if position is None else self._length_at.get(position.node.uuid, 0.0)
        for node in reversed(path):
            tokens = _prompt_tokens(node)
            total = total + _tokens(node) if tokens is None else tokens + _answer_tokens(node)
            self._length_at[node.uuid] = total
        return total

    def _harness_prompt_tokens(self) -> float:
        """Return an estimate of the number of tokens in the harness's own prompt, which no log contains."""
        first = self._answer_indices[0]
        return max((_prompt_tokens(self._messages[first]) or 0) - self._tokens_before[first], 0)


def _is_too_soon_for_rewind(written_at: Any, tail_at: Any, target_at: Any) -> bool:
    """Return whether a message follows the thread's last record too quickly for a rewind."""
    written_at, tail_at, target_at = _time(written_at), _time(tail_at), _time(target_at)
    if written_at is None or tail_at is None or target_at is None:
        return False
    return written_at - tail_at < _MIN_REWIND_TIME <= tail_at - target_at


def _time(value: Any) -> datetime | None:
    try:
        # All times in a log are in UTC; comparing an aware time with a naive one would raise.
        return datetime.fromisoformat(value).replace(tzinfo=None)
    except (TypeError, ValueError):
        return None


def _usage(node: Node) -> dict[str, Any]:
    usage = node.message.get("usage")
    return cast("dict[str, Any]", usage) if isinstance(usage, dict) else {}


def _prompt_tokens(node: Node) -> int | None:
    if node.kind != "assistant" or node.is_harness:
        return None
    counts = [value for name in _PROMPT_FIELDS if type(value := _usage(node).get(name)) is int and value > 0]
    return sum(counts) or None


def _answer_tokens(node: Node) -> int:
    value = _usage(node).get("output_tokens")
    return value if type(value) is int and value > 0 else 0


def _tokens(node: Node) -> float:
    return sum(_characters(block, 0) for block in node.blocks) / _CHARACTERS_PER_TOKEN


def _characters(value: Any, depth: int) -> int:
    if isinstance(value, str):
        return len(value)
    # Logs can nest values to any depth. No content block in a real message is this deep.
    if depth > 6 or not isinstance(value, (dict, list)):
        return 0
    if isinstance(value, dict):
        if value.get("type") == "image":
            return _TOKENS_OF_AN_IMAGE * _CHARACTERS_PER_TOKEN
        value = list(cast("dict[str, Any]", value).values())
    return sum(_characters(child, depth + 1) for child in cast("list[Any]", value))


# Several inline subagents may work at once, and their records interleave. Each sidechain begins with the prompt that a
# call on the main thread passed to it. A result belongs to the chain of its call, any other record to the chain of its
# parent. If that fails, the record goes to a chain that waits for its next record and that no other record continues.
# Without such a chain, the record begins a new one.

# Few subagents work at the same time, so only the latest chains are considered.
_MAX_PARALLEL = 64


@dataclass(slots=True)
class SubagentChain:
    """The records read so far of one inline subagent: the last one, and the candidates for the next parent."""

    name: str
    last_uuid: str
    agent: str | None = None
    tail: Node | None = None
    latest: set[str] = field(default_factory=set)
    """The records of the last message and after it; the next record links to one of these."""
    latest_key: str = ""
    named_until: int = -1
    """The number of the last sidechain record that links to a record of this chain."""

    @property
    def is_waiting(self) -> bool:
        """Whether the chain is incomplete, because an answer, a result or the rest of a message is still to come."""
        node = self.tail
        return node is None or node.kind != "assistant" or bool(node.called) or not _says_something(node)

    def take(self, entry: Entry, above: str | None) -> None:
        self.last_uuid = entry.uuid
        node = entry.node
        if node is None or not node.is_message:
            if above in self.latest:
                self.latest.add(entry.uuid)
            return
        self.tail = node
        # After a new message or prompt, the next record can no longer link to earlier records.
        is_next = node.kind == "assistant" and not node.is_harness and node.message_key != self.latest_key
        if is_next or (node.begins_turn and node.kind == "user"):
            self.latest = set()
            self.latest_key = node.message_key
        self.latest.add(entry.uuid)


class _Sidechains:
    """Assigns sidechain records to the chains of inline subagents; `of` maps uuids to chains."""

    def __init__(self, entries: list[Entry]) -> None:
        self.of: dict[str, SubagentChain] = {}
        self._by_age: dict[str, SubagentChain] = {}
        """All chains, the most recently written one last."""
        self._by_agent: dict[Any, SubagentChain] = {}
        self._by_message: dict[Any, SubagentChain] = {}
        self._by_missing: dict[Any, SubagentChain] = {}
        self._callers: dict[str, dict[str, SubagentChain]] = {}
        self._at = -1
        side = [entry for entry in entries if entry.is_sidechain]
        # A chain that a later record links to is continued by that record, so no other record is attached to it.
        self._last_named = {entry.parent: at for at, entry in enumerate(side) if isinstance(entry.parent, str)}
        nodes = [entry.node for entry in side if entry.node is not None]
        self._num_answers = Counter(call_id for node in nodes for call_id in node.answered)
        self._prompts = _prompts_of_calls(entries) if side else set[str]()

    def parent_of(self, entry: Entry, parents: Mapping[str, str | None]) -> tuple[str | None, bool]:
        """Return a record's parent and whether it is a guess; `parents` maps earlier records to their parents."""
        self._at += 1
        named_parent = entry.parent if isinstance(entry.parent, str) and entry.parent in parents else None
        linked = self.of.get(named_parent) if named_parent is not None else None
        names_other = named_parent is not None and linked is None
        chain = None if self._is_root(entry, names_other) else self._chain(entry, linked)
        if chain is None:
            parent = None if linked is not None else named_parent
            chain = SubagentChain(entry.uuid, entry.uuid)
            is_guess = linked is not None
        else:
            parent = named_parent if chain is linked else chain.last_uuid
            is_guess = chain is not linked
        self._take(entry, chain, parent)
        if named_parent is None and isinstance(entry.parent, str):
            self._by_missing.setdefault(entry.parent, chain)
        return parent, is_guess

    def _is_root(self, entry: Entry, names_other: bool) -> bool:
        """Return whether a record begins a chain: a boundary, a parent outside the chain, or a call's prompt."""
        node = entry.node
        if node is not None and node.is_boundary:
            return True
        if node is None or node.kind != "user" or node.answered:
            return False
        return names_other or not isinstance(entry.parent, str) or first_text_block(node) in self._prompts

    def _chain(self, entry: Entry, linked: SubagentChain | None) -> SubagentChain | None:
        """Return the chain of a record, by the most reliable evidence, or None if it begins a new chain."""
        node = entry.node
        fits = linked is not None and (node is None or self._fits(entry, node, linked))
        caller = None if node is None else self._caller(node, linked, fits)
        if caller is not None:
            return caller
        # A record with a subagent id belongs to that subagent.
        agent = self._by_agent.get(entry.agent)
        if agent is not None and (linked is None or linked.agent != entry.agent):
            return agent
        for chain in self._chains_by_name(entry):
            if chain is not linked and (not fits or (chain.is_waiting and self._is_open(chain))):
                return chain
        return linked if fits else self._next_waiting(entry) or linked

    def _chains_by_name(self, entry: Entry) -> Iterator[SubagentChain]:
        """Yield the chains that have records of the same message, or records that link to the same missing parent."""
        node = entry.node
        key = node.message_key if node is not None and node.kind == "assistant" else None
        chains = (self._by_message.get(key), self._by_missing.get(entry.named_parent or ""))
        return (chain for chain in chains if chain is not None)

    def _caller(self, node: Node, linked: SubagentChain | None, fits: bool) -> SubagentChain | None:
        """Return the chain with the calls that a record answers, preferring a plausible link."""
        for call_id in node.answered:
            chains = self._callers.get(call_id)
            if chains and linked is not None and linked.name in chains:
                return linked
            if chains and not (fits and self._num_answers[call_id] > 1):
                return next(reversed(chains.values()))
        return None

    def _fits(self, entry: Entry, node: Node, linked: SubagentChain) -> bool:
        is_same_message = node.kind == "assistant" and node.message_key == linked.latest_key
        return is_same_message or entry.named_parent in linked.latest or node.attachment is not None

    def _is_open(self, chain: SubagentChain) -> bool:
        return chain.named_until <= self._at

    def _next_waiting(self, entry: Entry) -> SubagentChain | None:
        """Return the most recently written chain to which records are missing, or None.

        A chain that seems finished is a candidate for a result, whose call may be missing, and for a record without a
        parent.
        """
        latest = islice(reversed(self._by_age.values()), _MAX_PARALLEL)
        opened = [chain for chain in latest if self._is_open(chain)]
        waiting = next((chain for chain in opened if chain.is_waiting), None)
        is_result = entry.node is not None and bool(entry.node.answered)
        return waiting or (opened[0] if opened and (is_result or not isinstance(entry.parent, str)) else None)

    def _take(self, entry: Entry, chain: SubagentChain, parent: str | None) -> None:
        self.of[entry.uuid] = chain
        chain.take(entry, parent)
        chain.named_until = max(chain.named_until, self._last_named.get(entry.uuid, -1))
        # Removing and inserting the chain moves it to the end of the dict.
        self._by_age.pop(chain.name, None)
        self._by_age[chain.name] = chain
        if entry.agent is not None:
            chain.agent = chain.agent or entry.agent
            self._by_agent.setdefault(entry.agent, chain)
            if parent is None:
                self._by_agent[entry.agent] = chain
        if entry.node is not None and entry.node.kind == "assistant":
            self._by_message.setdefault(entry.node.message_key, chain)
            for call_id in entry.node.called:
                self._callers.setdefault(call_id, {})[chain.name] = chain


def first_text_block(node: Node) -> str:
    """Return the text of a record, for comparing the first prompt of a sidechain with the prompt in a call."""
    return "\n".join(block["text"] for block in node.blocks if isinstance(block.get("text"), str)).strip()


def prompt_of(block: dict[str, Any]) -> str | None:
    """Return the prompt that a call passes to a subagent, or None for any other block."""
    arguments = block.get("input")
    if block.get("type") != "tool_use" or not isinstance(arguments, dict):
        return None
    prompt = cast("dict[str, Any]", arguments).get("prompt")
    return prompt.strip() if isinstance(prompt, str) else None


def _prompts_of_calls(entries: list[Entry]) -> set[str]:
    nodes = (entry.node for entry in entries if entry.node is not None and entry.node.kind == "assistant")
    prompts = {prompt_of(block) for node in nodes for block in node.blocks}
    return {prompt for prompt in prompts if prompt}


def _says_something(node: Node) -> bool:
    return any(block.get("type") not in ("thinking", "redacted_thinking") for block in node.blocks)
