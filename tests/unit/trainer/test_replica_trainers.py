"""Trainers as replicas: the outer loop around their steps, their part of the data, and the pace of the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from offline_pieces import logged, sessions_of, tiny, trainer_of, write_run

from composer_replication.cli.replicas.replica_training import _train_replica
from composer_replication.config import CrfConfig, loads
from composer_replication.diloco.training import OuterLoop
from composer_replication.errors import ConfigError, InputError
from composer_replication.trainer.objective.channels import ChannelSettings
from composer_replication.trainer.replica import Replica, ReplicaSteps
from refusals import refusal
from rollouts.tiny_policy import save_policy
from rollouts.trainers import by_first_token, make, questions, quick_config, weights
from small_replicas import OneReplica

pytest.importorskip("torchft")
BOTH = ChannelSettings(alpha_sdpo=0.7, beta_replay=0.3)
AVERAGING = OuterLoop(outer_lr=1.0, outer_momentum=0.0, nesterov=False, sync_every=2)


class Counting(OneReplica):
    """Counts the numbers that travel; `start` is the commit at which it begins, as after a heal."""

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.sent, self.step, self.weight = 0, start, 1.0

    def allreduce(self, tensor, should_quantize=False):
        self.sent += tensor.numel()
        return super().allreduce(tensor)


def replica(manager=None, *, rank=0, world_size=1, outer=AVERAGING) -> Replica:
    return Replica(manager=manager or Counting(), rank=rank, world_size=world_size, outer=outer)


def largest_difference(one, other) -> float:
    values = dict(one.named_parameters())
    assert values.keys() == dict(other.named_parameters()).keys()
    return max((values[name] - each).abs().max().item() for name, each in other.named_parameters())


def adapter():
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.mark.parametrize("peft_config", [None, adapter], ids=["whole weights", "an adapter"])
def test_the_offline_trainer_as_one_replica_that_averages_is_the_offline_trainer(tmp_path, peft_config):
    def trained(folder, *callbacks):
        torch.manual_seed(5)
        config = None if peft_config is None else peft_config()
        options = {"settings": BOTH, "peft_config": config, "callbacks": callbacks}
        trainer = trainer_of(tmp_path / folder, sessions_of(0, 1, 2), arguments_changes={"max_steps": 4}, **options)
        trainer.train()
        return trainer.model

    manager = Counting()
    plain, as_replica = trained("a"), trained("b", ReplicaSteps(replica(manager)))
    moved = [each for each in plain.parameters() if each.requires_grad]
    assert largest_difference(plain, as_replica) < 1e-6
    assert manager.current_step() == 2
    assert manager.sent == 2 * sum(each.numel() for each in moved)
    assert len(moved) == len(list(plain.parameters())) if peft_config is None else len(moved) == 8


def test_the_trainer_with_rollouts_as_one_replica_that_averages_is_that_trainer(tmp_path):
    from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer

    policy = save_policy(tmp_path / "policy")

    def trained(folder, callbacks):
        sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "max_steps": 2, "learning_rate": 0.01}
        config = quick_config(tmp_path / folder, **sizes)
        named = {"reward_funcs": by_first_token, "train_dataset": questions(), "callbacks": callbacks}
        trainer = make(ComposerReplicationTrainer, policy, config, **named)
        trainer.train()
        return weights(trainer)

    plain, as_replica = trained("a", None), trained("b", [ReplicaSteps(replica())])
    assert max((plain[name] - as_replica[name]).abs().max() for name in plain) < 1e-6
    assert set(plain) == set(as_replica)


def test_a_replica_that_was_started_again_goes_on_at_the_runs_step_with_its_learning_rate(tmp_path):
    changes = {"max_steps": 8, "lr_scheduler_type": "linear"}

    def rates(folder, manager):
        callbacks = [ReplicaSteps(replica(manager))]
        trainer = trainer_of(tmp_path / folder, sessions_of(0, 1), arguments_changes=changes, callbacks=callbacks)
        trainer.train()
        return {row["step"]: row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row}

    whole, again = rates("a", Counting()), rates("b", Counting(start=3))
    assert list(whole) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert again == {step: whole[step] for step in (7, 8)}


@pytest.mark.parametrize("every", [1, 2])
def test_a_replica_that_was_started_again_after_the_end_exchanges_and_changes_nothing(tmp_path, every):
    outer = OuterLoop(outer_lr=1.0, outer_momentum=0.0, nesterov=False, sync_every=every)
    manager = Counting(start=4 // every)
    steps = ReplicaSteps(replica(manager, outer=outer))
    trainer = trainer_of(tmp_path, sessions_of(0, 1), arguments_changes={"max_steps": 4}, callbacks=[steps])
    before = {name: each.detach().clone() for name, each in trainer.model.named_parameters()}
    trainer.train()
    assert (manager.current_step(), manager.sent, trainer.state.global_step) == (4 // every, 0, 4)
    assert all(torch.equal(before[name], each) for name, each in trainer.model.named_parameters())
    assert not [row for row in trainer.state.log_history if "learning_rate" in row]


def test_a_replica_ends_with_the_global_weights_of_all_fragments(tmp_path):
    outer = OuterLoop(sync_every=4, num_fragments=2, outer_lr=0.5)
    steps = ReplicaSteps(replica(outer=outer))
    trainer = trainer_of(tmp_path, sessions_of(0, 1), arguments_changes={"max_steps": 6}, callbacks=[steps])
    trainer.train()
    fragments = [part.original_parameters for part in steps.loop._fragments]
    shared = {name: value for each in fragments for name, value in each.items()}
    assert all(torch.equal(shared[name], each) for name, each in trainer.model.named_parameters())


def test_parts_are_disjoint_whole_and_alike_in_size():
    ids = [f"session-{number}" for number in range(23)]
    parts = [replica(rank=rank, world_size=4).part_of(ids) for rank in range(4)]
    assert sorted(len(part) for part in parts) == [5, 6, 6, 6]
    assert frozenset().union(*parts) == set(ids)
    assert parts[2] == replica(rank=2, world_size=4).part_of(reversed(ids))
    assert [*replica(rank=1, world_size=3).rows_of(8)] == [1, 4, 7]


def config_of(tmp_path, *, steps=2, warmup="auto") -> CrfConfig:
    return loads(
        CrfConfig,
        f"""
        [train]
        run = "{tmp_path / "run"}"
        model = "{tmp_path / "model"}"
        preset = "none"
        [train.optimiser]
        steps = {steps}
        lr = 1e-2
        [train.warmup]
        mode = "{warmup}"
        [train.proof]
        on = false
        [train.adapter]
        targets = ["q_proj"]
        """,
    )


def test_crf_train_as_two_replicas_learns_from_two_parts_into_two_folders(tmp_path):
    made = [logged(number) for number in range(3)]
    run = write_run(tmp_path / "run", made)
    save_policy(tmp_path / "model")
    samples = []
    for rank in range(2):
        manager = Counting()
        result = _train_replica(config_of(tmp_path), replica(manager, rank=rank, world_size=2))
        assert result.saved == run.root / "replicas" / str(rank) / "adapter"
        assert (result.steps, manager.current_step()) == (2, 1)
        samples.append(manager.weight)
    assert sorted(samples) == [1.0, 2.0]
    assert not run.path("ref_logprobs").exists()


def test_what_a_replica_cannot_do_is_refused(tmp_path):
    write_run(tmp_path / "run", [logged(0)])
    with refusal(InputError, what="train.optimiser.steps", got="3", expected="2", fix="4"):
        _train_replica(config_of(tmp_path, steps=3), replica())
    with refusal(ConfigError, what="train.warmup.mode", got="steps", expected="off"):
        _train_replica(config_of(tmp_path, warmup="steps"), replica())
    with pytest.raises(InputError, match=r"\breplica 2\b.*\b3\b"):
        replica(rank=2, world_size=3).weigh(0)
    with refusal(InputError, what="train.optimiser.steps", got="3"):
        trainer_of(tmp_path, sessions_of(0), model=tiny(), callbacks=[ReplicaSteps(replica())]).train()


@pytest.mark.full
def test_the_example_trains_one_adapter_with_two_processes(tmp_path):
    write_run(tmp_path / "run", [logged(number) for number in range(4)])
    save_policy(tmp_path / "model")
    example = Path(__file__).parents[3] / "examples" / "diloco" / "offline.py"
    overrides = ["train.preset=none", "train.proof.on=false", "train.adapter.targets=['q_proj']"]
    asked = [str(tmp_path / "run"), str(tmp_path / "model"), "--steps", "4", "--every", "2", "--output", "out", "--set"]
    command = [sys.executable, str(example), *asked, *overrides]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[:2]] == ["replica 0: succeeded", "replica 1: succeeded"]
    assert "'steps': 4, 'commits': 2" in lines[0]
    assert len(lines[2].removeprefix("weights: ").split(", ")) == 1
