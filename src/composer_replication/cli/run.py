"""`crf run PATH... --model M`: turn logs into an adapter, an evaluation on held-out sessions and a report.

run              parse the arguments, then plan or run the steps of `pipeline.py`
run_pipeline     run the steps and print the verdict
_plan_run        for `--dry-run`: find which steps would run and why, and their price, time and memory
_estimate_times  estimate how long training and evaluation would take on this machine
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from composer_replication.cli.console import (
    add_config_arguments,
    add_config_flag,
    format_count,
    log,
    overrides_from_args,
    plain,
    print_json,
    quiet_libraries,
    refuse_unread_options,
    show,
    table,
)
from composer_replication.cli.main import INTERRUPTED
from composer_replication.cli.pipeline import (
    STEPS,
    UP_TO_DATE,
    arm_configs,
    record_steps,
    resolve_for_training,
)
from composer_replication.cli.run_checks import (
    check_enough_training_data,
    check_verdict_possible,
    count_measurable,
    count_training_data,
)
from composer_replication.config import CrfConfig
from composer_replication.runs import ARTEFACTS, RunDir
from composer_replication.runs.artefacts import NOT_WRITTEN_YET
from composer_replication.runs.files import controls_among

if TYPE_CHECKING:
    from composer_replication.cli.pipeline import RunCallbacks, RunResult
    from composer_replication.evaluation.evaluate import Measurable
    from composer_replication.teacher_replay.cost_survey import PriceRange
    from composer_replication.trainer.from_config.offline import TrainingPace
    from composer_replication.trainer.from_config.train_run import TrainingPlan


WHEN_INTERRUPTED = "finished steps are saved; run the same command to resume"
SECTIONS = ("ingest", "split", "sites", "replay", "pairs", "loss", "render", "train", "evaluation", "run")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "logs, project folders, or all of ~/.claude/projects; or a run to resume with its own options"
    add_config_flag(parser, "paths", key="ingest.paths", nargs="*", metavar="PATH", help=text)
    text = "folder or hub name of the initial model; student is the tiny model that comes with the package"
    add_config_flag(parser, "--model", key="train.model", metavar="MODEL", help=text)
    add_config_flag(parser, "--advisers", key="replay.teachers", metavar="FILE")
    text = "train in this environment (mode grpo) rather than on the sessions alone, as module:callable"
    add_config_flag(parser, "--env", key="train.grpo.environment", metavar="NAME", help=text)
    parser.add_argument("-o", "--output", metavar="RUN", help="run directory; default run")
    add_config_flag(parser, "--control", key="run.control", value=True)
    parser.add_argument("--dry-run", action="store_true", help="print the steps, their cost and time; train nothing")
    parser.add_argument("--starter", action="store_true", help="print a config to start from, and exit")
    add_config_arguments(parser, *SECTIONS)
    parser.add_argument("--json", action="store_true", help="print the result, or the plan, as JSON")


def run(args: argparse.Namespace) -> int:
    from composer_replication.cli.run_checks import check_inputs

    if args.starter:
        from composer_replication.config.presets import starter_text

        print(starter_text(), end="")
        return 0
    output = _run_folder(args)
    config = _build_config(args, output)
    check_inputs(config, output)
    if args.dry_run:
        with quiet_libraries():
            plan = _plan_run(config, output)
        _show_plan(plan, as_json=args.json)
        return 0
    return run_pipeline(config, output, as_json=args.json, saves_options=True)


def _run_folder(args: argparse.Namespace) -> Path:
    """Return the run's folder. With `crf run RUN`, the argument names a run to resume instead of logs."""
    from composer_replication.errors import InputError, explain
    from composer_replication.runs.directory import MARKER

    paths = args.short.get("ingest.paths", [])
    runs = [path for path in paths if (Path(path) / MARKER).is_file()]
    if runs and (len(paths) > 1 or args.output is not None):
        expected = "logs, or a single run to resume: `crf run RUN`"
        raise InputError(explain("PATH", got=f"the run {runs[0]} with other paths, or with -o", expected=expected))
    if runs:
        args.short = {key: value for key, value in args.short.items() if key != "ingest.paths"}
    return Path(runs[0] if runs else args.output or "run")


