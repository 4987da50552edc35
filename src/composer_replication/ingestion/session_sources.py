"""Rows of `session_sources.jsonl`: which files each session came from, what they gave, and what was left out.

It is what makes a second ingest read only what is new. Names are scrubbed like any other text.
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
from composer_replication.ingestion.source import (
    COUNTED,
    IMAGES,
    UNPLACED,
    counts_of,
)
from composer_replication.messages import ToolSchemas
from composer_replication.runs import ARTEFACTS, RunDir
from composer_replication.runs.artefacts import OLDEST_READ, check_pair, open_records
from composer_replication.runs.files import conversation_from_row

SCHEMA, VERSION = "session_source", 1
FORGOTTEN = "forgotten session"
COPY = "copy of another session"
OLDER = "older copy of a session that went on"
Status = Literal["kept", "duplicate", "empty"]
Row = dict[str, Any]
_OF_ROWS = (*COUNTED, *UNPLACED, IMAGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSource:
    """One family of files.

    `path` is where its main log is, as the run sees it, and the order of all artefacts; `name` is the same from the
    folder that was asked for. The lists about files go together; `file_of` is the file that each conversation came
    from. `id_suffix` stands behind the ids because another family has the same.
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
        """What says that nothing has changed."""
        return tuple(zip(self.files, self.sizes, self.mtimes_ns, strict=True))

    def to_row(self) -> dict[str, object]:
        return asdict(self)

    @staticmethod
    def from_row(row: Mapping[str, Any]) -> SessionSource:
        try:
            return SessionSource(**{field.name: row[field.name] for field in fields(SessionSource)})
        except (KeyError, TypeError) as error:
            expected = f"the fields of {SCHEMA} {VERSION}"
            raise ArtefactCorruptError(explain("row of session_sources", got=error, expected=expected)) from error


def with_rows(
    source: SessionSource, kept: Sequence[Row], *, left_out: Mapping[str, int] | None = None
) -> SessionSource:
    """The account of a family of which the rows `kept`, their ids without suffix, are what there is."""
    counts: Counter[str] = Counter({key: number for key, number in source.counts.items() if key not in _OF_ROWS})
    for row in kept:
        counts.update(counts_of(conversation_from_row(row)))
    index = {identity: number for number, identity in enumerate(source.conversations)}
    positions = [index.get(row["id"]) for row in kept]
    return replace(
        source,
        status="kept" if kept else "empty",
        conversations=[row["id"] for row in kept],
        file_of=[source.file_of[at] if at is not None else "" for at in positions],
        counts=dict(sorted(counts.items())),
        skipped=dict(sorted((Counter(source.skipped) + Counter(left_out)).items())),
        redactions=source.redactions if kept else {},
    )


def with_suffix(rows: Sequence[Row], *, suffix: str, remove: str = "") -> list[Row]:
    """Rows with another suffix behind their ids, and behind those that their links name within the family."""
    if suffix == remove:
        return list(rows)
    names = {row["id"]: row["id"].removesuffix(remove) + suffix for row in rows}

    def link(parent: Row | None) -> Row | None:
        return parent and {**parent, "conversation_id": names.get(parent["conversation_id"], parent["conversation_id"])}

    return [{**row, "id": names[row["id"]], "parent": link(row["parent"])} for row in rows]


def read_accounts(run: RunDir) -> list[SessionSource]:
    """The accounts of the last ingest, in order."""
    return [SessionSource.from_row(row) for row in run.read_jsonl("session_sources", schema=SCHEMA, version=VERSION)]


def write_accounts(run: RunDir, sources: Iterable[SessionSource], *, is_scrubbed: bool) -> None:
    """After `conversations.jsonl`: its hash tells whether the accounts are those of its rows."""
    accounts = (source.to_row() for source in sources)
    settings = {"scrubbed": is_scrubbed}
    run.write_jsonl(
        "session_sources", accounts, schema=SCHEMA, version=VERSION, sources=["conversations"], settings=settings
    )


def add_totals(sources: Iterable[SessionSource], counts: Counter[str], drops: Counter[str]) -> None:
    """Add up what the sidecar of `conversations.jsonl` says."""
    for source in sources:
        counts.update(source.counts)
        counts.update({f"redacted: {kind}": number for kind, number in source.redactions.items()})
        drops.update(source.skipped)


