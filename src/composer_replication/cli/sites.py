"""`crf sites RUN`: find failed tool calls, decide whose fault each was, and write hints for the model's own errors.

Reads   conversations.jsonl and tools.jsonl; split.jsonl and conventions.md if they exist
Writes  sites.jsonl, one row per error site with its hint; conventions.md, the rules that users stated in passing
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from composer_replication.action_text import action_text
from composer_replication.cli.console import (
    add_config_arguments,
    add_config_flag,
    add_gate_arguments,
    config_from_args,
    log,
    plain,
    print_json,
    show,
    table,
)
from composer_replication.config import SitesConfig
from composer_replication.errors import InputError, explain
from composer_replication.hint_generator.context import StateCursor, find_call
from composer_replication.hint_generator.hint_sources import hint_from_user_words, user_correction_text, write_hint
from composer_replication.hint_generator.teacher_hints import WrittenHints, write_hints
from composer_replication.privacy import Scrubber
from composer_replication.privacy.outgoing import outgoing_gate
from composer_replication.runs import RunDir
from composer_replication.runs.conventions import NAME as CONVENTIONS
from composer_replication.runs.conventions import Convention, ConventionsFile, StatedRule, project_of
from composer_replication.runs.files import (
    SITES_SCHEMA,
    SITES_VERSION,
    ToolTable,
    as_rejected,
    mark_rejected,
    read_conversations,
    read_rejected_ids,
    read_site,
    read_sites,
    read_tools,
    site_to_row,
)
from composer_replication.runs.split import NAME as SPLIT
from composer_replication.runs.split import read_test_ids
from composer_replication.sites import BLAMES, KINDS, find_error_sites
from composer_replication.sites import verdict_revision as gates
from composer_replication.sites.find import NO_FAILURE
from composer_replication.sites.user_corrections import CORRECTED, REFUSED, find_user_rule, kind_of_call
from composer_replication.teacher_replay.replay import ReplayOptions
from composer_replication.teacher_replay.teachers import hint_writer_name, read_specs
from composer_replication.types import Conversation, ErrorSite, Hint

_CAPTION = (
    "Only errors blamed on the model are trained on (kept). Other blames: harness or user (refused or stopped\n"
    "the call), task (e.g. failing tests), env (machine or network). Sure: mean confidence."
)
_MAX_EXAMPLE_CHARS = 70
_MAX_TEXT_CHARS = 3000
_MAX_LINES_LISTED = 5
_HINT_SOURCES_WITH_WRITER = ("writer", "template", "raw_error")
_RULE_CONFIDENCE = 0.7  # of a refusal that a user's rule explains

SiteWithHint = tuple[ErrorSite, Hint | None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run directory with ingested conversations (`crf ingest`)")
    parser.add_argument("--kind", action="append", metavar="KIND", help="show only this kind; may be repeated")
    parser.add_argument("--blame", action="append", metavar="BLAME", help="show only this blame; may be repeated")
    add_config_flag(parser, "--min-confidence", key="sites.min_confidence")
    parser.add_argument("--show", metavar="ID", help="show one site: the turn, the failed result, the hint")
    parser.add_argument("--list", action="store_true", help="list every site with its hint, or why it has none")
    parser.add_argument("--drop", action="append", metavar="ID", help="reject this site permanently; may be repeated")
    parser.add_argument("--json", action="store_true", help="print the table, the list or the site as JSON")
    add_config_flag(parser, "--writer", key="sites.writer", metavar="FILE")
    add_config_arguments(parser, "sites")
    add_gate_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Find the sites, or list, show or reject those of an earlier call."""
    for blame in args.blame or ():
        if blame not in BLAMES:
            raise InputError(explain("--blame", got=repr(blame), expected=f"one of {', '.join(BLAMES)}"))
    section, run_dir = config_from_args(args).sites, RunDir.open(args.run)
    if args.show is not None:
        _print_site(run_dir, args.show, as_json=args.json)
        return 0
    for site in mark_rejected(run_dir, args.drop, what="--drop") if args.drop else ():
        log(f"Rejected site {site.id} ({site.kind}). Undo: `crf hints RUN --keep {site.id}`")
    # Listing must not recompute the sites: the user may be reviewing those that a training has used.
    if not args.drop and not (args.list and run_dir.path("sites").exists()):
        result = write_sites(section, run_dir, no_scrub=args.no_scrub, allowed=args.allow)
        if not args.list:
            _print_table(run_dir, result.sites, args)
            _log_rules(run_dir, result, args)
            if result.writer_outcomes:
                log_writer_outcomes(result.writer_outcomes)
            return 0
    _print_list(run_dir, args)
    return 0


