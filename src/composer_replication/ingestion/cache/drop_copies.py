"""Which of the gathered rows stay: no copies, no older copies, nothing forgotten, and no two equal ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

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
    taken: set[str] = set()
    for number, family in enumerate(gathered):
        if number in reasons:
            yield SettledFamily(_as_copy(family.source, reasons[number]))
            continue
        source, facts = family.source, [each for each in family.facts if not each.is_forgotten]
        num_lost, ids = len(family.facts) - len(facts), {each.id for each in facts}
        suffix = "@" + id_mark("path", source.path).partition(":")[2][:8] if ids & taken else ""
        taken |= {f"{each}{suffix}" for each in ids}
        if not num_lost and not suffix:
            yield SettledFamily(source, family.lines(), facts)
            continue
        kept = [row for row, each in zip(family.rows(), family.facts, strict=True) if not each.is_forgotten]
        source = with_rows(source, kept, left_out={FORGOTTEN: num_lost}) if num_lost else source
        lines = [encode_as_written(row, where="conversation") for row in with_suffix(kept, suffix=suffix)]
        yield SettledFamily(replace(source, id_suffix=suffix), lines, facts)


# Shorter ids of turns are numbers that many logs have.
_SHORTEST_NAME = 16
_Place = tuple[int, int]
"""The number of a family, and of a conversation in it."""


class _Along(NamedTuple):
    """A conversation that may be a copy: its marks turn by turn, and the turns themselves."""

    marks: list[str]
    turns: list[Row]

    def goes_on_from(self, other: _Along) -> bool:
        """Whether the other is its beginning; of a live log's last message only a part may have been there yet."""
        if not other.marks or len(self.marks) < len(other.marks) or self.marks[-1] == other.marks[-1]:
            return False
        if other.marks[-1] in self.marks:
            return True
        at = len(other.marks) - 1
        return at > 0 and self.marks[at - 1] == other.marks[at - 1] and _is_part(other.turns[at], self.turns[at])


def _is_part(turn: Row, whole: Row) -> bool:
    """Whether a message was not finished yet; another answer to the same question is another session."""
    return (
        turn["id"] == whole["id"]
        and whole["text"].startswith(turn["text"])
        and whole["thinking"].startswith(turn["thinking"])
        and whole["calls"][: len(turn["calls"])] == turn["calls"]
        and whole["results"][: len(turn["results"])] == turn["results"]
    )


def _copies(gathered: Sequence[GatheredFamily]) -> dict[int, str]:
    """Families, by number, all of whose conversations are in other families too, whole or gone on."""
    by_mark: dict[str, list[int]] = {}
    by_key: dict[str, list[_Place]] = {}
    for number, family in enumerate(gathered):
        for mark in {each.mark for each in family.facts}:
            by_mark.setdefault(mark, []).append(number)
        for index, each in enumerate(family.facts):
            for key in _keys(each):
                by_key.setdefault(key, []).append((number, index))
    shared = {key: places for key, places in by_key.items() if len({number for number, _ in places}) > 1}
    along = _along_shared(gathered, shared)
    reasons: dict[int, str] = {}
    for number, family in enumerate(gathered):
        reason = _why_copy(number, family, by_mark, shared, along, reasons)
        if reason is not None:
            reasons[number] = reason
    return reasons


def _keys(facts: RowFacts) -> Iterator[str]:
    """What a conversation has in common with its copies: its id, or the record it begins with under another name."""
    yield f"id {facts.id}"
    if len(facts.beginning) >= _SHORTEST_NAME:
        yield f"first {facts.beginning}"


def _along_shared(gathered: Sequence[GatheredFamily], shared: dict[str, list[_Place]]) -> dict[_Place, _Along]:
    """Every conversation that has a key in common with one of another family."""
    wanted: dict[int, set[int]] = {}
    for number, index in (place for places in shared.values() for place in places):
        wanted.setdefault(number, set()).add(index)
    return {
        (number, index): _Along(list(marks_along(row)), row["turns"])
        for number in sorted(wanted)
        for index, row in enumerate(gathered[number].rows())
        if index in wanted[number]
    }


def _why_copy(
    number: int,
    family: GatheredFamily,
    by_mark: dict[str, list[int]],
    shared: dict[str, list[_Place]],
    along: dict[_Place, _Along],
    gone: dict[int, str],
) -> str | None:
    if not family.facts:
        return None
    # Of two that are equal the later one is the copy, unless the later family went on where this one ended.
    went_on, waiting, verdicts = set[int](), list[set[int]](), set[str]()
    for index, facts in enumerate(family.facts):
        mark, places = facts.mark, {place for key in _keys(facts) for place in shared.get(key, ())}
        others = [place for place in places if place[0] != number and place[0] not in gone]
        longer = {place[0] for place in others if along[place].goes_on_from(along[number, index])}
        same = {place[0] for place in others if along[place].marks[-1:] == [mark]}
        # A greeting may well be said twice; a long conversation, word for word, is not.
        elsewhere = mark.startswith("begins:") and any(each < number and each not in gone for each in by_mark[mark])
        went_on |= longer
        if elsewhere or any(each < number for each in same):
            verdicts.add(COPY)
        elif longer:
            verdicts.add(OLDER)
        elif same:
            waiting.append(same)
        else:
            return None
    if not all(same & went_on for same in waiting):
        return None
    return OLDER if OLDER in verdicts else COPY


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