def _build_config(args: argparse.Namespace, output: Path) -> CrfConfig:
    """Return the config from preset, file and flags. Without `--config`, the file is the run's saved options."""
    from composer_replication.cli.run_checks import (
        drop_missing_logs,
        list_reused_options,
        resolve_paths,
        saved_options_path,
    )
    from composer_replication.config.presets import load_with_preset

    flags = overrides_from_args(args)
    if "train.grpo.environment" in args.short:
        flags.insert(0, "train.mode=grpo")  # first, so that the user can still set another mode
    saved = None if args.config is not None else saved_options_path(output)
    config = resolve_paths(load_with_preset(args.config or saved, flags))
    refuse_unread_options(args)
    flag_keys = [flag.partition("=")[0].strip() for flag in flags]
    if saved is not None and (reused := list_reused_options(saved, flag_keys)):
        log(f"options from {saved}: {', '.join(reused)}")
    if saved is not None and "ingest.paths" not in args.short:
        config, missing = drop_missing_logs(config)
        for path in missing:
            log(f"{path} no longer exists; its sessions stay in the run")
    return config


def run_pipeline(config: CrfConfig, output: Path, *, as_json: bool, saves_options: bool = False) -> int:
    """Run the steps, print the verdict, and return the exit status.

    With `saves_options`, the options are stored for the next call (see `run_checks.save_options`).
    """
    from composer_replication.cli.ingest import run_directory
    from composer_replication.cli.pipeline import run_steps

    with quiet_libraries(), run_directory(output) as run_dir:
        result = run_steps(config, run_dir, _console_callbacks(), saves_options=saves_options)
    if result.stopped_by:
        log(f"{result.stopped_by}: stopped. All work so far is saved; resume with `crf run {output}`")
        return INTERRUPTED
    assert result.evaluation is not None
    assert result.report is not None
    if as_json:
        print_json(_to_json(result))
        return 0
    for line in _result_lines(result.evaluation, result.report):
        print(plain(line))
    return 0


def _console_callbacks() -> RunCallbacks:
    """Return callbacks that log the reason, the outcome and the duration of each step."""
    import time

    from composer_replication.cli.pipeline import RunCallbacks
    from composer_replication.cli.progress import byte_progress, format_duration, training_progress

    started_s = 0.0

    def on_step_begin(name: str, why: str) -> None:
        nonlocal started_s
        started_s = time.monotonic()
        log(f"{name}: {why}")

    def on_step_end(name: str, outcome: Any) -> None:
        log(f"{name}: {_describe_outcome(name, outcome)} ({format_duration(time.monotonic() - started_s)})")

    return RunCallbacks(
        on_step_begin=on_step_begin,
        on_step_end=on_step_end,
        on_message=log,
        ingest_progress=lambda: byte_progress("reading sessions", quiet=False),
        training_progress=training_progress,
    )


def _to_json(result: RunResult) -> dict[str, Any]:
    steps = [outcome._asdict() for outcome in result.outcomes]
    return {"steps": steps, "report": str(result.report), "evaluation": result.evaluation}


def _show_plan(plan: _RunPlan, *, as_json: bool) -> None:
    from dataclasses import asdict

    from composer_replication.cli.progress import format_duration

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
    rows = [(step.name, "make" if step.why else "keep", step.why or UP_TO_DATE) for step in plan.steps]
    show(table("Steps", ("step", "would", "why"), rows))
    for remark in plan.remarks:
        log(remark)
    if plan.price is not None:
        price = plan.price
        log(f"price: {price.num_calls:,} calls, about ${price.low_usd:.4f} and at most ${price.high_usd:.4f}")
    if plan.writer_usd is not None:
        log(f"price: at most ${plan.writer_usd:g} (sites.max_usd) for the hint writer")
    elif plan.price is None:
        log("price: nothing, because no teachers are set")
    if plan.time:
        rows = [(part.name, format_duration(part.seconds), part.basis) for part in plan.time]
        total_s = sum(part.seconds for part in plan.time)
        total = ("total", format_duration(total_s), "at the current speed of this machine")
        show(table("Time, roughly", ("part", "about", "for"), [*rows, total], last_is_total=True))
    if plan.training.memory is not None:
        log(f"memory of a step:\n{plan.training.memory}")


# ---- The outcome of a step or a run in a few lines


def _describe_outcome(name: str, outcome: Any) -> str:
    """Describe the outcome of a step in one line. The text is empty if there is nothing to describe."""
    describe = _OUTCOME_DESCRIBERS.get(name.partition("-")[0])  # "control-2", the second control -> "control"
    return describe(outcome) if describe is not None else ""


