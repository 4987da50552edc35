"""An offline run that was interrupted and resumed is the run that was not, bit for bit, teacher and schedules too."""

from __future__ import annotations

import pytest
import torch
from offline_pieces import logged, sessions_of, tiny, trainer_of

from composer_replication.errors import StaleArtefactError
from composer_replication.runs.journal import read_journal
from composer_replication.trainer.objective.channels import ChannelSettings
from composer_replication.trainer.teacher_keeper import TeacherKeeper

MADE = [logged(0), logged(1, with_site=False), logged(2), logged(3, with_pair=False), logged(4)]
SETTINGS = ChannelSettings(alpha_sdpo=0.7, beta_replay=0.3, sdpo_wrapper="taid", anneal="linear", anneal_end=0.5)


def trainer(folder, *, kind="ema", **changes):
    settings = {
        "max_steps": 5,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_steps": 3,
        "train_sampling_strategy": "random",
        "lr_scheduler_type": "linear",
    }
    return trainer_of(
        folder,
        sessions_of(made=MADE),
        model=tiny(dropout=0.1),
        settings=SETTINGS,
        teacher=TeacherKeeper(kind, ema_rate=0.3),
        arguments_changes=settings | changes,
    )


def figures(rows):
    """Without what depends on the clock, and without the line that says how a call of `train` ended."""
    return [row for row in rows if "train_runtime" not in row]


@pytest.mark.parametrize("kind", ["ema", "trust_region"])
def test_a_resumed_run_ends_where_the_uninterrupted_one_does(tmp_path, kind):
    whole = trainer(tmp_path / "whole", kind=kind)
    whole.train()
    trainer(tmp_path / "cut", kind=kind).train()
    for later in ("checkpoint-4", "checkpoint-5"):  # as if the process had died at step 5, before it was saved
        for path in sorted((tmp_path / "cut" / later).glob("*")):
            path.unlink()
        (tmp_path / "cut" / later).rmdir()
    resumed = trainer(tmp_path / "cut", kind=kind)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 5
    others = dict(whole.model.named_parameters())
    assert all(torch.equal(value, others[name]) for name, value in resumed.model.named_parameters())
    assert resumed.taid.state_dict() == whole.taid.state_dict()
    mine, theirs = resumed.teacher.state()["weights"], whole.teacher.state()["weights"]
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    assert resumed.channel_log.ran_steps == whole.channel_log.ran_steps
    kept = figures(read_journal(tmp_path / "cut" / "metrics.jsonl").rows)
    assert kept == figures(read_journal(tmp_path / "whole" / "metrics.jsonl").rows)
    assert [row["step"] for row in kept] == [3]


def test_a_run_is_not_resumed_with_another_teacher(tmp_path):
    trainer(tmp_path, max_steps=2).train()
    with pytest.raises(StaleArtefactError, match="teacher"):
        trainer(tmp_path, kind="frozen", max_steps=4).train(resume_from_checkpoint=True)
