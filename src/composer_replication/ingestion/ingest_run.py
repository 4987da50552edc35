"""Ingest sessions into a run directory, reading only new files. The output is byte-identical to that of a fresh ingest.

A session is a main log with the logs of its subagents. The steps: `read_sessions.plan_ingest` decides which sessions
are read, `read_sessions.gather_sessions` writes the rows of all sessions to a temporary file, and `_drop_duplicates`
decides which rows go into `conversations.jsonl`.
"""

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
from composer_replication.ingestion.read_sessions import (
    GatheredSession,
    IngestPlan,
    PlannedSession,
    gather_sessions,
    plan_ingest,
)
from composer_replication.ingestion.registry import no_session_error
from composer_replication.ingestion.scrubbing import ScrubSettings
from composer_replication.ingestion.session_sources import (
    COPY,
    FORGOTTEN,
    OLDER,
    EarlierIngest,
    Row,
    RowFacts,
    SessionSource,
    add_totals,
    first_locations,
    id_mark,
    prefix_marks,
    read_earlier_ingest,
    replace_id_suffix,
    replace_rows,
    write_accounts,
)
from composer_replication.ingestion.source_files import IMAGES, UNPLACED, IngestReport
from composer_replication.ingestion.states import write_tools
from composer_replication.messages import ToolSchemas
from composer_replication.privacy.scrubber import NAME_KIND
from composer_replication.runs import RunDir
from composer_replication.runs.artefacts import EncodedRow
from composer_replication.runs.files import CONVERSATIONS_SCHEMA, CONVERSATIONS_VERSION, KEYS

if TYPE_CHECKING:
    from composer_replication.ingestion.read_sessions import GatheredSession


Progress = Callable[[int, int], None]
"""Called with the number of bytes processed and the total number of bytes."""


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
    """Write `conversations.jsonl`, `session_sources.jsonl` and `tools.jsonl` from all sessions below `paths`.

    Sessions from earlier ingests stay even if their files no longer exist; excluded and forgotten sessions are removed.
    With `scrub=None` secrets are not redacted, and the sidecars say so. `num_workers=None` chooses the number of
    processes. If an error occurs, the run is not changed.
    """
    with run.exclusive("ingest"):
        # A crashed ingest leaves temporary files.
        run.remove_leftovers("conversations", "session_sources", "tools")
        earlier = read_earlier_ingest(run, scrub)
        try:
            planned = plan_ingest(
                run.root,
                _distinct_roots(paths),
                earlier,
                scrub=scrub,
                exclude=exclude,
                reread=reread,
                follow_links=follow_links,
            )
            _check_logs_of_old_rows(run, planned, earlier)
            with gather_sessions(run.root, planned.sessions, earlier, scrub, num_workers, progress) as gathered:
                _check_paths_hold_sessions(planned, gathered)
                return _write(run, planned, gathered, earlier, scrub, tools or {})
        finally:
            earlier.close()


def _write(
    run: RunDir,
    planned: IngestPlan,
    gathered: Sequence[GatheredSession],
    earlier: EarlierIngest,
    scrub: ScrubSettings | None,
    tools: Mapping[str, Mapping[str, Any]],
) -> IngestSummary:
    """Write the three artifacts, starting with the conversations, and return the summary."""
    sources, inferred = list[SessionSource](), ToolSchemas()
    counts, drops = Counter[str](), Counter(planned.discovery.skipped)

    def all_lines() -> Iterator[EncodedRow]:
        # Collected while the rows are written, since all rows together may not fit into memory.
        for session in _drop_duplicates(gathered):
            sources.append(session.source)
            for line, facts in zip(session.lines, session.facts, strict=True):
                inferred.add(facts.tools)
                yield EncodedRow(line, KEYS)
        add_totals(sources, counts, drops)

    settings = {"scrubbed": scrub is not None}
    # Tells the next ingest whether rules and secret values are unchanged, without revealing the values.
    salted = {f"settings_{name}": getattr(earlier.fingerprint, name) for name in ("salt", "digest")}
    run.write_jsonl(
        "conversations",
        all_lines(),
        schema=CONVERSATIONS_SCHEMA,
        version=CONVERSATIONS_VERSION,
        counts=counts,
        drops=drops,
        settings=settings | salted,
    )
    write_accounts(run, sources, is_scrubbed=scrub is not None)
    # Descriptions and examples in the user's schemas may contain secrets, too.
    given_tools = tools if scrub is None else scrub.scrubber().scope().value(dict(tools))
    write_tools(run, inferred, given_tools, is_scrubbed=scrub is not None)
    is_scrubbed = scrub is not None
    return IngestSummary.of(sources, planned, gathered, reuse_error=earlier.reuse_error, is_scrubbed=is_scrubbed)


