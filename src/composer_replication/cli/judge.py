"""`crf judge RUN`: predict before each logged call whether it will fail, and count how often this is right.

The rules are in `sites/judge/`. This verb applies them to every call of a run and writes no file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from composer_replication.cli.console import log, print_json, show, table
from composer_replication.runs import RunDir
from composer_replication.runs.files import read_conversations
from composer_replication.sites.judge import JudgedCall, Repository, Score, judged_calls
from composer_replication.sites.judge.judged_calls import earlier_sessions
from composer_replication.types import Conversation, ErrorSite

if TYPE_CHECKING:
    from composer_replication.sites.judge import RuleScore


_CAPTION = (
    "A prediction (fails) is right if the call failed in any way. Left out: calls that the\n"
    "user or the harness refused, and calls that report failed work, such as failing tests."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run directory with ingested conversations (`crf ingest`)")
    parser.add_argument(
        "--earlier",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="use what earlier sessions of the same project have shown; on by default",
    )
    parser.add_argument(
        "--repo",
        metavar="PATH",
        type=Path,
        help="a clone of the project, to look up files at each session's date; nothing is checked out or run",
    )
    parser.add_argument("--json", action="store_true", help="print the tables as JSON")


def run(args: argparse.Namespace) -> int:
    run_dir = RunDir.open(args.run)
    _show(run_dir, _judge_run(run_dir, earlier=args.earlier, repo=args.repo), as_json=args.json)
    return 0


def _show(run_dir: RunDir, score: Score, *, as_json: bool) -> None:
    if as_json:
        print_json({"run": str(run_dir.root), "in_all": _totals(score), "rules": score.rules, "kinds": score.kinds})
        return
    columns = ("says", "rule", "kind", "said", "right", "wrong", "precision")
    show(table("Predictions", columns, [_rule_row(rule_score) for rule_score in score.rules], caption=_CAPTION))
    kinds = [(kind_score.kind, kind_score.failures, kind_score.predicted) for kind_score in score.kinds]
    show(table("Failures", ("kind", "failures", "predicted"), kinds))
    precision, share, false = score.precision, score.share_predicted, score.false_per_thousand
    log(
        f"{score.num_calls} calls with a result, {score.num_left_out} left out; {score.num_failures} failures, "
        f"{score.num_predicted} predicted ({_percent(share)}); precision {_number(precision)}; {score.num_false} false "
        f"alarms, {_number(false)} per 1,000 good calls"
    )


def _rule_row(rule_score: RuleScore) -> tuple[object, ...]:
    """Return a row of the table for one rule.

    The prediction "ok" is right for calls that worked; "unknown" is neither right nor wrong.
    """
    worked = rule_score.said - rule_score.failed
    right, wrong = (worked, rule_score.failed) if rule_score.says == "ok" else (rule_score.failed, worked)
    if rule_score.says == "unknown":
        return rule_score.says, rule_score.rule, rule_score.kind, rule_score.said, "", "", ""
    return (
        rule_score.says,
        rule_score.rule,
        rule_score.kind,
        rule_score.said,
        right,
        wrong,
        f"{right / rule_score.said:.3f}",
    )


def _totals(score: Score) -> dict[str, object]:
    return {
        "calls": score.num_calls,
        "left_out": score.num_left_out,
        "good": score.num_good,
        "failures": score.num_failures,
        "predicted": score.num_predicted,
        "false_alarms": score.num_false,
        "precision": score.precision,
        "share_predicted": score.share_predicted,
        "false_alarms_per_1000_good_calls": score.false_per_thousand,
    }


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def _judge_run(run: RunDir, *, earlier: bool = True, repo: Path | None = None) -> Score:
    """Predict the outcome of every call in a run, and return how often the predictions were right.

    Args:
        run: The run.
        earlier: Also use what earlier sessions of the same project have shown.
        repo: A clone of the project, to look up the files as of each session's date.
    """
    calls = judged_sessions(run, earlier=earlier, repository=None if repo is None else Repository(repo))
    return Score(judged for _, judged in calls)


def judged_sessions(
    run: RunDir,
    *,
    earlier: bool = True,
    repository: Repository | None = None,
    sites: Mapping[str, Mapping[str, ErrorSite]] | None = None,
) -> Iterator[tuple[Conversation, JudgedCall]]:
    """Yield every call of every conversation with its predicted and its actual outcome.

    With `earlier`, the conversations are read twice: the first time to collect what each session has shown. `sites`
    holds the failures by conversation and call, if they have already been classified.
    """
    sessions = earlier_sessions(read_conversations(run)) if earlier else None
    for conversation in read_conversations(run):
        calls = judged_calls(
            conversation,
            sites=None if sites is None else sites.get(conversation.id, {}),
            project=None if sessions is None else sessions.before(conversation),
            checkout=None if repository is None else repository.before(conversation),
        )
        yield from ((conversation, judged) for judged in calls)
