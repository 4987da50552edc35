"""Sessions into a run directory: what is new is read, the rest taken over, and the bytes are those of a fresh run."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from composer_replication.canonical_json import encode_as_written
from composer_replication.errors import InputError, RunError, explain
from composer_replication.ingestion import states as tool_schemas
from composer_replication.ingestion.gather import (
    GatheredFamily,
    IngestPlan,
    Planned,
    gather,
    plan,
)
from composer_replication.ingestion.registry import no_session
from composer_replication.ingestion.scrubbing import ScrubSettings
from composer_replication.ingestion.session_sources import (
    COPY,
    FORGOTTEN,
    OLDER,
    Earlier,
    Row,
    RowFacts,
    SessionSource,
    add_totals,
    first_places,
    id_mark,
    marks_along,
    read_earlier,
    with_rows,
    with_suffix,
    write_accounts,
)
from composer_replication.ingestion.source import IMAGES, UNPLACED, IngestReport
from composer_replication.messages import ToolSchemas
from composer_replication.privacy.scrubber import NAME_KIND
from composer_replication.runs import RunDir
from composer_replication.runs import files as rows
from composer_replication.runs.artefacts import EncodedRow

if TYPE_CHECKING:
    from composer_replication.ingestion.gather import GatheredFamily


Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


def ingest_into(
    run: RunDir,
    paths: Iterable[str | Path],
    *,
    scrub: ScrubSettings | None,
    exclude: Sequence[str] = (),
    num_workers: int | None = 1,
    tools: Mapping[str, Mapping[str, Any]] | None = None,
    reread: bool = False,
    follow_links: bool = False,
    progress: Progress | None = None,
) -> IngestSummary:
    """Write `conversations.jsonl`, `session_sources.jsonl` and `tools.jsonl` of all sessions below `paths`.

    Sessions of earlier calls stay, also those whose files are gone by now; what is excluded or forgotten does not.
    `scrub=None` leaves secrets in, and the sidecars say so. `num_workers=None` is as many processes as pay off.
    On an error the run is left as it was.
    """
    with run.exclusive("ingest"):
        run.remove_leftovers("conversations", "session_sources", "tools")
        earlier = read_earlier(run, scrub)
        try:
            planned = plan(
                run.root,
                _roots(paths),
                earlier,
                scrub=scrub,
                exclude=exclude,
                reread=reread,
                follow_links=follow_links,
            )
            _refuse_what_cannot_be_read_anew(run, planned, earlier)
            with gather(run.root, planned.families, earlier, scrub, num_workers, progress) as gathered:
                _refuse_empty(planned, gathered)
                return _write(run, planned, gathered, earlier, scrub, tools or {})
        finally:
            earlier.close()


def _write(
    run: RunDir,
    planned: IngestPlan,
    gathered: Sequence[GatheredFamily],
    earlier: Earlier,
    scrub: ScrubSettings | None,
    tools: Mapping[str, Mapping[str, Any]],
) -> IngestSummary:
    sources, inferred = list[SessionSource](), ToolSchemas()
    counts, drops = Counter[str](), Counter(planned.outside.skipped)

    def all_lines() -> Iterator[EncodedRow]:
        for family in settle(gathered):
            sources.append(family.source)
            for line, facts in zip(family.lines, family.facts, strict=True):
                inferred.add(facts.tools)
                yield EncodedRow(line, rows.KEYS)
        add_totals(sources, counts, drops)

    settings = {"scrubbed": scrub is not None}
    salted = {f"settings_{name}": getattr(earlier.fingerprint, name) for name in ("salt", "digest")}
    run.write_jsonl(
        "conversations",
        all_lines(),
        schema=rows.CONVERSATIONS_SCHEMA,
        version=rows.CONVERSATIONS_VERSION,
        counts=counts,
        drops=drops,
        settings=settings | salted,
    )
    write_accounts(run, sources, is_scrubbed=scrub is not None)
    given_tools = tools if scrub is None else scrub.scrubber().scope().value(dict(tools))
    tool_schemas.write_tools(run, inferred, given_tools, is_scrubbed=scrub is not None)
    return IngestSummary.of(sources, planned, gathered, lost=earlier.lost, is_scrubbed=scrub is not None)


def _roots(paths: Iterable[str | Path]) -> list[Path]:
    """An empty string is an unset variable, not the folder one happens to be in."""
    paths = list(paths)
    if any(str(path) == "" for path in paths):
        raise InputError(explain("path", got="an empty string", expected="a file or a folder with session logs"))
    return [Path(path) for path in paths]


def _refuse_what_cannot_be_read_anew(run: RunDir, planned: IngestPlan, earlier: Earlier) -> None:
    """Rows of an older version are read anew from their logs, all of which have to be among those named now."""
    if not earlier.is_old:
        return
    missing = [
        planned_family.source.path
        for planned_family in planned.families
        if planned_family.family is None or _has_lost_files(planned_family)
    ]
    if missing:
        got = (
            f"a run made before arguments kept their order, with {len(missing)} sessions whose logs are not among"
            " those that were named this time"
        )
        expected = f"the logs of all its sessions, to read them anew; the first that is missing: {missing[0]}"
        fix = "Name them too. If they are gone, ingest the others into a new run: `crf ingest PATH... -o NEW_RUN`"
        raise RunError(explain(str(run.root), got=got, expected=expected, fix=fix))


def _has_lost_files(planned: Planned) -> bool:
    return planned.old is not None and bool(planned.gone.intersection(planned.old.file_of))


def _refuse_empty(planned: IngestPlan, gathered: Sequence[GatheredFamily]) -> None:
    """A path that holds no session at all is an error, also beside others that do."""
    held = {family.source.path: family for family in gathered}
    for root, paths in planned.of_root.items():
        below = [held[path] for path in paths]
        if root in planned.all_ignored or any(family.facts or FORGOTTEN in family.source.skipped for family in below):
            continue
        reasons = Counter[str](planned.outside.skipped)
        for family in below:
            reasons.update(family.source.skipped)
        raise no_session(root, reasons)


# Which of the gathered rows stay: no copies, no older copies, nothing forgotten, and no two equal ids.


class _SettledFamily(NamedTuple):
    """A family as it goes into the run."""

    source: SessionSource
    lines: Sequence[bytes] = ()
    facts: Sequence[RowFacts] = ()


def settle(gathered: Sequence[GatheredFamily]) -> Iterator[_SettledFamily]:
    """Each family's account and the lines that stay, in order; only those that change are written anew."""
    reasons = _copies(gathered)
    taken_ids: set[str] = set()
    for number, family in enumerate(gathered):
        if number in reasons:
            yield _SettledFamily(_as_copy(family.source, reasons[number]))
            continue
        source, facts = family.source, [row_facts for row_facts in family.facts if not row_facts.is_forgotten]
        num_lost, ids = len(family.facts) - len(facts), {row_facts.id for row_facts in facts}
        suffix = "@" + id_mark("path", source.path).partition(":")[2][:8] if ids & taken_ids else ""
        taken_ids |= {f"{identity}{suffix}" for identity in ids}
        if not num_lost and not suffix:
            yield _SettledFamily(source, family.lines(), facts)
            continue
        kept_rows = [
            row for row, row_facts in zip(family.rows(), family.facts, strict=True) if not row_facts.is_forgotten
        ]
        source = with_rows(source, kept_rows, left_out={FORGOTTEN: num_lost}) if num_lost else source
        lines = [encode_as_written(row, where="conversation") for row in with_suffix(kept_rows, suffix=suffix)]
        yield _SettledFamily(replace(source, id_suffix=suffix), lines, facts)


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


