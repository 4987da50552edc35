"""`crf train` as one replica of several: what a replica's process runs, on its part of a run's sessions.

replica_entrypoint.main(URI, WORLD_SIZE, "composer_replication.cli.replicas.replica_training", trainer_kwargs={
    "config": "train.toml", "overrides": ["train.run=RUN"], "outer": {"sync_every": 50}})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.config import CrfConfig
from composer_replication.errors import ConfigError, explain
from composer_replication.trainer.from_config.train_run import train as train_step

if TYPE_CHECKING:
    from composer_replication.trainer.from_config.plan import TrainingResult
    from composer_replication.trainer.from_config.training import TrainingCallbacks

FOLDER = "replicas"


def train(
    *,
    manager: Any,
    rank: int,
    world_size: int,
    config: str | None = None,
    overrides: Sequence[str] = (),
    outer: Mapping[str, Any] | None = None,
    progress: TrainingCallbacks | None = None,
) -> dict[str, Any]:
    """Train as the file `config` and the overrides say; JSON that says what came of it.

    `outer` are fields of `diloco.training.OuterLoop`. Every replica has a folder of its own, `replicas/RANK` in
    `train.output` or the run; their weights are equal.
    """
    from composer_replication.config.presets import load_with_preset
    from composer_replication.diloco.training import OuterLoop
    from composer_replication.trainer.replica import Replica

    chosen = load_with_preset(config, overrides)
    replica = Replica(manager=manager, rank=rank, world_size=world_size, outer=OuterLoop(**(outer or {})))
    result = train_replica(chosen, replica, progress=progress)
    return {"rank": rank, "steps": result.steps, "commits": manager.current_step(), "saved": str(result.saved)}


def train_replica(config: CrfConfig, replica: Any, *, progress: TrainingCallbacks | None = None) -> TrainingResult:
    """`replica` (a `trainer.replica.Replica`) of this training."""
    replica.check_steps(config.train.optimiser.steps)
    return train_step(_replica_config(config, replica.rank), replica=replica, progress=progress)


def _replica_config(config: CrfConfig, rank: int) -> CrfConfig:
    """Its own folder, and no warm-up or checkpoint: it begins with the run's weights whenever it is started."""
    train = config.train
    if train.warmup.mode in ("steps", "until"):
        fix = "Warm up first, with `crf train`, and start replicas from those weights; or set it to off."
        raise ConfigError(explain("train.warmup.mode of a replica", got=train.warmup.mode, expected="off", fix=fix))
    root = train.output or train.run
    if root is None:
        raise ConfigError(explain("train.output without train.run", got="none", expected="a folder"))
    return replace(
        config,
        train=replace(
            train,
            output=str(Path(root) / FOLDER / str(rank)),
            warmup=replace(train.warmup, mode="off"),
            save=replace(train.save, every=train.optimiser.steps),
        ),
    )
