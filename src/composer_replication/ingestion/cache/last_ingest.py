"""What an earlier ingest left in the run: its rows can be taken over where nothing has changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import BinaryIO

import orjson

from composer_replication.errors import ArtefactCorruptError, ArtefactNotFoundError, explain
from composer_replication.ingestion.cache.session_sources import Row, SessionSource, read_accounts
from composer_replication.ingestion.scrubbing import Fingerprint, ScrubSettings
from composer_replication.runs import ARTEFACTS, RunDir
from composer_replication.runs.artefacts import OLDEST_READ
from composer_replication.runs.records import check_pair, open_records

FORGOTTEN_SCHEMA, FORGOTTEN_VERSION = "forgotten", 1


@dataclass
class Earlier:
    """The families of the last ingest, in order, and their rows; nothing where there was none.

    `lost` says why an earlier ingest could not be taken over, if there was one. Rows of one that `is_old` can only be
    read anew.
    """

    fingerprint: Fingerprint
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
    forgotten = frozenset(read_forgotten(run))
    try:
        return _complete(run, scrub, forgotten)
    except ArtefactNotFoundError:
        return Earlier(Fingerprint.of(scrub), forgotten=forgotten)
    except ArtefactCorruptError as error:
        return Earlier(Fingerprint.of(scrub), same_settings=False, forgotten=forgotten, lost=str(error))


def read_forgotten(run: RunDir) -> Iterator[str]:
    """The marks of what must not come back."""
    if run.path("forgotten").exists():
        rows = run.read_jsonl("forgotten", schema=FORGOTTEN_SCHEMA, version=FORGOTTEN_VERSION)
        yield from (str(row["mark"]) for row in rows)


def write_forgotten(run: RunDir, marks: set[str]) -> None:
    """Add marks to those that are there."""
    all_marks = {*read_forgotten(run), *marks}
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
    fingerprint = Fingerprint.of(scrub, salt=salt if isinstance(salt, str) else None)
    starts = accumulate((len(source.conversations) for source in sources), initial=0)
    first_rows = {id(source): start for source, start in zip(sources, starts, strict=False)}
    is_old = meta.version < OLDEST_READ[meta.schema]
    same = fingerprint.digest == digest and not is_old
    return Earlier(fingerprint, same, sources, forgotten, None, is_old, file, offsets, first_rows)
