"""Rows of `session_sources.jsonl`: the files of each session, what they contributed, and what was skipped.

The rows let a second ingest read only new and changed files. Names in them are scrubbed like any other text.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, BinaryIO, Literal, NamedTuple, cast

import orjson

from composer_replication.errors import ArtefactCorruptError, ArtefactNotFoundError, explain
from composer_replication.ingestion.scrubbing import ScrubFingerprint, ScrubSettings
from composer_replication.ingestion.source_files import COUNTED, IMAGES, UNPLACED, count_contents
from composer_replication.messages import ToolSchemas
from composer_replication.runs import ARTEFACTS, RunDir
from composer_replication.runs.artefacts import OLDEST_READABLE, check_sidecar, open_records
from composer_replication.runs.files import conversation_from_row

SCHEMA, VERSION = "session_source", 1
# Reasons for dropping a row, which sidecars of runs store.
FORGOTTEN = "forgotten session"
COPY = "copy of another session"
OLDER = "older copy of a session that went on"
Status = Literal["kept", "duplicate", "empty"]
Row = dict[str, Any]
# Counts that depend on the rows alone, and are recomputed when rows change.
_ROW_COUNTS = (*COUNTED, *UNPLACED, IMAGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSource:
    """The account of one session: a session log with the files of its subagents.

    `path` is the location of the main log relative to the run, and orders all artifacts; `name` is its location
    relative to the ingested folder. `files`, `sizes`, `mtimes_ns` and `inodes` have one entry per file; `file_of` maps
    conversations to their files. `id_suffix` was appended to the ids because another session has the same ids.
    """

    path: str
    name: str
    status: Status = "empty"
    format: str | None = None
    files: Sequence[str] = ()
    sizes: Sequence[int] = ()
    mtimes_ns: Sequence[int] = ()
    inodes: Sequence[int] = ()
    conversations: Sequence[str] = ()
    file_of: Sequence[str] = ()
    id_suffix: str = ""
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])
    skips: Sequence[Sequence[str | int]] = ()
    redactions: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def stamp(self) -> tuple[tuple[str, int, int], ...]:
        """The name, size and modification time of every file. Equal stamps mean that nothing has changed."""
        return tuple(zip(self.files, self.sizes, self.mtimes_ns, strict=True))

    def to_row(self) -> dict[str, object]:
        return asdict(self)

    @staticmethod
    def from_row(row: Mapping[str, Any]) -> SessionSource:
        try:
            return SessionSource(**{field.name: row[field.name] for field in fields(SessionSource)})
        except (KeyError, TypeError) as error:
            expected = f"the fields of {SCHEMA}, version {VERSION}"
            raise ArtefactCorruptError(
                explain("a row in session_sources.jsonl", got=error, expected=expected)
            ) from error


def replace_rows(
    source: SessionSource, rows: Sequence[Row], *, left_out: Mapping[str, int] | None = None
) -> SessionSource:
    """Return the account of a session, limited to these rows, whose ids have no suffix.

    Its conversations and the counts that depend on them are computed from the rows.
    """
    # Counts of files and of records without a message do not depend on the rows.
    counts: Counter[str] = Counter({key: number for key, number in source.counts.items() if key not in _ROW_COUNTS})
    for row in rows:
        counts.update(count_contents(conversation_from_row(row)))
    index = {identity: number for number, identity in enumerate(source.conversations)}
    positions = [index.get(row["id"]) for row in rows]
    return replace(
        source,
        status="kept" if rows else "empty",
        conversations=[row["id"] for row in rows],
        file_of=[source.file_of[at] if at is not None else "" for at in positions],
        counts=dict(sorted(counts.items())),
        skipped=dict(sorted((Counter(source.skipped) + Counter(left_out)).items())),
        redactions=source.redactions if rows else {},
    )


def replace_id_suffix(rows: Sequence[Row], *, suffix: str, remove: str = "") -> list[Row]:
    """Return rows with a different suffix on their ids, and on the ids in links within the session."""
    if suffix == remove:
        return list(rows)
    names = {row["id"]: row["id"].removesuffix(remove) + suffix for row in rows}

    def link(parent: Row | None) -> Row | None:
        return parent and {**parent, "conversation_id": names.get(parent["conversation_id"], parent["conversation_id"])}

    return [{**row, "id": names[row["id"]], "parent": link(row["parent"])} for row in rows]


def read_accounts(run: RunDir) -> list[SessionSource]:
    """Return the accounts from the last ingest, in order."""
    return [SessionSource.from_row(row) for row in run.read_jsonl("session_sources", schema=SCHEMA, version=VERSION)]


def write_accounts(run: RunDir, sources: Iterable[SessionSource], *, is_scrubbed: bool) -> None:
    """Write `session_sources.jsonl`, after `conversations.jsonl`.

    Its sidecar holds the hash of the conversations, which shows whether both files were written by the same ingest.
    """
    accounts = (source.to_row() for source in sources)
    settings = {"scrubbed": is_scrubbed}
    run.write_jsonl(
        "session_sources", accounts, schema=SCHEMA, version=VERSION, sources=["conversations"], settings=settings
    )


def add_totals(sources: Iterable[SessionSource], counts: Counter[str], drops: Counter[str]) -> None:
    """Add up the counts and skip reasons of all accounts for the sidecar of `conversations.jsonl`."""
    for source in sources:
        counts.update(source.counts)
        counts.update({f"redacted: {kind}": number for kind, number in source.redactions.items()})
        drops.update(source.skipped)


def first_locations(sources: Sequence[SessionSource]) -> dict[str, tuple[int, str]]:
    """Return how often something was skipped for each reason, and the first location, by reason."""
    first: dict[str, tuple[int, str]] = {}
    for source in sources:
        locations: dict[str, str] = {}
        for reason, file, line in source.skips:
            locations.setdefault(cast("str", reason), f"{file}:{line}" if line else str(file))
        for reason, number in source.skipped.items():
            before, location = first.get(reason, (0, locations.get(reason, source.name)))
            first[reason] = (before + number, location)
    return first


# The rows from the last ingest are reused if nothing has changed.

FORGOTTEN_SCHEMA, FORGOTTEN_VERSION = "forgotten", 1


@dataclass
class EarlierIngest:
    """The sessions from the last ingest, in order, and their rows; empty if there was no ingest.

    `reuse_error` says why an earlier ingest could not be reused. With `is_outdated`, the rows have an older schema
    version and can only be read again from their logs.
    """

    fingerprint: ScrubFingerprint
    same_settings: bool = True
    sources: list[SessionSource] = field(default_factory=list[SessionSource])
    forgotten: frozenset[str] = frozenset()
    reuse_error: str | None = None
    is_outdated: bool = False
    file: BinaryIO | None = None
    _offsets: list[int] = field(default_factory=list[int])
    _first_rows: dict[int, int] = field(default_factory=dict[int, int])
    """id() of a source -> number of its first row. Paths are no keys, since two sources may have the same path."""

    def read_rows(self, source: SessionSource) -> tuple[int, list[Row]]:
        """Return the offset in `file` at which a session's rows from the last ingest begin, and the rows themselves."""
        if not source.conversations or self.file is None:
            return 0, []
        offset = self._offsets[self._first_rows[id(source)]]
        self.file.seek(offset)
        rows = [orjson.loads(self.file.readline()) for _ in source.conversations]
        if [row["id"] for row in rows] != [f"{identity}{source.id_suffix}" for identity in source.conversations]:
            expected = f"the conversations of {source.path}"
            fix = "Ingest again with `--reread`."
            raise ArtefactCorruptError(
                explain("conversations.jsonl", got="the rows of different conversations", expected=expected, fix=fix)
            )
        return offset, rows

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def read_earlier_ingest(run: RunDir, scrub: ScrubSettings | None) -> EarlierIngest:
    """Return the last ingest of this run, if it is complete.

    A crash between two renames leaves files from different ingests. In that case no rows are reused and all logs are
    reread. Forgotten sessions stay forgotten, since their marks are in a separate file that no ingest writes.
    """
    forgotten = frozenset(_read_forgotten(run))
    try:
        return _read_earlier_ingest(run, scrub, forgotten)
    except ArtefactNotFoundError:
        return EarlierIngest(ScrubFingerprint.of(scrub), forgotten=forgotten)
    except ArtefactCorruptError as error:
        return EarlierIngest(
            ScrubFingerprint.of(scrub), same_settings=False, forgotten=forgotten, reuse_error=str(error)
        )