def first_places(sources: Sequence[SessionSource]) -> dict[str, tuple[int, str]]:
    """Reason -> how often something was left out for it, and where first."""
    first: dict[str, tuple[int, str]] = {}
    for source in sources:
        locations: dict[str, str] = {}
        for reason, file, line in source.skips:
            locations.setdefault(cast("str", reason), f"{file}:{line}" if line else str(file))
        for reason, number in source.skipped.items():
            before, location = first.get(reason, (0, locations.get(reason, source.name)))
            first[reason] = (before + number, location)
    return first


# What an earlier ingest left in the run: its rows can be taken over where nothing has changed.

FORGOTTEN_SCHEMA, FORGOTTEN_VERSION = "forgotten", 1


@dataclass
class Earlier:
    """The families of the last ingest, in order, and their rows; nothing where there was none.

    `lost` says why an earlier ingest could not be taken over, if there was one. Rows of one that `is_old` can only be
    read anew.
    """

    fingerprint: ScrubFingerprint
    same_settings: bool = True
    sources: list[SessionSource] = field(default_factory=list[SessionSource])
    forgotten: frozenset[str] = frozenset()
    lost: str | None = None
    is_old: bool = False
    file: BinaryIO | None = None
    _offsets: list[int] = field(default_factory=list[int])
    _first_rows: dict[int, int] = field(default_factory=dict[int, int])  # by identity: paths may be equal

    def take(self, source: SessionSource) -> tuple[int, list[Row]]:
        """Where in `file` the rows of one of `sources` begin, and the rows as they were written."""
        if not source.conversations or self.file is None:
            return 0, []
        offset = self._offsets[self._first_rows[id(source)]]
        self.file.seek(offset)
        rows = [orjson.loads(self.file.readline()) for _ in source.conversations]
        if [row["id"] for row in rows] != [f"{identity}{source.id_suffix}" for identity in source.conversations]:
            expected = f"the conversations of {source.path}"
            fix = "Ingest with --reread"
            raise ArtefactCorruptError(explain("conversations.jsonl", got="other rows", expected=expected, fix=fix))
        return offset, rows

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def read_earlier(run: RunDir, scrub: ScrubSettings | None) -> Earlier:
    """The earlier ingest of this run, if there was a complete one.

    A crash between two renames leaves files that do not belong together. Then nothing is taken over and everything is
    read again; what must stay forgotten is in a file of its own, which an ingest never writes.
    """
    forgotten = frozenset(_read_forgotten(run))
    try:
        return _complete(run, scrub, forgotten)
    except ArtefactNotFoundError:
        return Earlier(ScrubFingerprint.of(scrub), forgotten=forgotten)
    except ArtefactCorruptError as error:
        return Earlier(ScrubFingerprint.of(scrub), same_settings=False, forgotten=forgotten, lost=str(error))


def _read_forgotten(run: RunDir) -> Iterator[str]:
    """The marks of what must not come back."""
    if run.path("forgotten").exists():
        rows = run.read_jsonl("forgotten", schema=FORGOTTEN_SCHEMA, version=FORGOTTEN_VERSION)
        yield from (str(row["mark"]) for row in rows)


def write_forgotten(run: RunDir, marks: set[str]) -> None:
    """Add marks to those that are there."""
    all_marks = {*_read_forgotten(run), *marks}
    rows = ({"mark": mark} for mark in sorted(all_marks))
    run.write_jsonl("forgotten", rows, schema=FORGOTTEN_SCHEMA, version=FORGOTTEN_VERSION)


def _complete(run: RunDir, scrub: ScrubSettings | None, forgotten: frozenset[str]) -> Earlier:
    meta, file = open_records(run.root, ARTEFACTS["conversations"])
    with contextlib.ExitStack() as on_the_way_out:
        on_the_way_out.callback(file.close)
        account, sources = run.meta("session_sources"), read_accounts(run)
        check_pair(file, meta, ARTEFACTS["conversations"], verify=True)
        if account.sources[0].sha256 != meta.sha256:
            raise ArtefactCorruptError("session_sources.jsonl is about other conversations: a crash came between them")
        offsets = [0, *accumulate(len(line) for line in file)]
        on_the_way_out.pop_all()  # all is well, and the caller closes it
    salt, digest = meta.settings.get("settings_salt"), meta.settings.get("settings_digest")
    fingerprint = ScrubFingerprint.of(scrub, salt=salt if isinstance(salt, str) else None)
    starts = accumulate((len(source.conversations) for source in sources), initial=0)
    first_rows = {id(source): start for source, start in zip(sources, starts, strict=False)}
    is_old = meta.version < OLDEST_READ[meta.schema]
    same = fingerprint.digest == digest and not is_old
    return Earlier(fingerprint, same, sources, forgotten, None, is_old, file, offsets, first_rows)


