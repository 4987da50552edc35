"""`crf sites RUN`: which turns erred, whose doing it was, and the hint for each that may be taught."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from composer_replication.cli.console import (
    add_config_arguments,
    add_gate_arguments,
    add_short,
    config_of,
)
from composer_replication.config import SitesConfig
from composer_replication.hint_generator.context import StateCursor, find_call
from composer_replication.hint_generator.write import hint_from_user_words, user_words, write_hint
from composer_replication.hint_generator.writer import WrittenHints, write_hints
from composer_replication.privacy import Scrubber
from composer_replication.privacy.outgoing import gate_of
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
from composer_replication.runs.files import (
    SITES_SCHEMA,
    SITES_VERSION,
    ToolTable,
    read_conversations,
    read_tools,
    site_to_row,
    struck_out,
    struck_sites,
)
from composer_replication.runs.split import NAME as SPLIT
from composer_replication.runs.split import held_out_of
from composer_replication.sites import course as gates
from composer_replication.sites import find_error_sites
from composer_replication.sites.find import NO_FAILURE
from composer_replication.sites.user_words import (
    CORRECTED,
    REFUSED,
    call_kind,
    convention_in,
)
from composer_replication.teacher_replay.replay import ReplayOptions
from composer_replication.teacher_replay.teachers import read_specs, writer_in
from composer_replication.types import Conversation, ErrorSite, Hint

if TYPE_CHECKING:
    from composer_replication.runs import RunDir
    from composer_replication.types import Conversation, ErrorSite, Hint


_CAPTION = (
    "Only failures that are the model's are taught (kept). Harness and user refused or stopped a call; task is the\n"
    "work itself, such as failing tests; env is the machine or the network. Sure: mean confidence."
)
_MAX_EXAMPLE = 70
_MAX_SHOWN, _MAX_LINES = 3000, 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory with conversations in it")
    parser.add_argument("--kind", action="append", metavar="KIND", help="show only this kind; may be repeated")
    parser.add_argument("--blame", action="append", metavar="BLAME", help="show only this blame; may be repeated")
    add_short(parser, "--min-confidence", key="sites.min_confidence")
    parser.add_argument("--show", metavar="ID", help="print one site: turn, failing result, evidence, hint")
    parser.add_argument("--list", action="store_true", help="print every site with its hint, or why it has none")
    parser.add_argument("--drop", action="append", metavar="ID", help="strike this site out, for good; may be repeated")
    parser.add_argument("--json", action="store_true", help="print the table, the list or the site as JSON")
    add_short(parser, "--writer", key="sites.writer", metavar="FILE")
    add_config_arguments(parser, "sites")
    add_gate_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from composer_replication.cli.console import say
    from composer_replication.runs import RunDir

    _check_filters(args)
    section, run_dir = config_of(args).sites, RunDir.open(args.run)
    if args.show is not None:
        _show_site(run_dir, args.show, as_json=args.json)
    elif args.drop or (args.list and run_dir.path("sites").exists()):  # as they are: they are looked at, not found anew
        _drop(run_dir, args.drop or ())
        _list(run_dir, args)
    elif args.list:
        write_sites(section, run_dir, no_scrub=args.no_scrub, allowed=args.allow)
        _list(run_dir, args)
    else:
        done = write_sites(section, run_dir, no_scrub=args.no_scrub, allowed=args.allow)
        _show_table(run_dir, done.sites, args)
        _show_rules(run_dir, done, args)
        if done.hints:
            say(f"hints by a model: {', '.join(f'{what} {number}' for what, number in sorted(done.hints.items()))}")
    return 0


def _drop(run_dir: RunDir, identities: Sequence[str]) -> None:
    from composer_replication.cli.console import say
    from composer_replication.runs.files import strike_sites

    for site in strike_sites(run_dir, identities, what="--drop") if identities else ():
        say(f"struck out: site {site.id} ({site.kind}); `crf hints RUN --keep {site.id}` takes it back")


def _list(run_dir: RunDir, args: argparse.Namespace) -> None:
    """Every site in the order of the sessions, for somebody who looks through them; after a --drop only if asked."""
    from composer_replication.cli.console import plain, print_json, say
    from composer_replication.runs.files import read_sites
    from composer_replication.sites.find import NO_FAILURE

    every = [entry for entry in read_sites(run_dir) if entry[0].kind != NO_FAILURE]
    check_kinds(args.kind or (), {site.kind for site, _ in every})
    listed = [entry for entry in every if _is_asked_for(entry[0], args)] if args.list else []
    if args.json:
        rows = [{"site": site, "hint": hint} for site, hint in listed]
        print_json({"run": str(run_dir.root), "sites": [{k: _plain_data(v) for k, v in row.items()} for row in rows]})
        return
    for site, hint in listed:
        state = "kept" if site.is_kept else f"not kept: {site.reason}"
        print(plain(f"{site.id}  {site.kind}, {site.tool}, blame {site.blame}, sure {site.confidence:.2f}, {state}"))
        print(plain(f"    failed  {_short(site.evidence_text)}"))
        if hint is not None:
            print(plain(f"    hint    {' '.join(hint.text.split())}"))
    if args.list:
        num_kept = sum(site.is_kept for site, _ in listed)
        say(
            f"{len(listed)} sites, {num_kept} kept with a hint."
            " `--show ID` shows one, `--drop ID` strikes it out for good"
        )


def _plain_data(record: ErrorSite | Hint | None) -> dict[str, object] | None:
    from dataclasses import asdict

    return None if record is None else asdict(record)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_EXAMPLE else line[: _MAX_EXAMPLE - 1] + "…"


def _check_filters(args: argparse.Namespace) -> None:
    from composer_replication.errors import InputError, explain
    from composer_replication.sites import BLAMES

    for blame in args.blame or ():
        if blame not in BLAMES:
            raise InputError(explain("--blame", got=repr(blame), expected=f"one of {', '.join(BLAMES)}"))


def _show_table(run_dir: RunDir, every: Sequence[ErrorSite], args: argparse.Namespace) -> None:
    from composer_replication.cli.console import (
        print_json,
        say,
        show,
        table,
    )
    from composer_replication.sites.find import NO_FAILURE

    sites = [site for site in every if _is_asked_for(site, args)]
    counted = tabulate(sites)
    passed_over = Counter(site.reason for site in sites if site.kind == NO_FAILURE)
    check_kinds(args.kind or (), {site.kind for site in every})
    if args.json:
        print_json({"run": str(run_dir.root), "table": counted, "passed_over": dict(passed_over)})
        return
    columns = ("kind", "blame", "sites", "kept", "sure", "example", "id")
    rows = [_row(count) for count in counted]
    show(table("Error sites", columns, rows, caption=_CAPTION, shrinks="example"))
    if passed_over:
        show(table("Looked like an error, and is none", ("why", "times"), sorted(passed_over.items())))
    num_kept, number = sum(site.is_kept for site in sites), len(sites) - passed_over.total()
    scope = "" if len(sites) == len(every) else "of the kinds and blames asked for: "
    counted_in = f"{run_dir.path('sites')}: {scope}{number} failures, {num_kept} kept with a hint"
    say(f"{counted_in}. `crf sites RUN --list` shows them all, `--show ID` one")


def _show_rules(run_dir: RunDir, done: _SitesOfRun, args: argparse.Namespace) -> None:
    """How many sites are users' words, and where the rules are that they named."""
    from composer_replication.cli.console import say

    num_corrections = sum(site.kind == "user_corrected" and site.is_kept for site in done.sites)
    if num_corrections and not args.json:
        say(f"{num_corrections} of them are corrections in the user's own words")
    if done.conventions and not args.json:
        from composer_replication.runs.conventions import unread_lines

        kept_rules = [rule for rule in done.conventions if rule.is_kept]
        idle = sum(not rule.call_kinds for rule in kept_rules)
        rules = f"rules that users named: {len(done.conventions)}, kept: {len(kept_rules)}"
        rules += f", of which {idle} have no `for:` below them and are used nowhere" if idle else ""
        say(f"{run_dir.path('conventions')}: {rules}. Mark with an x what holds elsewhere, and run this again")
        if unread := unread_lines(run_dir):
            lines = ", ".join(map(str, unread[:_MAX_LINES])) + (" and more" if len(unread) > _MAX_LINES else "")
            say(
                f"{run_dir.path('conventions')}, lines {lines}: not read. A rule is `- [x] words` below `## project`; "
                "below it stands `  - for: git push`"
            )