def log_writer_outcomes(counts: Mapping[str, int]) -> None:
    log(f"hints by a model: {', '.join(f'{what} {number}' for what, number in sorted(counts.items()))}")


def _print_list(run_dir: RunDir, args: argparse.Namespace) -> None:
    """Print the error sites in session order, or with `--json` as JSON.

    After `--drop`, the list is printed only if `--list` is given as well.
    """
    rows = [(site, hint) for site, hint in read_sites(run_dir) if site.kind != NO_FAILURE]
    check_kinds(args.kind or (), {site.kind for site, _ in rows})
    rows = [(site, hint) for site, hint in rows if _matches_filters(site, args)] if args.list else []
    if args.json:
        records = [{"site": asdict(site), "hint": None if hint is None else asdict(hint)} for site, hint in rows]
        print_json({"run": str(run_dir.root), "sites": records})
        return
    for site, hint in rows:
        state = "kept" if site.is_kept else f"not kept: {site.reason}"
        print(plain(f"{site.id}  {site.kind}, {site.tool}, blame {site.blame}, sure {site.confidence:.2f}, {state}"))
        print(plain(f"    failed  {_shorten(site.evidence_text)}"))
        if hint is not None:
            print(plain(f"    hint    {' '.join(hint.text.split())}"))
    if args.list:
        num_kept = sum(site.is_kept for site, _ in rows)
        log(f"{len(rows)} sites, {num_kept} kept with a hint. `--show ID` shows one, `--drop ID` rejects it for good")


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_EXAMPLE_CHARS else line[: _MAX_EXAMPLE_CHARS - 1] + "…"


def _print_table(run_dir: RunDir, all_sites: Sequence[ErrorSite], args: argparse.Namespace) -> None:
    """Print error sites by kind and blame, then the false alarms by reason."""
    sites = [site for site in all_sites if _matches_filters(site, args)]
    counts = _tabulate(sites)
    false_alarms = Counter(site.reason for site in sites if site.kind == NO_FAILURE)
    check_kinds(args.kind or (), {site.kind for site in all_sites})
    if args.json:
        print_json({"run": str(run_dir.root), "table": counts, "passed_over": dict(false_alarms)})
        return
    columns = ("kind", "blame", "sites", "kept", "sure", "example", "id")
    rows = [
        (row.kind, row.blame, row.number, row.num_kept, f"{row.confidence:.2f}", _shorten(row.example), row.example_id)
        for row in counts
    ]
    show(table("Error sites", columns, rows, caption=_CAPTION, shrinks="example"))
    if false_alarms:
        show(table("False alarms", ("why", "times"), sorted(false_alarms.items())))
    num_kept, num_errors = sum(site.is_kept for site in sites), len(sites) - false_alarms.total()
    scope = "" if len(sites) == len(all_sites) else "of the kinds and blames asked for: "
    summary = f"{run_dir.path('sites')}: {scope}{num_errors} failures, {num_kept} kept with a hint"
    log(f"{summary}. `crf sites RUN --list` shows them all, `--show ID` one")


def _log_rules(run_dir: RunDir, result: _SitesResult, args: argparse.Namespace) -> None:
    """Log how many error sites are corrections by the user, and how many of the user's rules are accepted."""
    if args.json:
        return
    num_corrections = sum(site.kind == CORRECTED and site.is_kept for site in result.sites)
    if num_corrections:
        log(f"{num_corrections} of them are corrections in the user's own words")
    if not result.rules:
        return
    path = run_dir.path("conventions")
    accepted = [rule for rule in result.rules if rule.is_kept]
    # Without a `for:` line nobody knows which calls a rule is about.
    num_unused = sum(not rule.call_kinds for rule in accepted)
    unused = f"; {num_unused} without a `for:` line, not used" if num_unused else ""
    log(f"{path}: {len(accepted)} of {len(result.rules)} user rules accepted{unused}. Accept more with [x], then rerun")
    if line_numbers := ConventionsFile(run_dir).unread:
        lines = ", ".join(map(str, line_numbers[:_MAX_LINES_LISTED]))
        more = " and more" if len(line_numbers) > _MAX_LINES_LISTED else ""
        log(f"{path}, lines {lines}{more}: cannot be read. Write `- [x] words`, and below it `  - for: git push`")


