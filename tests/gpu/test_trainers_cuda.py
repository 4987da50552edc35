"""Both trainers on a CUDA device: the figures of the CPU, mixed precision, checkpointing, and a resumed run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "trainer"))
pytest.importorskip("trl")

from offline_pieces import arguments, logged, sessions_of, tiny  # noqa: E402
from test_composer_channels import scripted  # noqa: E402

from composer_replication.trainer.objective.channels import ChannelSettings  # noqa: E402
from composer_replication.trainer.offline_trainer import OfflineTrainer  # noqa: E402
from composer_replication.trainer.teacher_keeper import TeacherKeeper  # noqa: E402
from rollouts.tiny_policy import save_policy  # noqa: E402


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize("kind", ["live", "ema", "trust_region"])
def test_rollouts_on_cuda_give_the_figures_of_the_cpu(policy: Path, tmp_path: Path, kind: Any) -> None:
    found = {}
    for use_cpu in (True, False):
        trainer = scripted(
            policy, tmp_path / str(use_cpu), {"use_cpu": use_cpu, "max_steps": 3}, alpha_sdpo=1.0, teacher=kind
        )
        trainer.train()
        lines = [line for line in trainer.state.log_history if "loss/sdpo_kl" in line]
        found[use_cpu] = [(line["loss/grpo"], line["loss/sdpo_kl"]) for line in lines]
    torch.testing.assert_close(torch.tensor(found[False]), torch.tensor(found[True]), rtol=5e-3, atol=1e-5)


def test_a_teacher_without_a_hint_teaches_nothing_in_mixed_precision(policy: Path, tmp_path: Path) -> None:
    settings = {"use_cpu": False, "bf16": True, "gradient_checkpointing": True}
    trainer = scripted(policy, tmp_path, settings, alpha_sdpo=1.0)
    original = trainer._generate_and_score_completions

    def unhinted(inputs: Any) -> Any:
        batch = original(inputs)
        for sample, each in enumerate(batch["sdpo_sites"]):
            ids = torch.cat([batch["prompt_ids"][sample], batch["completion_ids"][sample]])
            padding = int((batch["prompt_mask"][sample] == 0).sum())
            each[:] = [
                turn._replace(teacher_ids=ids[padding : padding + turn.end].cpu(), teacher_start=turn.start)
                for turn in each
            ]
        return batch

    trainer._generate_and_score_completions = unhinted  # type: ignore[method-assign]
    trainer.train()
    # Two kernels, one of them over a tree: what is left is the rounding of bf16 between them.
    assert abs(trainer.state.log_history[0]["loss/sdpo_kl"]) < 5e-4


@pytest.mark.parametrize("kind", ["ema", "trust_region"])
def test_a_resumed_run_on_cuda_ends_where_the_uninterrupted_one_does(tmp_path: Path, kind: Any) -> None:
    from peft import LoraConfig

    def trainer(folder: str) -> OfflineTrainer:
        changes = {"use_cpu": False, "bf16": True, "gradient_checkpointing": True, "max_steps": 4}
        args = arguments(tmp_path / folder, save_strategy="steps", save_steps=2, **changes)
        return OfflineTrainer(
            tiny(),
            args,
            sessions_of(made=[logged(number) for number in range(4)]),
            settings=ChannelSettings(alpha_sdpo=0.7, beta_replay=0.3),
            teacher=TeacherKeeper(kind),
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1),
        )

    whole = trainer("whole")
    whole.train()
    resumed = trainer("whole")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    # Not bit for bit: attention's backward adds up in any order on a GPU, and two whole runs differ as much.
    before, after = ([line["loss"] for line in each.state.log_history if "loss" in line] for each in (whole, resumed))
    assert after == pytest.approx(before, rel=1e-3)
    others = dict(whole.model.named_parameters())
    for name, value in resumed.model.named_parameters():
        torch.testing.assert_close(
            value, others[name], rtol=0, atol=1e-2, msg=lambda text, name=name: f"{name}: {text}"
        )
