"""The warm-up of `crf train`: whether there is one, and the model that the other steps begin with.

`train.warmup.mode` decides; on "auto" the start weights do, by how well they know the names of tools in the logs.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import set_seed

from composer_replication.batch.tree_batch import CHANNELS
from composer_replication.config import TrainConfig
from composer_replication.errors import ConfigError, explain
from composer_replication.objective.distributed import is_sharded
from composer_replication.sessions.phases import Say
from composer_replication.sessions.rendering import ids_said
from composer_replication.trainer.checkpoints.save_attempt import most_anywhere
from composer_replication.trainer.from_config.inputs import Inputs, lora_config, token_rows
from composer_replication.trainer.from_config.output_folder import TrainingFolder
from composer_replication.trainer.from_config.requirements import offline_arguments
from composer_replication.trainer.start_model import prepare_model, shard_model

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from composer_replication.trainer.from_config.offline import OfflineData


def start_model(
    inputs: Inputs, data: OfflineData, args: TrainingArguments, folder: TrainingFolder, say: Say
) -> tuple[nn.Module, Path | None]:
    """The start weights, with their adapter; and the checkpoint of the warm-up, where there is one.

    Whoever trains puts the checkpoint's weights in, after a warm-up of this process as after one of an earlier one.
    """
    from composer_replication.trainer.warmup import finished_warm_up, warm_up

    train = inputs.config.train
    if train.control != "none" and args.should_save and not folder.warmup.exists():
        real = TrainingFolder.of(replace(inputs.config, train=replace(train, control="none")))
        if finished_warm_up(real.warmup) is not None:
            folder.take_warmup(real)
    model = _load(inputs, data, args, say)
    is_wanted = _is_wanted(inputs, data, args, folder, model, say)
    if is_sharded(model):  # to be scored; what begins is whole
        del model
        model = _load(inputs, data, args, lambda _again: None)
    if not is_wanted:
        return model, None
    is_new = finished_warm_up(folder.warmup) is None
    if is_new and not folder.has_warmup and args.should_save:
        folder.write_config(inputs.config)
    done = warm_up(
        model,
        offline_arguments(train, folder.warmup, **_changes(train)),
        data.train,
        held_out=data.held_out,
        patience=train.warmup.patience if train.warmup.mode == "until" else None,
        on_held_out=lambda step, loss: say(f"warm-up step {step}: held-out loss of good turns {loss:.4f}"),
        hinted_corrections=train.warmup.hinted_corrections,
        processing_class=inputs.tokenizer,
        fsdp=train.fsdp.on,
    )
    say(done.in_words())
    if is_new:  # the steps were made in it
        del model
        gc.collect()
        torch.cuda.empty_cache()
        model = _load(inputs, data, args, lambda _again: None)
    return model, folder.warmup / done.checkpoint


def _load(inputs: Inputs, data: OfflineData, args: TrainingArguments, say: Say) -> nn.Module:
    train, said_ids = inputs.config.train, ids_said(data.train.rendered)
    assert train.model is not None
    set_seed(train.optimiser.seed)  # the adapter's first values are drawn before the trainer sets it
    why_not = "with FSDP" if args.fsdp or train.fsdp.on else ""
    quantization = "4bit" if train.adapter.kind == "qlora" else "none"
    return prepare_model(
        train.model,
        args,
        peft_config=lora_config(train.adapter),
        quantization=quantization,
        token_rows=lambda model: token_rows(inputs, model, said_ids, say, why_not=why_not),
    )


def _is_wanted(
    inputs: Inputs, data: OfflineData, args: TrainingArguments, folder: TrainingFolder, model: nn.Module, say: Say
) -> bool:
    """An explicit mode wins; a training that has begun goes on as it began."""
    from composer_replication.trainer.warmup import name_logprob

    warmup, items = inputs.config.train.warmup, data.train.channels
    if warmup.mode != "auto":
        if warmup.mode != "off" and not items[CHANNELS[0]]:
            fix = 'Set train.channels.good_turns = true, or train.warmup.mode = "off".'
            raise ConfigError(explain("train.warmup.mode", got=warmup.mode, expected="good turns to learn", fix=fix))
        return warmup.mode != "off"
    if folder.has_warmup or folder.newest_step() is not None:
        return folder.has_warmup
    # Without good turns it has nothing to learn from, without the other channels nothing to come before.
    if not items[CHANNELS[0]] or not any(items[name] for name in CHANNELS[1:]) or args.fsdp:
        return False
    if inputs.config.train.fsdp.on and args.world_size > 1:
        shard_model(model, args)
    elif not getattr(model, "is_quantized", False):
        model.to(args.device)
    logprob = name_logprob(model, data.train)
    is_low = bool(most_anywhere(int(logprob is not None and logprob < warmup.below), args.device))
    if is_low:
        say(
            f"log-prob of logged calls up to their tool's name: {logprob:.1f} nats, below {warmup.below:g}: this model"
            f" does not speak the logs' harness yet, and {warmup.steps} steps of channel 1 come first"
            ' (train.warmup.mode = "off" for none)'
        )
    return is_low


def _changes(train: TrainConfig) -> dict[str, Any]:
    """What a warm-up does otherwise than the steps after it: as many steps as its own keys say, at a constant rate."""
    warmup, is_until = train.warmup, train.warmup.mode == "until"
    steps = warmup.most if is_until else warmup.steps
    rising = min(train.optimiser.warmup, steps - 1)
    every = warmup.every if is_until else train.save.every
    return {
        "max_steps": steps,
        "lr_scheduler_type": "constant_with_warmup" if rising else "constant",
        "warmup_steps": rising,
        "eval_strategy": "steps" if is_until else "no",
        "eval_steps": warmup.every if is_until else None,
        "per_device_eval_batch_size": train.optimiser.per_device,
        "save_steps": every,
        "report_to": "none",
    }
