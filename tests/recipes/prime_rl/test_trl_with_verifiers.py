"""`crf train` with an environment of verifiers: TRL's trainer and verifiers' own loop, in one environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_replication.config import CrfConfig, load
from composer_replication.envs.student import load_student, student_folder
from composer_replication.errors import ConfigError
from refusals import refusal

for _library in ("verifiers.v1", "trl", "datasets"):
    pytest.importorskip(_library)
pytestmark = pytest.mark.filterwarnings("ignore")
NAME = "verifiers:composer-workspace"


def config(tmp_path: Path, *overrides: str) -> CrfConfig:
    given = [
        f"train.model={student_folder()}",
        f"train.output={tmp_path / 'out'}",
        "train.mode=grpo",
        f"train.grpo.environment={NAME}",
        "train.grpo.num_generations=4",
        "train.grpo.max_completion_length=200",
        "train.adapter.kind=none",
        "train.optimiser.steps=2",
        "train.optimiser.per_device=4",
        "train.optimiser.accumulation=1",
        "train.optimiser.bf16=false",
        "train.optimiser.lr=1e-4",
        "train.log_every=1",
        "loss.alpha_sdpo=0.1",
        "loss.beta_replay=0",
        *overrides,
    ]
    return load(CrfConfig, None, given)


def test_two_steps_of_grpo_with_sites_in_an_environment_of_verifiers(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from safetensors.torch import load_file

    from composer_replication.trainer.from_config.training import run_training

    done = run_training(config(tmp_path))
    assert done.steps == 2
    lines = [json.loads(line) for line in Path(done.metrics).read_text().splitlines()]
    logged = [line for line in lines if "loss/grpo" in line]
    assert len(logged) == 2
    for line in logged:
        assert line["completions/mean_length"] > 10
        assert 0 <= line["rewards/world_reward/mean"] <= 1
        assert line["sites/per_100_turns"] >= 0
    assert done.saved is not None
    trained = load_file(Path(done.saved) / "model.safetensors")
    before = dict(load_student(dtype=torch.float32)[0].named_parameters())
    moved = [name for name, value in trained.items() if name in before and not torch.equal(value.float(), before[name])]
    assert moved


def test_a_data_set_beside_its_own_tasks_is_refused(tmp_path: Path) -> None:
    from composer_replication.trainer.from_config.grpo import _train_and_eval_prompts
    from composer_replication.trainer.from_config.inputs import read_inputs

    rows, _ = _train_and_eval_prompts(read_inputs(config(tmp_path)))
    assert set(rows.column_names) == {"prompt", "task"}
    with refusal(ConfigError, what="train.grpo.dataset", got="x.jsonl"):
        _train_and_eval_prompts(read_inputs(config(tmp_path, "train.grpo.dataset=x.jsonl")))
