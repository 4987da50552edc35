"""`crf run PATH… --model M`: from logs to an adapter, an evaluation on held-out sessions and a report."""

from __future__ import annotations

import argparse
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.cli.main import INTERRUPTED
from composer_replication.cli.options import add_config_arguments, add_short, overrides_of, refuse_unread

if TYPE_CHECKING:
    from composer_replication.config import CrfConfig
    from composer_replication.steps.dry_run import RunPlan
    from composer_replication.steps.run import Listener, RunResult

HELP = "all of it: from logs to an adapter, its evaluation and a report; a second call goes on where one was stopped"
WHEN_INTERRUPTED = "what was made is kept, and the same command goes on from there"
SECTIONS = ("ingest", "split", "sites", "replay", "pairs", "loss", "render", "train", "evaluation", "run")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "logs, project folders, or all of ~/.claude/projects; or a run, to go on with it as it began"
    add_short(parser, "paths", key="ingest.paths", nargs="*", metavar="PATH", help=text)
    text = "folder or hub name of the start weights; student is the tiny model that comes with the package"
    add_short(parser, "--model", key="train.model", metavar="MODEL", help=text)
    add_short(parser, "--advisers", key="replay.teachers", metavar="FILE")
    text = "train in this environment (mode grpo) rather than on the sessions alone, as module:callable"
    add_short(parser, "--env", key="train.grpo.environment", metavar="NAME", help=text)
    parser.add_argument("-o", "--output", metavar="RUN", help="run directory; default run")
    add_short(parser, "--control", key="run.control", value=True)
    parser.add_argument("--dry-run", action="store_true", help="say what it would do, cost and take; train nothing")
    parser.add_argument("--starter", action="store_true", help="print a config to start from, and do no more")
    add_config_arguments(parser, *SECTIONS)
    parser.add_argument("--json", action="store_true", help="print the result, or the plan, as JSON")


def run(args: argparse.Namespace) -> int:
    from composer_replication.steps.running.options import check_given

    if args.starter:
        from composer_replication.config.presets import starter_text

        print(starter_text(), end="")
        return 0
    output = _output(args)
    config = config_from(args, output)
    check_given(config, output)
    if args.dry_run:
        from composer_replication.steps.dry_run import plan_run

        with quiet():
            plan = plan_run(config, output)
        _show_plan(plan, as_json=args.json)
        return 0
    return make(config, output, as_json=args.json, is_remembered=True)


def _output(args: argparse.Namespace) -> Path:
    """The run's folder; a run in the place of the logs is the run to go on with."""
    from composer_replication.errors import InputError, explain
    from composer_replication.runs.directory import MARKER

    paths = args.short.get("ingest.paths", [])
    runs = [path for path in paths if (Path(path) / MARKER).is_file()]
    if runs and (len(paths) > 1 or args.output is not None):
        expected = "logs, or a run alone to go on with: `crf run RUN`"
        raise InputError(explain("PATH", got=f"the run {runs[0]} among others, or with -o", expected=expected))
    if runs:
        args.short = {key: value for key, value in args.short.items() if key != "ingest.paths"}
    return Path(runs[0] if runs else args.output or "run")


def config_from(args: argparse.Namespace, output: Path) -> CrfConfig:
    """Preset, file and flags; where no file is named, what the run was told before. An environment means rollouts."""
    from composer_replication.cli.console import say
    from composer_replication.config.presets import load_with_preset
    from composer_replication.steps.running.options import reused, settled, told_before, without_lost_logs

    flags = overrides_of(args)
    if "train.grpo.environment" in args.short:
        flags.insert(0, "train.mode=grpo")
    before = None if args.config is not None else told_before(output)
    config = settled(load_with_preset(args.config or before, flags))
    refuse_unread(args)
    if before is not None and (same := reused(before, [flag.partition("=")[0].strip() for flag in flags])):
        say(f"as {before} says from before: {', '.join(same)}")
    if before is not None and "ingest.paths" not in args.short:
        config, lost = without_lost_logs(config)
        for path in lost:
            say(f"{path} is gone: what was read of it before stays")
    return config


