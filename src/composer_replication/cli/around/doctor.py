"""`crf doctor`: what this machine has and lacks for the work, each line with what to do."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

HELP = "look at Python, packages, GPU, memory, disk and, where they are named, a model and an endpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="MODEL", help="look at this model's tokenizer and template, too")
    parser.add_argument(
        "--run", metavar="RUN", dest="run_dir", help="look at the disk of this folder; default: this one"
    )
    parser.add_argument("--base-url", metavar="URL", help="ask this OpenAI-compatible endpoint for its models")
    parser.add_argument("--api-key-env", metavar="NAME", help="the variable that holds the endpoint's key")
    parser.add_argument("--json", action="store_true", help="print the lines as JSON")


def run(args: argparse.Namespace) -> int:
    from composer_replication.cli.console import plain, print_json, say
    from composer_replication.use.doctor import examine

    folder = None if args.run_dir is None else Path(args.run_dir)
    with contextlib.redirect_stdout(sys.stderr):  # what libraries say while loading is not our output
        lines = list(examine(model=args.model, folder=folder, base_url=args.base_url, api_key_env=args.api_key_env))
    number = {status: sum(line.status == status for line in lines) for status in ("ok", "warn", "fail")}
    if args.json:
        print_json({"lines": [line._asdict() for line in lines], **number})
    else:
        width = max(len(line.name) for line in lines)
        for line in lines:
            print(plain(f"{line.status:<4}  {line.name:<{width}}  {line.found}"))
            if line.fix:
                print(plain(f"{'':<6}{'':<{width}}  -> {line.fix}"))
        say(f"{number['ok']} ok, {number['warn']} warnings, {number['fail']} failures")
    return 1 if number["fail"] else 0
