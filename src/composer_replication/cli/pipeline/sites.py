"""`crf sites RUN`: which turns erred, whose doing it was, and the hint for each that may be taught."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from composer_replication.cli.console import add_gate_arguments
from composer_replication.cli.options import add_config_arguments, add_short, config_of

if TYPE_CHECKING:
    from composer_replication.runs import RunDir
    from composer_replication.steps.sites import KindCount, SitesOfRun
    from composer_replication.types import Conversation, ErrorSite, Hint

HELP = "find the turns that erred, whose fault it was, and what to say about it"
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
    from composer_replication.steps.sites import write_sites

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
    from composer_replication.runs.sites import strike_sites

    for site in strike_sites(run_dir, identities, what="--drop") if identities else ():
        say(f"struck out: site {site.id} ({site.kind}); `crf hints RUN --keep {site.id}` takes it back")


def _list(run_dir: RunDir, args: argparse.Namespace) -> None:
    """Every site in the order of the sessions, for somebody who looks through them; after a --drop only if asked."""
    from composer_replication.cli.console import plain, print_json, say
    from composer_replication.runs.sites import read_sites
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
    from composer_replication.cli.console import print_json, say, show, table
    from composer_replication.sites.find import NO_FAILURE
    from composer_replication.steps.sites import tabulate

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


def _show_rules(run_dir: RunDir, done: SitesOfRun, args: argparse.Namespace) -> None:
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


def _row(count: KindCount) -> tuple[object, ...]:
    confidence, example = f"{count.confidence:.2f}", _short(count.example)
    return count.kind, count.blame, count.number, count.num_kept, confidence, example, count.example_id


def _show_site(run_dir: RunDir, identity: str, *, as_json: bool) -> None:
    from composer_replication.cli.console import print_json
    from composer_replication.runs.sites import read_site

    site, hint, conversation = read_site(run_dir, identity)
    if as_json:
        print_json({"site": site, "hint": hint})
        return
    print("\n".join(_site_lines(site, hint, conversation)))


def _site_lines(site: ErrorSite, hint: Hint | None, conversation: Conversation) -> list[str]:
    from composer_replication.cli.console import plain
    from composer_replication.ingestion.states import action_text

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
