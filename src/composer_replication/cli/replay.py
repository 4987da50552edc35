"""`crf replay RUN`: ask teachers what they would have done at each state, within a hard cap."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.cli.console import add_gate_arguments

if TYPE_CHECKING:
    from composer_replication.runs import RunDir
    from composer_replication.teacher_replay.replay import ReplayOptions, ReplayReport
    from composer_replication.teacher_replay.run_replay import Which

HELP = "ask teachers what they would have done at each state, within a hard cap"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory with conversations in it")
    parser.add_argument(
        "--teachers", required=True, metavar="FILE", help="teachers with prices: `crf teachers -o FILE`"
    )
    parser.add_argument(
        "--max-usd", type=float, default=5.0, metavar="USD", help="hard cap over all restarts; default 5"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what it would cost, and send nothing")
    parser.add_argument("--sites", action="store_true", help="only states of turns that erred and may be taught")
    parser.add_argument(
        "--failed",
        action="store_true",
        help="only states of turns that failed or were refused: those pairs are made of",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N states")
    parser.add_argument("--full", action="store_true", help="ask every teacher, also where no vote can change a pair")
    parser.add_argument(
        "--gate", choices=["exact", "agree"], default="exact", help="agree: stop where the first agrees"
    )
    parser.add_argument("--threshold", type=int, default=2, metavar="N", help="votes that make a consensus; default 2")
    parser.add_argument(
        "--in-order",
        action="store_true",
        help="states of a session one after the other: slower, for some prompt caches",
    )
    parser.add_argument("--concurrency", type=int, default=64, metavar="N", help="requests at a time; default 64")
    parser.add_argument("--max-tokens", type=int, default=1024, metavar="N", help="longest answer; default 1024")
    parser.add_argument("--max-history", type=int, metavar="N", help="tokens of history sent; oldest turns go first")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="seconds to wait for an answer")
    parser.add_argument("--no-tools", action="store_true", help="do not send the tools' schemas")
    parser.add_argument("--go-on", action="store_true", help="send again after a teacher took more than its bound")
    add_gate_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(args: argparse.Namespace) -> int:
    import asyncio
    import os

    from composer_replication.cli.replay_progress import call_progress
    from composer_replication.runs import RunDir
    from composer_replication.teacher_replay.money import check_cap
    from composer_replication.teacher_replay.run_replay import replay_run
    from composer_replication.teacher_replay.store import TeacherStore
    from composer_replication.teacher_replay.teachers import read_teachers

    check_cap(args.max_usd)
    run_dir = RunDir.open(args.run)
    specs = _read_specs(Path(args.teachers))
    options = _options(args, run_dir)
    teachers = read_teachers(specs, environment=os.environ)
    which = _which(args)
    if args.go_on:
        with TeacherStore(options.cache) as store:
            store.resume_after_overrun()
    num_calls = _say_price(run_dir, which, teachers, options, args)
    if args.dry_run:
        return 0
    with call_progress(num_calls, args.max_usd, quiet=args.json) as bar:
        report = asyncio.run(
            replay_run(
                run_dir,
                which,
                specs,
                teachers,
                max_total_usd=args.max_usd,
                api_key=None,
                options=options,
                on_call=bar.on_call,
                on_meter=bar.on_meter,
            )
        )
    _show(run_dir, report, args)
    counts = run_dir.meta("teacher_calls").counts
    has_failed = counts.get("calls", 0) == counts.get("calls with an error", 0) > 0
    return 1 if report.stopped or report.given_up or has_failed else 0


def _read_specs(path: Path) -> list[dict[str, Any]]:
    from composer_replication.canonical_json import decode
    from composer_replication.errors import InputError, explain

    def refused(got: object) -> InputError:
        expected, fix = "a JSON list of teachers, each an object", "`crf teachers -o teachers.json` writes one."
        return InputError(explain(f"--teachers {path}", got=got, expected=expected, fix=fix))

    try:
        specs: Any = decode(path.read_bytes())
    except (OSError, ValueError) as error:
        raise refused(error) from error
    if not isinstance(specs, list):
        raise refused(f"JSON, but no list: {type(specs).__name__}")
    for number, each in enumerate(specs, start=1):
        if not isinstance(each, dict):
            raise refused(f"a list whose item {number} is {each!r:.60}")
    return specs


def _which(args: argparse.Namespace) -> Which:
    from composer_replication.teacher_replay.run_replay import Which

    return Which(
        only_sites=args.sites,
        only_failed=args.failed,
        limit=args.limit,
        max_history_tokens=args.max_history,
        send_tools=not args.no_tools,
    )


def _options(args: argparse.Namespace, run_dir: RunDir) -> ReplayOptions:
    import os

    from composer_replication.cli.console import say
    from composer_replication.ingestion.last_gate import gate_of
    from composer_replication.teacher_replay.replay import ReplayOptions
    from composer_replication.teacher_replay.requests import Settings

    if args.no_scrub:
        say("crf replay: --no-scrub: nothing is looked at, and teachers see whatever the run holds")
    return ReplayOptions(
        cache=run_dir.path("teacher_cache"),
        max_concurrency=args.concurrency,
        gate=None if args.full else args.gate,
        order="in_order" if args.in_order else "longest_first",
        agreement_threshold=args.threshold,
        timeout_s=args.timeout,
        settings=Settings(max_tokens=args.max_tokens),
        last_gate=gate_of(run_dir, os.environ, no_scrub=args.no_scrub, allowed=args.allow),
    )


def _say_price(
    run_dir: RunDir, which: Which, teachers: list[Any], options: ReplayOptions, args: argparse.Namespace
) -> int:
    """The price range, and the last look at what would be sent: before a cent is spent."""
    from composer_replication.cli.console import say
    from composer_replication.ingestion.last_gate import refusal
    from composer_replication.teacher_replay.run_replay import estimate, run_states
    from composer_replication.teacher_replay.store import TeacherStore

    with TeacherStore(options.cache) as store:
        found = estimate(run_states(run_dir, which), teachers, options, store, options.last_gate)
        meter = store.meter()
    spent = (meter.spent + meter.unknown) / 1e9
    say(
        f"{found.num_calls:,} calls to send, {found.num_cached:,} answered before; asking everyone once costs about "
        f"${found.low_usd:.4f} and at most ${found.high_usd:.4f}; ${spent:.4f} of the cap of ${args.max_usd:g} is spent"
    )
    if found.finds:
        raise refusal("requests to teachers", found.finds)
    return found.num_calls + found.num_cached


def _show(run_dir: RunDir, report: ReplayReport, args: argparse.Namespace) -> None:
    from composer_replication.cli.console import print_json, say, show, table

    counts = dict(run_dir.meta("teacher_calls").counts)
    if args.json:
        print_json({"run": str(run_dir.root), "calls": counts, "report": report})
        return
    num_calls = counts.get("calls", 0)
    num_answers = num_calls - counts.get("calls with an error", 0)
    why = report.stopped or report.given_up
    rows = sorted({**counts, **report.counts, **({"answers": num_answers} if why else {})}.items())
    show(table("Teacher calls, stopped early" if why else "Teacher calls", ("what", "number"), rows))
    unknown = f" and ${report.unknown_billed_usd:.4f} held for {report.num_unknown_billed} attempts that may be billed"
    say(f"spent ${report.spent_usd:.4f}{unknown if report.num_unknown_billed else ''}; cap ${args.max_usd:g}")
    if refused := report.counts.get("refused"):
        say(f"the cap kept {refused:,} calls from being sent; --max-usd raises it, and only they are asked then")
    if report.stopped:
        say(f"stopped: {report.stopped}. Look at it, then go on with --go-on")
    if report.given_up:
        say(f"stopped: {report.given_up}. {num_answers:,} answers are kept; the same command asks for the rest")
    pairs = "`crf pairs RUN` makes pairs of it"
    if num_calls and not num_answers:
        pairs = "no call has an answer, so there is nothing to make pairs of"
    elif why:
        pairs = f"{num_answers:,} of {num_calls:,} calls have an answer; pairs of those alone would be few"
    say(f"{run_dir.path('teacher_calls')}: {pairs}")
