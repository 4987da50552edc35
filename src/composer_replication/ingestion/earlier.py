"""What an earlier ingest left in the run: its rows can be taken over where nothing has changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from composer_replication.errors import ArtefactCorruptError, ArtefactNotFoundError, explain
from composer_replication.ingestion.scrub_settings import Fingerprint, ScrubSettings
from composer_replication.ingestion.session_sources import Row, SessionSource, read_accounts
from composer_replication.runs import RunDir
from composer_replication.runs import conversations as rows


@dataclass
class Earlier:
    """The families of the last ingest, in order, and their rows; nothing where there was none."""

    fingerprint: Fingerprint
    same_settings: bool = True
    sources: list[SessionSource] = field(default_factory=list[SessionSource])
    _rows: Iterator[Row] = field(default_factory=lambda: iter(()))
    _position: int = 0

    def take(self, source: SessionSource) -> list[Row]:
        """The rows of one of `sources`. Families are asked for in their order; those passed over are skipped."""
        while (passed := self.sources[self._position]) is not source:
            for _ in islice(self._rows, len(passed.conversations)):
                pass
            self._position += 1
        self._position += 1
        taken = list(islice(self._rows, len(source.conversations)))
        if [row["id"] for row in taken] != [f"{each}{source.id_suffix}" for each in source.conversations]:
            fix = "Remove session_sources.jsonl and its sidecar, and ingest again"
            expected = f"the conversations of {source.path}"
            raise ArtefactCorruptError(explain("conversations.jsonl", got="other rows", expected=expected, fix=fix))
        return taken


def read_earlier(run: RunDir, scrub: ScrubSettings | None) -> Earlier:
    """The earlier ingest of this run, if there was a complete one.

    A crash between the two artefacts leaves accounts of rows that are not there: then only what must stay forgotten is
    taken over, and everything is read again.
    """
    try:
        meta, account = run.meta("conversations"), run.meta("session_sources")
    except ArtefactNotFoundError:
        return Earlier(Fingerprint.of(scrub))
    salt, digest = meta.settings.get("settings_salt"), meta.settings.get("settings_digest")
    fingerprint = Fingerprint.of(scrub, salt=salt if isinstance(salt, str) else None)
    sources = read_accounts(run)
    if account.sources[0].sha256 != meta.sha256:
        forgotten = [SessionSource(path=s.path, name=s.name, forgotten=s.forgotten) for s in sources if s.forgotten]
        return Earlier(fingerprint, same_settings=False, sources=forgotten)
    stored = run.read_jsonl("conversations", schema=rows.SCHEMA, version=rows.VERSION)
    return Earlier(fingerprint, fingerprint.digest == digest, sources, stored)