def _distinct_roots(paths: Iterable[str | Path]) -> list[Path]:
    """Return the paths as `Path` objects.

    Raises InputError for an empty path, which usually comes from an unset variable.
    """
    paths = list(paths)
    if any(str(path) == "" for path in paths):
        raise InputError(
            explain("path", got="an empty string", expected="the path of a log or of a folder with session logs")
        )
    return [Path(path) for path in paths]


def _check_logs_of_old_rows(run: RunDir, planned: IngestPlan, earlier: EarlierIngest) -> None:
    """Raise RunError if rows with an outdated schema have to be read again, but some of their logs no longer exist."""
    if not earlier.is_outdated:
        return
    missing = [
        planned_session.source.path
        for planned_session in planned.sessions
        if planned_session.session is None or _has_lost_files(planned_session)
    ]
    if missing:
        got = f"rows in an outdated format, and {len(missing)} sessions without their logs"
        expected = f"the logs of all sessions, including {missing[0]}, to read them again"
        fix = "Add the paths of the logs. If they no longer exist, start a new run: `crf ingest PATH... -o NEW_RUN`"
        raise RunError(explain(str(run.root), got=got, expected=expected, fix=fix))


def _has_lost_files(planned: PlannedSession) -> bool:
    return planned.old is not None and bool(planned.deleted_files.intersection(planned.old.file_of))


def _check_paths_hold_sessions(planned: IngestPlan, gathered: Sequence[GatheredSession]) -> None:
    """Raise InputError if any of the paths contains no session."""
    by_path = {session.source.path: session for session in gathered}
    for root, paths in planned.paths_of_root.items():
        below = [by_path[path] for path in paths]
        if root in planned.all_ignored or any(
            session.facts or FORGOTTEN in session.source.skipped for session in below
        ):
            continue
        # The error lists why the files below the path are not sessions.
        reasons = Counter[str](planned.discovery.skipped)
        for session in below:
            reasons.update(session.source.skipped)
        raise no_session_error(root, reasons)


# Duplicates: the same session is often in several logs, since resuming a session copies its messages into a new file.
# Copies, older versions and forgotten conversations are dropped, and no two rows share an id.


class _FinalSession(NamedTuple):
    """A session in the form in which it is written to the run."""

    source: SessionSource
    lines: Sequence[bytes] = ()
    facts: Sequence[RowFacts] = ()


def _drop_duplicates(gathered: Sequence[GatheredSession]) -> Iterator[_FinalSession]:
    """Yield every session in the form in which it is written to the run.

    Copies have no rows. The other sessions have no forgotten conversations, and a suffix on their ids if they were
    already in use. Only changed rows are encoded again.
    """
    reasons = _find_copies(gathered)
    used_ids: set[str] = set()
    for number, session in enumerate(gathered):
        if number in reasons:
            yield _FinalSession(_make_copy_account(session.source, reasons[number]))
            continue
        source, facts = session.source, [row_facts for row_facts in session.facts if not row_facts.is_forgotten]
        num_forgotten, ids = len(session.facts) - len(facts), {row_facts.id for row_facts in facts}
        # Derived from the path, so that every ingest computes the same suffix.
        suffix = "@" + id_mark("path", source.path).partition(":")[2][:8] if ids & used_ids else ""
        used_ids |= {f"{identity}{suffix}" for identity in ids}
        if not num_forgotten and not suffix:
            yield _FinalSession(source, session.lines(), facts)
            continue
        kept_rows = [
            row for row, row_facts in zip(session.rows(), session.facts, strict=True) if not row_facts.is_forgotten
        ]
        source = replace_rows(source, kept_rows, left_out={FORGOTTEN: num_forgotten}) if num_forgotten else source
        lines = [encode_as_written(row, where="conversation") for row in replace_id_suffix(kept_rows, suffix=suffix)]
        yield _FinalSession(replace(source, id_suffix=suffix), lines, facts)


# Shorter turn ids are plain numbers, which many logs share.
_MIN_ID_LENGTH = 16


