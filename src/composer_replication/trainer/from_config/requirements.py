"""Check a config's requirements before anything is loaded: installed packages, and support by the hardware."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.config import TrainConfig
from composer_replication.errors import ComposerError, ConfigError, MissingExtraError, explain
from composer_replication.optional import available
from composer_replication.trainer.presets import training_arguments
from composer_replication.trainer.same_start import launched_processes

if TYPE_CHECKING:
    from transformers import TrainingArguments


def offline_arguments(train: TrainConfig, output: Path, **changes: Any) -> TrainingArguments:
    """Return the TrainingArguments for an offline run. tqdm is off, since the caller reports progress."""
    import torch
    from transformers import TrainingArguments

    arguments = training_arguments(train) | changes
    # torch warns about pinned memory without a GPU.
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
    """Return `make(**arguments)`, where `make` is TrainingArguments or a subclass. Errors are
    converted by `refused`.
    """
    import torch

    _check_installed(train)
    # Without an accelerator, accelerate creates a (gloo) process group only if `use_cpu` is set.
    on_cpu = {"use_cpu": True} if launched_processes() > 1 and not torch.accelerator.is_available() else {}
    try:
        return make(**on_cpu, **arguments)
    except (ValueError, ImportError, RuntimeError) as error:
        raise refused(error, train) from error


def refused(error: Exception, train: TrainConfig) -> ComposerError:
    """Convert a library's error to a ConfigError, which names the option at fault or else quotes
    the library's message.
    """
    if isinstance(error, ComposerError):
        return error
    got = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if train.optimiser.bf16 and "bf16" in got:
        fix = "Set train.optimiser.bf16 = false to compute in fp32."
        expected = "false, or a GPU that supports bf16"
        return ConfigError(explain("train.optimiser.bf16", got=f"true ({got})", expected=expected, fix=fix))
    if train.mode == "grpo" and "divisible by num_generations" in got:
        return _incomplete_groups(train)
    library = "TRL" if train.mode == "grpo" else "transformers"
    return ConfigError(explain(f"train.mode {train.mode}", got=got, expected=f"options that {library} accepts"))


def _incomplete_groups(train: TrainConfig) -> ConfigError:
    """Return the error for a step that cannot be divided into complete groups of rollouts for the same prompt."""
    group = train.grpo.num_generations
    per_device, accumulation = train.optimiser.per_device, train.optimiser.accumulation
    got = f"{per_device} x {accumulation} = {per_device * accumulation} rollouts per process and step"
    expected = f"complete groups of train.grpo.num_generations = {group} rollouts over all processes"
    fix = f"Set train.optimiser.per_device = {group}, or train.grpo.num_generations to a divisor of the rollout count."
    return ConfigError(
        explain("train.optimiser.per_device x train.optimiser.accumulation", got=got, expected=expected, fix=fix)
    )


def _check_installed(train: TrainConfig) -> None:
    """Raise ConfigError if a package is missing that only one option needs and that no extra installs."""
    if train.report_to != "none" and not available(train.report_to):
        fix = f'Type: pip install {train.report_to}. Or set train.report_to = "none": metrics.jsonl has everything.'
        got = f"{train.report_to}, which is not installed"
        raise ConfigError(explain("train.report_to", got=got, expected="none, or an installed tracker", fix=fix))
    if train.adapter.kind == "qlora" and not available("bitsandbytes"):
        fix = 'Type: pip install bitsandbytes. Or set train.adapter.kind = "lora", which does not quantize the weights.'
        got = "qlora without bitsandbytes"
        raise ConfigError(
            explain("train.adapter.kind", got=got, expected="lora or none, or bitsandbytes installed", fix=fix)
        )


def check_extra(train: TrainConfig) -> None:
    """Raise MissingExtraError, with the command to install them, if packages from the extra `train` are missing."""
    needed = ["accelerate"]
    needed += ["peft"] if train.adapter.kind != "none" else []
    needed += ["trl", "datasets"] if train.mode == "grpo" else []
    missing = [package for package in needed if not available(package)]
    if missing:
        fix = 'Type: pip install "composer-replication[train]"'
        got = f"no {', no '.join(missing)}"
        raise MissingExtraError(explain("training", got=got, expected="the extra `train`", fix=fix), name=missing[0])
