"""`crf train RUN`: train on a run's sessions, or on rollouts in an environment.

The training itself is `trainer.from_config.train_run`. It is imported late, because it loads torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from composer_replication.cli.console import (
    add_config_arguments,
    add_short,
    is_terminal,
    log,
    only_rank_0_prints,
    overrides_of,
    plain,
    print_json,
    refuse_unread,
    show,
    table,
)
from composer_replication.cli.main import INTERRUPTED
from composer_replication.cli.progress import as_shown

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
    add_short(parser, "run", key="train.run", nargs="?", metavar="RUN", help=text)
    add_config_arguments(parser, "train", "loss", "render", "split")
    parser.add_argument("--resume", action="store_true", help="resume from the newest complete checkpoint, or fail")
    parser.add_argument("--dry-run", action="store_true", help="print what would be trained on and whether it fits")
    parser.add_argument("--force", action="store_true", help="start even if the memory plan says that it does not fit")
    parser.add_argument("--options", action="store_true", help="print every key of --set and --config, and exit")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    with only_rank_0_prints():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    import sys
    from pathlib import Path

    if args.options:
        _show_options(as_json=args.json)
        return 0

    config = _config(args)
    config.train.required_model()  # fail before torch is loaded, which takes seconds
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # so that rewards and environments of the user are found
    if args.dry_run:
        _show_plan(_plan(config), as_json=args.json)
        return 0
    result = _train(config, args)
    _show_result(result, as_json=args.json)
    if result.stopped_by:
        _log_how_to_resume(result, args)
        return INTERRUPTED
    return 0


def _config(args: argparse.Namespace) -> CrfConfig:
    """Return the config that the arguments describe, with the remembered options of RUN if there is no --config.

    Raises InputError or ConfigError if RUN is not a run directory or an option is not one of this verb.
    """
    from pathlib import Path

    from composer_replication.cli.run_checks import remembered_options
    from composer_replication.config.presets import load_with_preset
    from composer_replication.errors import InputError, explain
    from composer_replication.runs import RunDir

    refuse_unread(args)
    path, run = args.config, args.short.get("train.run")
    if run is not None:
        if Path(run).is_file():
            fix = f"If it is a config, use `crf train --config {run}`"
            raise InputError(explain("RUN", got=f"the file {run}", expected="a run directory", fix=fix))
        RunDir.open(run)
        path = path or remembered_options(Path(run))
    config = load_with_preset(path, overrides_of(args))
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


def _plan(config: CrfConfig) -> TrainingPlan:
    import contextlib
    import sys

    with contextlib.redirect_stdout(sys.stderr):  # libraries print while loading; stdout is for results
        quiet_libraries()
        from composer_replication.trainer.from_config.train_run import plan

        return plan(config)


def _train(config: CrfConfig, args: argparse.Namespace) -> TrainingResult:
    import contextlib
    import sys

    from composer_replication.cli.progress import training_progress

    with contextlib.redirect_stdout(sys.stderr):
        quiet_libraries()
        from composer_replication.trainer.from_config.train_run import train

        with training_progress(config.train.optimiser.steps) as progress:
            return train(config, resume=args.resume, must_fit=not args.force, progress=progress)


def quiet_libraries() -> None:
    """Silence TRL's warning about experimental features, and progress bars of libraries outside of a terminal."""
    import os
    import sys

    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    if is_terminal(sys.stderr):
        return
    for name in ("HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS"):  # of transformers as well
        os.environ.setdefault(name, "1")
    if "huggingface_hub" in sys.modules:  # it reads the variables when it is imported, so they come too late
        _hide_progress_bars()


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
    return as_shown(channel.name), f"{channel.weight:g}", channel.in_words(steps), *losses


def _dropped_rows(drops: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted((as_shown(what), number) for what, number in drops.items())


def _count_tables(counts: Mapping[str, int], drops: Mapping[str, int]) -> list[Table]:
    """Return the tables of what is trained on, and of what is left out if anything is."""

    known_counts = [(text, counts[name]) for name, text in _COUNTS if name in counts]
    other_counts = sorted(
        (name.replace("_", " "), number) for name, number in counts.items() if name not in dict(_COUNTS)
    )
    tables = [table("To train on", ("what", "number"), [*known_counts, *other_counts])]
    return [*tables, table("Left out", ("what", "number"), _dropped_rows(drops))] if drops else tables


def _log_how_to_resume(result: TrainingResult, args: argparse.Namespace) -> None:
    import shlex

    words = ["crf", "train", *([args.short["train.run"]] if "train.run" in args.short else [])]
    words += ["--config", args.config] if args.config else []
    for override in args.set:
        words += ["--set", override]
    command = shlex.join([*words, "--resume"])
    log(f"{result.stopped_by}: stopped after step {result.steps} of {result.total_steps}, which is saved.")
    log(f"Resume with: {command}")


def _hide_progress_bars() -> None:
    """Switch off the progress bars of huggingface_hub and transformers."""
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    # transformers copies the hub's setting on import, so it needs a call only if it is imported already.
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.disable_progress_bar()