def _find_copies(gathered: Sequence[GatheredSession]) -> dict[int, str]:
    """Return the reason why each copied session is a copy, by the number of the session.

    A session is a copy if other sessions contain all its conversations, unchanged or continued. If two sessions are
    equal, the later one is the copy, unless it continues a conversation from the earlier one.

    Sessions are looked up in indexes, so the cost grows with the size of the logs rather than with the number of pairs.
    """
    other_sessions = _SharedConversations(gathered)
    earlier_marks: set[str] = set()
    reasons: dict[int, str] = {}
    for number, session in enumerate(gathered):
        other_sessions.remove(number)
        reason = _why_copy(session, other_sessions, earlier_marks)
        if reason is None:
            other_sessions.restore(number, session)
            earlier_marks.update(facts.mark for facts in session.facts)
        else:
            reasons[number] = reason
    return reasons


def _why_copy(session: GatheredSession, other_sessions: _SharedConversations, earlier_marks: set[str]) -> str | None:
    """Return why a session is a copy, or None if at least one of its conversations is in no other session.

    `earlier_marks` has the marks of all conversations in earlier sessions that stay.
    """
    verdicts, equal_only = set[str](), list[RowFacts]()
    for facts in session.facts:
        # Two sessions may begin with the same greeting, but they do not repeat a long conversation verbatim.
        is_repeated = facts.mark.startswith("begins:") and facts.mark in earlier_marks
        if is_repeated or other_sessions.has_earlier_equal(facts):
            verdicts.add(COPY)
        elif any(other_sessions.with_continuation(facts)):
            verdicts.add(OLDER)
        elif any(other_sessions.with_equal(facts)):
            equal_only.append(facts)
        else:
            return None
    # Only later sessions contain these conversations unchanged. This session is the copy only if such a session also
    # continues one of its other conversations.
    if equal_only:
        continued = [
            numbers for facts in session.facts for numbers in other_sessions.with_continuation(facts) if numbers
        ]
        for facts in equal_only:
            if not any(
                not equal.isdisjoint(numbers) for equal in other_sessions.with_equal(facts) for numbers in continued
            ):
                return None
    return (OLDER if OLDER in verdicts else COPY) if session.facts else None


def _keys(facts: RowFacts) -> Iterator[str]:
    """Yield the keys that a conversation shares with its copies.

    The keys are its id and the id of its first turn, since a resumed session repeats turns under a new session id.
    """
    if not facts.num_turns:
        return
    yield f"id {facts.id}"
    if len(facts.beginning) >= _MIN_ID_LENGTH:
        yield f"first {facts.beginning}"


class _SharedConversations:
    """An index of sessions, for finding those that contain or continue a given conversation.

    Only conversations that share a key with a conversation from another session are indexed.
    """

    def __init__(self, gathered: Sequence[GatheredSession]) -> None:
        self._shared = _shared_keys(gathered)
        self._ends: dict[tuple[str, str], set[int]] = {}
        self._continued: dict[tuple[str, str], set[int]] = {}
        self._versions: dict[tuple[str, str, str], _TurnVersions] = {}
        self._sets_of: dict[int, list[set[int]]] = {}
        self._earlier_ends: set[tuple[str, str]] = set()
        for session in gathered:
            for facts in session.facts:
                for key in self._keys(facts):
                    self._ends[key, facts.mark] = set()
                    self._continued[key, facts.mark] = set()
                    if facts.num_turns > 1:  # a half-written first message is no evidence
                        self._versions[key, facts.mark_before_last, facts.last_turn] = _TurnVersions()
        # All prefixes that rows have to be looked up by are known only at this point.
        for number, session in enumerate(gathered):
            self._add(number, session)

    def remove(self, number: int) -> None:
        """Remove a session from the indexes, so that lookups return only other sessions."""
        for numbers in self._sets_of.get(number, ()):
            numbers.discard(number)

    def restore(self, number: int, session: GatheredSession) -> None:
        """Put a session back into the indexes, as an earlier session for all sessions after it."""
        for numbers in self._sets_of.get(number, ()):
            numbers.add(number)
        self._earlier_ends.update((key, facts.mark) for facts in session.facts for key in self._keys(facts))

    def has_earlier_equal(self, facts: RowFacts) -> bool:
        """Return whether an earlier session that stays has an identical conversation."""
        return any((key, facts.mark) in self._earlier_ends for key in self._keys(facts))

    def with_equal(self, facts: RowFacts) -> Iterator[set[int]]:
        """Yield sets of sessions with an identical conversation; some may be empty."""
        for key in self._keys(facts):
            yield self._ends[key, facts.mark]

    def with_continuation(self, facts: RowFacts) -> Iterator[set[int]]:
        """Yield sets of sessions with a longer conversation that starts with this one; some may be empty.

        The last message may be longer, too: a log that was copied while it was being written ends in a partial message.
        """
        for key in self._keys(facts):
            yield self._continued[key, facts.mark]
            if facts.num_turns > 1:
                yield from self._versions[key, facts.mark_before_last, facts.last_turn].longer_than(facts.mark)

    def _keys(self, facts: RowFacts) -> list[str]:
        return [key for key in _keys(facts) if key in self._shared]

    def _add(self, number: int, session: GatheredSession) -> None:
        """Add a session to the sets for all prefixes of its conversations."""
        keys_of = [self._keys(facts) for facts in session.facts]
        for keys, line in zip(keys_of, session.lines() if any(keys_of) else (), strict=False):
            if not keys:
                continue
            row: Row = orjson.loads(line)
            marks = list(prefix_marks(row))
            for key in keys:
                sets = [self._ends[key, marks[-1]]]
                sets += [self._continued[key, mark] for mark in marks[:-1] if (key, mark) in self._continued]
                for before, mark, turn in zip(marks, marks[1:], row["turns"][1:], strict=False):
                    if versions := self._versions.get((key, before, turn["id"])):
                        sets.append(versions.sessions(mark, turn))
                for numbers in sets:
                    numbers.add(number)
                self._sets_of.setdefault(number, []).extend(sets)


