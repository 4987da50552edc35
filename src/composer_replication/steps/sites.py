"""`crf sites`: every failure of a run, whose doing it was, and a hint for each that may be taught."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from composer_replication.config import SitesConfig
from composer_replication.hint_generator.along import StateAlong, call_of
from composer_replication.hint_generator.write import said_hint, user_words, write_hint
from composer_replication.ingestion.last_gate import gate_of
from composer_replication.privacy import Scrubber
from composer_replication.runs import RunDir
from composer_replication.runs.conventions import NAME as CONVENTIONS
from composer_replication.runs.conventions import (
    Convention,
    Heard,
    add_conventions,
    kept_by_call,
    project_of,
    read_conventions,
)
from composer_replication.runs.conversations import read_conversations
from composer_replication.runs.sites import SCHEMA, VERSION, struck_out, struck_sites, to_row
from composer_replication.runs.split import NAME as SPLIT
from composer_replication.runs.split import held_out_of
from composer_replication.runs.tools import ToolTable, read_tools
from composer_replication.sites import find_error_sites, gates
from composer_replication.sites.find import NO_FAILURE
from composer_replication.sites.user_words import CORRECTED, REFUSED, call_kind, convention_in
from composer_replication.teacher_replay.hint_writer import WrittenHints, write_hints
from composer_replication.teacher_replay.replay import ReplayOptions
from composer_replication.teacher_replay.teachers import read_specs, writer_in
from composer_replication.types import Conversation, ErrorSite, Hint

_WITH_WRITER = ("writer", "template", "raw_error")
_AS_SURE_AS_A_RULE = 0.7


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
    """Every site; what looked like a failure and is none is of kind `NO_FAILURE`. `hints` counts what a model wrote.

    `conventions` are the rules of `conventions.md`, with those that are new.
    """

    sites: list[ErrorSite]
    hints: Mapping[str, int]
    conventions: list[Convention]


def write_sites(
    section: SitesConfig, run: RunDir, *, no_scrub: bool = False, allowed: Iterable[str] = ()
) -> SitesOfRun:
    """Find every failure in the run's conversations, write a hint for those that may be taught, and keep both.

    With a writer the conversations are read once more, before: what a model is shown goes through the last gate, which
    refuses a run made with `--no-scrub` unless that is said here, too.
    """
    hints = None if section.writer is None else _asked_for(section, run, no_scrub, allowed)
    sources: dict[str, Any] = {} if hints is None else {"sources": _WITH_WRITER, "writer": hints.writer()}
    # What was ingested with its secrets in it does not get them into a hint, which is trained on.
    scrubber = None if run.meta("conversations").settings.get("scrubbed") is True else Scrubber()
    options = {"scrubber": scrubber, **sources}
    made_of = [run.source(name) for name in ("conversations", "tools", SPLIT) if run.path(name).exists()]
    rules = _Rules(run, scrubber, section.min_confidence)
    rows = _with_hints(read_conversations(run), rules, read_tools(run), section.min_confidence, options)
    struck = struck_sites(run)
    rows = [(struck_out(site), None) if hint and site.id in struck else (site, hint) for site, hint in rows]
    drops = Counter(site.reason for site, _ in rows if site.kind == NO_FAILURE)
    conventions = add_conventions(run, rules.heard)
    if run.path(CONVENTIONS).exists():
        made_of.append(run.source(CONVENTIONS))  # as it is now: what its user changes later makes these sites old
    run.write_jsonl(
        "sites",
        (to_row(*row) for row in rows),
        schema=SCHEMA,
        version=VERSION,
        sources=made_of,
        counts=_counts(rows),
        drops=drops,
        settings={"min_confidence": section.min_confidence, "struck": sorted(struck), **_written_by(section, hints)},
    )
    return SitesOfRun([site for site, _ in rows], {} if hints is None else hints.counts, conventions)


def _written_by(section: SitesConfig, hints: WrittenHints | None) -> dict[str, Any]:
    paid = {} if hints is None else {"writer_calls": sum(hints.counts.values()), "writer_usd": hints.paid}
    return {"writer": writer_in(section.writer), **paid}


def _counts(rows: Iterable[tuple[ErrorSite, Hint | None]]) -> Counter[str]:
    counts = Counter[str]()
    for site, hint in rows:
        counts.update(("sites", f"blame: {site.blame}") if site.kind != NO_FAILURE else ())
        counts.update((f"hint: {hint.source}",) if hint is not None else ())
    return counts


class _Rules:
    """Rules that users named: those that are heard on the way, and what the kept ones say about other refusals.

    Nothing is heard from sessions that are `held_out`, and no rule is used that was said nowhere else.
    """

    def __init__(self, run: RunDir, scrubber: Scrubber | None, min_confidence: float) -> None:
        self.held_out = held_out_of(run)
        rules = [rule for rule in read_conventions(run) if not rule.said or {at for _, at in rule.said} - self.held_out]
        self._kept = kept_by_call(rules) if min_confidence <= _AS_SURE_AS_A_RULE else {}
        self._scrubber = scrubber
        self.heard: list[Heard] = []

    def applied(self, site: ErrorSite, conversation: Conversation) -> tuple[ErrorSite, Hint | None]:
        """The site of a refusal without words and its hint, where a kept rule is about such calls; else as it is."""
        if site.kind != REFUSED or not self._kept or _is_copied(site, conversation):
            return site, None
        call = call_of(site, conversation)
        words = None if call is None else self._kept.get((project_of(conversation), call_kind(call)))
        hint = None if words is None else said_hint(words, template="convention", scrubber=self._scrubber)
        if hint is None:
            return site, None
        reason = "refused, and a rule that the user keeps is about such calls"
        taught: dict[str, Any] = {"blame": "model", "is_kept": True, "reason": reason}
        return replace(site, confidence=_AS_SURE_AS_A_RULE, **taught), hint

    def hear(self, site: ErrorSite, conversation: Conversation) -> None:
        """The rule that a correction names, if it names one."""
        if site.kind != CORRECTED or not site.is_kept or conversation.id in self.held_out:
            return
        rule, call = convention_in(user_words(site, conversation)), call_of(site, conversation)
        if rule and call is not None:
            rule = rule if self._scrubber is None else self._scrubber.scope().text(rule)
            origin = (site.id, site.conversation_id)
            self.heard.append(Heard(project_of(conversation), rule, call_kind(call), *origin))


def _is_copied(site: ErrorSite, conversation: Conversation) -> bool:
    return any(turn.id == site.turn_id and turn.origin == "copied" for turn in conversation.turns)


def _with_hints(
    conversations: Iterable[Conversation],
    rules: _Rules,
    tools: ToolTable,
    min_confidence: float,
    options: Mapping[str, Any],
) -> list[tuple[ErrorSite, Hint | None]]:
    """Every site with its hint. All wait for the last conversation: a gate's first refusal may not be its project's."""
    rows: list[tuple[ErrorSite, Hint | None]] = []
    refusals: list[gates.Refusal] = []
    hints_if_second: dict[str, Hint | None] = {}
    for conversation in conversations:
        passed_over, mine = list[ErrorSite](), list[gates.Refusal]()
        failures = find_error_sites(conversation, min_confidence=min_confidence, passed_over=passed_over, refusals=mine)
        # Given schemas alone say what a tool needs; those that were inferred say which tools there are.
        tool_options = {"tool_schemas": tools.given, "inferred_tools": tools.schemas(conversation.format)}
        hint_of = partial(
            write_hint, conversation=conversation, along=StateAlong(conversation), **tool_options, **options
        )
        second = {refusal.site.id: refusal.site for refusal in mine if refusal.site.is_kept}
        for failure in failures:
            site, hint = rules.applied(failure, conversation)
            rows.append((site, hint_of(site) if site.is_kept and hint is None else hint))
            rules.hear(site, conversation)
            hints_if_second |= {site.id: hint_of(second[site.id])} if site.id in second else {}
        rows += [(site, None) for site in passed_over]
        refusals += mine
    later = gates.conventions(refusals, held_out=rules.held_out)
    return [(later[site.id], hints_if_second.get(site.id)) if site.id in later else (site, hint) for site, hint in rows]


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
            example=example.evidence_text,
            example_id=example.id,
        )
        for (kind, blame), group in groups.items()
        for example in [next((site for site in group if site.evidence_text), group[0])]
    ]
    return sorted(table, key=lambda row: (row.blame != "model", row.blame, -row.number, row.kind))
