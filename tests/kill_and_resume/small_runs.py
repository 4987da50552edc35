"""A tiny language model with dropout, its data and a Trainer with safe checkpoints: what is killed and resumed."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from composer_replication.errors import RunError
from composer_replication.trainer.checkpoints import load_tree, save_tree, weights_digest, write_manifest
from composer_replication.trainer.checkpoints.run_checkpoints import model_identity
from composer_replication.trainer.checkpoints.weights import (
    gather_state,
    load_optimiser_tree,
    load_weights,
    optimiser_tree,
    save_weights,
)
from composer_replication.trainer.overrides import SafeCheckpoints

VOCAB, LENGTH = 31, 8


class SmallTrainer(SafeCheckpoints, Trainer):
    """Notes which examples it saw, and counts them in its extra state."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[list[int]] = []
        self.examples_so_far = 0

    def training_step(self, model: Any, inputs: dict[str, torch.Tensor], *args: Any) -> torch.Tensor:
        self.seen.append(inputs.pop("number").tolist())
        self.examples_so_far += len(self.seen[-1])
        return super().training_step(model, inputs, *args)

    def extra_state(self) -> dict[str, Any]:
        return {**super().extra_state(), "examples": self.examples_so_far}

    def load_extra_state(self, tree: dict[str, Any]) -> None:
        super().load_extra_state(tree)
        self.examples_so_far = tree["examples"]


class Numbered(torch.utils.data.Dataset):
    """Rows of random ids; each row knows its number."""

    def __init__(self, size: int) -> None:
        self._ids = torch.randint(0, VOCAB, (size, LENGTH), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index], "number": torch.tensor(index)}


def small_model(*, lora: bool = False, hidden: int = 16, seed: int = 3) -> Any:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=16, n_embd=hidden, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model: Any = GPT2LMHeadModel(config)
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(seed + 1)
        settings = LoraConfig(
            r=2, lora_dropout=0.2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True
        )
        model = get_peft_model(model, settings)
    return model


def small_trainer(
    output: Path, *, lora: bool = False, model: Any = None, size: int = 24, callbacks: Any = None, **settings: Any
) -> SmallTrainer:
    """Micro-batches of 2, two of them a step: six steps in an epoch of 24 examples."""
    defaults = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_steps": 3,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "seed": 7,
    }
    args = TrainingArguments(output_dir=str(output), **(defaults | settings))
    model = small_model(lora=lora) if model is None else model
    data = Numbered(size)
    rows = [{key: data[number][key] for key in ("input_ids", "labels")} for number in range(4)]
    return SmallTrainer(model=model, args=args, train_dataset=data, eval_dataset=rows, callbacks=callbacks)


def weights_of(model: Any) -> str:
    """A digest of every weight's bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def write_weights_manifest(folder: Path, model: Any) -> None:
    """Make weights that were saved alone a checkpoint."""
    about = {"model": model_identity(model), "data": {}, "weights_only": True}
    write_manifest(folder, step=0, about=about)


def job(folder: Path, resume: bool, *, stop_rank: int | None = None, **options: Any) -> dict[str, Any]:
    """A run of the small trainer: what it ends with; the process `stop_rank` is asked to stop in step 3."""
    trainer = small_trainer(folder, **options)
    if trainer.args.process_index == stop_rank:
        trainer.add_callback(AskToStop())
    trainer.train(resume_from_checkpoint=resume)
    return {
        "weights": weights_of(trainer.model),
        "examples": trainer.examples_so_far,
        "steps": trainer.state.global_step,
        "seen": trainer.seen,
        "stopped_by": trainer.stopped_by,
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
    }


class AskToStop(TrainerCallback):
    """SIGTERM to its own process in the middle of step 3."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def job_with_failing_disk(folder: Path, resume: bool, *, rank: int) -> dict[str, Any]:
    """The second save of one process fails; what every process says."""
    trainer = small_trainer(folder, max_steps=4)
    extra_state = trainer.extra_state

    def no_space() -> dict[str, Any]:
        if trainer.state.global_step == 4 and trainer.args.process_index == rank:
            raise OSError(errno.ENOSPC, "No space left on device")
        return extra_state()

    trainer.extra_state = no_space
    try:
        trainer.train(resume_from_checkpoint=resume)
    except RunError as error:
        return {"error": str(error)}
    return {"error": ""}


def sharded_job(folder: Path, resume: bool, *, lora: bool) -> dict[str, Any]:
    """Two steps of an FSDP2 model, a save, a step more; and the same from the save in a new model."""
    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))

    def fresh(seed: int) -> tuple[Any, Any]:
        model = small_model(lora=lora, seed=seed).eval()
        for block in (model.get_base_model() if lora else model).transformer.h:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1)

    def step(model: Any, optimiser: Any, number: int) -> None:
        ids = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(number))
        model(input_ids=ids, labels=ids).loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    model, optimiser = fresh(3)
    step(model, optimiser, 1)
    step(model, optimiser, 2)
    state, tree = gather_state(model), optimiser_tree(model, optimiser)
    about = {"model": model_identity(model), "data": {}, "weights_only": True}
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_weights(model, folder, state, own_names=True)
        save_tree(folder, "optimizer", tree)
        write_manifest(folder, step=2, about=about)
    torch.distributed.barrier()
    again, other_optimiser = fresh(3 if lora else 4)  # below an adapter the base is not in the checkpoint
    load_weights(again, folder)
    load_optimiser_tree(again, other_optimiser, load_tree(folder, "optimizer"))
    step(model, optimiser, 3)
    step(again, other_optimiser, 3)
    digests = [weights_of_sharded(each) for each in (model, again)]
    parts = [weights_digest(each) for each in (model, again, fresh(3)[0])]
    torch.distributed.destroy_process_group()
    files = sorted(path.name for path in folder.iterdir())
    return {"stayed": digests[0], "resumed": digests[1], "parts": parts, "files": files}


def weights_of_sharded(model: Any) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        digest.update(name.encode())
        digest.update(whole.contiguous().numpy().tobytes())
    return digest.hexdigest()