def _shared_keys(gathered: Sequence[GatheredSession]) -> set[str]:
    """Return the keys shared by conversations from at least two sessions."""
    first_session: dict[str, int] = {}
    return {
        key
        for number, session in enumerate(gathered)
        for facts in session.facts
        for key in _keys(facts)
        if first_session.setdefault(key, number) != number
    }


class _TurnVersions:
    """The versions of one turn that sessions have after the same earlier turns.

    They are indexed by the mark (a hash) of the conversation up to the turn.
    """

    def __init__(self) -> None:
        self._turn_parts: dict[str, tuple[str, ...]] = {}
        self._sessions: dict[str, set[int]] = {}
        self._orders: list[list[tuple[str, str]]] = []

    def sessions(self, mark: str, turn: Row) -> set[int]:
        """Return the set of sessions with this version of the turn; the caller adds to the set."""
        if mark not in self._turn_parts:
            self._turn_parts[mark], self._sessions[mark] = _turn_parts(turn), set()
        return self._sessions[mark]

    def longer_than(self, mark: str) -> Iterator[set[int]]:
        """Yield the set of sessions for each longer version of the turn that contains this version."""
        parts = self._turn_parts[mark]
        if len(self._turn_parts) == 1:
            return
        if not self._orders:
            self._orders = [
                sorted((texts[at], name) for name, texts in self._turn_parts.items()) for at in range(len(parts))
            ]
        # In sorted order, all versions of a part that start with it are neighbors. Only the shortest range is compared.
        ranges = [_beginning_with(part, order) for part, order in zip(parts, self._orders, strict=True)]
        first, last, order = min(
            ((*ends, order) for ends, order in zip(ranges, self._orders, strict=True)),
            key=lambda candidate: candidate[1] - candidate[0],
        )
        for _, other_mark in reversed(order[first:last]):  # the longest first: shorter ones may have been dropped
            if other_mark != mark and all(map(str.startswith, self._turn_parts[other_mark], parts)):
                yield self._sessions[other_mark]


def _turn_parts(turn: Row) -> tuple[str, ...]:
    """Return the text, thinking, calls and results of a turn as four texts.

    While the turn is being written, each of them only grows at its end.
    """
    calls, results = (
        b"".join(orjson.dumps(part, option=orjson.OPT_SORT_KEYS) + b"\n" for part in turn[name]).decode()
        for name in ("calls", "results")
    )
    return turn["text"], turn["thinking"], calls, results


def _beginning_with(text: str, order: list[tuple[str, str]]) -> tuple[int, int]:
    """Return the range of entries in a sorted list that start with a prefix."""
    first = bisect_left(order, text, key=lambda entry: entry[0])
    return first, bisect_right(order, text, lo=first, key=lambda entry: entry[0][: len(text)])