def check_kinds(kinds: Sequence[str], kinds_in_run: set[str]) -> None:
    """Raise InputError if a kind of error occurs neither in the rules nor in the error sites of the run."""
    for kind in kinds:
        if kind not in kinds_in_run and kind not in KINDS:
            fix = f"Kinds in this run: {', '.join(sorted(kinds_in_run))}"
            raise InputError(explain("--kind", got=repr(kind), expected="a kind of failure", fix=fix))


def _matches_filters(site: ErrorSite, args: argparse.Namespace) -> bool:
    return (not args.kind or site.kind in args.kind) and (not args.blame or site.blame in args.blame)


def _print_site(run_dir: RunDir, site_id: str, *, as_json: bool) -> None:
    site, hint, conversation = read_site(run_dir, site_id)
    if as_json:
        print_json({"site": site, "hint": hint})
        return
    print("\n".join(_site_lines(site, hint, conversation)))


def _site_lines(site: ErrorSite, hint: Hint | None, conversation: Conversation) -> list[str]:
    turn = next(turn for turn in conversation.turns if turn.id == site.turn_id)
    results = [r for t in conversation.turns if t.id == site.result_turn_id for r in t.results]
    text = next((result.text for result in results if result.call_id == site.call_id), site.evidence_text)
    start, end = site.evidence
    marked = f"{text[:start]}>>>{text[start:end]}<<<{text[end:]}" if end > start else text
    state = "kept" if site.is_kept else "not kept"
    lines = [
        f"site {site.id}  {site.kind}, blame {site.blame}, confidence {site.confidence:g}, {state}: {site.reason}",
        f"conversation {site.conversation_id}, turn {site.turn_id}",
        f"read from {turn.provenance.file}, lines {', '.join(map(str, turn.provenance.lines))}",
    ]
    if site.repeats:
        lines.append(f"repeats site {site.repeat_of} ({site.repeats} before, {site.between} other calls since)")
    lines += [
        "",
        "--- the turn",
        _cut_middle(action_text(turn)),
        "",
        "--- what came back, evidence between >>> and <<<",
        _cut_middle(marked),
    ]
    lines += ["", f"--- the hint ({hint.source}: {hint.template}, version {hint.version})" if hint else "--- no hint"]
    lines += [hint.text] if hint else []
    return [plain(line) for line in lines]


def _cut_middle(text: str) -> str:
    half, num_cut = _MAX_TEXT_CHARS // 2, len(text) - _MAX_TEXT_CHARS
    return text if num_cut <= 0 else f"{text[:half]}\n[... {num_cut} characters ...]\n{text[-half:]}"


@dataclass(frozen=True, slots=True)
class _KindCount:
    """A row of the table: how many failures of one kind have the same blame. The field names are those of `--json`."""

    kind: str
    blame: str
    number: int
    num_kept: int
    confidence: float
    example: str
    example_id: str


class _SitesResult(NamedTuple):
    """The error sites that were found, the outcomes of the hint writer, and the rules that users stated."""

    sites: list[ErrorSite]  # with false alarms, of kind NO_FAILURE, so that they can be counted
    writer_outcomes: Mapping[str, int]  # how many hints a model wrote, or why it wrote none
    rules: list[Convention]  # all rules of conventions.md, the new ones included


