"""States of two sessions that say nearly the same: what a user asked for last, and the messages right before a turn.

Texts are compared by their pairs of neighbouring words; one with a path or a number in it counts as `#`:

    likeness(a, b) = pairs that both have / pairs that either has        (Jaccard; a pair that comes again counts again)

The likeness of two states is the smaller of what was asked and of the last messages; from ALIKE on they are
near-duplicates. Of more than 128 pairs those with the smallest hashes are compared: an estimate that errs by 0.04.
"""

from __future__ import annotations

import json
import math
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b

from composer_replication.types import Conversation, Turn

ALIKE = 0.7
_LAST, _LOOKED_AT = 4, 4000
_SKETCH, _BUCKET_BITS, _ROUNDING = 128, 20, 1e-9
_PRIME, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1

Sketch = Sequence[int]
"""The smallest hashes of a text's pairs of words, in order."""
State = tuple[Sketch, Sketch]
"""What was asked, and the last messages."""


def states_of(conversation: Conversation) -> Iterator[tuple[str, State]]:
    """Each turn of the model, by its id, with what stands before it."""
    request, last = sketch(()), list[Sketch]()
    for turn in conversation.turns:
        if turn.role == "assistant" and turn.origin == "model":
            yield turn.id, (request, _smallest({digest for message in last for digest in message}))
        message = sketch(_texts(turn))
        last = [*last, message][-_LAST:]
        request = message if turn.origin == "human" else request


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
    return sum(digest in first and digest in second for digest in smallest) / len(smallest) if smallest else 1.0


class StateIndex:
    """States that were learnt from; what stands below requests that are not alike is never compared."""

    def __init__(self) -> None:
        self._requests, self._ends = _SketchIndex(), _SketchIndex()
        self._numbers: dict[bytes, int] = {}
        self._asked: list[int] = []
        self._alike: dict[bytes, frozenset[int]] = {}

    def add(self, state: State) -> None:
        request, last = state
        key = bytes(array("I", request))
        if key not in self._numbers:
            self._numbers[key] = self._requests.add(request)
            self._alike.clear()
        self._asked.append(self._numbers[key])
        self._ends.add(last)

    def has(self, state: State) -> bool:
        """Whether a state is a near-duplicate of one that was added."""
        request, last = state
        key = bytes(array("I", request))
        if key not in self._alike:  # once for all states below a request
            matches = self._requests.alike(request) if request else (self._numbers.get(key, -1),)
            self._alike[key] = frozenset(matches)
        requests = self._alike[key]
        matches = self._ends.alike(last, among=lambda number: self._asked[number] in requests)
        return next(matches, None) is not None


class _SketchIndex:
    """Sketches that are found again by their rarest hashes.

    Of two with a likeness of ALIKE each has that share of the other's hashes. So whichever order all hashes stand in,
    among the first 1 - ALIKE of each, and one more, there is one that both have. With the rarest first, those who share
    what every session says are not compared with each other.
    """

    def __init__(self) -> None:
        self._sketches: list[Sketch] = []
        self._often = array("I", bytes(4 << _BUCKET_BITS))
        self._places: array[int] | None = None

    def add(self, added: Sketch) -> int:
        for digest in added:
            self._often[digest >> (32 - _BUCKET_BITS)] += 1
        self._places = None
        self._sketches.append(added)
        return len(self._sketches) - 1

    def alike(self, asked: Sketch, among: Callable[[int], bool] = lambda _number: True) -> Iterator[int]:
        """Numbers of those that are near-duplicates of a sketch that says something."""
        for number in dict.fromkeys(self._candidates(asked)):
            if among(number) and likeness(asked, self._sketches[number]) >= ALIKE:
                yield number

    def _candidates(self, query_sketch: Sketch) -> Iterator[int]:
        if self._places is None:
            every = (
                digest << 32 | at
                for at, known_sketch in enumerate(self._sketches)
                for digest in self._rarest(known_sketch)
            )
            self._places = array("Q", sorted(every))
        for digest in self._rarest(query_sketch):
            at = bisect_left(self._places, digest << 32)
            while at < len(self._places) and self._places[at] >> 32 == digest:
                yield self._places[at] & 0xFFFFFFFF
                at += 1

    def _rarest(self, digests: Sketch) -> Sequence[int]:
        number = len(digests) - math.ceil(ALIKE * len(digests) - _ROUNDING) + 1 if digests else 0
        return sorted(digests, key=lambda digest: (self._often[digest >> (32 - _BUCKET_BITS)], digest))[:number]


def _smallest(hashes: set[int]) -> Sketch:
    return array("I", sorted(hashes)[:_SKETCH])


def _blurred(word: str) -> str:
    return "#" if any(character in "/\\" or character.isdigit() for character in word) else word


def _hash(first: str, second: str, again: int) -> int:
    mixed = (_hash_of_word(first) * _PRIME + _hash_of_word(second) + again * 0xD1B54A32D192ED03) & _MASK
    return ((mixed ^ mixed >> 29) * _PRIME & _MASK) >> 32


@lru_cache(maxsize=1 << 16)
def _hash_of_word(word: str) -> int:
    return int.from_bytes(blake2b(word.encode("utf-8", "replace"), digest_size=8).digest(), "big")
