"""The sites of a run, each with its hint: `sites.jsonl`, and the table that sums it up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from composer_replication.errors import ArtefactCorruptError, InputError, explain
from composer_replication.hint_generator.facts import StateAlong
from composer_replication.hint_generator.write import write_hint
from composer_replication.privacy import Scrubber
from composer_replication.runs import RunDir
from composer_replication.runs.conversations import read_conversations
from composer_replication.runs.tools import read_tools
from composer_replication.sites import MIN_CONFIDENCE, find_error_sites
from composer_replication.sites.find import NO_FAILURE
from composer_replication.types import ErrorSite, Hint

SCHEMA, VERSION = "error_site", 1
_MIN_PREFIX = 4
_SITE = tuple(each.name for each in fields(ErrorSite))


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


def write_sites(run: RunDir, *, min_confidence: float = MIN_CONFIDENCE) -> None:
    """Find every failure in the run's conversations, write a hint for those that may be taught, and keep both."""
    counts, drops = Counter[str](), Counter[str]()
    # What was ingested with its secrets in it does not get them into a hint, which is trained on.
    scrubber = None if run.meta("conversations").settings.get("scrubbed") is True else Scrubber()
    # Of every agent, as a file gave them: an inferred schema does not say what a tool needs.
    tools = read_tools(run).given

    def all_rows() -> Iterator[dict[str, object]]:
        for conversation in read_conversations(run):
            passed_over, along = list[ErrorSite](), StateAlong(conversation)
            found = find_error_sites(conversation, min_confidence=min_confidence, passed_over=passed_over)
            for site in found:
                options = {"tool_schemas": tools, "scrubber": scrubber, "along": along}
                hint = write_hint(site, conversation, **options) if site.is_kept else None
                counts.update(("sites", f"blame: {site.blame}"))
                counts.update((f"hint: {hint.source}",) if hint is not None else ())
                yield to_row(site, hint)
            for site in passed_over:
                drops[site.reason] += 1
                yield to_row(site, None)

    run.write_jsonl(
        "sites",
        all_rows(),
        schema=SCHEMA,
        version=VERSION,
        sources=["conversations", "tools"],
        counts=counts,
        drops=drops,
        settings={"min_confidence": f"{min_confidence:g}"},
    )


def read_sites(run: RunDir) -> Iterator[tuple[ErrorSite, Hint | None]]:
    """The sites of a run, in order, each with its hint."""
    return (from_row(row) for row in run.read_jsonl("sites", schema=SCHEMA, version=VERSION))


def find_site(run: RunDir, identity: str) -> tuple[ErrorSite, Hint | None]:
    """The site with this id, or whose id alone begins like this."""
    found = [each for each in read_sites(run) if each[0].id.startswith(identity)]
    if len(found) != 1 or len(identity) < _MIN_PREFIX:
        got = f"{identity!r}, which {len(found)} sites begin with"
        expected = f"the id of a site, or at least {_MIN_PREFIX} characters that only one begins with"
        raise InputError(explain("site", got=got, expected=expected, fix="`crf sites RUN` shows ids"))
    return found[0]


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


def to_row(site: ErrorSite, hint: Hint | None) -> dict[str, object]:
    """One row of `sites.jsonl`."""
    return {**asdict(site), "hint": None if hint is None else asdict(hint)}


def from_row(row: Mapping[str, Any]) -> tuple[ErrorSite, Hint | None]:
    """The inverse of `to_row`."""
    try:
        site = ErrorSite(**{name: row[name] for name in _SITE if name != "evidence"}, evidence=tuple(row["evidence"]))
        return site, None if row["hint"] is None else Hint(**row["hint"])
    except (KeyError, TypeError) as error:
        expected = f"the fields of {SCHEMA} {VERSION}"
        raise ArtefactCorruptError(explain(f"site {row.get('id')!r}", got=error, expected=expected)) from error
