"""`crf sites`: every failure of a run, whose doing it was, and a hint for each that may be taught."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from composer_replication.config import SitesConfig
from composer_replication.hint_generator.facts import StateAlong
from composer_replication.hint_generator.write import write_hint
from composer_replication.ingestion.last_gate import gate_of
from composer_replication.privacy import Scrubber
from composer_replication.runs import RunDir
from composer_replication.runs.conversations import read_conversations
from composer_replication.runs.sites import SCHEMA, VERSION, to_row
from composer_replication.runs.tools import read_tools
from composer_replication.sites import find_error_sites
from composer_replication.sites.find import NO_FAILURE
from composer_replication.sites.user_words import CORRECTED
from composer_replication.teacher_replay.hint_writer import WrittenHints, write_hints
from composer_replication.teacher_replay.replay import ReplayOptions
from composer_replication.teacher_replay.teachers import read_specs
from composer_replication.types import ErrorSite

_WITH_WRITER = ("writer", "template", "raw_error")


@dataclass(frozen=True, slots=True)
class KindCount:
    """One row of the table: failures of one kind that were one party's doing, with an example."""

    kind: str
    blame: str
    number: int
    num_kept: int
    confidence: float
    example: str
    example_id: str


class SitesOfRun(NamedTuple):
    """Every site; what looked like a failure and is none is of kind `NO_FAILURE`. `hints` counts what a model wrote."""

    sites: list[ErrorSite]
    hints: Mapping[str, int]


def write_sites(
    section: SitesConfig, run: RunDir, *, no_scrub: bool = False, allowed: Iterable[str] = ()
) -> SitesOfRun:
    """Find every failure in the run's conversations, write a hint for those that may be taught, and keep both.

    With a writer the conversations are read once more, before: what a model is shown goes through the last gate, which
    refuses a run made with `--no-scrub` unless that is said here, too.
    """
    hints = None if section.writer is None else _asked_for(section, run, no_scrub, allowed)
    sources: dict[str, Any] = {} if hints is None else {"sources": _WITH_WRITER, "writer": hints.writer()}
    counts, drops = Counter[str](), Counter[str]()
    written: list[ErrorSite] = []
    # What was ingested with its secrets in it does not get them into a hint, which is trained on.
    scrubber = None if run.meta("conversations").settings.get("scrubbed") is True else Scrubber()
    # Of every agent, as a file gave them: an inferred schema does not say what a tool needs.
    tools = read_tools(run).given

    def all_rows() -> Iterator[dict[str, object]]:
        for conversation in read_conversations(run):
            passed_over, along = list[ErrorSite](), StateAlong(conversation)
            for site in find_error_sites(conversation, min_confidence=section.min_confidence, passed_over=passed_over):
                options = {"tool_schemas": tools, "scrubber": scrubber, "along": along, **sources}
                hint = write_hint(site, conversation, **options) if site.is_kept else None
                counts.update(("sites", f"blame: {site.blame}"))
                counts.update((f"hint: {hint.source}",) if hint is not None else ())
                written.append(site)
                yield to_row(site, hint)
            for site in passed_over:
                drops[site.reason] += 1
                written.append(site)
                yield to_row(site, None)

    run.write_jsonl(
        "sites",
        all_rows(),
        schema=SCHEMA,
        version=VERSION,
        sources=["conversations", "tools"],
        counts=counts,
        drops=drops,
        settings={"min_confidence": section.min_confidence},
    )
    return SitesOfRun(written, {} if hints is None else hints.counts)


def _asked_for(section: SitesConfig, run: RunDir, no_scrub: bool, allowed: Iterable[str]) -> WrittenHints:
    """What a model says about each site that may be taught; answers are kept and paid for as those of a replay are."""
    first, *_ = read_specs(section.writer, "sites.writer") or [{}]
    gate = gate_of(run, os.environ, no_scrub=no_scrub, allowed=allowed)
    sites = (
        (site, conversation)
        for conversation in read_conversations(run)
        for site in find_error_sites(conversation, min_confidence=section.min_confidence)
        if site.kind != CORRECTED  # what a user said needs no other words
    )
    options = ReplayOptions(cache=run.path("teacher_cache"), last_gate=gate)
    with run.used_for("replay"):
        return asyncio.run(
            write_hints(sites, first, max_total_usd=section.max_usd, options=options, environment=os.environ)
        )


def tabulate(sites: Iterable[ErrorSite]) -> list[KindCount]:
    """Sites by kind and blame: those that may be taught first, the most frequent first among them."""
    groups: dict[tuple[str, str], list[ErrorSite]] = {}
    for site in sites:
        if site.kind == NO_FAILURE:
            continue
        groups.setdefault((site.kind, site.blame), []).append(site)
    table = [
        KindCount(
            kind=kind,
            blame=blame,
            number=len(group),
            num_kept=sum(site.is_kept for site in group),
            confidence=round(sum(site.confidence for site in group) / len(group), 2),
            example=shown.evidence_text,
            example_id=shown.id,
        )
        for (kind, blame), group in groups.items()
        for shown in [next((site for site in group if site.evidence_text), group[0])]
    ]
    return sorted(table, key=lambda row: (row.blame != "model", row.blame, -row.number, row.kind))
