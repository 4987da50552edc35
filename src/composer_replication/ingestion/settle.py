"""Which of the gathered rows stay: no copies, no older copies, nothing forgotten, and no two equal ids."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace

from composer_replication.ingestion.content_marks import id_mark, is_forgotten, marks_along
from composer_replication.ingestion.gather import Gathered, GatheredFamily
from composer_replication.ingestion.session_sources import (
    COPY,
    FORGOTTEN,
    OLDER,
    Row,
    SessionSource,
    with_rows,
    with_suffix,
)


def settle(gathered: Gathered, forgotten: Set[str]) -> Iterator[tuple[SessionSource, list[Row]]]:
    """Each family's account and the rows that stay, in order."""
    reasons = _copies(gathered)
    taken: set[str] = set()
    for number, family in enumerate(gathered.families):
        reason = reasons.get(number)
        if reason is not None:
            yield _as_copy(family.source, reason), []
            continue
        found = gathered.rows_of(family)
        kept = [row for row in found if not is_forgotten(row, list(marks_along(row)), frozenset(forgotten))]
        num_lost = len(found) - len(kept)
        source = with_rows(family.source, kept, left_out={FORGOTTEN: num_lost} if num_lost else None)
        ids = {row["id"] for row in kept}
        suffix = "@" + id_mark("path", source.path).partition(":")[2][:8] if ids & taken else ""
        taken |= {f"{each}{suffix}" for each in ids}
        yield replace(source, id_suffix=suffix), with_suffix(kept, suffix=suffix)


def _copies(gathered: Gathered) -> dict[int, str]:
    """Families, by number, all of whose conversations are in other families too, whole or gone on."""
    by_mark: dict[str, list[int]] = {}
    by_id: dict[str, list[int]] = {}
    for number, family in enumerate(gathered.families):
        for mark in set(family.marks):
            by_mark.setdefault(mark, []).append(number)
        for identity in set(family.source.conversations):
            by_id.setdefault(identity, []).append(number)
    shared = {identity: numbers for identity, numbers in by_id.items() if len(numbers) > 1}
    along = _marks_of_shared(gathered, shared)
    reasons: dict[int, str] = {}
    for number, family in enumerate(gathered.families):
        reason = _why_copy(number, family, by_mark, shared, along, reasons)
        if reason is not None:
            reasons[number] = reason
    return reasons


def _marks_of_shared(gathered: Gathered, shared: dict[str, list[int]]) -> dict[tuple[int, str], list[str]]:
    """The marks along every conversation whose id more than one family has."""
    wanted = {number for numbers in shared.values() for number in numbers}
    return {
        (number, row["id"]): list(marks_along(row))
        for number in sorted(wanted)
        for row in gathered.rows_of(gathered.families[number])
        if row["id"] in shared
    }


def _why_copy(
    number: int,
    family: GatheredFamily,
    by_mark: dict[str, list[int]],
    shared: dict[str, list[int]],
    along: dict[tuple[int, str], list[str]],
    gone: dict[int, str],
) -> str | None:
    if not family.num_rows:
        return None
    verdicts = set[str]()
    for identity, mark in zip(family.source.conversations, family.marks, strict=True):
        others = [each for each in shared.get(identity, ()) if each != number and each not in gone]
        longer = [each for each in others if mark in along[each, identity][:-1]]
        same = [each for each in others if along[each, identity][-1:] == [mark] and each < number]
        # A greeting may well be said twice; a long conversation, word for word, is not.
        elsewhere = [
            each for each in by_mark[mark] if each < number and each not in gone and mark.startswith("begins:")
        ]
        if not (longer or same or elsewhere):
            return None
        verdicts.add(COPY if same or elsewhere else OLDER)
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
