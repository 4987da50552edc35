"""Whether a message went on from the record before it or back to an earlier one, as clock and token counts say.

After a rewind the context is as long as it was at the record that was gone back to; after a wrong link it goes on
growing from the record before it. And a rewind takes a person a moment: what was written within the same second as the
record before it, such as the parts of a command, follows that.
"""

from __future__ import annotations

from bisect import bisect_left
from datetime import datetime, timedelta
from itertools import accumulate
from typing import Any, Literal, cast

from composer_replication.ingestion.formats.claude_code.ancestry import Place
from composer_replication.ingestion.formats.claude_code.record import Node

Verdict = Literal["went on", "went back"]
_PROMPT_FIELDS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
_CHARACTERS_PER_TOKEN = 4
_TOKENS_OF_AN_IMAGE = 1500
# Of 854 messages of real logs the prompt behind them was 0 to 500 tokens longer than reckoned in half of all cases, and
# more than 1,600 in a twentieth; in a tenth it was shorter by 4,000 and more (old results are left out after a pause).
_LEAST_GAP = 800
_NEAR = 0.25
_MOMENT = timedelta(seconds=1)


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
        found = bisect_left(self._places, at)
        if found == len(self._places):
            return None
        answered_at = self._places[found]
        said = self._said[answered_at] - self._said[at]
        length = (_prompt_tokens(self._messages[answered_at]) or 0) - said
        going_on, going_back = self._length_behind(tail), self._length_behind(target)
        gap = going_on - going_back
        if abs(gap) < _LEAST_GAP:
            return None
        share = (length - going_back) / gap
        return "went on" if share > 1 - _NEAR else "went back" if share < _NEAR else None

    def _length_behind(self, place: Place | None) -> float:
        """Tokens of the context with everything up to `place` in it; each message is looked at once."""
        way: list[Node] = []
        while place is not None and place.node.uuid not in self._behind:
            way.append(place.node)
            if _prompt_tokens(place.node) is not None:
                break
            place = place.up
        total = self._before_all() if place is None else self._behind.get(place.node.uuid, 0.0)
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
    return sum(_characters(each, depth + 1) for each in cast("list[Any]", value))
