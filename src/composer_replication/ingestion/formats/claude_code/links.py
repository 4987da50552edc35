"""Which link of a Claude Code log is believed: what hangs from a wrong one would take whole stretches with it.

A record whose parent is not the record before it leaves a stretch behind. That is right for parallel calls, whose
records and results are siblings, and for a rewind: a user's message that takes the place of another one, or follows one
in its answer's place. In the middle of a turn nobody rewinds; such a link is damage, and the record is attached to the
one before it, by guess, and counted as that. A message that looks like a rewind is none where the log's own clock or
token counts say that the session went on.
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
from composer_replication.ingestion.source import IngestReport

ORPHAN = "orphan attached to the record before it"
NO_PARENT = "no parent: attached by guess to the record before it"
GUESSED = "wrong parent: attached by guess to the record before it"
NO_BOUNDARY = "no boundary before a compaction's summary: the context before it closed by guess"
GUESSED_END = "wrong end of a compacted context: the record before it taken by guess"
# What is left beside the thread are the records of one message or two; more is a stretch that is left behind.
_MAX_BESIDE = 64


class RecordLinks:
    """Takes the records in order; `nodes`, `parents`, `nearest`, `chain_of` and `ended_at` are a `RecordTree`'s."""

    def __init__(self, file: str, report: IngestReport) -> None:
        self._file, self._report = file, report
        self.nodes: dict[str, Node] = {}
        self.parents: dict[str, str | None] = {}
        self.nearest: dict[str, str | None] = {}
        self.chain_of: dict[str, SubagentChain] = {}
        self.ended_at: dict[str, str] = {}
        self._above: dict[str, _LinkedRecord | None] = {}  # any record -> the message or boundary at or above it
        self._callers: dict[str, Node] = {}
        self._tail: _LinkedRecord | None = None
        """Where the main thread stands: its last message or boundary."""
        self._last_message: Node | None = None
        self._last_main: str | None = None
        self._messages: list[Node] = []
        self._lengths: _ContextLengths | None = None
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
        sides, messages = _Sidechains(entries), Messages(self._file, self._report)
        for entry in entries:
            if entry.is_sidechain:
                self._take_side(entry, sides)
            else:
                self._take(entry, messages)
            if entry.node is not None and entry.is_sidechain:
                messages.take(entry.node, sides.of[entry.uuid].name)
        messages.settle()
        self.chain_of = sides.of

    def _take_side(self, entry: Entry, sides: _Sidechains) -> None:
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

    def _set(self, entry: Entry, parent: str | None) -> _LinkedRecord | None:
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

    def _note_main(self, node: Node, above: _LinkedRecord | None) -> None:
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

    def _is_late_result(self, node: Node, target: _LinkedRecord | None) -> bool:
        """Whether it answers calls where it hangs, and the thread goes on elsewhere: nothing hangs from it."""
        is_last = node is self._messages[-1]
        askers = [] if node.kind == "assistant" or is_last or node.uuid in self._named else self._asking(node)
        return bool(askers) and all(_is_above(asker, target) for asker in askers)

    def _note_stray(self, entry: Entry, parent: str) -> None:
        if parent in self._strayed:
            self._strayed[entry.uuid] = self._strayed[parent]
        elif self._tail is not None and self._above[parent] is not self._tail:
            self._strayed[entry.uuid] = entry.time

    def _is_beside(self, tail: _LinkedRecord, node: Node, target: _LinkedRecord | None) -> bool:
        """Whether all that came after `target` is of messages on the way to `node`: their records and results."""
        if target is None:
            return False
        keys = {asker.message_key for asker in self._asking(target.node)}
        if node.kind == "assistant":
            keys.add(node.message_key)
        position: _LinkedRecord | None = tail
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

    def _answers_above(self, node: Node, keys: set[str], target: _LinkedRecord) -> bool:
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

    def _is_rewind(self, tail: _LinkedRecord, node: Node, target: _LinkedRecord | None, came: Any) -> bool:
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

    def _is_unanswered(self, tail: _LinkedRecord, abandoned_top: _LinkedRecord) -> bool:
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

    def _verdict(self, target: _LinkedRecord | None, came: Any) -> Verdict | None:
        """What clock and token counts say of a message that may be a rewind, and `came` at this time."""
        tail = self._tail
        assert tail is not None
        times = [
            (self._messages[0] if position is None else position.node).record.get("timestamp")
            for position in (tail, target)
        ]
        if _is_too_soon(came, *times):
            return "went on"
        self._lengths = self._lengths or _ContextLengths(self._messages)
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


