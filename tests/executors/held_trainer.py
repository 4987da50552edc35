"""The tiny trainer, whose rank 1 waits after two exchanges until its machine is taken away; the next one trains on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from composer_replication.diloco import tiny_trainer


def train(*, manager: Any, rank: int, held: str, **options: Any) -> dict[str, Any]:
    current_step = manager.current_step

    def held_step() -> int:
        step = current_step()
        if rank == 1 and step == 2 and not Path(held).exists():
            Path(held).touch()
            time.sleep(600)
        return step

    manager.current_step = held_step
    return tiny_trainer.train(manager=manager, rank=rank, **options)
