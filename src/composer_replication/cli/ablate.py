"""`crf ablate --config arms.toml`: train several arms with several seeds at equal budgets, and compare them.

The plan, its jobs and the results page are in `evaluation/ablation/`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.cli.console import log, print_json, refuse_unread_options, show, table

if TYPE_CHECKING:
    from composer_replication.evaluation.ablation.jobs import AblationResults, JobCallbacks, JobKey
    from composer_replication.evaluation.ablation.plan import AblationPlan

WHEN_INTERRUPTED = "finished jobs are saved; the same command resumes the others from their last checkpoint"
_SECTIONS = ("loss", "render", "train", "evaluation")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="arms.toml: question, arms, predictions, budget")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="folder for results; default: the file's")
    parser.add_argument("--run", metavar="RUN", help="the run whose sessions to train on; overrides ablate.run")
    parser.add_argument("--only", type=_parse_names, default=(), metavar="ARM,ARM", help="only these arms")
    parser.add_argument("--seeds", type=_parse_numbers, default=(), metavar="1,2", help="only these seeds of the plan")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="parallel jobs; default 1")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=C",
        help="set an option of every arm, such as train.model, overriding the file; may be repeated",
    )
    parser.add_argument("--table", action="store_true", help="rebuild table and plots from results.json")
    parser.add_argument("--dry-run", action="store_true", help="print which jobs would run, and write nothing")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(sections=_SECTIONS)


def _parse_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _parse_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in _parse_names(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected whole numbers, such as 1,2") from None


def run(args: argparse.Namespace) -> int:
    from composer_replication.errors import InputError, explain
    from composer_replication.evaluation.ablation.jobs import check_ready, read_results, run_jobs, select_jobs
    from composer_replication.evaluation.ablation.plan import read_plan

    folder = args.output or (args.config.parent if args.config else None)
    config: Path | None = args.config
    if folder is None or (config is None and not args.table):
        expected = "a plan (`crf ablate --config arms.toml`), or with --table a folder (-o DIR)"
        raise InputError(explain("--config", got="none", expected=expected))
    if args.workers < 1:
        raise InputError(explain("--workers", got=args.workers, expected="1 or more"))
    if args.table or config is None:
        if args.only or args.seeds or args.run or args.set:
            expected = "no --only, --seeds, --run or --set, because the table covers all of results.json"
            raise InputError(explain("--table", got="other options with it", expected=expected))
        return _finish(read_results(folder), folder, as_json=args.json)
    if not config.is_file():
        fix = "docs/guides/ablate.md has an example."
        raise InputError(
            explain("--config", got=f"{config}, which is not a file", expected="the path to an arms.toml", fix=fix)
        )
    refuse_unread_options(args)
    plan = read_plan(config, args.set, run=args.run)
    jobs = select_jobs(plan, only=args.only, seeds=args.seeds)
    if args.dry_run:
        check_ready(plan, folder)
        return _print_plan(plan, folder, jobs)
    callbacks = _console_callbacks(folder)
    return _finish(run_jobs(plan, folder, jobs, workers=args.workers, callbacks=callbacks), folder, as_json=args.json)


def _console_callbacks(folder: Path) -> JobCallbacks:
    from composer_replication.cli.progress import format_duration
    from composer_replication.evaluation.ablation.job import JOB
    from composer_replication.evaluation.ablation.jobs import JobCallbacks

    def failed(failure: Any) -> None:
        log(f"{failure.arm}, seed {failure.seed}: failed; the others continue. Its last lines:")
        for line in failure.last_lines:
            log(f"    {line}")

    def begins(job_key: JobKey, done: int, total: int) -> None:
        how = "resumes" if (_job_folder(folder, job_key) / JOB).is_file() else "starts"
        log(f"{job_key.arm}, seed {job_key.seed}: {how} ({done} of {total} done)")

    return JobCallbacks(
        begins=begins,
        done=lambda job, result: log(
            f"{job.arm}, seed {job.seed}: done in {format_duration(result.spent.seconds)},"
            f" {result.spent.steps:,} steps, {result.spent.rollouts:,} rollouts"
        ),
        failed=failed,
    )


def _print_plan(plan: AblationPlan, folder: Path, job_keys: list[JobKey]) -> int:
    from composer_replication.evaluation.ablation.job import RESULT

    rows = [
        (job.arm, job.seed, "done" if _job_folder(folder, job).joinpath(RESULT).is_file() else "would run")
        for job in job_keys
    ]
    arms = [(name, arm.about, arm.predict, arm.expect or "") for name, arm in plan.arms.items()]
    show(
        table("Arms", ("arm", "what", "predicted", "in a word"), arms),
        table("Jobs", ("arm", "seed", "state"), rows),
    )
    return 0


def _job_folder(folder: Path, job_key: JobKey) -> Path:
    return folder / "jobs" / job_key.arm / str(job_key.seed)


def _finish(results: AblationResults, folder: Path, *, as_json: bool) -> int:
    """Write and print the results, and return the exit status, which is 1 if jobs have failed or budgets differ."""
    from composer_replication.evaluation.ablation.job import stored_path
    from composer_replication.evaluation.ablation.jobs import RESULTS, find_breaches
    from composer_replication.evaluation.ablation.page import as_json as page_as_json
    from composer_replication.evaluation.ablation.page import write_page

    page = write_page(results, folder)
    if as_json:
        print_json(page_as_json(results))
    else:
        show(*_tables(results))
    breaches = find_breaches(results)
    for arm, sentences in breaches.items():
        for sentence in sentences:
            log(f"unequal budgets: {arm}, {sentence}")
    for failure in results.failed:
        log(f"failed: {failure.arm}, seed {failure.seed}")
    source = stored_path(folder / RESULTS).name
    log(f"{page}: all results; rebuild it from {source} with `crf ablate --table -o {folder}`")
    return 1 if breaches or results.failed else 0


def _tables(results: AblationResults) -> list[Any]:
    from composer_replication.evaluation.ablation.page import AGAINST, against_rows, compute_figures, figure_rows

    figures = compute_figures(results, results.frozen.metrics)
    primary = results.frozen.experiment.primary
    primary_rows = list(figure_rows(results, [figure for figure in figures if figure.metric == primary]))
    tables = [table(results.frozen.experiment.question, ("figure", *results.frozen.arms), primary_rows)]
    rows = list(against_rows(results, figures, [primary]))
    return [*tables, table("Against each other", AGAINST, rows)] if rows else tables
