"""Which of the gathered rows stay: no copies, no older copies, nothing forgotten, and no two equal ids."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import orjson

from composer_replication.canonical_json import encode_as_written
from composer_replication.ingestion.cache.content_marks import RowFacts, id_mark, marks_along
from composer_replication.ingestion.cache.session_sources import (
    COPY,
    FORGOTTEN,
    OLDER,
    Row,
    SessionSource,
    with_rows,
    with_suffix,
)

if TYPE_CHECKING:
    from composer_replication.ingestion.cache.gather import GatheredFamily


class SettledFamily(NamedTuple):
    """A family as it goes into the run."""

    source: SessionSource
    lines: Sequence[bytes] = ()
    facts: Sequence[RowFacts] = ()


def settle(gathered: Sequence[GatheredFamily]) -> Iterator[SettledFamily]:
    """Each family's account and the lines that stay, in order; only those that change are written anew."""
    reasons = _copies(gathered)
    taken_ids: set[str] = set()
    for number, family in enumerate(gathered):
        if number in reasons:
            yield SettledFamily(_as_copy(family.source, reasons[number]))
            continue
        source, facts = family.source, [row_facts for row_facts in family.facts if not row_facts.is_forgotten]
        num_lost, ids = len(family.facts) - len(facts), {row_facts.id for row_facts in facts}
        suffix = "@" + id_mark("path", source.path).partition(":")[2][:8] if ids & taken_ids else ""
        taken_ids |= {f"{identity}{suffix}" for identity in ids}
        if not num_lost and not suffix:
            yield SettledFamily(source, family.lines(), facts)
            continue
        kept_rows = [
            row for row, row_facts in zip(family.rows(), family.facts, strict=True) if not row_facts.is_forgotten
        ]
        source = with_rows(source, kept_rows, left_out={FORGOTTEN: num_lost}) if num_lost else source
        lines = [encode_as_written(row, where="conversation") for row in with_suffix(kept_rows, suffix=suffix)]
        yield SettledFamily(replace(source, id_suffix=suffix), lines, facts)


# Shorter ids of turns are numbers that many logs have.
_SHORTEST_NAME = 16


def _copies(gathered: Sequence[GatheredFamily]) -> dict[int, str]:
    """Return, by number of the family, why it is a copy: all its conversations are in other families, whole or longer.

    Of two equal families the later one is the copy, unless the later one holds the continuation of the other's end.
    Each family is looked up in indexes of the others, so the work grows with the logs and not with the pairs of them.
    """
    other_families = _SharedConversations(gathered)
    earlier_marks: set[str] = set()
    reasons: dict[int, str] = {}
    for number, family in enumerate(gathered):
        other_families.remove(number)
        reason = _why_copy(family, other_families, earlier_marks)
        if reason is None:
            other_families.restore(number, family)
            earlier_marks.update(facts.mark for facts in family.facts)
        else:
            reasons[number] = reason
    return reasons


def _why_copy(family: GatheredFamily, other_families: _SharedConversations, earlier_marks: set[str]) -> str | None:
    """Return the reason, or None for a family with a conversation of its own; `earlier_marks` are those before it."""
    verdicts, equal_only = set[str](), list[RowFacts]()
    for facts in family.facts:
        # A greeting may well be said twice; a long conversation, word for word, is not.
        is_repeated = facts.mark.startswith("begins:") and facts.mark in earlier_marks
        if is_repeated or other_families.has_earlier_equal(facts):
            verdicts.add(COPY)
        elif any(other_families.with_continuation(facts)):
            verdicts.add(OLDER)
        elif any(other_families.with_equal(facts)):
            equal_only.append(facts)
        else:
            return None
    if equal_only:
        continued = [
            numbers for facts in family.facts for numbers in other_families.with_continuation(facts) if numbers
        ]
        for facts in equal_only:
            if not any(
                not equal.isdisjoint(numbers) for equal in other_families.with_equal(facts) for numbers in continued
            ):
                return None
    return (OLDER if OLDER in verdicts else COPY) if family.facts else None


def _keys(facts: RowFacts) -> Iterator[str]:
    """Yield what a conversation has in common with its copies: its id, or its first record under another name."""
    if not facts.num_turns:
        return
    yield f"id {facts.id}"
    if len(facts.beginning) >= _SHORTEST_NAME:
        yield f"first {facts.beginning}"


