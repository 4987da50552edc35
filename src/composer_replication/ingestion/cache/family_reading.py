"""Families to finished lines of `conversations.jsonl`, one after the other or in several processes.

The lines of a family depend on nothing but its files and the settings, and come back in the order they were asked for:
one process or many, the artefact has the same bytes.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import NamedTuple

from composer_replication.canonical_json import encode_as_written
from composer_replication.errors import InputError, RunError
from composer_replication.ingestion.cache.content_marks import RowFacts, facts_of
from composer_replication.ingestion.cache.session_sources import SessionSource
from composer_replication.ingestion.discovery import Family
from composer_replication.ingestion.reading.counts import counts_of
from composer_replication.ingestion.reading.source import IngestReport
from composer_replication.ingestion.registry import read_with_files
from composer_replication.ingestion.scrubbing import FamilyScrubber, ScrubSettings, shown
from composer_replication.runs.conversations import to_row

# How many results may wait for the one before them, per process: enough to keep all busy, and memory flat.
_AHEAD = 4
_MOST_WORKERS = 8
_BYTES_PER_WORKER = 1 << 20  # what one process reads while another one starts


class FamilyLines(NamedTuple):
    """What a family gave: its conversations as lines of JSON, what is to be known of each, and the account of it."""

    source: SessionSource
    lines: list[bytes]
    facts: list[RowFacts]


def workers_for(num_bytes: int) -> int:
    """How many processes pay off: one per core, but none for so little that it is read before they have begun."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MOST_WORKERS, cores, 1 + num_bytes // _BYTES_PER_WORKER)


def read_families(
    asked: Iterable[tuple[SessionSource, Family]],
    settings: ScrubSettings | None,
    forgotten: frozenset[str],
    *,
    num_workers: int,
) -> Iterator[FamilyLines]:
    """The lines of every family, in order; `asked` brings the account to complete."""
    if num_workers <= 1:
        scrubber = None if settings is None else settings.family_scrubber()
        for draft, family in asked:
            yield read_lines(draft, family, scrubber, forgotten)
        return
    # Not fork: the caller may have threads, a progress bar's for one, and a lock that one of them holds stays held.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(settings, forgotten)) as pool:
        waiting: deque[Future[FamilyLines]] = deque()
        try:
            for draft, family in asked:
                waiting.append(pool.submit(_read_in_worker, draft, family))
                if len(waiting) > num_workers * _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except (BrokenProcessPool, BrokenPipeError) as error:  # a pipe to a worker that never began, not one of ours
            died = "a worker process could not start or died, perhaps for lack of memory: try `--workers 1`"
            raise RunError(died) from error
        finally:
            for future in waiting:
                future.cancel()


def read_lines(
    draft: SessionSource, family: Family, scrubber: FamilyScrubber | None, forgotten: frozenset[str]
) -> FamilyLines:
    """Read, scrub and encode one family. What cannot be written is counted and named like what cannot be read."""
    report, scope = IngestReport(), None if scrubber is None else scrubber.scope()
    names = dict(zip((source.name for source in family.sources), draft.files, strict=True))
    lines, facts, file_of = list[bytes](), list[RowFacts](), list[str]()
    file_format: str | None = None
    for conversation, file in read_with_files(family, report):
        scrubbed = conversation if scrubber is None or scope is None else scrubber.scrub(conversation, scope)
        row = to_row(scrubbed)
        try:
            lines.append(encode_as_written(row, where="conversation"))
        except InputError:
            report.skip("conversation that JSON cannot hold", family.name)
            continue
        report.counts.update(counts_of(conversation))
        file_format = file_format or conversation.format
        facts.append(facts_of(row, forgotten))
        file_of.append(names[file])
    skipped: Counter[str] = Counter()
    for reason, number in report.skipped.items():
        skipped[shown(reason, scope)] += number
    source = replace(
        draft,
        status="kept" if lines else "empty",
        format=file_format,
        conversations=tuple(row_facts.id for row_facts in facts),
        file_of=tuple(file_of),
        counts=dict(sorted(report.counts.items())),
        skipped=dict(sorted(skipped.items())),
        skips=tuple((shown(skip.reason, scope), shown(skip.file, scope), skip.line) for skip in report.skips),
        redactions={} if scope is None or not lines else scope.report.to_dict(),
    )
    return FamilyLines(source, lines, facts)


_worker: tuple[FamilyScrubber | None, frozenset[str]] = (None, frozenset())


def _start_worker(settings: ScrubSettings | None, forgotten: frozenset[str]) -> None:
    global _worker  # noqa: PLW0603 (one per process: building the rules once is the point)
    _worker = None if settings is None else settings.family_scrubber(), forgotten


def _read_in_worker(draft: SessionSource, family: Family) -> FamilyLines:
    return read_lines(draft, family, *_worker)