def _read_forgotten(run: RunDir) -> Iterator[str]:
    """Yield the marks of forgotten conversations."""
    if run.path("forgotten").exists():
        rows = run.read_jsonl("forgotten", schema=FORGOTTEN_SCHEMA, version=FORGOTTEN_VERSION)
        yield from (str(row["mark"]) for row in rows)


def write_forgotten(run: RunDir, marks: set[str]) -> None:
    """Add marks to those already stored."""
    all_marks = {*_read_forgotten(run), *marks}
    rows = ({"mark": mark} for mark in sorted(all_marks))
    run.write_jsonl("forgotten", rows, schema=FORGOTTEN_SCHEMA, version=FORGOTTEN_VERSION)


def _read_earlier_ingest(run: RunDir, scrub: ScrubSettings | None, forgotten: frozenset[str]) -> EarlierIngest:
    """Return the last ingest. Raises an exception if one of its files is missing or does not match the others."""
    meta, file = open_records(run.root, ARTEFACTS["conversations"])
    with contextlib.ExitStack() as on_error:
        on_error.callback(file.close)
        account, sources = run.meta("session_sources"), read_accounts(run)
        check_sidecar(file, meta, ARTEFACTS["conversations"], verify=True)
        if account.sources[0].sha256 != meta.sha256:
            raise ArtefactCorruptError(
                "session_sources.jsonl does not match conversations.jsonl: an ingest crashed while writing them"
            )
        offsets = [0, *accumulate(len(line) for line in file)]
        on_error.pop_all()  # the file stays open; the caller closes it
    salt, digest = meta.settings.get("settings_salt"), meta.settings.get("settings_digest")
    fingerprint = ScrubFingerprint.of(scrub, salt=salt if isinstance(salt, str) else None)
    starts = accumulate((len(source.conversations) for source in sources), initial=0)
    first_rows = {id(source): start for source, start in zip(sources, starts, strict=False)}
    is_outdated = meta.version < OLDEST_READABLE[meta.schema]
    same = fingerprint.digest == digest and not is_outdated
    return EarlierIngest(fingerprint, same, sources, forgotten, None, is_outdated, file, offsets, first_rows)