def check_kinds(asked: Sequence[str], found: set[str]) -> None:
    """Refuse a kind that no rule and no site of the run has."""
    from composer_replication.errors import InputError, explain
    from composer_replication.sites import KINDS

    for kind in asked:
        if kind not in found and kind not in KINDS:
            fix = f"Kinds in this run: {', '.join(sorted(found))}"
            raise InputError(explain("--kind", got=repr(kind), expected="a kind of failure", fix=fix))


def _is_asked_for(site: ErrorSite, args: argparse.Namespace) -> bool:
    return (not args.kind or site.kind in args.kind) and (not args.blame or site.blame in args.blame)


def _row(count: _KindCount) -> tuple[object, ...]:
    confidence, example = f"{count.confidence:.2f}", _short(count.example)
    return count.kind, count.blame, count.number, count.num_kept, confidence, example, count.example_id


def _show_site(run_dir: RunDir, identity: str, *, as_json: bool) -> None:
    from composer_replication.cli.console import print_json
    from composer_replication.runs.files import read_site

    site, hint, conversation = read_site(run_dir, identity)
    if as_json:
        print_json({"site": site, "hint": hint})
        return
    print("\n".join(_site_lines(site, hint, conversation)))


def _site_lines(site: ErrorSite, hint: Hint | None, conversation: Conversation) -> list[str]:
    from composer_replication.action_text import action_text
    from composer_replication.cli.console import plain

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
        _cut(action_text(turn)),
        "",
        "--- what came back, evidence between >>> and <<<",
        _cut(marked),
    ]
    lines += ["", f"--- the hint ({hint.source}: {hint.template}, version {hint.version})" if hint else "--- no hint"]
    lines += [hint.text] if hint else []
    return [plain(line) for line in lines]