def _result_lines(evaluation: Mapping[str, Any], report: Path) -> Iterator[str]:
    """Yield the verdict, the primary result of the trained model and of the control, and the path of the report."""
    yield from evaluation["verdict"]["sentences"]
    yield from evaluation["verdict"].get("remarks", ())
    name = evaluation["primary"]
    primary = [figure for figure in evaluation["figures"] if figure["name"] == name and figure.get("kind") is None]
    for arm, words in (("after", "trained"), ("control", "control")):
        for figure in primary:
            if figure["arm"] == arm:
                shuffles = f", {figure['shuffles']} shuffles" if (figure.get("shuffles") or 1) > 1 else ""
                yield f"{words}: {_figure(figure)}{shuffles}"
    sampled = [
        figure
        for figure in evaluation["figures"]
        if (figure["name"], figure["arm"], figure.get("kind")) == ("sampled_failures", "after", None)
    ]
    yield from (f"sampled calls: {_figure(figure)}" for figure in sampled if figure["name"] != name)
    yield f"report: {report}"


def _figure(figure: Mapping[str, Any]) -> str:
    what = f"{figure['label'][0].lower()}{figure['label'][1:]}"
    number = f"{figure['estimate']:+.3g}" if figure["estimate"] is not None else "none"
    interval = "" if figure["low"] == figure["high"] else f" [{figure['low']:+.3g}, {figure['high']:+.3g}]"
    format_count = f"{figure['n']} in {figure['sessions']} {figure.get('over', 'session')}s"
    return f"{what}: {number}{interval} {figure['unit']} ({figure['better']} is better), {format_count}"


def _describe_ingest(outcome: Any) -> str:
    total = outcome.total
    return (
        f"{total.sessions:,} sessions, {total.turns:,} turns, {total.calls:,} tool calls ({total.errors:,} marked as"
        f" errors); redacted: {format_count(total.secrets, 'secret')} and {format_count(total.names, 'user name')}"
    )


def _describe_split(outcome: Any) -> str:
    sides = ", ".join(f"{count.side} {count.sessions:,}" for count in outcome.counts())
    return f"sessions: {sides}; near-duplicate states in the test split: {outcome.num_near_duplicates:,}"


def _describe_sites(outcome: Any) -> str:
    failures = [site for site in outcome.sites if site.kind != "no_failure"]
    count = sum(site.is_kept for site in failures)
    return f"{len(failures):,} failed calls; {count:,} are the model's errors and will be trained on"


def _describe_replay(outcome: Any) -> str:
    return f"{outcome.num_answers:,} answers, ${outcome.report.spent_usd:.4f} spent"


def _describe_pairs(outcome: Any) -> str:
    by_source = ", ".join(f"{source} {number:,}" for source, number in sorted(outcome.by_source.items()))
    return f"{sum(outcome.by_source.values()):,} pairs" + (f": {by_source}" if by_source else "")


def _describe_train(outcome: Any) -> str:
    channels = ", ".join(
        f"{channel.name} {'in ' if channel.steps else ''}{channel.in_words(None)}"
        for channel in outcome.channels
        if channel.weight
    )
    return f"{outcome.steps:,} of {outcome.total_steps:,} steps; {channels}"


_OUTCOME_DESCRIBERS = {
    "ingest": _describe_ingest,
    "split": _describe_split,
    "sites": _describe_sites,
    "replay": _describe_replay,
    "pairs": _describe_pairs,
    "train": _describe_train,
    "control": _describe_train,
    "evaluate": lambda evaluation: str(evaluation["verdict"]["word"]).replace("_", " "),
    "report": lambda report: str(report.html),
}


# ---- `crf run --dry-run`
# Steps that take seconds (ingest, split, sites, pairs) run in a temporary copy, so that the plan can use their results.
# The run itself is not changed, no request is sent, and no weights are loaded.

_LIGHT_COMMANDS = ("crf ingest", "crf forget", "crf split", "crf sites", "crf hints", "crf replay", "crf pairs")


class _PlannedStep(NamedTuple):
    """A step and the reason why it would run. The reason is empty if the step is up to date."""

    name: str
    why: str


@dataclass(frozen=True, kw_only=True)
class _RunPlan:
    """What `crf run` would do, and what it would cost."""

    steps: Sequence[_PlannedStep]
    training: TrainingPlan
    price: PriceRange | None  # of the teachers' answers
    writer_usd: float | None  # upper bound for the hint writer, if it would be asked
    time: Sequence[_TimeEstimate] | None  # of the parts that take minutes; None if unknown
    remarks: Sequence[str]