def _is_above(asker: Node, position: _LinkedRecord | None) -> bool:
    """Whether a message, by this record of it or a later one, is at `position` or above it."""
    if position is None or position.node.index < asker.index:
        return False
    return position.is_below(asker) or any(
        neighbour.node.message_key == asker.message_key and neighbour.node.index >= asker.index
        for neighbour in position.near()
    )


def _reaches(top: _LinkedRecord | None, abandoned_top: _LinkedRecord | None) -> bool:
    """Whether a row of records that begins at `top` has everything in it that was left."""
    return top is not None and abandoned_top is not None and top.node.index <= abandoned_top.node.index


# What is above a message of a Claude Code log, found in few steps, and whether it went on from there or back.
#
# Any record may name any other as its parent, so a walk up the links may be as long as the log, for every record of it.
# Each place remembers a far ancestor beside its parent, and how far up the records reach that are like it.
#
# After a rewind the context is as long as it was at the record that was gone back to; after a wrong link it goes on
# growing from the record before it. And a rewind takes a person a moment: what was written within the same second as
# the record before it, such as the parts of a command, follows that.

# Records of one message and results of its calls lie close together.
_NEAR = 256
Verdict = Literal["went on", "went back"]
_PROMPT_FIELDS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
_CHARACTERS_PER_TOKEN = 4
_TOKENS_OF_AN_IMAGE = 1500
# Of 854 messages of real logs the prompt behind them was 0 to 500 tokens longer than reckoned in half of all cases, and
# more than 1,600 in a twentieth; in a tenth it was shorter by 4,000 and more (old results are left out after a pause).
_LEAST_GAP = 800
_NEAR_SHARE = 0.25
_MOMENT = timedelta(seconds=1)


@dataclass(slots=True)
class _LinkedRecord:
    """A message or boundary with what is above it; nothing is above the start of a context."""

    node: Node
    up: _LinkedRecord | None
    far: _LinkedRecord | None
    """An ancestor: chosen so that the way to any other takes steps like the logarithm of the depth."""
    depth: int
    owner: str
    """The assistant's message that it is a record of, or whose calls it answers; "" for neither or for several."""
    same_owner: _LinkedRecord
    """The topmost of the records, from here up without a gap, that have this owner."""
    prompts: _LinkedRecord | None
    """The topmost of the records, from here up without a gap, that begin a turn; None where this one does not."""
    harness: _LinkedRecord | None
    """The same for the harness's own words in the model's place."""

    def topmost_after(self, index: int) -> _LinkedRecord | None:
        """The oldest at or above this one that is newer than record number `index`."""
        position = self
        if position.node.index <= index:
            return None
        while position.up is not None and position.up.node.index > index:
            far = position.far
            position = far if far is not None and far.node.index > index else position.up
        return position

    def is_below(self, other: Node) -> bool:
        """Whether `other` is this record or above it."""
        top = self.topmost_after(other.index - 1)
        return top is not None and top.node is other

    def near(self) -> Iterator[_LinkedRecord]:
        """This one and those above it, not very many."""
        return islice(self._upwards(), _NEAR)

    def _upwards(self) -> Iterator[_LinkedRecord]:
        position: _LinkedRecord | None = self
        while position is not None:
            yield position
            position = position.up


def place_of(node: Node, up: _LinkedRecord | None, owner: str) -> _LinkedRecord:
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
    """As far above `up` as its own two last jumps together, where these are equally long; else `up` itself."""
    far = up.far
    if far is None or far.far is None or up.depth - far.depth != far.depth - far.far.depth:
        return up
    return far.far


