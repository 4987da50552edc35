"""Compare the judge's verdicts with what happened in the sessions of a run, half of which are held out.

Failures are those in the run's own `sites.jsonl`, or those of an older run on the same logs. The rules were developed
on half 0; half 1 is for the final measurement. The hash of a session's id decides its half.

python benchmarks/judge.py RUN                      # half 0: the session alone, then with earlier sessions
python benchmarks/judge.py RUN --repo CLONE         # and with a checkout at each session's date
python benchmarks/judge.py RUN --repo CLONE --held-out --classed OLD_RUN
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections import defaultdict
from pathlib import Path

from composer_replication.cli.judge import judged_sessions
from composer_replication.runs import RunDir
from composer_replication.runs.files import read_sites
from composer_replication.sites.find import NO_FAILURE
from composer_replication.sites.judge import Repository, Score
from composer_replication.types import Conversation, ErrorSite

GOALS = {"precision": 0.93, "with earlier sessions": 0.45, "with a checkout": 0.60, "false alarms": 0.6}
WHOLE_FILE_RULES = frozenset({"no_match", "ambiguous", "edit_noop"})


def half(conversation: Conversation) -> int:
    session = conversation.session_id or conversation.id
    return int(hashlib.sha256(f"half:{session}".encode()).hexdigest(), 16) % 2


def failures(run: RunDir) -> dict[str, dict[str, ErrorSite]]:
    """Return the failures of a run by conversation and call."""
    found: dict[str, dict[str, ErrorSite]] = defaultdict(dict)
    for site, _ in read_sites(run):
        if site.kind != NO_FAILURE and site.call_id:
            found[site.conversation_id][site.call_id] = site
    return found


def scores(run: RunDir, classed: RunDir, *, earlier: bool, repository: Repository | None) -> tuple[Score, Score]:
    both = (Score(), Score())
    for conversation, judged in judged_sessions(run, earlier=earlier, repository=repository, sites=failures(classed)):
        both[half(conversation)].add(judged)
    return both


def print_score(score: Score, share_goal: float | None) -> None:
    print("| says | rule | kind | said | failed | of that kind | share |\n|---|---|---|---|---|---|---|")
    for row in score.rules:
        if row.says in ("fails", "risky"):
            counts = f"{row.said} | {row.failed} | {row.num_of_kind} | {row.share_failed:.3f}"
            print(f"| {row.says} | {row.rule} | {row.kind} | {counts} |")
    whole = sum(row.said - row.failed for row in score.rules if row.says == "fails" and row.rule in WHOLE_FILE_RULES)
    kinds = ", ".join(f"{kind.kind} {kind.predicted} of {kind.failures}" for kind in score.kinds)
    goal = "" if share_goal is None else f" (goal {share_goal})"
    print(f"\npredicted {score.num_predicted} of {score.num_failures} failures: {score.share_predicted or 0:.3f}{goal}")
    print(f"precision {score.precision or 0:.3f} (goal {GOALS['precision']})")
    false = score.false_per_thousand or 0
    print(f"false alarms {score.num_false}, {false:.2f} per 1,000 good calls (goal {GOALS['false alarms']})")
    print(f"false alarms of edit rules on wholly shown files: {whole} (goal 0)\nby kind: {kinds}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="The judge against what really happened.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--repo", type=Path)
    parser.add_argument("--held-out", action="store_true", help="print half 1 too: once, at the end")
    parser.add_argument("--classed", type=Path, metavar="RUN", help="take failures as this run's sites class them")
    args = parser.parse_args()
    run = RunDir.open(args.run)
    classed = run if args.classed is None else RunDir.open(args.classed)
    knows: list[tuple[str, bool, Repository | None, float | None]] = [
        ("the session alone", False, None, None),
        ("with earlier sessions", True, None, GOALS["with earlier sessions"]),
    ]
    if args.repo is not None:
        knows.append(("with a checkout", True, Repository(args.repo), GOALS["with a checkout"]))
    for name, earlier, repository, goal in knows:
        started = time.process_time()
        both = scores(run, classed, earlier=earlier, repository=repository)
        for number, score in enumerate(both[: 2 if args.held_out else 1]):
            print(f"### Half {number}, {name}: {score.num_calls} calls, {time.process_time() - started:.0f} s\n")
            print_score(score, goal)


if __name__ == "__main__":
    main()
