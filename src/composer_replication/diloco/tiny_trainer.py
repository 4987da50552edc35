"""A tiny trainer for trying out a launch, and an example for writing your own.

It fits a line to points, which are divided among the replicas.

crf diloco launch bucket --replicas 2 --trainer-module composer_replication.diloco.tiny_trainer
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from composer_replication.diloco.training import OuterLoop, train_replica


def train(
    *,
    manager: Any,
    rank: int,
    world_size: int,
    exchanges: int = 4,
    sync_every: int = 5,
    outer_lr: float = 1.0,
    kill: str | None = None,
) -> dict[str, Any]:
    """Train until the run has made `exchanges` exchanges of weights. The caller uploads the folder returned as `saved`
    to the bucket.

    If `kill` is given (the path of a marker file), rank 1 creates that file and kills itself once, to show that the run
    survives.
    """
    from safetensors.torch import save_file

    # Every replica starts with the same weights.
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    points = torch.linspace(-1, 1, 64)[rank::world_size].unsqueeze(1)
    outer = OuterLoop(outer_lr=outer_lr, outer_momentum=0.0, nesterov=False, sync_every=sync_every)
    with train_replica(manager, model, optimizer, outer, commits=exchanges):
        while manager.current_step() < exchanges:
            loss = (model(points) - (3 * points + 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if kill and rank == 1 and manager.current_step() == 2 and not Path(kill).exists():
                Path(kill).touch()
                os.kill(os.getpid(), signal.SIGKILL)
    # This folder is removed once its files are uploaded.
    folder = Path(os.environ["CRF_REPLICA_FOLDER"], "weights")
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    print(f"rank {rank}: {manager.current_step()} exchanges")
    return {"saved": str(folder), "exchanges": manager.current_step()}
