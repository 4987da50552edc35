"""`crf forget SESSION…`: a session and everything made from it out of a run, for good."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_replication.runs import RunDir
    from composer_replication.steps.around.forget import Forgetting

HELP = "remove sessions, and everything derived from them, from a run; they do not come back"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sessions", nargs="+", metavar="SESSION", help="id of a session or conversation, or its first 6 characters"
    )
    parser.add_argument("--run", default=".", metavar="RUN", dest="run_dir", help="run directory; default: this folder")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--dry-run", action="store_true", help="only say what would go")
    parser.add_argument(
        "--discard-answers", action="store_true", help="also throw away paid answers that no session is known to own"
    )
    parser.add_argument("--json", action="store_true", help="print what went as JSON")


def run(args: argparse.Namespace) -> int:
    from composer_replication.cli.console import is_terminal, say
    from composer_replication.runs import RunDir
    from composer_replication.steps.around.forget import forget, plan_forgetting

    run_dir = RunDir.open(args.run_dir)
    plan = plan_forgetting(run_dir, args.sessions)
    if args.dry_run:
        _show(plan, run_dir, as_json=args.json, done=False)
        return 0
    if not args.yes:
        _show(plan, run_dir, as_json=False, done=False, to_stderr=True)
        if not is_terminal(sys.stdin):
            say("crf forget: nothing was removed. Say --yes to remove it")
            return 1
        print("Remove all this? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            say("Nothing was removed")
            return 1
    forgotten = forget(run_dir, args.sessions, discard_answers=args.discard_answers)
    _show(forgotten, run_dir, as_json=args.json, done=True)
    return 0


def _show(plan: Forgetting, run_dir: RunDir, *, as_json: bool, done: bool, to_stderr: bool = False) -> None:
    from dataclasses import asdict

    from composer_replication.cli.console import plain, print_json

    if as_json:
        print_json({"run": str(run_dir.root), "done": done, **asdict(plan)})
        return
    verb = "Removed" if done else "Would remove"
    lines = [
        f"{verb} from the run, conversations: {len(plan.conversations)}",
        *(f"  {plain(conversation)}" for conversation in plan.conversations),
    ]
    lines += [f"{verb} their rows from {run_dir.path(name).name}" for name in plan.filtered]
    lines += [f"{verb} {run_dir.path(name).name}, made from them" for name in plan.deleted]
    if plan.num_conventions:
        lines.append(f"{verb} from conventions.md, rules that were said nowhere else: {plan.num_conventions}")
    if plan.answers is not None:
        of_nobody = f" and {plan.answers.num_unowned:,} of nobody known" if plan.answers.num_unowned else ""
        lines.append(
            f"{verb} {plan.answers.num_gone:,} paid answers of theirs{of_nobody} from teacher_cache.sqlite; "
            f"{plan.answers.num_kept:,} of other sessions stay, and what was spent stays counted"
        )
    for artefact in plan.elsewhere:
        may = "have learnt from" if artefact.what in ("checkpoints", "trained weights", "exported weights") else "hold"
        not_removed = "Not removed" if done else "Would not remove"
        lines.append(f"{not_removed}: {plain(artefact.path)} ({artefact.what}) may {may} them")
    print("\n".join(lines), file=sys.stderr if to_stderr else sys.stdout)
