"""What the machine cannot do that a config asks for, told before anything is loaded, by the name of its key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.config import TrainConfig
from composer_replication.errors import (
    ComposerError,
    ConfigError,
    MissingExtraError,
    explain,
)
from composer_replication.optional import available
from composer_replication.trainer.presets import training_arguments
from composer_replication.trainer.same_start import launched_processes

if TYPE_CHECKING:
    from transformers import TrainingArguments


def offline_arguments(train: TrainConfig, output: Path, **changes: Any) -> TrainingArguments:
    """Progress is told by whoever called; pinned memory is of use to a GPU alone."""
    import torch
    from transformers import TrainingArguments

    arguments = training_arguments(train) | changes
    pinned = torch.cuda.is_available()
    return make_arguments(
        TrainingArguments,
        train,
        output_dir=str(output),
        disable_tqdm=True,
        dataloader_pin_memory=pinned,
        **arguments,
    )


def make_arguments(make: Callable[..., Any], train: TrainConfig, **arguments: Any) -> Any:
    """`make(**arguments)`, a constructor of TrainingArguments or one of its kind; a refusal names the option."""
    import torch

    _check_installed(train)
    # Where there is no accelerator, accelerate makes a process group (by gloo) only if it is asked for the CPU.
    on_cpu = {"use_cpu": True} if launched_processes() > 1 and not torch.accelerator.is_available() else {}
    try:
        return make(**on_cpu, **arguments)
    except (ValueError, ImportError, RuntimeError) as error:
        raise refused(error, train) from error


def refused(error: Exception, train: TrainConfig) -> ComposerError:
    """What a library refuses, as an error of ours; in its own words where no option is known to be the reason."""
    if isinstance(error, ComposerError):
        return error
    got = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if train.optimiser.bf16 and "bf16" in got:
        fix = "Set train.optimiser.bf16 = false: a machine without such a GPU computes in 32 bits."
        expected = "false, or a GPU that computes in bf16"
        return ConfigError(explain("train.optimiser.bf16", got=f"true ({got})", expected=expected, fix=fix))
    if train.mode == "grpo" and "divisible by num_generations" in got:
        return _no_whole_groups(train)
    library = "TRL" if train.mode == "grpo" else "transformers"
    return ConfigError(explain(f"train.mode {train.mode}", got=got, expected=f"what {library} takes"))


def _no_whole_groups(train: TrainConfig) -> ConfigError:
    """Rollouts of a prompt are one group, and a step holds whole groups; processes multiply what one holds."""
    group, per_device, accumulation = (
        train.grpo.num_generations,
        train.optimiser.per_device,
        train.optimiser.accumulation,
    )
    got = f"{per_device} x {accumulation} = {per_device * accumulation} rollouts a process and step"
    expected = f"as many as make whole groups of train.grpo.num_generations, {group}, on all processes"
    fix = f"Set train.optimiser.per_device = {group}, or train.grpo.num_generations to a number that divides them."
    return ConfigError(
        explain("train.optimiser.per_device x train.optimiser.accumulation", got=got, expected=expected, fix=fix)
    )


def _check_installed(train: TrainConfig) -> None:
    """What is needed for one option alone, and is in no extra."""
    if train.report_to != "none" and not available(train.report_to):
        fix = f'Type: pip install {train.report_to}. Or set train.report_to = "none": metrics.jsonl has it all.'
        got = f"{train.report_to}, which is not installed"
        raise ConfigError(explain("train.report_to", got=got, expected="none, or what is installed", fix=fix))
    if train.adapter.kind == "qlora" and not available("bitsandbytes"):
        fix = 'Type: pip install bitsandbytes. Or set train.adapter.kind = "lora", which keeps the weights whole.'
        got = "qlora, and bitsandbytes is not installed"
        raise ConfigError(explain("train.adapter.kind", got=got, expected="lora, none, or bitsandbytes", fix=fix))


def check_extra(train: TrainConfig) -> None:
    """Raise MissingExtraError that names what this config needs of the extra `train`, and the command to type."""
    needed = ["accelerate"]
    needed += ["peft"] if train.adapter.kind != "none" else []
    needed += ["trl", "datasets"] if train.mode == "grpo" else []
    missing = [package for package in needed if not available(package)]
    if missing:
        fix = 'Type: pip install "composer-replication[train]"'
        got = f"no {', no '.join(missing)}"
        raise MissingExtraError(explain("training", got=got, expected="the extra `train`", fix=fix), name=missing[0])
