"""`crf run PATH… --model M`: from logs to an adapter, an evaluation on held-out sessions and a report."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from composer_replication.cli.console import (
    add_config_arguments,
    add_short,
    overrides_of,
    refuse_unread,
)
from composer_replication.cli.main import INTERRUPTED
from composer_replication.cli.pipeline import (
    RECORDS,
    arms_of,
    as_made,
    step_named,
    why_records,
)
from composer_replication.cli.run_checks import (
    check_judgeable,
    check_learnable,
    learnable,
    to_judge_by,
)
from composer_replication.config import CrfConfig
from composer_replication.runs import ARTEFACTS, RunDir
from composer_replication.runs.artefacts import NOT_THERE
from composer_replication.runs.files import controls_among

if TYPE_CHECKING:
    from composer_replication.cli.pipeline import RunCallbacks, RunResult
    from composer_replication.config import CrfConfig
    from composer_replication.evaluation.evaluate import Measurable
    from composer_replication.teacher_replay.cost_survey import PriceRange
    from composer_replication.trainer.from_config.plan import TrainingPace, TrainingPlan


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
    from composer_replication.cli.run_checks import check_given

    if args.starter:
        from composer_replication.config.presets import starter_text

        print(starter_text(), end="")
        return 0
    output = _output(args)
    config = _config_from(args, output)
    check_given(config, output)
    if args.dry_run:
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


def _config_from(args: argparse.Namespace, output: Path) -> CrfConfig:
    """Preset, file and flags; where no file is named, what the run was told before. An environment means rollouts."""
    from composer_replication.cli.console import say
    from composer_replication.cli.run_checks import (
        reused,
        settled,
        told_before,
        without_lost_logs,
    )
    from composer_replication.config.presets import load_with_preset

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
    from composer_replication.cli.ingest import run_directory
    from composer_replication.cli.pipeline import run_steps

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
    for line in _result_lines(result.evaluation, result.report):
        print(plain(line))
    return 0


@contextmanager
def quiet() -> Generator[None]:
    """What libraries say is not our output."""
    import contextlib
    import sys

    from composer_replication.cli.train import quiet_libraries

    with contextlib.redirect_stdout(sys.stderr):
        quiet_libraries()
        yield


def listener() -> RunCallbacks:
    """Says which step comes and why, what came of it, and how far it is."""
    import time

    from composer_replication.cli.console import say
    from composer_replication.cli.pipeline import RunCallbacks
    from composer_replication.cli.progress import byte_progress, duration, training_progress

    began: list[float] = [0.0]

    def begin(name: str, why: str) -> None:
        began[0] = time.monotonic()
        say(f"{name}: {why}")

    def done(name: str, outcome: Any) -> None:
        say(f"{name}: {words_of(name, outcome)} ({duration(time.monotonic() - began[0])})")

    def reading() -> Any:
        return byte_progress("reading sessions", quiet=False)

    return RunCallbacks(begin=begin, done=done, say=say, reading=reading, training=training_progress)


def _as_json(result: RunResult) -> dict[str, Any]:
    steps = [outcome._asdict() for outcome in result.outcomes]
    return {"steps": steps, "report": str(result.report), "evaluation": result.evaluation}


def _show_plan(plan: _RunPlan, *, as_json: bool) -> None:
    from dataclasses import asdict

    from composer_replication.cli.console import (
        print_json,
        say,
        show,
        table,
    )
    from composer_replication.cli.progress import duration

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


# What came of each step of a run in a line, and of all of it in a few.


def words_of(name: str, made: Any) -> str:
    """The result of a step in a line; empty where there is none to tell."""
    word = _WORDS.get(name.partition("-")[0])  # a control of another shuffle is called control-2
    return word(made) if word is not None else ""


def _result_lines(evaluation: Mapping[str, Any], report: Path) -> Iterator[str]:
    """What a run has come to: the verdict, its figure with the control's, what was drawn, and where to look."""
    yield from evaluation["verdict"]["sentences"]
    yield from evaluation["verdict"].get("remarks", ())
    name = evaluation["primary"]
    primary = [figure for figure in evaluation["figures"] if figure["name"] == name and figure.get("kind") is None]
    for arm, words in (("after", "trained"), ("control", "control")):
        for figure in primary:
            if figure["arm"] == arm:
                shuffles = f", {figure['shuffles']} shuffles" if (figure.get("shuffles") or 1) > 1 else ""
                yield f"{words}: {_figure(figure)}{shuffles}"
    drawn = [
        figure
        for figure in evaluation["figures"]
        if (figure["name"], figure["arm"], figure.get("kind")) == ("sampled_failures", "after", None)
    ]
    yield from (f"drawn calls: {_figure(figure)}" for figure in drawn if figure["name"] != name)
    yield f"report: {report}"


