"""What rollouts from kept keys take for granted: where TRL generates, and what transformers hands to its loop."""

from __future__ import annotations

import pytest
import torch
import transformers
import trl
from trl import GRPOTrainer

from rollouts.tiny_policy import save_policy
from rollouts.trainers import light_process, make, quick_config

SAYS = f"trl {trl.__version__} with transformers {transformers.__version__}"


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    with light_process():
        yield make(GRPOTrainer, save_policy(folder), quick_config(folder / "run"))


def test_a_turn_is_one_call_of_the_unwrapped_models_generate(trainer):
    """Where kept keys stand in; whatever else a call names is left to transformers."""
    calls = []
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    assert model is trainer.model
    model.__dict__["generate"] = lambda **inputs: calls.append(inputs) or torch.cat([inputs["input_ids"]] * 2, dim=1)
    trainer._generate_single_turn([[5, 6, 7], [8]], None, {}, 1)
    assert [sorted(each) for each in calls] == [["attention_mask", "generation_config", "input_ids"]]
    assert calls[0]["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]], f"{SAYS}: prompts are padded elsewhere"
    assert calls[0]["generation_config"].max_new_tokens == trainer.max_completion_length
    del model.__dict__["generate"]


def test_transformers_hands_everything_to_a_sampling_loop_of_ones_own(trainer):
    seen = {}

    def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        seen.update(model_kwargs, processors=logits_processor, criteria=stopping_criteria, config=generation_config)
        return input_ids

    ids = torch.tensor([[5, 6], [0, 7]])
    options = {"max_new_tokens": 4, "temperature": 0.7, "do_sample": True, "eos_token_id": 2, "pad_token_id": 0}
    found = trainer.model.generate(input_ids=ids, attention_mask=(ids > 0).long(), custom_generate=loop, **options)
    assert found is ids, f"{SAYS}: generate no longer returns what its loop does"
    assert {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"} >= {
        name for name, value in seen.items() if value is not None
    } - {"processors", "criteria", "config"}, f"{SAYS}: a plain text model is given {sorted(seen)}"
    assert "TemperatureLogitsWarper" in {type(each).__name__ for each in seen["processors"]}
    ends = [type(each).__name__ for each in seen["criteria"]]
    assert ends == ["MaxLengthCriteria", "EosTokenCriteria"], f"{SAYS}: {ends}"
    assert (seen["config"].max_length, seen["criteria"][1].eos_token_id.tolist()) == (6, [2])
