"""The first loss on pairs beside rollouts, in bf16: policy and reference are one model, so it is ln 2."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from test_composer_channels import TRACE, scripted
from transformers import AutoModelForCausalLM

from composer_replication.trainer.data_collator import CollatorConfig, ComposerDataCollator
from composer_replication.trainer.sessions.reference import precompute_ref_logprobs
from rollouts.tiny_policy import load_tokenizer, save_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize("is_precomputed", [False, True])
def test_the_first_loss_on_pairs_is_ln_2_in_the_precision_of_the_steps(
    policy: Path, tmp_path: Path, is_precomputed: bool
) -> None:
    """bf16 is what TRL computes in by default; references that somebody made without autocast are made again."""
    collator = ComposerDataCollator(load_tokenizer(policy), CollatorConfig(hint_generator=lambda *_: "Use the tools."))
    if is_precomputed:
        start = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
        collator.reference = precompute_ref_logprobs(start, collator.renderer, collator.pairs([TRACE]))
    more = {} if is_precomputed else {"peft_config": LoraConfig(r=4, target_modules=["q_proj"])}
    options = {"alpha_sdpo": 1.0, "beta_replay": 1.0, "trace_dataset": [TRACE], "data_collator": collator}
    trainer = scripted(policy, tmp_path, {"bf16": True, "max_steps": 1}, **options, **more)
    trainer.train()
    losses = [row["loss/trace_replay_dpo"] for row in trainer.state.log_history if "loss/trace_replay_dpo" in row]
    assert losses == [pytest.approx(math.log(2), abs=1e-6)]