# Facts and marks: what is kept in memory for every row during deduplication.
#
# Turns are hashed in a chain, so the marks of a continued conversation include the mark of the shorter version. Marks
# are computed from scrubbed content, since a short password could be guessed from its hash.

MarkRow = Mapping[str, Any]
_NUM_HEX_DIGITS = 32
# Many conversations begin with the same greeting and answer: a prefix of at most this many bytes identifies nothing.
_MIN_BEGINNING_BYTES = 400
_SORT_KEYS = orjson.OPT_SORT_KEYS


class RowFacts(NamedTuple):
    """The facts about a row that must be available without reading it again; the id has no suffix.

    `mark` identifies the whole conversation, and `mark_before_last` all turns except the last (empty if there is only
    one turn). `beginning` and `last_turn` are the ids of the first and last turn in the log.
    """

    id: str
    mark: str
    num_turns: int
    beginning: str
    mark_before_last: str
    last_turn: str
    is_forgotten: bool
    tools: ToolSchemas


def extract_facts(row: MarkRow, forgotten: frozenset[str]) -> RowFacts:
    """Return the facts about a row."""
    marks = list(prefix_marks(row))
    turns, whole = row["turns"], marks[-1] if marks else "whole:"
    tools = ToolSchemas()
    tools.add_row(row)
    return RowFacts(
        id=row["id"],
        mark=whole,
        num_turns=len(turns),
        beginning=turns[0]["id"] if turns else "",
        mark_before_last=marks[-2] if len(marks) > 1 else "",
        last_turn=turns[-1]["id"] if turns else "",
        is_forgotten=_belongs_to_forgotten(row, marks, forgotten),
        tools=tools,
    )


