"""`crf replay RUN`: ask teachers what they would have done at each state, within a hard cap."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from composer_replication.cli.console import add_gate_arguments
from composer_replication.cli.options import add_config_arguments, add_short, config_of

if TYPE_CHECKING:
    from composer_replication.steps.replay import Replayed, ReplayPlan

HELP = "ask teachers what they would have done at each state, within a hard cap"
WHEN_INTERRUPTED = "answers that came are kept, and the same command asks for the rest"
_COUNTED_TWICE = {"not asked", "calls not sent"}  # rows of the record that the asker's own counts explain better

# Flags of earlier versions: the key that each is short for, and its value where none is typed.
_KNOWN_FLAGS: dict[str, tuple[str, object]] = {
    "--sites": ("states", "sites"),
    "--limit": ("limit", None),
    "--full": ("gate", "none"),
    "--gate": ("gate", None),
    "--threshold": ("threshold", None),
    "--in-order": ("order", "in_order"),
    "--concurrency": ("concurrency", None),
    "--max-tokens": ("max_tokens", None),
    "--max-history": ("max_history_tokens", None),
    "--timeout": ("timeout_s", None),
    "--no-tools": ("send_tools", False),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory with conversations in it")
    add_short(parser, "--teachers", key="replay.teachers", metavar="FILE")
    add_short(parser, "--max-usd", key="replay.max_usd", metavar="USD")
    text = "only states of turns that failed or were refused: those pairs are made of"
    add_short(parser, "--failed", key="replay.states", value="failed", help=text)
    parser.add_argument("--dry-run", action="store_true", help="say what it would cost, and send nothing")
    parser.add_argument("--go-on", action="store_true", help="send again after a teacher took more than its bound")
    add_config_arguments(parser, "replay")
    add_gate_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    for flag, (key, value) in _KNOWN_FLAGS.items():
        add_short(parser, flag, key=f"replay.{key}", value=value, hidden=True)


def run(args: argparse.Namespace) -> int:
    import asyncio

    from composer_replication.cli.console import say
    from composer_replication.cli.pages.progress import call_progress
    from composer_replication.runs import RunDir
    from composer_replication.steps.replay import ask, plan_replay, refuse_finds, refuse_small_cap

    section, run_dir = config_of(args).replay, RunDir.open(args.run)
    if args.no_scrub:
        say("crf replay: --no-scrub: nothing is looked at, and teachers see whatever the run holds")
    plan = plan_replay(section, run_dir, no_scrub=args.no_scrub, allowed=args.allow)
    _say_price(plan)
    refuse_small_cap(plan)
    refuse_finds(plan)
    if args.dry_run:
        if args.json:
            _print_plan(plan)
        return 0
    price = plan.price
    with call_progress(price.num_calls + price.num_cached, section.max_usd, quiet=args.json) as bar:
        done = asyncio.run(ask(plan, on_call=bar.on_call, on_meter=bar.on_meter, goes_on=args.go_on))
    _show(plan, done, as_json=args.json)
    has_failed = not done.num_answers and any(done.counts.get(name) for name in ("calls", "calls not sent"))
    return 1 if done.report.stopped or done.report.given_up or has_failed else 0


def _say_price(plan: ReplayPlan) -> None:
    from composer_replication.cli.console import say

    price, cap = plan.price, f"${plan.section.max_usd:g}"
    say(
        f"up to {price.num_calls:,} calls to send, {price.num_cached:,} answered before; if all are sent they cost "
        f"about ${price.low_usd:.4f} and at most ${price.high_usd:.4f}; ${price.spent_usd:.4f} of the cap of {cap} is "
        "spent"
    )
    if price.num_fitting < price.num_calls:
        say(f"the cap leaves room for about {price.num_fitting:,} of them; --max-usd raises it")


def _print_plan(plan: ReplayPlan) -> None:
    from dataclasses import asdict

    from composer_replication.cli.console import print_json

    summary = {"run": str(plan.run.root), "done": False, "states": len(plan.asked), "cap_usd": plan.section.max_usd}
    print_json({**summary, **asdict(plan.price)})


def _show(plan: ReplayPlan, done: Replayed, *, as_json: bool) -> None:
    from composer_replication.cli.console import print_json, say, show, table
    from composer_replication.teacher_replay.ask_and_retry import KEPT_BACK

    run_dir, report, counts = plan.run, done.report, dict(done.counts)
    if as_json:
        print_json({"run": str(run_dir.root), "calls": counts, "report": report})
        return
    num_calls = counts.get("calls", 0) + counts.get("calls not sent", 0)
    why = report.stopped or report.given_up
    rows = {**counts, **report.counts, **({"answers": done.num_answers} if why else {})}
    table_rows = sorted((what, number) for what, number in rows.items() if what not in _COUNTED_TWICE)
    show(table("Teacher calls, stopped early" if why else "Teacher calls", ("what", "number"), table_rows))
    unknown = f" and ${report.unknown_billed_usd:.4f} held for {report.num_unknown_billed} attempts that may be billed"
    say(f"spent ${report.spent_usd:.4f}{unknown if report.num_unknown_billed else ''}; cap ${plan.section.max_usd:g}")
    if kept_back := report.counts.get(KEPT_BACK):
        say(f"the cap kept {kept_back:,} calls from being sent; --max-usd raises it, and only they are asked then")
    if report.stopped:
        say(f"stopped: {report.stopped}. Look at it, then go on with --go-on")
    if report.given_up:
        say(f"stopped: {report.given_up}. {done.num_answers:,} answers are kept; the same command asks for the rest")
    pairs = "`crf pairs RUN` makes pairs of it"
    if num_calls and not done.num_answers:
        pairs = "no call has an answer, so there is nothing to make pairs of"
    elif why:
        pairs = f"{done.num_answers:,} of {num_calls:,} calls have an answer; pairs of those alone would be few"
    say(f"{run_dir.path('teacher_calls')}: {pairs}")