# What is kept of a row while it is decided which rows stay: hashes by which its content is known again, and its tools.
#
# The turns are hashed in a chain, so that a conversation that goes on has the mark of the shorter one among its own.
# Marks are made of scrubbed content: a hash of what was scrubbed away would let a short password be guessed.

MarkRow = Mapping[str, Any]
_SIZE = 32
# A greeting and its answer begin many conversations: so short a one is known only as a whole.
_SHORTEST_BEGINNING = 400
_OPTIONS = orjson.OPT_SORT_KEYS


class RowFacts(NamedTuple):
    """So much of a row that it need not be read back: its id without suffix, the mark of the whole, and the rest.

    `beginning` and `last_turn` are the ids of its first and last turn, where a log gave them one; `mark_before_last` is
    the mark of all turns but the last, empty where there is no other.
    """

    id: str
    mark: str
    num_turns: int
    beginning: str
    mark_before_last: str
    last_turn: str
    is_forgotten: bool
    tools: ToolSchemas


def facts_of(row: MarkRow, forgotten: frozenset[str]) -> RowFacts:
    marks = list(marks_along(row))
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
        is_forgotten=is_forgotten(row, marks, forgotten),
        tools=tools,
    )


def marks_along(row: MarkRow) -> Iterator[str]:
    """One mark per turn: of the conversation up to there."""
    digest, length = hashlib.sha256(), 0
    for turn in row["turns"]:
        content = _content(turn)
        digest.update(content)
        length += len(content)
        kind = "begins" if length >= _SHORTEST_BEGINNING else "whole"
        yield f"{kind}:{digest.hexdigest()[:_SIZE]}"


def mark_of(row: MarkRow) -> str:
    """The mark of the whole conversation."""
    return deque(marks_along(row), maxlen=1)[0] if row["turns"] else "whole:"


def is_marked(marks: Sequence[str], known: frozenset[str] | set[str]) -> bool:
    """Whether a conversation with these marks is one that is known, or goes on from one."""
    if not marks or not known:
        return False
    return marks[-1] in known or any(mark in known for mark in marks if mark.startswith("begins:"))


def id_mark(kind: str, identity: str) -> str:
    """A mark of an id: of a `session`, or of a `conversation`."""
    return f"{kind}:{hashlib.sha256(identity.encode('utf-8', 'surrogatepass')).hexdigest()[:_SIZE]}"


def forgotten_marks(dead: Iterable[MarkRow], living: Iterable[MarkRow]) -> set[str]:
    """What tells rows that are forgotten from all others, wherever they turn up again.

    Ids count only where the log gave them: many are nothing but a file's name and a number. The id of a session counts
    only when the whole of it goes.
    """
    dead = list(dead)
    alive = {row["session_id"] for row in living}
    marks = {mark_of(row) for row in dead}
    for row in dead:
        session = row["session_id"]
        if session is not None:
            marks.add(id_mark("conversation", row["id"]))
            if session not in alive:
                marks.add(id_mark("session", session))
    return marks


def is_forgotten(row: MarkRow, marks: Sequence[str], known: frozenset[str] | set[str]) -> bool:
    """Whether a row must not come back."""
    if not known:
        return False
    session = row["session_id"]
    if session is None:
        return is_marked(marks, known)
    if {id_mark("conversation", row["id"]), id_mark("session", session)} & known:
        return True
    # Another session may well say the same few words; one that repeats many has copied them.
    return is_marked([mark for mark in marks if mark.startswith("begins:")], known)


def _content(turn: MarkRow) -> bytes:
    calls = [[call["name"], call["arguments"], call["raw_arguments"]] for call in turn["calls"]]
    results = [[result["text"], result["is_error"]] for result in turn["results"]]
    return orjson.dumps([turn["role"], turn["text"], turn["thinking"], calls, results], option=_OPTIONS)