def prefix_marks(row: MarkRow) -> Iterator[str]:
    """Yield a mark (a hash) for every turn, which identifies the conversation up to and including this turn."""
    digest, length = hashlib.sha256(), 0
    for turn in row["turns"]:
        content = _encode_content(turn)
        digest.update(content)
        length += len(content)
        kind = "begins" if length >= _MIN_BEGINNING_BYTES else "whole"
        yield f"{kind}:{digest.hexdigest()[:_NUM_HEX_DIGITS]}"


def _content_mark(row: MarkRow) -> str:
    """Return the mark that identifies the whole conversation by a hash of its content."""
    return deque(prefix_marks(row), maxlen=1)[0] if row["turns"] else "whole:"


def _has_forgotten_mark(marks: Sequence[str], forgotten: frozenset[str] | set[str]) -> bool:
    """Return whether a conversation with these marks equals or continues a forgotten conversation."""
    if not marks or not forgotten:
        return False
    return marks[-1] in forgotten or any(mark in forgotten for mark in marks if mark.startswith("begins:"))


def id_mark(kind: str, identity: str) -> str:
    """Return the mark of an id, which is a hash. `kind` is "session", "conversation" or "path"."""
    return f"{kind}:{hashlib.sha256(identity.encode('utf-8', 'surrogatepass')).hexdigest()[:_NUM_HEX_DIGITS]}"


def forgotten_marks(dead: Iterable[MarkRow], living: Iterable[MarkRow]) -> set[str]:
    """Return marks that identify forgotten rows in any future log.

    An id is marked only if it comes from the log, since generated ids are just a file name and a number. The id of a
    session is marked only if none of its conversations stays.
    """
    dead = list(dead)
    alive = {row["session_id"] for row in living}
    marks = {_content_mark(row) for row in dead}
    for row in dead:
        session = row["session_id"]
        if session is not None:
            marks.add(id_mark("conversation", row["id"]))
            if session not in alive:
                marks.add(id_mark("session", session))
    return marks


def _belongs_to_forgotten(row: MarkRow, marks: Sequence[str], forgotten: frozenset[str] | set[str]) -> bool:
    """Return whether a row belongs to a forgotten conversation or session."""
    if not forgotten:
        return False
    session = row["session_id"]
    # If the log has no session id, ids are derived from the file name, which another log may have.
    if session is None:
        return _has_forgotten_mark(marks, forgotten)
    if {id_mark("conversation", row["id"]), id_mark("session", session)} & forgotten:
        return True
    # Another session may contain the same few words; a session that repeats a long prefix is a copy.
    return _has_forgotten_mark([mark for mark in marks if mark.startswith("begins:")], forgotten)


def _encode_content(turn: MarkRow) -> bytes:
    # Neither ids nor timestamps, which may differ between copies of a session.
    calls = [[call["name"], call["arguments"], call["raw_arguments"]] for call in turn["calls"]]
    results = [[result["text"], result["is_error"]] for result in turn["results"]]
    return orjson.dumps([turn["role"], turn["text"], turn["thinking"], calls, results], option=_SORT_KEYS)
