"""What has to be installed to train, found out before anything is read or loaded."""

from __future__ import annotations

from composer_replication.config import TrainConfig
from composer_replication.errors import MissingExtraError, explain
from composer_replication.optional import available


def check_extra(train: TrainConfig) -> None:
    """Raise MissingExtraError that names what this config needs of the extra `train`, and the command to type."""
    needed = ["accelerate"]
    needed += ["peft"] if train.adapter.kind != "none" else []
    needed += ["trl", "datasets"] if train.mode == "grpo" else []
    missing = [each for each in needed if not available(each)]
    if missing:
        fix = 'Type: pip install "composer-replication[train]"'
        got = f"no {', no '.join(missing)}"
        raise MissingExtraError(explain("training", got=got, expected="the extra `train`", fix=fix), name=missing[0])