def _plan_run(config: CrfConfig, output: Path) -> _RunPlan:
    """Return the plan for a run at `output`, which may not exist yet."""
    from composer_replication.trainer.from_config.train_run import plan

    with tempfile.TemporaryDirectory(prefix="crf-plan-") as folder:
        run = _copy_light_files(output, Path(folder) / "run")
        remarks: list[str] = []
        steps, price = _light_steps(config, run)
        asks_writer = any(step.why for step in steps if step.name == "sites")
        training_data = count_training_data(run)
        check_enough_training_data(config, training_data)
        config = resolve_for_training(config)
        measurable = count_measurable(config, run)
        check_verdict_possible(config, training_data, measurable, remarks.append)
        steps += _heavy_steps(config, run, output)
        training = plan(replace(config, train=replace(config.train, output=None)), run)
    step_names = [step.name for step in steps if step.why]
    return _RunPlan(
        steps=steps,
        training=training,
        price=price,
        writer_usd=config.sites.max_usd if config.sites.writer and asks_writer else None,
        time=_estimate_times(config, measurable, training, step_names),
        remarks=[f"to learn from: {training_data.describe()}", *remarks, *training.remarks],
    )


def _copy_light_files(output: Path, folder: Path) -> RunDir:
    """Copy the small files of the run at `output` to `folder`.

    If there is no run at `output`, an empty run is created in `folder`.
    """
    if not (output.is_dir() and any(output.iterdir())):
        return RunDir.create(folder)
    run = RunDir.open(output)
    folder.mkdir()
    light = [artefact for artefact in ARTEFACTS.values() if artefact.command in _LIGHT_COMMANDS]
    names = {"run.json", *(artefact.file_name for artefact in light), *(artefact.sidecar_name for artefact in light)}
    for path in sorted(run.root.iterdir()):
        if path.name in names or path.name.startswith("teacher_cache.sqlite"):
            shutil.copy2(path, folder / path.name)
    return RunDir.open(folder)


def _light_steps(config: CrfConfig, run: RunDir) -> tuple[list[_PlannedStep], PriceRange | None]:
    """Run the light steps, which need no training, in a copy of the run.

    Return the steps with the reasons why they would run, and the price of the replay.
    """
    from composer_replication.cli.replay import plan_replay

    steps, price = list[_PlannedStep](), None
    if config.ingest.paths:
        old_sha256 = run.meta("conversations").sha256 if run.path("conversations").exists() else None
        STEPS["ingest"].function(config.ingest, run)
        has_changed = run.meta("conversations").sha256 != old_sha256
        steps.append(_PlannedStep("ingest", "reads what is new" if has_changed else ""))
    # Without a hint writer, because a plan sends nothing. The sites are the same, with hints from templates.
    sections: dict[str, Any] = {
        "split": config.split,
        "sites": replace(config.sites, writer=None),
        "pairs": config.pairs,
    }
    for step in record_steps(config):
        steps.append(_PlannedStep(step.name, step.why_stale(config, run)))
        if step.name == "replay":
            price = plan_replay(config.replay, run).price
        elif steps[-1].why:
            step.function(sections[step.name], run)
    return steps, price


def _heavy_steps(config: CrfConfig, run: RunDir, output: Path) -> list[_PlannedStep]:
    """Plan the training runs, the evaluation and the report, without running them.

    Evaluation and report are stale if any step before them is.
    """
    from composer_replication.trainer.from_config.train_run import describe_training, why_train

    has_run = (output / "run.json").exists()
    steps = list[_PlannedStep]()
    for name, arm in arm_configs(config).items():
        arm = replace(arm, train=replace(arm.train, output=arm.train.output or str(output)))
        why = why_train(arm, run)
        words = describe_training(arm, run, why) if why.why else ""
        steps.append(_PlannedStep(name, words if has_run else NOT_WRITTEN_YET))
    why = next((f"{step.name} is made" for step in steps if step.why), "")
    for name, file in (("evaluate", "evaluation"), ("report", "report_html")):
        exists = has_run and RunDir.open(output).path(file).exists()
        steps.append(_PlannedStep(name, why or ("" if exists else NOT_WRITTEN_YET)))
    return steps


# ---- How long a run will take on this machine
# Estimated from the number of floating-point operations and the current speed of matrix multiplication. Per weight and
# token, a forward pass takes 2 operations, forward and backward together 6, and 8 with a teacher pass.