class _ContextLengths:
    """The answers of the main thread with the length of their prompts, in order."""

    def __init__(self, messages: list[Node]) -> None:
        self._messages = messages
        self._places = [at for at, node in enumerate(messages) if _prompt_tokens(node) is not None]
        self._said = [0.0, *accumulate(map(_tokens, messages))]
        """Tokens of everything before each message."""
        self._behind: dict[str, float] = {}

    def verdict(self, at: int, tail: _LinkedRecord, target: _LinkedRecord | None) -> Verdict | None:
        """Of message number `at`: it went on from `tail`, back to `target` (None: the start), or it cannot be told."""
        next_answer = bisect_left(self._places, at)
        if next_answer == len(self._places):
            return None
        answered_at = self._places[next_answer]
        tokens_between = self._said[answered_at] - self._said[at]
        length = (_prompt_tokens(self._messages[answered_at]) or 0) - tokens_between
        going_on, going_back = self._length_behind(tail), self._length_behind(target)
        gap = going_on - going_back
        if abs(gap) < _LEAST_GAP:
            return None
        share = (length - going_back) / gap
        return "went on" if share > 1 - _NEAR_SHARE else "went back" if share < _NEAR_SHARE else None

    def _length_behind(self, position: _LinkedRecord | None) -> float:
        """Tokens of the context with everything up to `position` in it; each message is looked at once."""
        way: list[Node] = []
        while position is not None and position.node.uuid not in self._behind:
            way.append(position.node)
            if _prompt_tokens(position.node) is not None:
                break
            position = position.up
        total = self._before_all() if position is None else self._behind.get(position.node.uuid, 0.0)
        for node in reversed(way):
            tokens = _prompt_tokens(node)
            total = total + _tokens(node) if tokens is None else tokens + _answer_tokens(node)
            self._behind[node.uuid] = total
        return total

    def _before_all(self) -> float:
        """The prompt of the harness itself, which no log holds: what the first answer had read beside the messages."""
        first = self._places[0]
        return max((_prompt_tokens(self._messages[first]) or 0) - self._said[first], 0)


def _is_too_soon(came: Any, left: Any, gone_to: Any) -> bool:
    """Of three times as logs have them: whether a message came before, or within a second of, what it would leave."""
    came, left, gone_to = _time(came), _time(left), _time(gone_to)
    if came is None or left is None or gone_to is None:
        return False
    return came - left < _MOMENT <= left - gone_to


def _time(value: Any) -> datetime | None:
    try:
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
    if depth > 6 or not isinstance(value, (dict, list)):
        return 0
    if isinstance(value, dict):
        if value.get("type") == "image":
            return _TOKENS_OF_AN_IMAGE * _CHARACTERS_PER_TOKEN
        value = list(cast("dict[str, Any]", value).values())
    return sum(_characters(child, depth + 1) for child in cast("list[Any]", value))


# Which inline sub-agent a record of a sidechain belongs to: several may work at once, and their records interleave.
#
# Each sidechain begins with the prompt that a call of the main thread gave it. A result belongs where its call was
# made, any other record where its parent stands. Where that cannot be, a chain that waits for its next record and
# that nobody else goes on from is the one that misses it; without such a chain it begins one of its own.

# Sub-agents that work at the same time are few.
_NUM_AT_WORK = 64


@dataclass(slots=True)
class SubagentChain:
    """One inline sub-agent: where it stands, and until when other records name its own."""

    name: str
    last_uuid: str
    agent: str | None = None
    tail: Node | None = None
    latest: set[str] = field(default_factory=set)
    """The records of its last message, and what followed: what comes next names one of these."""
    latest_key: str = ""
    named_until: int = -1

    @property
    def waits(self) -> bool:
        """Whether something is to follow: an answer, a result, or the rest of a message."""
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
        is_next = node.kind == "assistant" and not node.is_harness and node.message_key != self.latest_key
        if is_next or (node.begins_turn and node.kind == "user"):
            self.latest = set()
            self.latest_key = node.message_key
        self.latest.add(entry.uuid)