# What an ingest did, for a table or for a machine: numbers, kinds and places, never a value.

_BESIDE = ("queued messages", "attachments ", IMAGES)
_COLUMNS = ("sessions", "conversations", "turns", "calls", "results", "errors")


@dataclass(frozen=True, slots=True)
class _FormatCounts:
    """One row of the table."""

    format: str
    files: int
    sessions: int
    conversations: int
    turns: int
    calls: int
    results: int
    errors: int
    secrets: int
    names: int  # home directories and user names, which are no secrets


@dataclass(frozen=True, slots=True)
class Left:
    """Something that was left out: why, how often, and where first."""

    reason: str
    number: int
    first: str


@dataclass(frozen=True, slots=True)
class _Unplaced:
    """Calls or results of one format that have no counterpart: what, and how many."""

    format: str
    what: str
    number: int


@dataclass(frozen=True, slots=True)
class IngestSummary:
    """The run as it is after an ingest; `num_read` files were read, `num_reused` taken over as they were.

    `beside` counts what logs hold beside messages: queued messages, attachments, images.
    """

    formats: tuple[_FormatCounts, ...]
    total: _FormatCounts
    redactions: Mapping[str, int]
    skipped: tuple[Left, ...]
    unplaced: tuple[_Unplaced, ...]
    beside: Mapping[str, int]
    num_read: int
    num_reused: int
    is_scrubbed: bool
    remarks: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    @staticmethod
    def of(
        sources: Sequence[SessionSource],
        planned: IngestPlan,
        gathered: Sequence[GatheredFamily],
        *,
        lost: str | None,
        is_scrubbed: bool,
    ) -> IngestSummary:
        by_format: dict[str, list[SessionSource]] = {}
        for source in sources:
            if source.format is not None and source.status == "kept":
                by_format.setdefault(source.format, []).append(source)
        formats = [_counts(name, by_format[name]) for name in sorted(by_format)]
        redactions: Counter[str] = Counter()
        for source in sources:
            redactions.update(source.redactions)
        first_skips = first_places([*sources, _account_of(planned.outside)])
        num_read = sum(len(family.source.sizes) for family in gathered if family.was_read)
        return IngestSummary(
            formats=tuple(formats),
            total=_counts("all", [source for group in by_format.values() for source in group]),
            redactions=dict(redactions.most_common()),
            skipped=tuple(Left(reason, *first_skips[reason]) for reason in sorted(first_skips)),
            unplaced=tuple(_unplaced(by_format)),
            beside=_beside([source for group in by_format.values() for source in group]),
            num_read=num_read,
            num_reused=sum(len(family.source.sizes) for family in gathered) - num_read,
            is_scrubbed=is_scrubbed,
            remarks=tuple(_remarks(planned, lost)),
        )