def make(config: CrfConfig, output: Path, *, as_json: bool, is_remembered: bool = False) -> int:
    """Make the steps, and print what came of it."""
    from composer_replication.cli.console import plain, print_json, say
    from composer_replication.cli.pages.step_words import result_lines
    from composer_replication.steps.ingest import run_directory
    from composer_replication.steps.run import run_steps

    with quiet(), run_directory(output) as run_dir:
        result = run_steps(config, run_dir, listener(), is_remembered=is_remembered)
    if result.stopped_by:
        say(f"{result.stopped_by}: stopped; what is done is saved, and `crf run {output}` goes on")
        return INTERRUPTED
    assert result.evaluation is not None
    assert result.report is not None
    if as_json:
        print_json(_as_json(result))
        return 0
    for line in result_lines(result.evaluation, result.report):
        print(plain(line))
    return 0


@contextmanager
def quiet() -> Generator[None]:
    """What libraries say is not our output."""
    import contextlib
    import sys

    from composer_replication.cli.pipeline.train import quiet_libraries

    with contextlib.redirect_stdout(sys.stderr):
        quiet_libraries()
        yield


def listener() -> Listener:
    """Says which step comes and why, what came of it, and how far it is."""
    import time

    from composer_replication.cli.console import say
    from composer_replication.cli.pages.progress import byte_progress, duration, training_progress
    from composer_replication.cli.pages.step_words import words_of
    from composer_replication.steps.run import Listener

    began: list[float] = [0.0]

    def begin(name: str, why: str) -> None:
        began[0] = time.monotonic()
        say(f"{name}: {why}")

    def done(name: str, outcome: Any) -> None:
        say(f"{name}: {words_of(name, outcome)} ({duration(time.monotonic() - began[0])})")

    def reading() -> Any:
        return byte_progress("reading sessions", quiet=False)

    return Listener(begin=begin, done=done, say=say, reading=reading, training=training_progress)


def _as_json(result: RunResult) -> dict[str, Any]:
    steps = [outcome._asdict() for outcome in result.outcomes]
    return {"steps": steps, "report": str(result.report), "evaluation": result.evaluation}


def _show_plan(plan: RunPlan, *, as_json: bool) -> None:
    from dataclasses import asdict

    from composer_replication.cli.console import print_json, say, show, table
    from composer_replication.cli.pages.progress import duration

    if as_json:
        memory = plan.training.memory
        fits = None if memory is None else {"peak": memory.peak, "available": memory.available, "fits": memory.fits}
        price = None if plan.price is None else asdict(plan.price)
        time = None if plan.time is None else [part._asdict() for part in plan.time]
        seconds = None if plan.time is None else sum(part.seconds for part in plan.time)
        estimates = {"seconds": seconds, "time": time, "memory": fits, "price": price, "writer_usd": plan.writer_usd}
        estimates |= {"remarks": list(plan.remarks)}
        print_json(
            {"steps": [step._asdict() for step in plan.steps], **estimates, "counts": dict(plan.training.counts)}
        )
        return
    rows = [(step.name, "make" if step.why else "keep", step.why or "as it should be") for step in plan.steps]
    show(table("Steps", ("step", "would", "why"), rows))
    for remark in plan.remarks:
        say(remark)
    if plan.price is not None:
        price = plan.price
        say(f"price: {price.num_calls:,} calls, about ${price.low_usd:.4f} and at most ${price.high_usd:.4f}")
    if plan.writer_usd is not None:
        say(f"price: at most ${plan.writer_usd:g} (sites.max_usd) for the writer of hints")
    elif plan.price is None:
        say("price: nothing; no adviser is named")
    if plan.time:
        rows = [(part.name, duration(part.seconds), part.basis) for part in plan.time]
        total = (
            "all of it",
            duration(sum(part.seconds for part in plan.time)),
            "by the speed of this machine right now",
        )
        show(table("Time, roughly", ("part", "about", "for"), [*rows, total], last_is_total=True))
    if plan.training.memory is not None:
        say(f"memory of a step:\n{plan.training.memory}")