def _cut(text: str) -> str:
    half = _MAX_SHOWN // 2
    return (
        text
        if len(text) <= _MAX_SHOWN
        else f"{text[:half]}\n[... {len(text) - _MAX_SHOWN} characters ...]\n{text[-half:]}"
    )


# `crf sites`: every failure of a run, whose doing it was, and a hint for each that may be taught.

_WITH_WRITER = ("writer", "template", "raw_error")
_AS_SURE_AS_A_RULE = 0.7


@dataclass(frozen=True, slots=True)
class _KindCount:
    """One row of the table: failures of one kind that were one party's doing, with an example."""

    kind: str
    blame: str
    number: int
    num_kept: int
    confidence: float
    example: str
    example_id: str


class _SitesOfRun(NamedTuple):
    """Every site; what looked like a failure and is none is of kind `NO_FAILURE`. `hints` counts what a model wrote.

    `conventions` are the rules of `conventions.md`, with those that are new.
    """

    sites: list[ErrorSite]
    hints: Mapping[str, int]
    conventions: list[Convention]


def write_sites(
    section: SitesConfig, run: RunDir, *, no_scrub: bool = False, allowed: Iterable[str] = ()
) -> _SitesOfRun:
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
    rules = _UserRules(run, scrubber, section.min_confidence)
    rows = _with_hints(read_conversations(run), rules, read_tools(run), section.min_confidence, options)
    struck = struck_sites(run)
    rows = [(struck_out(site), None) if hint and site.id in struck else (site, hint) for site, hint in rows]
    drops = Counter(site.reason for site, _ in rows if site.kind == NO_FAILURE)
    conventions = add_conventions(run, rules.heard)
    if run.path(CONVENTIONS).exists():
        made_of.append(run.source(CONVENTIONS))  # as it is now: what its user changes later makes these sites old
    run.write_jsonl(
        "sites",
        (site_to_row(*row) for row in rows),
        schema=SITES_SCHEMA,
        version=SITES_VERSION,
        sources=made_of,
        counts=_counts(rows),
        drops=drops,
        settings={"min_confidence": section.min_confidence, "struck": sorted(struck), **_written_by(section, hints)},
    )
    return _SitesOfRun([site for site, _ in rows], {} if hints is None else hints.counts, conventions)


