"""Rows of `session_sources.jsonl`: which files each session came from, what they gave, and what was left out.

It is what makes a second ingest read only what is new. Names are scrubbed like any other text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, cast

from composer_replication.errors import ArtefactCorruptError, explain
from composer_replication.ingestion.reading.counts import COUNTED, IMAGES, UNPLACED, counts_of
from composer_replication.runs import RunDir
from composer_replication.runs.conversations import from_row

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
        counts.update(counts_of(from_row(row)))
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
