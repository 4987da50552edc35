"""With its weights at 0 the trainer is GRPOTrainer, bit for bit, whether channel 2 is off or measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
from rollouts.tiny_policy import save_policy
from rollouts.trainers import by_first_token, make, questions, quick_config, weights

LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")


class Complaining:
    """An environment with a tool that is never called by chance, and a complaint about every rollout's first turn."""

    def reset(self, **_row: Any) -> None:
        self.signals = [{"turn": 0, "kind": "other", "message": "wrong", "hint": "Use the tool `look`."}]

    def look(self, path: str) -> str:
        """Looks.

        Args:
            path: where
        """
        return f"nothing at {path}"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


def _trained(trainer_class: type[GRPOTrainer], policy: Path, folder: Path, loss_type: str, **named: Any) -> GRPOTrainer:
    config = quick_config(
        folder,
        loss_type=loss_type,
        max_steps=3,
        per_device_train_batch_size=2,
        num_generations=4,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        learning_rate=0.01,
    )
    trainer = make(
        trainer_class,
        policy,
        config,
        reward_funcs=by_first_token,
        train_dataset=questions(),
        environment_factory=Complaining,
        **named,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_weights_of_0_leave_every_loss_type_as_it_is(policy: Path, tmp_path: Path, loss_type: str) -> None:
    plain = _trained(GRPOTrainer, policy, tmp_path / "a", loss_type)
    off = _trained(ComposerReplicationTrainer, policy, tmp_path / "b", loss_type)
    measured = _trained(ComposerReplicationTrainer, policy, tmp_path / "c", loss_type, measure_channels=True)
    wanted = weights(plain)
    for trainer in (off, measured):
        found = weights(trainer)
        assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    values = [entry["loss/sdpo_kl"] for entry in measured.state.log_history if "loss/sdpo_kl" in entry]
    assert len(values) == 3
    assert min(values) > 1e-5  # it was computed, on rollouts that were sampled
    start = make(GRPOTrainer, policy, quick_config(tmp_path / "d"), train_dataset=questions())
    assert not torch.equal(weights(start)["lm_head.weight"], wanted["lm_head.weight"])


def test_weights_of_0_leave_an_adapter_as_it_is(policy: Path, tmp_path: Path) -> None:
    from peft import LoraConfig

    found: list[dict[str, torch.Tensor]] = []
    for trainer_class, named in (
        (GRPOTrainer, {}),
        (ComposerReplicationTrainer, {}),
        (ComposerReplicationTrainer, {"measure_channels": True, "teacher": "trust_region"}),
    ):
        adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        folder = tmp_path / str(len(found))
        found.append(weights(_trained(trainer_class, policy, folder, "dapo", peft_config=adapter, **named)))
    for other in found[1:]:
        assert all(torch.equal(found[0][name], other[name]) for name in found[0])


def test_a_positive_weight_changes_the_run(policy: Path, tmp_path: Path) -> None:
    plain = weights(_trained(GRPOTrainer, policy, tmp_path / "a", "dapo"))
    taught = weights(_trained(ComposerReplicationTrainer, policy, tmp_path / "b", "dapo", alpha_sdpo=1.0))
    assert sum(not torch.equal(plain[name], taught[name]) for name in plain) == len(plain)


def test_rows_that_an_adapter_trains_are_in_the_loss_of_rollouts_and_of_sites(policy: Path, tmp_path: Path) -> None:
    """TRL computes from the head's weight as well: log-probs are those of the model's own logits, and the row moves."""
    from peft import LoraConfig

    rows = {"embed_tokens": [5], "lm_head": [5]}
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], trainable_token_indices=rows)
    named = {"peft_config": adapter, "alpha_sdpo": 1.0, "teacher": "trust_region"}
    trainer = _trained(ComposerReplicationTrainer, policy, tmp_path, "dapo", **named)
    assert min(entry["loss/sdpo_kl"] for entry in trainer.state.log_history if "loss/sdpo_kl" in entry) > 1e-5
    model, ids = trainer.model, torch.tensor([[3, 5, 7, 5, 9, 4]])
    head = model.get_output_embeddings()
    assert not torch.equal(head.weight[5], head.original_module.weight[5])
    assert torch.equal(head.weight[:5], head.original_module.weight[:5])
    with torch.no_grad():
        found = trainer._get_per_token_logps_and_entropies(model, ids, torch.ones_like(ids), 4)[0]
        logprobs = model(input_ids=ids).logits.div(trainer.temperature).log_softmax(-1)
    wanted = logprobs[0, 1:5].gather(-1, ids[0, 2:, None])[:, 0]
    assert torch.allclose(found[0], wanted, atol=1e-5)
