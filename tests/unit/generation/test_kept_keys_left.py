"""What is not done from kept keys is left to transformers and named; what is done leaves the model as it was."""

from __future__ import annotations

import logging
import re
from contextlib import nullcontext

import pytest
import torch
from kept_rows import padded, random_rows, small_model
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import StoppingCriteria, StoppingCriteriaList

from composer_replication.errors import InputError
from composer_replication.trainer.rollouts.generation import generator as generator_module
from composer_replication.trainer.rollouts.generation import row_cache
from composer_replication.trainer.rollouts.generation.generator import RolloutGenerator
from composer_replication.trainer.rollouts.generation.row_cache import NextTokens
from model_families import build
from refusals import refusal

ROWS = random_rows((12, 9, 12))
GREEDY = {"max_new_tokens": 8, "do_sample": False}


def messages_of(logger, caplog):
    return [record.getMessage() for record in caplog.records if record.name == logger.name]


class Never(StoppingCriteria):
    def __call__(self, input_ids, scores, **_):
        return torch.zeros(len(input_ids), dtype=torch.bool)


LEFT = {
    "beams": ({"num_beams": 2}, "beam_search"),
    "a processor that is not known": ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor"),
    "a criterion that is not known": ({"stopping_criteria": StoppingCriteriaList([Never()])}, "Never"),
    "scores as well": ({"return_dict_in_generate": True}, "return_dict_in_generate"),
    "no cache": ({"use_cache": False}, "use_cache"),
}


@pytest.mark.parametrize(("settings", "reason"), LEFT.values(), ids=list(LEFT))
def test_what_is_not_known_is_left_to_transformers_and_said_once(settings, reason, caplog):
    model, generator = small_model(), RolloutGenerator()
    with caplog.at_level(logging.WARNING, logger="composer_replication"):
        found = [generator.generate(model, **padded(ROWS), **GREEDY, **settings) for _ in range(2)]
    expected = model.generate(**padded(ROWS), **GREEDY, **settings)
    assert torch.equal(getattr(found[0], "sequences", found[0]), getattr(expected, "sequences", expected))
    told = messages_of(generator_module.logger, caplog)
    assert len(told) == 1
    assert reason in told[0]
    assert generator.counts == {"usual_calls": 2}


def test_padding_on_the_right_is_left_to_transformers():
    inputs = {name: value.flip(1) for name, value in padded(ROWS).items()}
    generator = RolloutGenerator()
    generator.generate(small_model(), **inputs, **GREEDY)
    (reason,) = generator.left_because
    assert "pad" in reason


def test_rows_longer_than_a_sliding_window_are_left_and_shorter_ones_are_not():
    model, generator = build("Mistral, window 32"), RolloutGenerator()
    for count, calls in ((20, 1), (21, 1)):
        inputs = {**padded(ROWS), "max_new_tokens": count, "do_sample": False}
        assert torch.equal(generator.generate(model, **inputs), model.generate(**inputs))
        assert generator.counts["fast_calls"] == calls
    (reason,) = generator.left_because
    assert "window" in reason
    assert re.findall(r"\d+", reason) == ["33", "32"]


def test_a_model_that_keeps_more_than_its_config_tells_is_found_out():
    """A layer that also looks at the token before it: nothing in the config says so."""
    model, generator = small_model(), RolloutGenerator()
    mlp = model.model.layers[1].mlp
    usual = mlp.forward
    mlp.forward = lambda hidden: usual(hidden) + nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]
    generator.generate(model, **padded(ROWS), **GREEDY)
    (reason,) = generator.left_because
    assert "logits" in reason
    assert re.search(r"\b\d\.\de[-+]\d\d\b", reason)  # by how much they differ
    assert model.config._attn_implementation == "sdpa"


def test_an_adapter_is_part_of_what_generates():
    model = get_peft_model(small_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    plain = model.generate(**padded(ROWS), **GREEDY)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    generator = RolloutGenerator()
    with generator.replace_generate(model):
        found = model.generate(**padded(ROWS), **GREEDY)
    assert torch.equal(found, model.generate(**padded(ROWS), **GREEDY))
    assert not torch.equal(found, plain)
    assert generator.counts["fast_calls"] == 1


def test_noise_while_generating_is_left_as_it_is():
    settings = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj"])
    model, generator = get_peft_model(small_model(), settings).train(), RolloutGenerator()
    generator.generate(model, **padded(ROWS), **GREEDY)
    (reason,) = generator.left_because
    assert "dropout" in reason
    generator.generate(model.eval(), **padded(ROWS), **GREEDY)
    assert generator.counts == {**generator.counts, "usual_calls": 1, "fast_calls": 1}


def test_modes_checkpointing_and_generate_itself_are_as_before():
    model = small_model().train()
    model.gradient_checkpointing_enable()
    model.model.layers[1].eval()
    before = {name: module.training for name, module in model.named_modules()}
    generator, usual = RolloutGenerator(), model.generate
    with generator.replace_generate(model):
        assert model.generate != usual
        model.generate(**padded(ROWS), **GREEDY)
    assert generator.counts["fast_calls"] == 1
    assert {name: module.training for name, module in model.named_modules()} == before
    assert model.is_gradient_checkpointing
    assert model.generate == usual
    assert "generate" not in vars(model)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_under_autocast_and_in_half_precision_rows_are_kept_too():
    inputs = {**padded(ROWS), **GREEDY}
    casts_itself = small_model()  # as accelerate makes it
    casts_itself.forward = torch.autocast("cpu", dtype=torch.bfloat16)(casts_itself.forward)
    for model, is_cast in ((small_model(), True), (small_model().bfloat16(), False), (casts_itself, False)):
        generator = RolloutGenerator()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_cast):
            found = generator.generate(model, **inputs)
            expected = model.generate(**inputs)
        assert generator.counts["fast_calls"] == 1
        assert (found[:, :13] == expected[:, :13]).all()  # later ones may differ by a rounding


def test_probabilities_that_are_no_numbers_are_an_error():
    model = small_model()
    generator = RolloutGenerator()
    generator.generate(model, **padded(ROWS), **GREEDY)
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    with refusal(InputError, got="NaN"):
        generator.generate(model, **padded(ROWS), max_new_tokens=3, do_sample=True)


def test_prompts_with_more_than_text_are_left():
    model, generator = small_model(), RolloutGenerator()
    with pytest.raises(ValueError, match="token_type_ids"):  # transformers' own word
        generator.generate(model, **padded(ROWS), token_type_ids=torch.zeros(3, 12, dtype=torch.long), **GREEDY)


def test_a_pass_that_cannot_be_recorded_runs_unrecorded_and_says_so_once(monkeypatch, caplog):
    """On CUDA a model may ask the device for a number in its pass; here recording fails whatever it does."""
    usual, tried = NextTokens.__init__, []
    monkeypatch.setattr(NextTokens, "__init__", lambda self, model, cache, **_: usual(self, model, cache, record=True))
    monkeypatch.setattr(row_cache, "_no_device_sync", nullcontext)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())

    because = "operation not permitted when stream is capturing"

    def failing(_self, *_given):
        tried.append(1)
        raise RuntimeError(f"{because}\nmore")

    monkeypatch.setattr(NextTokens, "_record", failing)
    model, generator = small_model(), RolloutGenerator()
    for _ in range(2):
        assert torch.equal(
            generator.generate(model, **padded(ROWS), **GREEDY), model.generate(**padded(ROWS), **GREEDY)
        )
    told = messages_of(row_cache.logger, caplog)
    assert len(told) == len(tried) == 1
    assert because in told[0]
    assert "\n" not in told[0]
