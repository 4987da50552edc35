"""`crf train` on logged sessions: the trainer, and what its hint proof kept."""

from __future__ import annotations

from collections import Counter

import torch
from transformers import TrainerCallback, TrainingArguments, set_seed

from composer_replication.sessions.dataset import LoggedSessions
from composer_replication.trainer.from_config.arguments import make_arguments
from composer_replication.trainer.from_config.folder import TrainingFolder
from composer_replication.trainer.from_config.parts import Inputs, Say, lora_config, teacher_of, weighting_of
from composer_replication.trainer.from_config.sessions import OfflineData
from composer_replication.trainer.offline_trainer import OfflineTrainer
from composer_replication.trainer.presets import channel_settings, training_arguments


def offline_arguments(inputs: Inputs, folder: TrainingFolder) -> TrainingArguments:
    """Progress is told by whoever called; pinned memory is of use to a GPU alone."""
    return make_arguments(
        TrainingArguments,
        inputs.config.train,
        output_dir=str(folder.checkpoints),
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        **training_arguments(inputs.config.train),
    )


def offline_trainer(
    inputs: Inputs,
    data: OfflineData,
    args: TrainingArguments,
    folder: TrainingFolder,
    callbacks: list[TrainerCallback],
) -> OfflineTrainer:
    """The trainer, with hints proved and reference log-probs there."""
    config = inputs.config
    assert config.train.model is not None
    set_seed(config.train.optimiser.seed)  # the adapter's first values are drawn before the trainer sets it
    return OfflineTrainer(
        config.train.model,
        args,
        data.train,
        settings=channel_settings(config),
        teacher=teacher_of(config),
        weighting=weighting_of(config),
        lm_weight=1.0 if config.train.channels.good_turns else 0.0,
        eval_sessions=data.held_out,
        peft_config=lora_config(config.train.adapter),
        quantization="4bit" if config.train.adapter.kind == "qlora" else "none",
        hint_margin=config.train.proof.margin if _has_proof(inputs) else None,
        metrics_path=folder.metrics,
        callbacks=callbacks,
        processing_class=inputs.tokenizer,
    )


def tell_proof(sessions: LoggedSessions, say: Say) -> None:
    """What the hint proof kept, in a line."""
    if sessions.proofs is None:
        return
    reasons = Counter(proof.reason for proof in sessions.proofs)
    kept = reasons.pop("kept", 0)
    dropped = ", ".join(f"{number} {reason.replace('_', ' ')}" for reason, number in sorted(reasons.items()))
    say(f"hint proof: {kept} of {len(sessions.proofs)} sites teach{f'; dropped: {dropped}' if dropped else ''}")


def _has_proof(inputs: Inputs) -> bool:
    return inputs.config.train.proof.on and inputs.config.loss.alpha_sdpo > 0
