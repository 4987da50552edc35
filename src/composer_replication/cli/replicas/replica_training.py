"""Run `crf train` as one of several replicas, on its share of a run's sessions.

A replica's process calls `train` through the entrypoint:

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
    from composer_replication.trainer.from_config.training import TrainingResult
    from composer_replication.trainer.sessions.phases import TrainingCallbacks

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
    """Train as one replica and return a JSON record of the result.

    Args:
        manager: The round manager, which exchanges weights with the other replicas.
        rank: Number of this replica.
        world_size: Number of replicas.
        config: A TOML file.
        overrides: Options that override those of the file.
        outer: Fields of `diloco.training.OuterLoop`.
        progress: Callbacks of the training.

    Each replica writes to its own folder, `replicas/RANK` in `train.output` or in the run. At the end all have the
    same weights.
    """
    from composer_replication.config.presets import load_with_preset
    from composer_replication.diloco.training import OuterLoop
    from composer_replication.trainer.replica import Replica

    chosen = load_with_preset(config, overrides)
    replica = Replica(manager=manager, rank=rank, world_size=world_size, outer=OuterLoop(**(outer or {})))
    result = _train_replica(chosen, replica, progress=progress)
    return {"rank": rank, "steps": result.steps, "commits": manager.current_step(), "saved": str(result.saved)}


def _train_replica(config: CrfConfig, replica: Any, *, progress: TrainingCallbacks | None = None) -> TrainingResult:
    """Train as the given replica, a `trainer.replica.Replica`."""
    replica.check_steps(config.train.optimiser.steps)
    return train_step(_replica_config(config, replica.rank), replica=replica, progress=progress)


def _replica_config(config: CrfConfig, rank: int) -> CrfConfig:
    """Return the config of one replica, with an output folder of its own, and without warm-up and intermediate
    checkpoints.

    Checkpoints are not needed, because a replica gets its weights from the other replicas' run whenever it starts.
    """
    train = config.train
    if train.warmup.mode in ("steps", "until"):
        fix = "Warm up with `crf train` first and start replicas from those weights, or set it to off."
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