def _unplaced(by_format: Mapping[str, Sequence[SessionSource]]) -> Iterator[_Unplaced]:
    for name in sorted(by_format):
        for what in UNPLACED:
            number = sum(source.counts.get(what, 0) for source in by_format[name])
            if number:
                yield _Unplaced(name, what, number)


def _beside(sources: Sequence[SessionSource]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for source in sources:
        total.update({key: number for key, number in source.counts.items() if key.startswith(_BESIDE)})
    return {key: number for key, number in sorted(total.items()) if number}


def _remarks(planned: IngestPlan, lost: str | None) -> Iterator[str]:
    if lost is not None:
        yield f"the earlier ingest could not be taken over, so everything was read again: {lost}"
    for pattern in planned.unused_patterns:
        yield f"--exclude {pattern!r} matched no file; patterns are tried on paths below the folder that was named"


def _counts(name: str, sources: Sequence[SessionSource]) -> _FormatCounts:
    total, redactions = Counter[str](), Counter[str]()
    for source in sources:
        total.update(source.counts)
        redactions.update(source.redactions)
    return _FormatCounts(
        format=name,
        files=sum(len(source.sizes) for source in sources),
        secrets=redactions.total() - redactions[NAME_KIND],
        names=redactions[NAME_KIND],
        **{column: total[column] for column in _COLUMNS},
    )


def _account_of(report: IngestReport) -> SessionSource:
    skips = [(skip.reason, skip.file, skip.line) for skip in report.skips]
    return SessionSource(path="", name="", skipped=dict(report.skipped), skips=skips)
