"""States of two sessions that say nearly the same: what a user asked for last, and the messages right before a turn.

Texts are compared by their pairs of neighbouring words; one with a path or a number in it counts as `#`:

    likeness(a, b) = pairs that both have / pairs that either has        (Jaccard; a pair that comes again counts again)

The likeness of two states is the smaller of what was asked and of the last messages; from ALIKE on they are
near-duplicates. Of more than 128 pairs those with the smallest hashes are compared: an estimate that errs by 0.04.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b

from composer_replication.types import Conversation, Turn

ALIKE = 0.7
_LAST, _LOOKED_AT = 4, 4000
_SKETCH, _INDEXED = 128, 8
_PRIME, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1

Sketch = Sequence[int]
"""The smallest hashes of a text's pairs of words, in order."""
State = tuple[Sketch, Sketch]
"""What was asked, and the last messages."""


def states_of(conversation: Conversation) -> Iterator[tuple[str, State]]:
    """Each turn of the model, by its id, with what stands before it."""
    asked, last = sketch(()), list[Sketch]()
    for turn in conversation.turns:
        if turn.role == "assistant" and turn.origin == "model":
            yield turn.id, (asked, _smallest({each for message in last for each in message}))
        message = sketch(_texts(turn))
        last = [*last, message][-_LAST:]
        asked = message if turn.origin == "human" else asked


def _texts(turn: Turn) -> Iterator[str]:
    yield turn.role
    yield turn.text
    yield from (json.dumps([call.name, dict(call.arguments)], default=str) for call in turn.calls)
    yield from (result.text for result in turn.results)


def sketch(texts: Iterable[str]) -> Sketch:
    """Of texts as one after the other, each from its beginning as far as is looked at."""
    words = [_blurred(word) for text in texts for word in text[:_LOOKED_AT].split()]
    pairs = Counter(zip(["", *words], [*words, ""], strict=True)) if words else Counter[tuple[str, str]]()
    return _smallest({_hash(*pair, again) for pair, number in pairs.items() for again in range(number)})


def likeness(one: Sketch, other: Sketch) -> float:
    """Jaccard's, between 0 and 1: of the smallest hashes of both together, the share that both have."""
    first, second = set(one), set(other)
    smallest = sorted(first | second)[:_SKETCH]
    return sum(each in first and each in second for each in smallest) / len(smallest) if smallest else 1.0


class StateIndex:
    """States that were learnt from. Two that are alike share some of their very smallest hashes, and are found by them.

    With a likeness of ALIKE the eight smallest of one are all absent from the other's once in 15,000 times.
    """

    def __init__(self) -> None:
        self._states: list[State] = []
        self._by_hash: dict[int, list[int]] = defaultdict(list)
        self._asked: dict[tuple[bytes, bytes], bool] = {}

    def add(self, state: State) -> None:
        for each in state[1][:_INDEXED]:
            self._by_hash[each].append(len(self._states))
        self._states.append(state)

    def has(self, state: State) -> bool:
        """Whether a state is a near-duplicate of one that was added."""
        asked, last = state
        numbers = dict.fromkeys(at for each in last[:_INDEXED] for at in self._by_hash.get(each, ()))
        others = (self._states[number] for number in numbers)
        return any(self._is_asked_alike(asked, their) and likeness(last, end) >= ALIKE for their, end in others)

    def _is_asked_alike(self, one: Sketch, other: Sketch) -> bool:
        """Asked once for all states below the same two requests."""
        key = bytes(array("I", one)), bytes(array("I", other))
        if key not in self._asked:
            self._asked[key] = likeness(one, other) >= ALIKE
        return self._asked[key]


def _smallest(hashes: set[int]) -> Sketch:
    return array("I", sorted(hashes)[:_SKETCH])


def _blurred(word: str) -> str:
    return "#" if any(each in "/\\" or each.isdigit() for each in word) else word


def _hash(first: str, second: str, again: int) -> int:
    mixed = (_hash_of_word(first) * _PRIME + _hash_of_word(second) + again * 0xD1B54A32D192ED03) & _MASK
    return ((mixed ^ mixed >> 29) * _PRIME & _MASK) >> 32


@lru_cache(maxsize=1 << 16)
def _hash_of_word(word: str) -> int:
    return int.from_bytes(blake2b(word.encode("utf-8", "replace"), digest_size=8).digest(), "big")
