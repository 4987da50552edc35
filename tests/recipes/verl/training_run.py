"""A run in a process of its own: `python -m recipes.verl.training_run FOLDER LAST [--resume] [--die-in STEP]`.

A checkpoint of verl's own after every step. A run that is told to die does so by SIGKILL in the middle of a step, after
its gradients are made and before its weights move. What each step reported is in FOLDER/steps.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch

from composer_replication.recipes.verl.engine import StepChannels
from recipes.recorded_steps import ITERATIONS, recorded_batches
from recipes.verl.cpu_engine import channels, data_proto, join_group, new_engine, policy_loss, step_data


def new_run() -> Any:
    engine = new_engine()
    engine.channels = StepChannels(channels(anneal="linear"), new_engine())
    return engine


def train(engine: Any, number: int) -> dict[str, float]:
    """One step, and the schedule's."""
    data = step_data(data_proto(recorded_batches()[number // ITERATIONS]))
    with engine.train_mode():
        outputs = engine.train_batch(data, policy_loss(8))
    engine.lr_scheduler_step()
    found = outputs["metrics"]
    return {
        "step": number,
        "loss": sum(outputs["loss"]),
        "weight": float(found["composer/sdpo_kl_weight"].aggregate()),
        "grad_norm": found["grad_norm"],
    }


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().full_tensor().clone() for name, value in engine.module.named_parameters()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("last", type=int)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--die-in", type=int, default=-1)
    given = parser.parse_args()
    join_group(given.folder)
    engine, first = new_run(), 0
    latest = given.folder / "latest"
    if given.resume:
        first = int(latest.read_text()) + 1
        engine.load_checkpoint(str(given.folder / f"step-{first - 1}"), del_local_after_load=False)
    for number in range(first, given.last + 1):
        if number == given.die_in:
            engine.optimizer_step = lambda: os.kill(os.getpid(), signal.SIGKILL)
        line = train(engine, number)
        engine.save_checkpoint(str(given.folder / f"step-{number}"), global_step=number)
        latest.write_text(str(number))
        with (given.folder / "steps.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    from safetensors.torch import save_file

    save_file(weights_of(engine), given.folder / "weights.safetensors")


if __name__ == "__main__":
    main()
