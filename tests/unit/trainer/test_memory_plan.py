"""The planner against measured steps, against counts of tensors, and what it advises."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from offline_pieces import sessions_of, tiny, trainer_of
from transformers import Qwen2Config

from composer_replication.errors import InputError
from composer_replication.trainer.watch import memory_plan as planner
from composer_replication.trainer.watch.memory_plan import (
    GIB,
    _estimate_parts,
    _StepSettings,
    free_memory,
    plan_memory,
    shape_of,
)

SHAPES = {
    "0.5B": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
    "1.5B": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "intermediate_size": 8960},
}
# benchmarks/README.md, "A whole session": tree with three channels, bf16, a frozen reference beside it. The trunk,
# whether activations were checkpointed, the peak in GiB. A tree also has 8 sites of 320 and 16 pairs of 256 tokens.
MEASURED = [
    ("0.5B", 16384, False, 34.6),
    ("0.5B", 8192, False, 23.7),
    ("0.5B", 12000, False, 28.7),
    ("0.5B", 16384, True, 4.9),
    ("0.5B", 8192, True, 4.1),
    ("0.5B", 12000, True, 4.4),
    ("1.5B", 16384, False, 73.6),
    ("1.5B", 8192, False, 50.5),
    ("1.5B", 12000, False, 61.0),
    ("1.5B", 16384, True, 11.9),
    ("1.5B", 8192, True, 10.7),
    ("1.5B", 12000, True, 11.3),
]
LONG = ("0.5B", 131072 + 64 * 320 + 16 * 256, True, 20.4)
TOLERANCE = 0.1


def config(name):
    return Qwen2Config(vocab_size=151_936, num_key_value_heads=2, tie_word_embeddings=True, **SHAPES[name])


@pytest.mark.parametrize(("name", "trunk", "checkpointing", "measured"), MEASURED)
def test_estimates_are_within_a_tenth_of_what_was_measured(name, trunk, checkpointing, measured):
    parts = _estimate_parts(
        shape_of(config(name)),
        _StepSettings(
            longest_tree=trunk + 8 * 320 + 16 * 256,
            checkpointing=checkpointing,
            teacher="trust_region",
            optimizer="sgd",
        ),
    )
    assert sum(parts.values()) / GIB == pytest.approx(measured, rel=TOLERANCE)


def test_the_estimate_holds_at_131072_tokens():
    name, tokens, checkpointing, measured = LONG
    settings = _StepSettings(longest_tree=tokens, checkpointing=checkpointing, teacher="trust_region", optimizer="sgd")
    assert sum(_estimate_parts(shape_of(config(name)), settings).values()) / GIB == pytest.approx(
        measured, rel=TOLERANCE
    )


def test_weights_gradients_and_optimiser_are_those_of_the_model():
    model = tiny()
    number = sum(each.numel() for each in model.parameters())
    settings = _StepSettings(longest_tree=64, weight_bytes=4, compute_bytes=4, teacher="frozen", accumulation=2)
    parts = _estimate_parts(shape_of(model), settings)
    assert parts["weights"] == parts["gradients"] == parts["teacher's copy"] == 4 * number
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    assert parts["optimiser"] == sum(each.numel() * each.element_size() for each in states)
    assert shape_of(model.config) == shape_of(model)


def test_an_adapter_counts_as_peft_makes_it():
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(tiny(), LoraConfig(r=8, target_modules="all-linear"))
    trainable = sum(each.numel() for each in adapted.parameters() if each.requires_grad)
    settings = _StepSettings(
        longest_tree=64, weight_bytes=4, compute_bytes=4, lora_rank=8, teacher="ema", accumulation=2
    )
    parts = _estimate_parts(shape_of(tiny()), settings)
    assert parts["gradients"] == parts["teacher's copy"] == 4 * trainable
    assert parts["optimiser"] == 8 * trainable


@pytest.mark.parametrize("teacher", ["frozen", "trust_region"])
def test_a_reference_costs_a_copy_without_an_adapter_and_none_with_one(teacher):
    shape = shape_of(config("0.5B"))
    settings = _StepSettings(longest_tree=1024, teacher=teacher)
    assert _estimate_parts(shape, settings)["teacher's copy"] == 2 * shape.num_weights
    assert "teacher's copy" not in _estimate_parts(shape, replace(settings, lora_rank=16))


def test_shards_share_the_weights_and_not_the_activations():
    shape = shape_of(config("0.5B"))
    alone = _estimate_parts(shape, _StepSettings(longest_tree=4096, teacher="ema"))
    shared = _estimate_parts(shape, _StepSettings(longest_tree=4096, teacher="ema", num_shards=4))
    for name in ("weights", "optimiser", "teacher's copy"):
        assert shared[name] == pytest.approx(alone[name] / 4, abs=1)
    assert shared["activations"] == alone["activations"]


def test_a_plan_that_fits_says_so_and_advises_nothing():
    plan = plan_memory(config("0.5B"), longest_tree=4096, available=80 * GIB, device="cuda")
    assert plan.fits
    assert plan.advice == ()
    assert says_that_it_fits(str(plan))


def says_that_it_fits(line):
    return re.search(r"\bfits\b", line) is not None


def test_advice_begins_with_checkpointing_and_ends_where_it_fits():
    settings = {"longest_tree": 23_040, "teacher": "trust_region", "device": "cuda"}
    plan = plan_memory(config("1.5B"), available=80 * GIB, **settings)
    assert not plan.fits
    assert len(plan.advice) == 1
    assert plan.advice[0].startswith("gradient_checkpointing=True")
    assert says_that_it_fits(plan.advice[0])
    smaller = plan_memory(config("1.5B"), available=12 * GIB, **settings)
    assert [re.search(r"gradient_checkpointing=|LoRA|$", line)[0] for line in smaller.advice[:2]] == [
        "gradient_checkpointing=",
        "LoRA",
    ]
    assert "trust_region" in smaller.advice[1]  # which costs nothing more under an adapter
    fixed = plan_memory(config("1.5B"), available=12 * GIB, checkpointing=True, lora_rank=16, **settings)
    assert f"{fixed.peak / GIB:.2f} GiB" in smaller.advice[1]
    assert fixed.fits == says_that_it_fits(smaller.advice[1])


def test_advice_names_the_budget_that_fits_and_that_budget_does():
    settings = {"teacher": "live", "device": "cuda", "checkpointing": True, "lora_rank": 16, "four_bit": True}
    plan = plan_memory(config("1.5B"), longest_tree=400_000, available=16 * GIB, **settings)
    budget = int(re.search(r"\bbudget=(\d+)\b", plan.advice[-1])[1])
    assert plan_memory(config("1.5B"), longest_tree=budget, available=16 * GIB, **settings).fits
    assert not plan_memory(config("1.5B"), longest_tree=budget + 256, available=16 * GIB, **settings).fits


def test_a_model_that_never_fits_is_said_to_be_too_large():
    plan = plan_memory(config("1.5B"), longest_tree=1024, available=GIB // 4, device="cuda")
    assert re.search(r"\b256 tokens\b.*\bmodel\b", plan.advice[-1])
    assert "budget=" not in plan.advice[-1]  # none would do


def test_a_processor_has_a_dense_mask_and_its_own_memory(monkeypatch):
    sessions = sessions_of(0, 1)
    plan = plan_memory(tiny(), longest_tree=2 * sessions.longest_tree, weight_bytes=4, compute_bytes=4)
    assert plan.parts["attention mask"] == 5 * (2 * sessions.longest_tree) ** 2
    assert plan.fits
    assert 0 < plan.available <= planner._free_ram()
    monkeypatch.setattr(planner, "_free_in_container", lambda: 1000)
    assert planner.free_memory() == 1000


def test_bad_settings_are_named():
    with pytest.raises(InputError, match="longest_tree"):
        plan_memory(tiny(), longest_tree=0)
    with pytest.raises(InputError, match="optimizer"):
        plan_memory(tiny(), longest_tree=8, optimizer="lion")
    with pytest.raises(InputError, match="available"):
        plan_memory(tiny(), longest_tree=8, available=0)


def test_a_trainer_plans_for_its_largest_step_and_says_when_it_may_not_fit(tmp_path, monkeypatch, caplog):
    from peft import LoraConfig

    from composer_replication.trainer import offline_trainer

    sessions = sessions_of(*range(4))
    trainer = trainer_of(tmp_path, sessions)
    sizes = sorted(item.num_tokens for item in sessions.items)
    plan = trainer.plan()
    assert plan.fits
    assert plan.parts["attention mask"] == 5 * (sizes[-1] + sizes[-2]) ** 2
    assert plan.parts["weights"] == 4 * sum(each.numel() for each in trainer.model.parameters())
    assert "GiB" not in caplog.text
    monkeypatch.setattr(offline_trainer, "free_memory", lambda device: 1000)
    adapted = trainer_of(tmp_path, sessions, peft_config=LoraConfig(r=8, target_modules="all-linear"))
    assert not adapted.plan().fits
    [warning] = [each.getMessage() for each in caplog.records if "GiB" in each.getMessage()]
    assert "attention mask" in warning
    trainable = sum(each.numel() for each in adapted.model.parameters() if each.requires_grad)
    assert adapted.plan().parts["optimiser"] == 8 * trainable


def test_after_a_warm_up_an_adapters_teacher_is_a_copy_of_the_adapter():
    settings = {"longest_tree": 512, "available": 10**12, "lora_rank": 8, "teacher": "trust_region"}
    before, after = (plan_memory(config("0.5B"), warmed_up=each, **settings).parts for each in (False, True))
    adapter = plan_memory(config("0.5B"), **settings | {"teacher": "ema"}).parts["teacher's copy"]
    assert "teacher's copy" not in before
    assert after == {**before, "teacher's copy": adapter}


def test_what_an_earlier_training_gave_back_to_the_allocator_can_be_had(monkeypatch):
    """A control is trained in the process of the training before it: 90 GiB of the allocator's own were not counted."""
    figures = {"mem_get_info": (45 * GIB, 139 * GIB), "memory_reserved": 92 * GIB, "memory_allocated": 2 * GIB}
    for name, value in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda _device, value=value: value)
    assert free_memory("cuda") == 135 * GIB
