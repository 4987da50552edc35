"""Checkpoints that are only a file with their step in it."""

from __future__ import annotations

from pathlib import Path

from composer_replication.trainer.watch.collapse_alarm import _Best


def checkpoint(output: Path, step: int) -> None:
    folder = output / f"checkpoint-{step}" / "inner"
    folder.mkdir(parents=True)
    (folder / "weights").write_text(f"weights of {step}")


def best_of(step: int, value: float) -> _Best:
    return _Best(step=step, metric="eval_reward", value=value, higher_is_better=True)


def names(output: Path) -> set[str]:
    return {path.name for path in output.iterdir()}
