"""`crf demo`: the whole run on generated sessions and the embedded student, on this machine, in minutes."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "see all of it work: generated sessions, a tiny model, its training, a control, the evaluation and the report"
WHEN_INTERRUPTED = "what was made is kept, and the same command goes on from there"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("demo"), metavar="DIR", help="folder for logs and run; default demo"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    import time

    from composer_replication.cli.console import say
    from composer_replication.cli.pages.progress import duration
    from composer_replication.cli.pipeline.run import make
    from composer_replication.steps.demo import channels_that_did_not_run, demo_config, demo_logs, use_one_thread

    use_one_thread()
    began, logs = time.monotonic(), args.output / "logs"
    if not logs.is_dir():
        say(f"sessions of an agent that errs on purpose: played into {logs}")
    args.output.mkdir(parents=True, exist_ok=True)
    status = make(demo_config(demo_logs(logs)), args.output / "run", as_json=args.json)
    if status:
        return status
    dead = channels_that_did_not_run(args.output / "run")
    for name in dead:
        say(f"crf demo: channel {name}")
    say(f"took {duration(time.monotonic() - began)}; the same command again makes only what is missing")
    return 1 if dead else 0
