"""`crf train RUN`: train on a run's sessions, or on rollouts in an environment.

The training itself is in `trainer.from_config.train_run`, which is imported late because it loads torch.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from composer_replication.cli.console import (
    add_config_arguments,
    add_config_flag,
    log,
    overrides_from_args,
    plain,
    print_json,
    quiet_libraries,
    rank_of_process,
    refuse_unread_options,
    show,
    table,
)
from composer_replication.cli.main import INTERRUPTED

if TYPE_CHECKING:
    from rich.table import Table

    from composer_replication.config import CrfConfig
    from composer_replication.runs.lineage import ChannelResult
    from composer_replication.trainer.from_config.train_run import TrainingPlan
    from composer_replication.trainer.from_config.training import TrainingResult

WHEN_INTERRUPTED = "what was computed is saved; run the same command to resume"
# Rows of the table "To train on": names of the plan's counts, and what they are called in print.
_COUNTS = (
    ("prompts", "prompts"),
    ("held_out_prompts", "prompts held out"),
    ("conversations", "conversations"),
    ("windows", "windows"),
    ("tree_tokens", "tokens of all trees"),
    ("model_turns", "turns of the model"),
    ("good_turns", "good turns of those"),
    ("sites", "error sites with a hint"),
    ("pairs", "preference pairs"),
    ("lm_ce", "target tokens of good turns (channel 1)"),
    ("sdpo_kl", "target tokens of erring turns (channel 2)"),
    ("trace_replay_dpo", "pairs (channel 3)"),
    ("thinking_target", "turns whose thinking is trained on"),
    ("thinking_context", "turns whose thinking is context"),
    ("thinking_left_out", "turns whose thinking is left out"),
    ("thinking_not_shown", "turns whose thinking the template does not show"),
    ("empty_thought_as_header", "turns after an empty think block, which is header"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "a run directory; without --config, its options from `crf run` or from its last training are used"
    add_config_flag(parser, "run", key="train.run", nargs="?", metavar="RUN", help=text)
    add_config_arguments(parser, "train", "loss", "render", "split")
    parser.add_argument("--resume", action="store_true", help="resume from the newest complete checkpoint, or fail")
    parser.add_argument("--dry-run", action="store_true", help="print what would be trained on and whether it fits")
    parser.add_argument("--force", action="store_true", help="start even if the memory plan says that it does not fit")
    parser.add_argument("--options", action="store_true", help="print every key of --set and --config, and exit")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    with _only_rank_0_prints():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    if args.options:
        _show_options(as_json=args.json)
        return 0

    config = _config(args)
    config.train.required_model()  # fail before torch is loaded, which takes seconds
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # so that rewards and environments of the user are found
    if args.dry_run:
        with quiet_libraries():
            from composer_replication.trainer.from_config.train_run import plan

            training_plan = plan(config)
        _show_plan(training_plan, as_json=args.json)
        return 0
    result = _train(config, args)
    _show_result(result, as_json=args.json)
    if result.stopped_by:
        _log_how_to_resume(result, args)
        return INTERRUPTED
    return 0


def _config(args: argparse.Namespace) -> CrfConfig:
    """Return the config that the arguments describe. Without `--config`, it is based on the options saved in RUN.

    Raises InputError or ConfigError if RUN is not a run directory or if the verb does not read an option.
    """
    from composer_replication.cli.run_checks import find_saved_options
    from composer_replication.config.presets import load_with_preset
    from composer_replication.errors import InputError, explain
    from composer_replication.runs import RunDir

    refuse_unread_options(args)
    path, run = args.config, args.short.get("train.run")
    if run is not None:
        if Path(run).is_file():
            fix = f"If it is a config, use `crf train --config {run}`"
            raise InputError(explain("RUN", got=f"the file {run}", expected="a run directory", fix=fix))
        RunDir.open(run)
        path = path or find_saved_options(Path(run))
    config = load_with_preset(path, overrides_from_args(args))
    if config.train.run is not None:
        RunDir.open(config.train.run)
    if path is not None and args.config is None:
        log(f"options from {path}; change one with --set, or replace all with --config")
    return config


def _show_options(*, as_json: bool) -> None:
    """Print every option with its type, its default (which a preset may change) and its description."""
    from composer_replication.config import CrfConfig, describe

    options = describe(CrfConfig)
    if as_json:
        names = ("key", "type", "default", "sentence")
        print_json({"options": [dict(zip(names, option, strict=True)) for option in options]})
        return
    for option in options:
        print(f"{option.path}: {option.type_text} = {option.default}\n    {option.sentence}")


def _train(config: CrfConfig, args: argparse.Namespace) -> TrainingResult:
    from composer_replication.cli.progress import training_progress

    with quiet_libraries():
        from composer_replication.trainer.from_config.train_run import train

        with training_progress(config.train.optimiser.steps) as progress:
            return train(config, resume=args.resume, must_fit=not args.force, progress=progress)


def _show_plan(plan: TrainingPlan, *, as_json: bool) -> None:
    from composer_replication.evaluation.report.records import explained, of_good_turns

    memory = plan.memory
    if as_json:
        fits = None if memory is None else {"peak": memory.peak, "available": memory.available, "fits": memory.fits}
        record = {"mode": plan.mode, "counts": dict(plan.counts), "drops": dict(plan.drops), "memory": fits}
        print_json(
            record
            | {
                "newest_checkpoint": plan.newest_checkpoint,
                "changed": list(plan.changed),
                "remarks": list(plan.remarks),
            }
        )
        return
    show(*_count_tables(plan.counts, plan.drops))
    for line in [*of_good_turns(plan.counts, plan.drops), *explained(plan.counts, plan.drops)]:
        print(line)
    if memory is not None:
        log(f"memory of a step:\n{memory}")
    if plan.newest_checkpoint is None:
        log(f"{plan.folder.config}: the complete config. Nothing was trained")
    else:
        log(f"{plan.folder.checkpoints} has {plan.newest_checkpoint}: training would resume from there")
    for remark in plan.remarks:
        log(remark)
    for change in plan.changed:
        log(f"changed since the run began: {change}")


def _show_result(result: TrainingResult, *, as_json: bool) -> None:
    from composer_replication.evaluation.report.records import explained

    if as_json:
        print_json(result.as_json())
        return
    columns = ("channel", "weight", "taught in steps", "first loss", "last loss")
    caption = "Losses are means since the line of metrics before."
    rows = [_channel_row(channel, result.steps) for channel in result.channels]
    show(table(f"Channels, {result.steps} of {result.total_steps} steps", columns, rows, caption=caption))
    if result.drops:
        print()
        show(table("Not trained on", ("what", "number"), _dropped_rows(result.drops)))
        for line in explained((), result.drops):
            print(line)
    for text in result.alarms:
        print(plain(f"alarm: {text}"))
    for text in result.diagnosis:
        print(plain(f"diagnosis: {text}"))
    if not result.diagnosis:
        print("diagnosis: no problem found")
    if result.saved is not None:
        log(f"{result.saved}: the trained weights; {result.metrics}: the metrics")


def _channel_row(channel: ChannelResult, steps: int) -> tuple[object, ...]:
    losses = ("" if loss is None else f"{loss:.4g}" for loss in (channel.first_loss, channel.last_loss))
    return _shown_name(channel.name), f"{channel.weight:g}", channel.in_words(steps), *losses


def _dropped_rows(drops: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted((_shown_name(what), number) for what, number in drops.items())


def _count_tables(counts: Mapping[str, int], drops: Mapping[str, int]) -> list[Table]:
    """Return a table of the training data and, if any data is left out, a table of what is left out."""

    known_counts = [(text, counts[name]) for name, text in _COUNTS if name in counts]
    other_counts = sorted(
        (name.replace("_", " "), number) for name, number in counts.items() if name not in dict(_COUNTS)
    )
    tables = [table("To train on", ("what", "number"), [*known_counts, *other_counts])]
    return [*tables, table("Left out", ("what", "number"), _dropped_rows(drops))] if drops else tables


def _log_how_to_resume(result: TrainingResult, args: argparse.Namespace) -> None:
    words = ["crf", "train", *([args.short["train.run"]] if "train.run" in args.short else [])]
    words += ["--config", args.config] if args.config else []
    for override in args.set:
        words += ["--set", override]
    command = shlex.join([*words, "--resume"])
    log(f"{result.stopped_by}: stopped after step {result.steps} of {result.total_steps}, which is saved.")
    log(f"Resume with: {command}")


def _shown_name(name: str) -> str:
    """Return the name under which a channel, or a reason for dropping its data, is printed."""
    # Metrics store the older name sdpo_kl: "sdpo_kl: longer_than_window" -> "sdpo_jsd: longer_than_window".
    return name.replace("sdpo_kl", "sdpo_jsd", 1) if name.startswith("sdpo_kl") else name


@contextlib.contextmanager
def _only_rank_0_prints() -> Generator[None]:
    """Silence all ranks except rank 0. With CRF_DEBUG=1, every rank prints."""
    if rank_of_process() == 0 or os.environ.get("CRF_DEBUG"):
        yield
        return
    _flush_streams()
    # Redirect the descriptors, not sys.stdout and sys.stderr: compiled libraries (NCCL) write to them directly.
    saved_descriptors = [os.dup(number) for number in (1, 2)]
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(devnull, number)
        yield
    finally:
        _flush_streams()
        for number, descriptor in zip((1, 2), saved_descriptors, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(devnull)


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # pyright: ignore[reportUnnecessaryComparison] (closed by whoever started us)
            stream.flush()