_OPS_TO_READ, _OPS_TO_LEARN = 2, 6
_PASSES_PER_HINT_CHECK = 2  # with and without hints; the shared context is read once
_MIN_SECONDS_PER_STEP = 0.02  # a generation step takes this long even with a tiny model
_GENERATION_SLOWDOWN = 6  # generating is slower than reading, because it goes token by token
_MEAN_LENGTH_SHARE = 0.5  # a call has this share of the maximum length on average
_GOOD_TURNS_PER_SESSION = 4


class _TimeEstimate(NamedTuple):
    """An estimate of how many seconds one part of a run takes, and the basis of the estimate."""

    name: str
    seconds: float
    basis: str


def _estimate_times(
    config: CrfConfig, measurable: Measurable, training: TrainingPlan, steps: Collection[str]
) -> list[_TimeEstimate] | None:
    """Return a time estimate for every part of these steps, or None if the time cannot be estimated, as with
    rollouts.
    """
    if training.pace is None or training.seconds is None:
        return None
    pace, parts = training.pace, list[_TimeEstimate]()
    if "train" in steps:
        parts += [*_estimate_warm_up(config, training, pace), *_estimate_hint_check(config, training, pace)]
        basis = f"{config.train.optimiser.steps:,} steps of about {pace.tokens_a_step:,.0f} tokens"
        parts.append(_TimeEstimate("training", training.seconds, basis))
    basis = "the same with shuffled hints and pairs"
    parts += [_TimeEstimate(name, training.seconds, basis) for name in controls_among(steps)]
    return [*parts, *([_estimate_evaluation(config, measurable, training, pace)] if "evaluate" in steps else [])]


def _estimate_warm_up(config: CrfConfig, training: TrainingPlan, pace: TrainingPace) -> list[_TimeEstimate]:
    warmup = config.train.warmup
    if warmup.mode == "off" or not training.counts.get("lm_ce"):
        return []
    steps = warmup.most if warmup.mode == "until" else warmup.steps
    why = {
        "auto": "at most, and none if the model knows the logs' tools",
        "until": "at most, until the held-out loss stops falling",
    }
    basis = f"{steps:,} steps{', ' + why[warmup.mode] if warmup.mode in why else ''}"
    return [_TimeEstimate("warm-up", pace.seconds(_OPS_TO_LEARN * pace.tokens_a_step * steps), basis)]


def _estimate_hint_check(config: CrfConfig, training: TrainingPlan, pace: TrainingPace) -> list[_TimeEstimate]:
    sites = training.counts.get("sites", 0)
    if not (config.train.proof.on and config.loss.alpha_sdpo and sites):
        return []
    basis = f"{sites:,} errors, each read with and without hints"
    return [
        _TimeEstimate("hint proof", pace.seconds(_OPS_TO_READ * pace.tokens * sites * _PASSES_PER_HINT_CHECK), basis)
    ]


def _estimate_evaluation(
    config: CrfConfig, measurable: Measurable, training: TrainingPlan, pace: TrainingPace
) -> _TimeEstimate:
    """Estimate the time of the evaluation.

    Each model reads errors, corrections and good turns, and samples calls. Two models also read the sites of the token
    gaps.
    """
    section, models = config.evaluation, 2 + (config.run.shuffles if config.run.control else 0)
    context = min(section.context, pace.tokens)
    good = min(section.good_turns, _GOOD_TURNS_PER_SESSION * measurable.sessions)
    gaps = min(section.token_gaps, measurable.values + training.counts.get("sites", 0))
    # An error is read with its correction, hence 2; token gaps are read by two models, with and without the hint.
    turns = models * (measurable.values * (2 + section.good_calls) + good) + 2 * 2 * gaps
    states = 2 * min(section.states, max(measurable.values, 1)) if section.samples else 0
    token_s = max(_MIN_SECONDS_PER_STEP, pace.seconds(_GENERATION_SLOWDOWN * _OPS_TO_READ * section.samples))
    generation_s = models * states * section.new_tokens * _MEAN_LENGTH_SHARE * token_s
    reading_s = pace.seconds(_OPS_TO_READ * context * (turns + models * states))
    basis = f"{models} models read {turns:,} turns"
    if states:
        basis += f" and sample {section.samples} calls of up to {section.new_tokens:,} tokens at {states:,} states each"
    return _TimeEstimate("evaluation", reading_s + generation_s, basis)
