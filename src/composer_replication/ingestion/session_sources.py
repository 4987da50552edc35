"""Rows of `session_sources.jsonl`: which files each session came from, what they gave, and what was left out.

It is what makes a second ingest read only what is new, and what `crf forget` keeps so that a session stays forgotten.
Names are scrubbed like any other text.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, cast

from composer_replication.errors import ArtefactCorruptError, explain
from composer_replication.runs import RunDir

SCHEMA, VERSION = "session_source", 1
FORGOTTEN = "forgotten session"
Status = Literal["kept", "forgotten", "duplicate", "empty"]
Row = dict[str, Any]
_COUNTED = ("conversations", "sessions", "turns", "assistant turns", "calls", "results", "errors")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSource:
    """One family of files.

    `path` is where its main log is, as the run sees it, and the order of all artefacts; `name` is the same from the
    folder that was asked for. `id_suffix` stands behind its ids because another family has the same ones. `forgotten`
    holds hashes of ids that must not come back.
    """

    path: str
    name: str
    status: Status = "empty"
    format: str | None = None
    sizes: Sequence[int] = ()
    mtimes_ns: Sequence[int] = ()
    sha256: str = ""
    conversations: Sequence[str] = ()
    id_suffix: str = ""
    forgotten: Sequence[str] = ()
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])
    skips: Sequence[Sequence[str | int]] = ()
    redactions: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def stamp(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self.sizes, self.mtimes_ns, strict=True))

    def to_row(self) -> dict[str, object]:
        return asdict(self)

    @staticmethod
    def from_row(row: Mapping[str, Any]) -> SessionSource:
        try:
            return SessionSource(**{each.name: row[each.name] for each in fields(SessionSource)})
        except (KeyError, TypeError) as error:
            expected = f"the fields of {SCHEMA} {VERSION}"
            raise ArtefactCorruptError(explain("row of session_sources", got=error, expected=expected)) from error


def id_hash(identity: str) -> str:
    """What is kept of the id of a forgotten session."""
    return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def tombstones(source: SessionSource, dead: Sequence[Row], *, whole: bool) -> set[str]:
    """Hashes by which rows of a family are known again: by id in the same place, by session id and as a copy anywhere.

    Many ids are nothing but a file's name, so they count only where they were.
    """
    marks = {_in_place(source, row["id"].removesuffix(source.id_suffix)) for row in dead}
    marks |= {id_hash(row["session_id"]) for row in dead if row["session_id"]}
    return marks | ({id_hash(source.sha256)} if whole and source.sha256 else set())


def is_forgotten(source: SessionSource, row: Row, marks: Set[str]) -> bool:
    """Whether a row, its ids without a suffix, is among those that must not come back."""
    if not marks:
        return False
    parent = row["parent"]
    names = {_in_place(source, row["id"]), id_hash(row["session_id"] or ""), id_hash(source.sha256)}
    return bool(marks & names) or (parent is not None and _in_place(source, parent["conversation_id"]) in marks)


def _in_place(source: SessionSource, identity: str) -> str:
    return id_hash(f"{source.path}\0{identity}")


def recounted(source: SessionSource, kept: Sequence[Row], *, num_forgotten: int) -> SessionSource:
    """The account of a family of which only the rows `kept` are left."""
    counts = {key: 0 if key in _COUNTED else number for key, number in source.counts.items()}
    for row in kept:
        turns = row["turns"]
        results = [result for turn in turns for result in turn["results"]]
        counts["conversations"] += 1
        counts["sessions"] += row["parent"] is None
        counts["turns"] += len(turns)
        counts["assistant turns"] += sum(turn["role"] == "assistant" for turn in turns)
        counts["calls"] += sum(len(turn["calls"]) for turn in turns)
        counts["results"] += len(results)
        counts["errors"] += sum(result["is_error"] is True for result in results)
    return replace(
        source,
        status="kept" if kept else "forgotten",
        conversations=[row["id"].removesuffix(source.id_suffix) for row in kept],
        counts=counts,
        skipped={**source.skipped, FORGOTTEN: source.skipped.get(FORGOTTEN, 0) + num_forgotten},
        redactions=source.redactions if kept else {},
    )


def with_suffix(rows: Sequence[Row], family: Sequence[str], *, old: str, new: str) -> list[Row]:
    """Rows with another suffix behind their ids, and behind those that their links name within the family."""
    if old == new:
        return list(rows)
    names = {f"{each}{old}": f"{each}{new}" for each in family}

    def link(parent: Row | None) -> Row | None:
        return parent and {**parent, "conversation_id": names.get(parent["conversation_id"], parent["conversation_id"])}

    return [{**row, "id": names[row["id"]], "parent": link(row["parent"])} for row in rows]


def read_accounts(run: RunDir) -> list[SessionSource]:
    """The accounts of the last ingest, in order."""
    return [SessionSource.from_row(row) for row in run.read_jsonl("session_sources", schema=SCHEMA, version=VERSION)]


def write_accounts(run: RunDir, sources: Iterable[SessionSource]) -> None:
    """After `conversations.jsonl`: its hash tells whether the accounts are those of its rows."""
    accounts = (source.to_row() for source in sources)
    run.write_jsonl("session_sources", accounts, schema=SCHEMA, version=VERSION, sources=["conversations"])


def add_totals(sources: Iterable[SessionSource], counts: Counter[str], drops: Counter[str]) -> None:
    """Add up what the sidecar of `conversations.jsonl` says."""
    for source in sources:
        counts.update(source.counts)
        counts.update({f"redacted: {kind}": number for kind, number in source.redactions.items()})
        drops.update(source.skipped)


def first_places(sources: Sequence[SessionSource]) -> dict[str, tuple[int, str]]:
    """Reason -> how often something was left out for it, and where first."""
    found: dict[str, tuple[int, str]] = {}
    for source in sources:
        places: dict[str, str] = {}
        for reason, file, line in source.skips:
            places.setdefault(cast("str", reason), f"{file}:{line}" if line else str(file))
        for reason, number in source.skipped.items():
            before, place = found.get(reason, (0, places.get(reason, source.name)))
            found[reason] = (before + number, place)
    return found
