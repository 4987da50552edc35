"""A run on logged sessions with all three channels and an averaging teacher: what is killed and resumed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kill_and_resume.small_runs import weights_of

PIECES = Path(__file__).parents[1] / "unit" / "trainer"


def job(folder: Path, resume: bool, **_options: Any) -> dict[str, Any]:
    """Six steps of two micro-batches, a checkpoint after every second."""
    sys.path.insert(0, str(PIECES))
    from offline_pieces import logged, sessions_of, tiny, trainer_of

    from composer_replication.trainer.objective.channels import ChannelSettings
    from composer_replication.trainer.teacher_keeper import TeacherKeeper

    model = tiny()
    keeper = TeacherKeeper("ema", ema_rate=0.2)
    changes = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    trainer = trainer_of(
        folder,
        sessions_of(made=[logged(number) for number in range(6)]),
        model=model,
        settings=ChannelSettings(alpha_sdpo=0.7, beta_replay=0.3, sdpo_wrapper="taid", anneal="linear"),
        teacher=keeper,
        arguments_changes=changes,
    )
    trainer.train(resume_from_checkpoint=resume)
    return {
        "weights": weights_of(trainer.model),
        "teacher": weights_of(keeper.model),
        "totals": [line["loss"] for line in trainer.state.log_history if "loss" in line],
    }
