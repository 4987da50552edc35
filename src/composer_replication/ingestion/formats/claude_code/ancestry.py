"""What is above a message of a Claude Code log, found in few steps, and whether it went on from there or back.

Any record may name any other as its parent, so a walk up the links may be as long as the log, for every record of it.
Each place remembers a far ancestor beside its parent, and how far up the records reach that are like it.

After a rewind the context is as long as it was at the record that was gone back to; after a wrong link it goes on
growing from the record before it. And a rewind takes a person a moment: what was written within the same second as the
record before it, such as the parts of a command, follows that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import accumulate, islice
from typing import Any, Literal, cast

from composer_replication.ingestion.formats.claude_code.record import Node

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
class Place:
    """A message or boundary with what is above it; nothing is above the start of a context."""

    node: Node
    up: Place | None
    far: Place | None
    """An ancestor: chosen so that the way to any other takes steps like the logarithm of the depth."""
    depth: int
    owner: str
    """The assistant's message that it is a record of, or whose calls it answers; "" for neither or for several."""
    same_owner: Place
    """The topmost of the records, from here up without a gap, that have this owner."""
    prompts: Place | None
    """The topmost of the records, from here up without a gap, that begin a turn; None where this one does not."""
    harness: Place | None
    """The same for the harness's own words in the model's place."""

    def topmost_after(self, index: int) -> Place | None:
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

    def near(self) -> Iterator[Place]:
        """This one and those above it, not very many."""
        return islice(self._upwards(), _NEAR)

    def _upwards(self) -> Iterator[Place]:
        position: Place | None = self
        while position is not None:
            yield position
            position = position.up


def place_of(node: Node, up: Place | None, owner: str) -> Place:
    position = Place.__new__(Place)
    position.node, position.up, position.owner = node, up, owner
    position.depth = 0 if up is None else up.depth + 1
    position.far = None if up is None else _far(up)
    position.same_owner = up.same_owner if up is not None and owner and up.owner == owner else position
    position.prompts = ((up.prompts if up is not None else None) or position) if node.begins_turn else None
    is_harness = node.kind == "assistant" and node.is_harness
    position.harness = ((up.harness if up is not None else None) or position) if is_harness else None
    return position


def _far(up: Place) -> Place:
    """As far above `up` as its own two last jumps together, where these are equally long; else `up` itself."""
    far = up.far
    if far is None or far.far is None or up.depth - far.depth != far.depth - far.far.depth:
        return up
    return far.far


class ContextLengths:
    """The answers of the main thread with the length of their prompts, in order."""

    def __init__(self, messages: list[Node]) -> None:
        self._messages = messages
        self._places = [at for at, node in enumerate(messages) if _prompt_tokens(node) is not None]
        self._said = [0.0, *accumulate(map(_tokens, messages))]
        """Tokens of everything before each message."""
        self._behind: dict[str, float] = {}

    def verdict(self, at: int, tail: Place, target: Place | None) -> Verdict | None:
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

    def _length_behind(self, position: Place | None) -> float:
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


def is_too_soon(came: Any, left: Any, gone_to: Any) -> bool:
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