class _Sidechains:
    """Takes the sidechains' records in order; `of` says for each to which chain it belongs."""

    def __init__(self, entries: list[Entry]) -> None:
        self.of: dict[str, SubagentChain] = {}
        self._by_age: dict[str, SubagentChain] = {}
        """All of them, the one written to last at the end."""
        self._by_agent: dict[Any, SubagentChain] = {}
        self._by_message: dict[Any, SubagentChain] = {}
        self._by_missing: dict[Any, SubagentChain] = {}
        self._callers: dict[str, dict[str, SubagentChain]] = {}
        self._at = -1
        side = [entry for entry in entries if entry.is_sidechain]
        self._last_named = {entry.parent: at for at, entry in enumerate(side) if isinstance(entry.parent, str)}
        nodes = [entry.node for entry in side if entry.node is not None]
        self._num_answers = Counter(call_id for node in nodes for call_id in node.answered)
        self._prompts = _prompts_of_calls(entries) if side else set[str]()

    def parent_of(self, entry: Entry, known: Mapping[str, str | None]) -> tuple[str | None, bool]:
        """What it hangs from, and whether that is a guess, whatever it says."""
        self._at += 1
        named_parent = entry.parent if isinstance(entry.parent, str) and entry.parent in known else None
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
        """Whether it begins a chain: a boundary, or a prompt that names none of a sidechain, or that a call gave."""
        node = entry.node
        if node is not None and node.is_boundary:
            return True
        if node is None or node.kind != "user" or node.answered:
            return False
        return names_other or not isinstance(entry.parent, str) or first_text(node) in self._prompts

    def _chain(self, entry: Entry, linked: SubagentChain | None) -> SubagentChain | None:
        node = entry.node
        fits = linked is not None and (node is None or self._fits(entry, node, linked))
        caller = None if node is None else self._caller(node, linked, fits)
        if caller is not None:
            return caller
        agent = self._by_agent.get(entry.agent)
        if agent is not None and (linked is None or linked.agent != entry.agent):
            return agent
        for chain in self._said_to_be_in(entry):
            if chain is not linked and (not fits or (chain.waits and self._is_open(chain))):
                return chain
        return linked if fits else self._next_waiting(entry) or linked

    def _said_to_be_in(self, entry: Entry) -> Iterator[SubagentChain]:
        """By its message's other records, or by others that name the same missing parent."""
        node = entry.node
        key = node.message_key if node is not None and node.kind == "assistant" else None
        chains = (self._by_message.get(key), self._by_missing.get(entry.named_parent or ""))
        return (chain for chain in chains if chain is not None)

    def _caller(self, node: Node, linked: SubagentChain | None, fits: bool) -> SubagentChain | None:
        """Where its calls were made; of a call with two results the one whose link fits may bear a wrong name."""
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
        """The chain written to last of those that miss a record; one that seems finished may miss the call of a result,
        or anything where nothing has a name."""
        latest = islice(reversed(self._by_age.values()), _NUM_AT_WORK)
        opened = [chain for chain in latest if self._is_open(chain)]
        waiting = next((chain for chain in opened if chain.waits), None)
        is_result = entry.node is not None and bool(entry.node.answered)
        return waiting or (opened[0] if opened and (is_result or not isinstance(entry.parent, str)) else None)

    def _take(self, entry: Entry, chain: SubagentChain, parent: str | None) -> None:
        self.of[entry.uuid] = chain
        chain.take(entry, parent)
        chain.named_until = max(chain.named_until, self._last_named.get(entry.uuid, -1))
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


def first_text(node: Node) -> str:
    return "\n".join(block["text"] for block in node.blocks if isinstance(block.get("text"), str)).strip()


def prompt_of(block: dict[str, Any]) -> str | None:
    """The prompt that a call gives to a sub-agent, where it is one that does."""
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
