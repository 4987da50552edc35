"""A run whose rollouts come from kept keys is the run without them: the same tokens, losses and weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import GenerationMixin
from trl import GRPOTrainer

from composer_replication.errors import InputError
from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
from composer_replication.trainer.rollouts.sites import RolloutOptions
from rollouts.tiny_policy import save_policy, turn_ids
from rollouts.trainers import by_first_token, light_process, make, questions, quick_config, spy, weights
from rollouts.workshop import Workshop

CALL = '<tool_call>\n{"name": "read_file", "arguments": {"path": "page.txt"}}\n</tool_call>'
ANSWER = "<tool_response>"


@pytest.fixture(scope="module", autouse=True)
def _light():
    with light_process():
        yield


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def train(policy, tmp_path, monkeypatch):
    """Steps in which the first turn of every second rollout of a group calls a tool; the rest is sampled."""

    def trained(mode: str, *, settings: Any = None, options: Any = None, **named: Any) -> tuple[GRPOTrainer, Any]:
        chosen = {"max_steps": 2, "max_completion_length": 120, "learning_rate": 0.01, **(settings or {})}
        config = quick_config(tmp_path / mode, **chosen)
        trainer = make(
            ComposerReplicationTrainer,
            policy,
            config,
            reward_funcs=by_first_token,
            train_dataset=questions(),
            environment_factory=Workshop,
            rollouts=RolloutOptions(fast_generation=mode, **(options or {})),
            **named,
        )
        call, answer = turn_ids(trainer.processing_class, CALL), trainer.processing_class.convert_tokens_to_ids(ANSWER)
        usual = GenerationMixin.generate

        def calling(self, *args, **inputs):
            found = usual(self, *args, **inputs)
            width = inputs["input_ids"].shape[1]
            if not (inputs["input_ids"] == answer).any():  # what was sampled is replaced: kept keys behind it are wrong
                found[::2, width : width + len(call)] = torch.tensor(call)[: found.shape[1] - width]
            return found

        monkeypatch.setattr(GenerationMixin, "generate", calling)
        turns = spy(trainer, "_generate_single_turn")
        trainer.train()
        monkeypatch.setattr(GenerationMixin, "generate", usual)
        return trainer, [(given[0], found[0]) for given, _, found in turns]

    return trained


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_a_run_with_tools_is_the_same_from_kept_keys(train, greedy):
    # Rows that have spent their budget end, where TRL samples on and cuts: fewer random numbers for the second step.
    settings = {"generation_kwargs": {"do_sample": False}} if greedy else {"max_steps": 1}
    (fast, fast_turns), (slow, slow_turns) = (train(mode, settings=settings) for mode in ("auto", "off"))
    assert [len(ids) for ids, _ in fast_turns] == [3, 2] * fast.args.max_steps, "every second rollout called a tool"
    assert fast_turns == slow_turns
    assert all(torch.equal(value, weights(slow)[name]) for name, value in weights(fast).items())
    losses = [[each["loss"] for each in trainer.state.log_history if "loss" in each] for trainer in (fast, slow)]
    assert losses[0] == losses[1]
    logged = [each for each in fast.state.log_history if "generation/fast_calls" in each]
    assert [each["generation/fast_calls"] for each in logged] == [1.0] * fast.args.max_steps
    assert all(0 < each["generation/read_share"] < 0.6 for each in logged)
    assert all(each["generation/cache_gib"] > 0 for each in logged)
    assert fast.sampling.fast.left_because == set()
    assert slow.sampling.fast is None


def test_with_an_adapter_checkpointing_and_parts_of_a_batch_it_is_the_same(train):
    named = {"peft_config": LoraConfig(r=2, target_modules=["q_proj", "v_proj"])}
    settings = {"gradient_checkpointing": True, "generation_kwargs": {"do_sample": False}}
    fast, turns = train("auto", settings=settings, options={"generation_batch": 2}, **named)
    _, expected = train("off", settings=settings, **named)
    assert turns == expected
    assert fast.sampling.fast.left_because == set()
    assert fast.model.is_gradient_checkpointing
    assert fast.model.training


def test_a_model_that_is_left_to_transformers_says_so_in_the_log_and_the_metrics(train, caplog):
    named = {"peft_config": LoraConfig(r=2, lora_dropout=0.5, target_modules=["q_proj"])}
    trainer, _ = train("auto", **named)
    [told] = [each.getMessage() for each in caplog.records if "dropout" in each.getMessage()]
    assert "rollouts" in told
    assert "transformers" in told
    logged = [each["generation/fast_calls"] for each in trainer.state.log_history if "generation/fast_calls" in each]
    assert logged == [0.0, 0.0]


def test_how_many_at_once_is_a_positive_number():
    with pytest.raises(InputError, match="generation_batch"):
        RolloutOptions(generation_batch=0)
