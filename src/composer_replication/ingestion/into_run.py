"""Sessions into a run directory: what is new is read, the rest taken over, and the bytes are those of a fresh run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from composer_replication.ingestion import schemas
from composer_replication.ingestion.earlier import Earlier, Row, read_earlier
from composer_replication.ingestion.family_reading import read_families
from composer_replication.ingestion.planning import Planned, plan
from composer_replication.ingestion.registry import no_session
from composer_replication.ingestion.scrub_settings import ScrubSettings
from composer_replication.ingestion.scrubbing import scrub_conversation
from composer_replication.ingestion.session_sources import (
    SessionSource,
    add_totals,
    id_hash,
    is_forgotten,
    recounted,
    with_suffix,
    write_accounts,
)
from composer_replication.ingestion.summary import IngestSummary
from composer_replication.runs import RunDir
from composer_replication.runs import conversations as rows

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""

COPY = "copy of another session"


def ingest_into(
    run: RunDir,
    paths: Iterable[str | Path],
    *,
    scrub: ScrubSettings | None,
    exclude: Sequence[str] = (),
    num_workers: int = 1,
    tools: Mapping[str, Mapping[str, Any]] | None = None,
    reread: bool = False,
    progress: Progress | None = None,
) -> IngestSummary:
    """Write `conversations.jsonl`, `session_sources.jsonl` and `tools.jsonl` of all sessions below `paths`.

    Sessions of earlier calls stay, also those whose files are gone by now; what is excluded or forgotten does not.
    `scrub=None` leaves secrets in, and the sidecar says so. On an error the run is left as it was.
    """
    roots = [Path(path) for path in paths]
    earlier = read_earlier(run, scrub)
    planned, outside = plan(run.root, roots, earlier, scrub=scrub, exclude=exclude, reread=reread)
    merge = _Merge(earlier, scrub, planned)
    counts, drops = Counter[str](), Counter(outside.skipped)

    def all_rows() -> Iterator[Row]:
        yield from merge.rows(num_workers, progress)
        _refuse_empty(roots, planned, merge.sources)
        add_totals(merge.sources, counts, drops)

    settings = {"scrubbed": scrub is not None} | {
        f"settings_{name}": getattr(earlier.fingerprint, name) for name in ("salt", "digest")
    }
    run.write_jsonl(
        "conversations",
        all_rows(),
        schema=rows.SCHEMA,
        version=rows.VERSION,
        counts=counts,
        drops=drops,
        settings=settings,
    )
    write_accounts(run, merge.sources)
    found = schemas.tool_rows(merge.tools, tools or {})
    run.write_jsonl("tools", found, schema=schemas.SCHEMA, version=schemas.VERSION, sources=["conversations"])
    return IngestSummary.of(merge.sources, outside, merge.read_paths, is_scrubbed=scrub is not None)


class _Merge:
    """Rows of the earlier ingest and new ones, in one order, without copies, forgotten sessions or equal ids."""

    def __init__(self, earlier: Earlier, scrub: ScrubSettings | None, planned: list[Planned]) -> None:
        self._earlier, self._scrub, self._planned = earlier, scrub, planned
        self._scrub_again = None if earlier.same_settings or scrub is None else scrub.scrubber()
        self._forgotten = {each for source in earlier.sources for each in source.forgotten}
        self._digests: set[str] = set()
        self._ids: set[str] = set()
        self.sources: list[SessionSource] = []
        self.tools = schemas.ToolSchemas()
        self.read_paths: set[str] = set()

    def rows(self, num_workers: int, progress: Progress | None) -> Iterator[Row]:
        total, done = sum(each.num_bytes for each in self._planned), 0
        asked = ((each.source, each.family) for each in self._planned if each.family is not None)
        reading = read_families(asked, self._scrub, num_workers=num_workers)
        for each in self._planned:
            if each.family is None:
                source, found = each.source, self._taken_over(each.source)
            else:
                source, lines = next(reading)
                found = [orjson.loads(line) for line in lines]
                self.read_paths.add(source.path)
            for row in self._settled(source, found):
                self.tools.add_row(row)
                yield row
            done += each.num_bytes
            if progress is not None:
                progress(done, total)

    def _taken_over(self, source: SessionSource) -> list[Row]:
        stored = self._earlier.take(source) if source.conversations else []
        found = with_suffix(stored, source.conversations, old=source.id_suffix, new="")
        if self._scrub_again is None:
            return found
        scope = self._scrub_again.scope()  # its file is gone: all there is to scrub is what was kept
        return [rows.to_row(scrub_conversation(rows.from_row(row), scope)) for row in found]

    def _settled(self, source: SessionSource, found: list[Row]) -> list[Row]:
        """The rows that stay, and the account of them in `sources`."""
        if found and source.sha256 and source.sha256 in self._digests:
            self.sources.append(_as_copy(source))
            return []
        self._digests.add(source.sha256)
        kept = [row for row in found if not is_forgotten(source, row, self._forgotten)]
        if len(kept) < len(found):
            source = recounted(source, kept, num_forgotten=len(found) - len(kept))
        ids = [row["id"] for row in kept]
        suffix = "@" + id_hash(source.path)[:8] if self._ids.intersection(ids) else ""
        self._ids.update(f"{each}{suffix}" for each in ids)
        self.sources.append(replace(source, conversations=ids, id_suffix=suffix))
        return with_suffix(kept, ids, old="", new=suffix)


def _as_copy(source: SessionSource) -> SessionSource:
    counts = {key: number for key, number in source.counts.items() if key.startswith("files")}
    return replace(
        source,
        status="duplicate",
        conversations=(),
        counts=counts,
        redactions={},
        skipped={COPY: 1},
        skips=[(COPY, source.name, 0)],
    )


def _refuse_empty(roots: list[Path], planned: list[Planned], sources: list[SessionSource]) -> None:
    """A path that holds no session at all is an error, also beside others that do."""
    for root in roots:
        below = [source for each, source in zip(planned, sources, strict=True) if each.root == root]
        if all(source.status == "empty" for source in below):
            reasons = Counter[str]()
            for source in below:
                reasons.update(source.skipped)
            raise no_session(root, reasons)