def _figure(figure: Mapping[str, Any]) -> str:
    what = f"{figure['label'][0].lower()}{figure['label'][1:]}"
    number = f"{figure['estimate']:+.3g}" if figure["estimate"] is not None else "none"
    interval = "" if figure["low"] == figure["high"] else f" [{figure['low']:+.3g}, {figure['high']:+.3g}]"
    counted = f"{figure['n']} in {figure['sessions']} {figure.get('over', 'session')}s"
    return f"{what}: {number}{interval} {figure['unit']} ({figure['better']} is better), {counted}"


def _ingest(outcome: Any) -> str:
    total = outcome.total
    return (
        f"{total.sessions:,} sessions, {total.turns:,} turns, {total.calls:,} calls, {total.errors:,} results that"
        f" the logs mark as errors; redacted: {_count(total.secrets, 'secret')} and {_count(total.names, 'user name')}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _split(outcome: Any) -> str:
    sides = ", ".join(f"{count.side} {count.sessions:,}" for count in outcome.counts())
    return f"sessions: {sides}; near-duplicate states of the test: {outcome.num_near_duplicates:,}"


def _sites(outcome: Any) -> str:
    failures = [site for site in outcome.sites if site.kind != "no_failure"]
    count = sum(site.is_kept for site in failures)
    return f"{len(failures):,} failures, by marks of the logs and by what results say; {count:,} are mistakes to teach"


def _replay(outcome: Any) -> str:
    return f"{outcome.num_answers:,} answers, ${outcome.report.spent_usd:.4f} spent"


def _pairs(outcome: Any) -> str:
    by_source = ", ".join(f"{source} {number:,}" for source, number in sorted(outcome.by_source.items()))
    return f"{sum(outcome.by_source.values()):,} pairs" + (f": {by_source}" if by_source else "")


def _train(outcome: Any) -> str:
    channels = ", ".join(
        f"{channel.name} {'in ' if channel.steps else ''}{channel.in_words(None)}"
        for channel in outcome.channels
        if channel.weight
    )
    return f"{outcome.steps:,} of {outcome.total_steps:,} steps; {channels}"


_WORDS = {
    "ingest": _ingest,
    "split": _split,
    "sites": _sites,
    "replay": _replay,
    "pairs": _pairs,
    "train": _train,
    "control": _train,
    "evaluate": lambda evaluation: str(evaluation["verdict"]["word"]).replace("_", " "),
    "report": lambda report: str(report.html),
}


# `crf run --dry-run`: which steps would be made and why, at what price, in what time, with what memory.
#
# What costs next to nothing (reading, sites, pairs) is done for the answer, in a folder that goes away again. The run
# itself is not touched, nobody is asked, and no weights are loaded.

_LIGHT = ("crf ingest", "crf forget", "crf split", "crf sites", "crf hints", "crf replay", "crf pairs")


class _PlannedStep(NamedTuple):
    """A step and why it would be made; empty where what is there holds."""

    name: str
    why: str


@dataclass(frozen=True, kw_only=True)
class _RunPlan:
    """What `crf run` would do. `time` is a guess for each part that takes minutes.

    `price` is that of advisers; `writer_usd` is the most that a writer of hints may cost, where one would be asked.
    """

    steps: Sequence[_PlannedStep]
    training: TrainingPlan
    price: PriceRange | None
    writer_usd: float | None
    time: Sequence[_TimeOfPart] | None
    remarks: Sequence[str]


def plan_run(config: CrfConfig, output: Path) -> _RunPlan:
    """The plan for a run at `output`, which need not be there."""
    from composer_replication.trainer.from_config.train_run import plan

    with tempfile.TemporaryDirectory(prefix="crf-plan-") as folder:
        run = _copy_of(output, Path(folder) / "run")
        remarks: list[str] = []
        steps, price = _light_steps(config, run)
        is_asked = any(step.why for step in steps if step.name == "sites")
        there = learnable(run)
        check_learnable(config, there)
        config = as_made(config)
        judged = to_judge_by(config, run)
        check_judgeable(config, there, judged, remarks.append)
        steps += _heavy_steps(config, run, output)
        training = plan(replace(config, train=replace(config.train, output=None)), run)
    step_names = [step.name for step in steps if step.why]
    return _RunPlan(
        steps=steps,
        training=training,
        price=price,
        writer_usd=config.sites.max_usd if config.sites.writer and is_asked else None,
        time=time_of_run(config, judged, training, step_names),
        remarks=[f"to learn from: {there.in_words()}", *remarks, *training.remarks],
    )


def _copy_of(output: Path, folder: Path) -> RunDir:
    """The run's small files, where there is a run."""
    if not (output.is_dir() and any(output.iterdir())):
        return RunDir.create(folder)
    run = RunDir.open(output)
    folder.mkdir()
    light = [artefact for artefact in ARTEFACTS.values() if artefact.command in _LIGHT]
    names = {"run.json", *(artefact.file_name for artefact in light), *(artefact.sidecar_name for artefact in light)}
    for path in sorted(run.root.iterdir()):
        if path.name in names or path.name.startswith("teacher_cache.sqlite"):
            shutil.copy2(path, folder / path.name)
    return RunDir.open(folder)


def _light_steps(config: CrfConfig, run: RunDir) -> tuple[list[_PlannedStep], PriceRange | None]:
    """Made in the copy, so that what comes after them is known; advisers are asked for nothing but their price."""
    from composer_replication.cli.replay import plan_replay

    steps, price = list[_PlannedStep](), None
    if config.ingest.paths:
        before = run.meta("conversations").sha256 if run.path("conversations").exists() else None
        step_named("ingest").function(config.ingest, run)
        is_new = run.meta("conversations").sha256 != before
        steps.append(_PlannedStep("ingest", "reads what is new" if is_new else ""))
    sections: dict[str, Any] = {
        "split": config.split,
        "sites": replace(config.sites, writer=None),
        "pairs": config.pairs,
    }
    for name, written in RECORDS.items():
        if name == "replay" and config.replay.teachers is None:
            continue
        steps.append(_PlannedStep(name, why_records(written, config, run)))
        if name == "replay":
            price = plan_replay(config.replay, run).price
        elif steps[-1].why:
            step_named(name).function(sections[name], run)
    return steps, price


def _heavy_steps(config: CrfConfig, run: RunDir, output: Path) -> list[_PlannedStep]:
    """Trainings, evaluation and report: made again as soon as anything before them is."""
    from composer_replication.trainer.from_config.train_run import what_training_does, why_train

    has_run = (output / "run.json").exists()
    steps = list[_PlannedStep]()
    for name, arm in arms_of(config).items():
        arm = replace(arm, train=replace(arm.train, output=arm.train.output or str(output)))
        why = why_train(arm, run)
        words = what_training_does(arm, run, why) if why.why else ""
        steps.append(_PlannedStep(name, words if has_run else NOT_THERE))
    why = next((f"{step.name} is made" for step in steps if step.why), "")
    for name, file in (("evaluate", "evaluation"), ("report", "report_html")):
        is_there = has_run and RunDir.open(output).path(file).exists()
        steps.append(_PlannedStep(name, why or ("" if is_there else NOT_THERE)))
    return steps


# How long the parts of a run may take here, and what each guess is based on.
#
# Counted in operations, at the speed that this machine multiplies with right now: a weight and a token take 2 to read
# them, 6 to learn from them, 8 with a teacher beside it. Drawing is slower than reading, a token at a time.

_READ, _LEARN = 2, 6
_READINGS_OF_A_PROOF = 2  # with and without hints; what contexts share is read once
_SECONDS_A_DRAWN_TOKEN = 0.02  # what a step of drawing takes at least, however small the model is
_DRAWS_SLOWER = 6
_SHARE_DRAWN = 0.5  # of the most tokens of a call, those it has before it ends
_GOOD_TURNS_A_SESSION = 4


class _TimeOfPart(NamedTuple):
    """A part of a run, how many seconds it may take, and why."""

    name: str
    seconds: float
    basis: str


def time_of_run(
    config: CrfConfig, judged: Measurable, training: TrainingPlan, made: Collection[str]
) -> list[_TimeOfPart] | None:
    """The parts of the steps that are `made`; None where nobody can say, as with rollouts."""
    if training.pace is None or training.seconds is None:
        return None
    pace, parts = training.pace, list[_TimeOfPart]()
    if "train" in made:
        parts += [*_warm_up(config, training, pace), *_proof(config, training, pace)]
    steps = f"{config.train.optimiser.steps:,} steps of about {pace.tokens_a_step:,.0f} tokens"
    parts += [_TimeOfPart("training", training.seconds, steps)] if "train" in made else []
    again = "the same again, with shuffled hints and pairs"
    parts += [_TimeOfPart(name, training.seconds, again) for name in controls_among(made)]
    return [*parts, *([_evaluation(config, judged, training, pace)] if "evaluate" in made else [])]


def _warm_up(config: CrfConfig, training: TrainingPlan, pace: TrainingPace) -> list[_TimeOfPart]:
    warmup = config.train.warmup
    if warmup.mode == "off" or not training.counts.get("lm_ce"):
        return []
    steps = warmup.most if warmup.mode == "until" else warmup.steps
    why = {
        "auto": "at most, and none if the model knows the logs' tools",
        "until": "at most, until the held-out loss stops falling",
    }
    basis = f"{steps:,} steps{', ' + why[warmup.mode] if warmup.mode in why else ''}"
    return [_TimeOfPart("warm-up", pace.seconds(_LEARN * pace.tokens_a_step * steps), basis)]


def _proof(config: CrfConfig, training: TrainingPlan, pace: TrainingPace) -> list[_TimeOfPart]:
    sites = training.counts.get("sites", 0)
    if not (config.train.proof.on and config.loss.alpha_sdpo and sites):
        return []
    basis = f"{sites:,} mistakes, each read with and without hints"
    return [_TimeOfPart("hint proof", pace.seconds(_READ * pace.tokens * sites * _READINGS_OF_A_PROOF), basis)]


def _evaluation(config: CrfConfig, judged: Measurable, training: TrainingPlan, pace: TrainingPace) -> _TimeOfPart:
    """Each model reads mistakes, corrections and good turns and draws calls; two of them read sites for token gaps."""
    section, models = config.evaluation, 2 + (config.run.shuffles if config.run.control else 0)
    context = min(section.context, pace.tokens)
    good = min(section.good_turns, _GOOD_TURNS_A_SESSION * judged.sessions)
    gaps = min(section.token_gaps, judged.values + training.counts.get("sites", 0))
    turns = models * (judged.values * (2 + section.good_calls) + good) + 2 * 2 * gaps
    states = 2 * min(section.states, max(judged.values, 1)) if section.samples else 0
    token = max(_SECONDS_A_DRAWN_TOKEN, pace.seconds(_DRAWS_SLOWER * _READ * section.samples))
    drawing = models * states * section.new_tokens * _SHARE_DRAWN * token
    basis = f"{models} models read {turns:,} turns"
    if states:
        basis += f" and draw {section.samples} calls of up to {section.new_tokens:,} tokens at {states:,} states each"
    return _TimeOfPart("evaluation", pace.seconds(_READ * context * (turns + models * states)) + drawing, basis)
