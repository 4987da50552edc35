"""`data_collator=` without `trace_dataset=`: rows of the training set that are traces are taken as such."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from composer_replication.errors import InputError
from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
from composer_replication.trainer.data_collator import CollatorConfig, ComposerDataCollator
from rollouts.tiny_policy import load_tokenizer, save_policy
from rollouts.trainers import make, questions, quick_config

ROW = {
    "trace_id": "t",
    "turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": "I look.", "tool_error": "file_not_found", "error_meta": {}},
    ],
    "dpo_pairs": [
        {
            "state_id": "s",
            "state_messages": [{"role": "user", "content": "Look"}],
            "chosen": "I will look at the file first.",
            "rejected": "The answer is 7.",
            "n_teachers_agreeing": 2,
        }
    ],
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


def by_length(completion_ids: list[list[int]], **_columns: Any) -> list[float]:
    return [float(len(ids) % 7) for ids in completion_ids]


def traces_of(policy: Path) -> ComposerDataCollator:
    config = CollatorConfig(hint_generator=lambda kind, meta: "Use the tools.")
    return ComposerDataCollator(load_tokenizer(policy), config)


@pytest.mark.parametrize("rows", [[ROW] * 2, Dataset.from_list([ROW] * 2)], ids=["list", "dataset"])
def test_a_collator_alone_takes_the_rows_of_the_training_set_as_traces(policy: Path, tmp_path: Path, rows: Any) -> None:
    chosen = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8}
    trainer: Any = ComposerReplicationTrainer(
        AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
        by_length,
        quick_config(tmp_path, **chosen),
        rows,
        processing_class=load_tokenizer(policy),
        data_collator=traces_of(policy),
        alpha_sdpo=0.1,
        beta_replay=1.0,
    )
    trainer.train()
    (entry, *_) = trainer.state.log_history
    assert entry["loss/trace_replay_dpo"] == pytest.approx(math.log(2), abs=1e-5)
    assert entry["loss/sdpo_kl_logged"] > 0
    assert trainer.train_dataset[0]["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look"},
    ]


def test_a_collator_alone_leaves_grpo_as_it_is_where_no_channel_reads_traces(policy: Path, tmp_path: Path) -> None:
    rows = [{**ROW, "prompt": [{"role": "user", "content": "Say."}]}]
    trainer = make(ComposerReplicationTrainer, policy, quick_config(tmp_path), train_dataset=rows, data_collator=len)
    assert trainer.channels_on() == ["grpo"]
    assert list(trainer.train_dataset) == [{"trace_id": "t", "prompt": [{"role": "user", "content": "Say."}]}]


@pytest.mark.parametrize(
    "rows",
    [
        questions(["Look"]),
        [{"turns": [{"role": "assistant", "content": "I begin."}]}],
        [ROW, {"prompt": "Look"}],
        [ROW, "Look"],
        Dataset.from_list([ROW]).to_iterable_dataset(),
    ],
)
def test_a_collator_alone_without_traces_in_the_training_set_is_an_error(policy: Path, tmp_path: Path, rows) -> None:
    with pytest.raises(InputError, match="trace_dataset"):
        make(
            ComposerReplicationTrainer,
            policy,
            quick_config(tmp_path),
            train_dataset=rows,
            data_collator=traces_of(policy),
            beta_replay=1.0,
        )