def write_sites(
    section: SitesConfig, run: RunDir, *, no_scrub: bool = False, allowed: Iterable[str] = ()
) -> _SitesResult:
    """Find the error sites of a run, write their hints, and store both in sites.jsonl.

    With `section.writer`, a model writes the hints. Its requests have to pass the outgoing check, which refuses a run
    that was ingested with `--no-scrub` unless `no_scrub` is set here as well.
    """
    written = None if section.writer is None else _write_hints_by_model(section, run, no_scrub, allowed)
    # Hints are trained on. If ingestion kept the secrets, they have to be redacted here.
    scrubber = None if run.meta("conversations").settings.get("scrubbed") is True else Scrubber()
    hint_options: dict[str, Any] = {"scrubber": scrubber}
    if written is not None:
        hint_options |= {"sources": _HINT_SOURCES_WITH_WRITER, "writer": written.writer()}
    sources = [run.source(name) for name in ("conversations", "tools", SPLIT) if run.path(name).exists()]
    rules = _UserRules(run, scrubber, section.min_confidence)
    rows = _find_sites(read_conversations(run), rules, read_tools(run), section.min_confidence, hint_options)
    struck = read_rejected_ids(run)
    rows = [(as_rejected(site), None) if hint and site.id in struck else (site, hint) for site, hint in rows]
    drops = Counter(site.reason for site, _ in rows if site.kind == NO_FAILURE)
    conventions = ConventionsFile(run)
    conventions.update(rules.stated)
    if run.path(CONVENTIONS).exists():
        # Recorded after the update: only what the user edits later should mark these sites as stale.
        sources.append(run.source(CONVENTIONS))
    run.write_jsonl(
        "sites",
        (site_to_row(*row) for row in rows),
        schema=SITES_SCHEMA,
        version=SITES_VERSION,
        sources=sources,
        counts=_counts(rows),
        drops=drops,
        settings={
            "min_confidence": section.min_confidence,
            "struck": sorted(struck),
            "writer": hint_writer_name(section.writer),
            **(
                {}
                if written is None
                else {"writer_calls": sum(written.counts.values()), "writer_usd": written.cost_usd}
            ),
        },
    )
    return _SitesResult([site for site, _ in rows], {} if written is None else written.counts, conventions.rules)


def _counts(rows: Iterable[tuple[ErrorSite, Hint | None]]) -> Counter[str]:
    counts = Counter[str]()
    for site, hint in rows:
        counts.update(("sites", f"blame: {site.blame}") if site.kind != NO_FAILURE else ())
        counts.update((f"hint: {hint.source}",) if hint is not None else ())
    return counts


class _UserRules:
    """Rules that users stated, such as "never push to main".

    They are collected from corrections by users and applied to refusals without a stated reason. Held-out sessions
    contribute no rules, and a rule stated only in held-out sessions is not applied, so that the test set stays unseen.
    """

    def __init__(self, run: RunDir, scrubber: Scrubber | None, min_confidence: float) -> None:
        self.held_out = read_test_ids(run)
        rules = ConventionsFile(run).rules
        # A rule without sessions was written into conventions.md by hand.
        usable = [rule for rule in rules if not rule.mentions or {where for _, where in rule.mentions} - self.held_out]
        # The first kept rule for each project and kind of call.
        self._by_call: dict[tuple[str, str], str] = {}
        for rule in usable if min_confidence <= _RULE_CONFIDENCE else ():
            for kind in rule.call_kinds if rule.is_kept else ():
                self._by_call.setdefault((rule.project, kind), rule.words)
        self._scrubber = scrubber
        self.stated: list[StatedRule] = []

    def explain(self, site: ErrorSite, conversation: Conversation) -> SiteWithHint:
        """Blame the model for a refused call that breaks an accepted rule, and use the rule as the hint."""
        if site.kind != REFUSED or not self._by_call or _is_copied(site, conversation):
            return site, None
        call = find_call(site, conversation)
        words = None if call is None else self._by_call.get((project_of(conversation), kind_of_call(call)))
        hint = None if words is None else hint_from_user_words(words, template="convention", scrubber=self._scrubber)
        if hint is None:
            return site, None
        reason = "refused, and a rule that the user keeps is about such calls"  # stored in sites.jsonl
        return replace(site, blame="model", is_kept=True, reason=reason, confidence=_RULE_CONFIDENCE), hint

    def collect(self, site: ErrorSite, conversation: Conversation) -> None:
        """Store the rule that a user's correction states, if it states one."""
        if site.kind != CORRECTED or not site.is_kept or conversation.id in self.held_out:
            return
        rule, call = find_user_rule(user_correction_text(site, conversation)), find_call(site, conversation)
        if rule and call is not None:
            rule = rule if self._scrubber is None else self._scrubber.scope().text(rule)
            self.stated.append(
                StatedRule(project_of(conversation), rule, kind_of_call(call), site.id, site.conversation_id)
            )


