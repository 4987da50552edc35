"""Extract the target runs of a tree batch as bytes, each with the context that attention gives it.

A row's context is computed from the attention rule of the batch (`enter`, `leave`), not from how the tree was built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

CHANNELS = ("good turn", "student", "teacher", "chosen", "rejected")


class Run(NamedTuple):
    """A run of target tokens and the context that its first token is predicted from, as marked bytes."""

    channel: str
    context: bytes
    target: bytes
    tokens: tuple[int, ...]


class BatchRuns:
    """The runs of one batch by channel; those of sites and pairs are tuples of two."""

    def __init__(self, batch: Any, bytes_of: Sequence[bytes]) -> None:
        self._batch, self._bytes_of = batch, bytes_of
        tree = batch.tree
        self._ids, self._enter, self._leave = (each.numpy() for each in (tree.input_ids, tree.enter, tree.leave))
        self._positions = tree.position_ids.numpy()
        pieces = [bytes_of[each] for each in self._ids.tolist()]
        self._text = b"".join(pieces)
        self._offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])])

    def good_turns(self) -> list[Run]:
        rows, targets = self._batch.response
        return [self._run("good turn", *stretch) for stretch in self._stretches(rows.numpy(), targets.numpy())]

    def sites(self) -> list[tuple[Run, Run]]:
        """The runs of each site: the student's and the teacher's."""
        batch = self._batch
        student, teacher = batch.student_rows.numpy(), batch.teacher_rows.numpy()
        if not student.size:
            return []
        numbers = batch.site_position.numpy()
        starts = [*np.flatnonzero(numbers == 0).tolist(), student.size]
        targets = batch.target_tokens.numpy()
        found = [(slice(a, b), targets[a:b]) for a, b in pairwise(starts)]
        return [
            (self._run("student", student[part], own), self._run("teacher", teacher[part], own)) for part, own in found
        ]

    def pairs(self) -> list[tuple[Run, Run]]:
        """The runs of each pair: chosen and rejected."""
        pairs = self._batch.pairs
        if pairs is None:
            return []
        rows, targets, owner = (each.numpy() for each in (pairs.rows, pairs.targets, pairs.response))
        sides = [(rows[owner == side], targets[owner == side]) for side in range(2 * pairs.num_pairs)]
        chosen, rejected = sides[: pairs.num_pairs], sides[pairs.num_pairs :]
        return [
            (self._run("chosen", *one), self._run("rejected", *other))
            for one, other in zip(chosen, rejected, strict=True)
        ]

    def _stretches(self, rows: Any, targets: Any) -> Iterator[tuple[Any, Any]]:
        """Yield stretches of consecutive rows with consecutive target tokens."""
        if not rows.size:
            return
        before, after = rows[:-1], rows[1:]
        follows = self._positions[after] == self._positions[before] + 1
        follows &= (self._enter[before] <= self._enter[after]) & (self._enter[after] < self._leave[before])
        follows &= self._ids[after] == targets[:-1]
        edges = [0, *(np.flatnonzero(~follows) + 1).tolist(), rows.size]
        for start, end in pairwise(edges):
            yield rows[start:end], targets[start:end]

    def _run(self, channel: str, rows: Any, targets: Any) -> Run:
        """Return a run. Every row must continue the one before it, because a token is predicted from the token before
        it.
        """
        for earlier, later, token in zip(rows, rows[1:], targets, strict=False):
            if self._ids[later] != token or self._positions[later] != self._positions[earlier] + 1:
                channel = f"{channel} (broken)"
                break
        tokens = tuple(targets.tolist())
        return Run(channel, self._seen_by(int(rows[0])), b"".join(self._bytes_of[each] for each in tokens), tokens)

    def _seen_by(self, row: int) -> bytes:
        """Return the bytes that a row attends to, including its own."""
        enter = self._enter[row]
        seen = np.flatnonzero((self._enter[: row + 1] <= enter) & (enter < self._leave[: row + 1]))
        breaks = np.flatnonzero(np.diff(seen) != 1)
        firsts, lasts = seen[np.concatenate([[0], breaks + 1])], seen[np.concatenate([breaks, [seen.size - 1]])]
        return b"".join(
            self._text[self._offsets[first] : self._offsets[last + 1]]
            for first, last in zip(firsts, lasts, strict=True)
        )
