"""Where a message of a Claude Code log stands: what is above it, found in few steps however long the log.

Any record may name any other as its parent, so a walk up the links may be as long as the log, for every record of it.
Each place remembers a far ancestor beside its parent, and how far up the records reach that are like it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from composer_replication.ingestion.formats.claude_code.record import Node

# Records of one message and results of its calls lie close together.
_NEAR = 256


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
        place = self
        if place.node.index <= index:
            return None
        while place.up is not None and place.up.node.index > index:
            far = place.far
            place = far if far is not None and far.node.index > index else place.up
        return place

    def is_below(self, other: Node) -> bool:
        """Whether `other` is this record or above it."""
        top = self.topmost_after(other.index - 1)
        return top is not None and top.node is other

    def near(self) -> Iterator[Place]:
        """This one and those above it, not very many."""
        return islice(self._upwards(), _NEAR)

    def _upwards(self) -> Iterator[Place]:
        place: Place | None = self
        while place is not None:
            yield place
            place = place.up


def place_of(node: Node, up: Place | None, owner: str) -> Place:
    place = Place.__new__(Place)
    place.node, place.up, place.owner = node, up, owner
    place.depth = 0 if up is None else up.depth + 1
    place.far = None if up is None else _far(up)
    place.same_owner = up.same_owner if up is not None and owner and up.owner == owner else place
    place.prompts = ((up.prompts if up is not None else None) or place) if node.begins_turn else None
    is_harness = node.kind == "assistant" and node.is_harness
    place.harness = ((up.harness if up is not None else None) or place) if is_harness else None
    return place


def _far(up: Place) -> Place:
    """As far above `up` as its own two last jumps together, where these are equally long; else `up` itself."""
    far = up.far
    if far is None or far.far is None or up.depth - far.depth != far.depth - far.far.depth:
        return up
    return far.far