class _SharedConversations:
    """Families by the beginnings of those conversations that share a key with a conversation of another family.

    Only beginnings at which some conversation ends are indexed: no others are asked for.
    """

    def __init__(self, gathered: Sequence[GatheredFamily]) -> None:
        self._shared = _shared_keys(gathered)
        self._ends: dict[tuple[str, str], set[int]] = {}
        self._continued: dict[tuple[str, str], set[int]] = {}
        self._versions: dict[tuple[str, str, str], _TurnVersions] = {}
        self._sets_of: dict[int, list[set[int]]] = {}
        self._earlier_ends: set[tuple[str, str]] = set()
        for family in gathered:
            for facts in family.facts:
                for key in self._keys(facts):
                    self._ends[key, facts.mark] = set()
                    self._continued[key, facts.mark] = set()
                    if facts.num_turns > 1:  # a half-written first message says too little
                        self._versions[key, facts.mark_before_last, facts.last_turn] = _TurnVersions()
        for number, family in enumerate(gathered):
            self._add(number, family)

    def remove(self, number: int) -> None:
        """Take a family out of the indexes: those that are left are the others."""
        for numbers in self._sets_of.get(number, ()):
            numbers.discard(number)

    def restore(self, number: int, family: GatheredFamily) -> None:
        """Add a family that stays again; it is an earlier one for all that follow."""
        for numbers in self._sets_of.get(number, ()):
            numbers.add(number)
        self._earlier_ends.update((key, facts.mark) for facts in family.facts for key in self._keys(facts))

    def has_earlier_equal(self, facts: RowFacts) -> bool:
        """Return whether an earlier family that stays has the same conversation."""
        return any((key, facts.mark) in self._earlier_ends for key in self._keys(facts))

    def with_equal(self, facts: RowFacts) -> Iterator[set[int]]:
        """Yield sets of families that have the same conversation; some may be empty."""
        for key in self._keys(facts):
            yield self._ends[key, facts.mark]

    def with_continuation(self, facts: RowFacts) -> Iterator[set[int]]:
        """Yield sets of families with a longer conversation that begins with this one; some may be empty.

        The last message of a live log may have been only half written.
        """
        for key in self._keys(facts):
            yield self._continued[key, facts.mark]
            if facts.num_turns > 1:
                yield from self._versions[key, facts.mark_before_last, facts.last_turn].longer_than(facts.mark)

    def _keys(self, facts: RowFacts) -> list[str]:
        return [key for key in _keys(facts) if key in self._shared]

    def _add(self, number: int, family: GatheredFamily) -> None:
        keys_of = [self._keys(facts) for facts in family.facts]
        for keys, line in zip(keys_of, family.lines() if any(keys_of) else (), strict=False):
            if not keys:
                continue
            row: Row = orjson.loads(line)
            marks = list(marks_along(row))
            for key in keys:
                sets = [self._ends[key, marks[-1]]]
                sets += [self._continued[key, mark] for mark in marks[:-1] if (key, mark) in self._continued]
                for before, mark, turn in zip(marks, marks[1:], row["turns"][1:], strict=False):
                    if versions := self._versions.get((key, before, turn["id"])):
                        sets.append(versions.families(mark, turn))
                for numbers in sets:
                    numbers.add(number)
                self._sets_of.setdefault(number, []).extend(sets)


def _shared_keys(gathered: Sequence[GatheredFamily]) -> set[str]:
    """Return the keys that conversations of two families or more have."""
    first_family: dict[str, int] = {}
    return {
        key
        for number, family in enumerate(gathered)
        for facts in family.facts
        for key in _keys(facts)
        if first_family.setdefault(key, number) != number
    }


class _TurnVersions:
    """What different families have as the turn of one id after one beginning, by the mark of its content."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[str, ...]] = {}
        self._families: dict[str, set[int]] = {}
        self._orders: list[list[tuple[str, str]]] = []

    def families(self, mark: str, turn: Row) -> set[int]:
        """Return the set of the families that have the turn with this content."""
        if mark not in self._parts:
            self._parts[mark], self._families[mark] = _parts(turn), set()
        return self._families[mark]

    def longer_than(self, mark: str) -> Iterator[set[int]]:
        """Yield the families of every version that this one is a part of."""
        mine = self._parts[mark]
        if len(self._parts) == 1:
            return
        if not self._orders:
            self._orders = [sorted((parts[at], name) for name, parts in self._parts.items()) for at in range(len(mine))]
        # Of each part, the versions that begin with this one's lie next to each other: the fewest are compared.
        ranges = [_beginning_with(part, order) for part, order in zip(mine, self._orders, strict=True)]
        first, last, order = min(
            ((*ends, order) for ends, order in zip(ranges, self._orders, strict=True)),
            key=lambda candidate: candidate[1] - candidate[0],
        )
        for _, other_mark in reversed(order[first:last]):  # the longest first: shorter ones may have been dropped
            if other_mark != mark and all(map(str.startswith, self._parts[other_mark], mine)):
                yield self._families[other_mark]


def _parts(turn: Row) -> tuple[str, ...]:
    """Return four texts of a turn, each of which only grows at its end while the turn is written."""
    calls, results = (
        b"".join(orjson.dumps(part, option=orjson.OPT_SORT_KEYS) + b"\n" for part in turn[name]).decode()
        for name in ("calls", "results")
    )
    return turn["text"], turn["thinking"], calls, results


def _beginning_with(text: str, order: list[tuple[str, str]]) -> tuple[int, int]:
    """Return where, in a sorted list, those that begin with a text begin and end."""
    first = bisect_left(order, text, key=lambda entry: entry[0])
    return first, bisect_right(order, text, lo=first, key=lambda entry: entry[0][: len(text)])


def _as_copy(source: SessionSource, reason: str) -> SessionSource:
    counts = {key: number for key, number in source.counts.items() if key.startswith("files")}
    return replace(
        source,
        status="duplicate",
        conversations=(),
        file_of=(),
        counts=counts,
        redactions={},
        skipped={reason: 1},
        skips=[(reason, source.name, 0)],
    )