def _make_copy_account(source: SessionSource, reason: str) -> SessionSource:
    """Return the `session_sources.jsonl` row of a session that is skipped as a copy."""
    # The files were read; all other counts belong to the session that stays.
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


# The summary that `crf ingest` prints: counts, kinds and locations, but no values from the logs.

# Key prefixes of the counts in `IngestSummary.beside`.
_BESIDE = ("queued messages", "attachments ", IMAGES)
_COLUMNS = ("sessions", "conversations", "turns", "calls", "results", "errors")


@dataclass(frozen=True, slots=True)
class _FormatCounts:
    """One row of the summary table."""

    format: str
    files: int
    sessions: int
    conversations: int
    turns: int
    calls: int
    results: int
    errors: int
    secrets: int
    names: int  # home directories and user names, which are not secrets


@dataclass(frozen=True, slots=True)
class _SkipSummary:
    """A reason why something was skipped, how often it occurred, and its first location."""

    reason: str
    number: int
    first: str


@dataclass(frozen=True, slots=True)
class _Unplaced:
    """Calls or results in one format that have no counterpart: their kind and their number."""

    format: str
    what: str
    number: int


@dataclass(frozen=True, slots=True)
class IngestSummary:
    """The state of a run after an ingest, with the number of files read and of unchanged files reused.

    `beside` counts log content other than messages: queued messages, attachments and images.
    """

    formats: tuple[_FormatCounts, ...]
    total: _FormatCounts
    redactions: Mapping[str, int]
    skipped: tuple[_SkipSummary, ...]
    unplaced: tuple[_Unplaced, ...]
    beside: Mapping[str, int]
    num_read: int
    num_reused: int
    is_scrubbed: bool
    remarks: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as plain JSON data."""
        return asdict(self)

    @staticmethod
    def of(
        sources: Sequence[SessionSource],
        planned: IngestPlan,
        gathered: Sequence[GatheredSession],
        *,
        reuse_error: str | None,
        is_scrubbed: bool,
    ) -> IngestSummary:
        """Return the summary of an ingest. `reuse_error` says why rows from the last ingest could not be reused."""
        by_format: dict[str, list[SessionSource]] = {}
        for source in sources:
            if source.format is not None and source.status == "kept":
                by_format.setdefault(source.format, []).append(source)
        formats = [_counts(name, by_format[name]) for name in sorted(by_format)]
        redactions: Counter[str] = Counter()
        for source in sources:
            redactions.update(source.redactions)
        first_skips = first_locations([*sources, _make_account(planned.discovery)])
        num_read = sum(len(session.source.sizes) for session in gathered if session.was_read)
        return IngestSummary(
            formats=tuple(formats),
            total=_counts("all", [source for group in by_format.values() for source in group]),
            redactions=dict(redactions.most_common()),
            skipped=tuple(_SkipSummary(reason, *first_skips[reason]) for reason in sorted(first_skips)),
            unplaced=tuple(_sum_unplaced(by_format)),
            beside=_sum_extra_counts([source for group in by_format.values() for source in group]),
            num_read=num_read,
            num_reused=sum(len(session.source.sizes) for session in gathered) - num_read,
            is_scrubbed=is_scrubbed,
            remarks=tuple(_make_remarks(planned, reuse_error)),
        )


def _sum_unplaced(by_format: Mapping[str, Sequence[SessionSource]]) -> Iterator[_Unplaced]:
    for name in sorted(by_format):
        for what in UNPLACED:
            number = sum(source.counts.get(what, 0) for source in by_format[name])
            if number:
                yield _Unplaced(name, what, number)


def _sum_extra_counts(sources: Sequence[SessionSource]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for source in sources:
        total.update({key: number for key, number in source.counts.items() if key.startswith(_BESIDE)})
    return {key: number for key, number in sorted(total.items()) if number}


def _make_remarks(planned: IngestPlan, reuse_error: str | None) -> Iterator[str]:
    if reuse_error is not None:
        yield f"the earlier ingest could not be reused, so everything was read again: {reuse_error}"
    for pattern in planned.unused_patterns:
        yield f"--exclude {pattern!r} matched no file; patterns apply to paths relative to PATH"


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


def _make_account(report: IngestReport) -> SessionSource:
    skips = [(skip.reason, skip.file, skip.line) for skip in report.skips]
    return SessionSource(path="", name="", skipped=dict(report.skipped), skips=skips)