def _is_copied(site: ErrorSite, conversation: Conversation) -> bool:
    """Return whether the turn was copied from the conversation that this one resumes, where it is already counted."""
    return any(turn.id == site.turn_id and turn.origin == "copied" for turn in conversation.turns)


def _find_sites(
    conversations: Iterable[Conversation],
    rules: _UserRules,
    tools: ToolTable,
    min_confidence: float,
    hint_options: Mapping[str, Any],
) -> list[SiteWithHint]:
    """Return every error site of the run with its hint, including false alarms."""
    rows: list[SiteWithHint] = []
    all_refusals: list[gates.Refusal] = []
    hints_if_repeated: dict[str, Hint | None] = {}
    for conversation in conversations:
        false_alarms, refusals = list[ErrorSite](), list[gates.Refusal]()
        failures = find_error_sites(
            conversation, min_confidence=min_confidence, passed_over=false_alarms, refusals=refusals
        )
        make_hint = partial(
            write_hint,
            conversation=conversation,
            along=StateCursor(conversation),
            tool_schemas=tools.declared,  # declared schemas: only they say which arguments a tool requires
            inferred_tools=tools.schemas(conversation.format),  # from calls: enough to know which tools exist
            **hint_options,
        )
        repeated = {refusal.site.id: refusal.site for refusal in refusals if refusal.site.is_kept}
        for failure in failures:
            site, hint = rules.explain(failure, conversation)
            rows.append((site, make_hint(site) if site.is_kept and hint is None else hint))
            rules.collect(site, conversation)
            if site.id in repeated:
                hints_if_repeated[site.id] = make_hint(repeated[site.id])
        rows += [(site, None) for site in false_alarms]
        all_refusals += refusals
    # A hook's first refusal in a project only informs the model about the hook; the second one is the model's error.
    # Conversations are not stored by time, so which was first is known only now.
    errors = gates.repeated_refusals(all_refusals, held_out=rules.held_out)
    return [
        (errors[site.id], hints_if_repeated.get(site.id)) if site.id in errors else (site, hint) for site, hint in rows
    ]


def _write_hints_by_model(section: SitesConfig, run: RunDir, no_scrub: bool, allowed: Iterable[str]) -> WrittenHints:
    """Let a model write the hints. Answers are cached and count towards the spending cap, as in `crf replay`."""
    writer, *_ = read_specs(section.writer, "sites.writer") or [{}]
    outgoing_check = outgoing_gate(run, os.environ, no_scrub=no_scrub, allowed=allowed)
    sites = (
        (site, conversation)
        for conversation in read_conversations(run)
        for site in find_error_sites(conversation, min_confidence=section.min_confidence)
        if site.kind != CORRECTED  # the user's own words are the hint
    )
    options = ReplayOptions(cache=run.path("teacher_cache"), last_gate=outgoing_check)
    job = write_hints(sites, writer, max_total_usd=section.max_usd, options=options, environment=os.environ)
    with run.used_for("replay"):
        return asyncio.run(job)


def _tabulate(sites: Iterable[ErrorSite]) -> list[_KindCount]:
    """Count the error sites by kind and blame. The model's errors come first, ordered by frequency of the kind."""
    groups: dict[tuple[str, str], list[ErrorSite]] = {}
    for site in sites:
        if site.kind != NO_FAILURE:
            groups.setdefault((site.kind, site.blame), []).append(site)
    counts = []
    for (kind, blame), group in groups.items():
        example = next((site for site in group if site.evidence_text), group[0])
        num_kept, confidence = sum(s.is_kept for s in group), round(sum(s.confidence for s in group) / len(group), 2)
        counts.append(_KindCount(kind, blame, len(group), num_kept, confidence, example.evidence_text, example.id))
    return sorted(counts, key=lambda row: (row.blame != "model", row.blame, -row.number, row.kind))