def _written_by(section: SitesConfig, hints: WrittenHints | None) -> dict[str, Any]:
    paid = {} if hints is None else {"writer_calls": sum(hints.counts.values()), "writer_usd": hints.paid}
    return {"writer": writer_in(section.writer), **paid}


def _counts(rows: Iterable[tuple[ErrorSite, Hint | None]]) -> Counter[str]:
    counts = Counter[str]()
    for site, hint in rows:
        counts.update(("sites", f"blame: {site.blame}") if site.kind != NO_FAILURE else ())
        counts.update((f"hint: {hint.source}",) if hint is not None else ())
    return counts


class _UserRules:
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
        call = find_call(site, conversation)
        words = None if call is None else self._kept.get((project_of(conversation), call_kind(call)))
        hint = None if words is None else hint_from_user_words(words, template="convention", scrubber=self._scrubber)
        if hint is None:
            return site, None
        reason = "refused, and a rule that the user keeps is about such calls"
        taught: dict[str, Any] = {"blame": "model", "is_kept": True, "reason": reason}
        return replace(site, confidence=_AS_SURE_AS_A_RULE, **taught), hint

    def hear(self, site: ErrorSite, conversation: Conversation) -> None:
        """The rule that a correction names, if it names one."""
        if site.kind != CORRECTED or not site.is_kept or conversation.id in self.held_out:
            return
        rule, call = convention_in(user_words(site, conversation)), find_call(site, conversation)
        if rule and call is not None:
            rule = rule if self._scrubber is None else self._scrubber.scope().text(rule)
            origin = (site.id, site.conversation_id)
            self.heard.append(Heard(project_of(conversation), rule, call_kind(call), *origin))


def _is_copied(site: ErrorSite, conversation: Conversation) -> bool:
    return any(turn.id == site.turn_id and turn.origin == "copied" for turn in conversation.turns)


def _with_hints(
    conversations: Iterable[Conversation],
    rules: _UserRules,
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
            write_hint, conversation=conversation, along=StateCursor(conversation), **tool_options, **options
        )
        second = {refusal.site.id: refusal.site for refusal in mine if refusal.site.is_kept}
        for failure in failures:
            site, hint = rules.applied(failure, conversation)
            rows.append((site, hint_of(site) if site.is_kept and hint is None else hint))
            rules.hear(site, conversation)
            hints_if_second |= {site.id: hint_of(second[site.id])} if site.id in second else {}
        rows += [(site, None) for site in passed_over]
        refusals += mine
    later = gates.repeated_refusals(refusals, held_out=rules.held_out)
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


def tabulate(sites: Iterable[ErrorSite]) -> list[_KindCount]:
    """Sites by kind and blame: those that may be taught first, the most frequent first among them."""
    groups: dict[tuple[str, str], list[ErrorSite]] = {}
    for site in sites:
        if site.kind == NO_FAILURE:
            continue
        groups.setdefault((site.kind, site.blame), []).append(site)
    table = [
        _KindCount(
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
