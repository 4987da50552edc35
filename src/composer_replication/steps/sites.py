"""`crf sites`: every failure of a run, whose doing it was, and a hint for each that may be taught."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from composer_replication.config import SitesConfig
from composer_replication.hint_generator.facts import StateAlong
from composer_replication.hint_generator.write import write_hint
from composer_replication.privacy import Scrubber
from composer_replication.runs import RunDir
from composer_replication.runs.conversations import read_conversations
from composer_replication.runs.sites import SCHEMA, VERSION, to_row
from composer_replication.runs.tools import read_tools
from composer_replication.sites import find_error_sites
from composer_replication.sites.find import NO_FAILURE
from composer_replication.types import ErrorSite


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


def write_sites(section: SitesConfig, run: RunDir) -> list[ErrorSite]:
    """Find every failure in the run's conversations, write a hint for those that may be taught, and keep both.

    Also returned is what looked like a failure and is none; its kind is `NO_FAILURE`.
    """
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
                options = {"tool_schemas": tools, "scrubber": scrubber, "along": along}
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
    return written


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
