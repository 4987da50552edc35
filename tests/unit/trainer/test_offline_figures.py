"""What an offline run says about itself: its teacher, its figures, channels that never ran, routers."""

from __future__ import annotations

import re

import pytest
import torch
from offline_pieces import logged, renderer, sessions_of, tiny, trainer_of
from peft import LoraConfig
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2MoeConfig

from composer_replication import compose_loss
from composer_replication.batch.tree_batch import pack_batches
from composer_replication.errors import ConfigError
from composer_replication.trainer.objective.channels import ChannelSettings
from composer_replication.trainer.teacher_keeper import TeacherKeeper
from refusals import refusal

BOTH = ChannelSettings(alpha_sdpo=0.7, beta_replay=0.3)


def of(trainer, name):
    return [row[name] for row in trainer.state.log_history if name in row]


def test_the_teacher_is_a_trust_region_unless_another_is_given_or_nothing_is_taught(tmp_path):
    assert trainer_of(tmp_path, sessions_of(0, 1), settings=BOTH).teacher.kind == "trust_region"
    off = ChannelSettings(alpha_sdpo=0.0, beta_replay=0.3)
    bare = trainer_of(tmp_path, sessions_of(0, 1), settings=off)
    assert (bare.teacher.kind, bare.teacher.model) == ("live", None)  # no copy for nothing


@pytest.mark.parametrize(
    ("kind", "optim", "warns"), [("live", "adamw_torch", True), ("live", "sgd", False), ("ema", "adamw_torch", False)]
)
def test_a_live_teacher_with_an_adaptive_optimiser_is_told_what_was_measured(tmp_path, caplog, kind, optim, warns):
    changes = {"optim": optim}
    trainer_of(tmp_path, sessions_of(0), settings=BOTH, teacher=TeacherKeeper(kind), arguments_changes=changes)
    warning = ("2.95", "train.teacher.kind")  # what was measured, and where another teacher is chosen
    assert [each in caplog.text for each in warning] == [warns, warns]


def test_an_optimiser_that_was_given_counts_and_not_the_one_that_is_named(tmp_path, caplog):
    model = tiny()
    given = (torch.optim.SGD(model.parameters(), lr=0.1), None)
    options = {"settings": BOTH, "teacher": TeacherKeeper("live"), "optimizers": given}
    trainer_of(tmp_path, sessions_of(0), model=model, **options)
    assert "train.teacher.kind" not in caplog.text


def test_logged_losses_are_means_over_the_items_of_all_steps_since_the_last_line(tmp_path):
    """Steps of unequal sizes, weights that stay: the mean is that of one evaluation over all of it."""
    made = [logged(0), logged(123456789, with_site=True), logged(2, with_site=False)]
    changes = {"per_device_train_batch_size": 1, "max_steps": 3, "logging_steps": 3, "learning_rate": 0.0}
    sessions = sessions_of(made=made)
    trainer = trainer_of(tmp_path, sessions, settings=BOTH, arguments_changes=changes)
    trainer.train()
    whole = pack_batches(list(sessions.with_references(tiny()).batches()))
    sizes = [batch.counts()["sdpo_jsd"] for batch in sessions.batches()]
    assert sizes[0] != sizes[1]
    with torch.no_grad():
        wanted = compose_loss(tiny(), whole, alpha_sdpo=0.7, beta_replay=0.3)
    assert of(trainer, "loss/sdpo_kl") == [pytest.approx(float(wanted.sdpo_jsd), abs=1e-6)]
    assert of(trainer, "loss/lm_ce") == [pytest.approx(float(wanted.lm_ce), abs=1e-5)]
    assert of(trainer, "items/sdpo_kl") == [sum(sizes) / 3]


def test_the_last_evaluation_has_channel_2_though_its_weight_is_0(tmp_path):
    settings = ChannelSettings(alpha_sdpo=0.7, beta_replay=0.0, anneal="linear")
    held_out = sessions_of(5, 6)
    changes = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.0}
    options = {"settings": settings, "eval_sessions": held_out, "arguments_changes": changes}
    trainer = trainer_of(tmp_path, sessions_of(0, 1), **options)
    trainer.train()
    first, last = of(trainer, "eval_sdpo_kl")
    assert first == last > 0
    assert trainer.weights()["sdpo_jsd"] == 0.0
    assert of(trainer, "eval_loss")[-1] == pytest.approx(of(trainer, "eval_lm_ce")[-1], abs=1e-9)


def test_a_channel_whose_items_were_never_drawn_is_told_with_its_weight_and_both_numbers(tmp_path, caplog):
    made = [logged(0, with_site=False), logged(1, with_site=False), logged(2)]
    settings = ChannelSettings(alpha_sdpo=0.1, beta_replay=0.0, anneal="linear")
    changes = {"per_device_train_batch_size": 1, "max_steps": 2}
    trainer = trainer_of(tmp_path, sessions_of(made=made), settings=settings, arguments_changes=changes)
    total = trainer.train_dataset.channels["sdpo_jsd"]
    assert total > 0
    trainer.train()
    figures = rf"\bsdpo_jsd\b.*\b2 steps\b.*\b0\b.*\b{total}\b.*\balpha_sdpo 0\.1\b"
    assert [each for each in caplog.records if re.search(figures, each.getMessage())]


def experts(kind, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": len(renderer().tokenizer), "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    if kind == "mixtral":
        config = MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2, **changes)
    else:
        inner = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4}
        config = Qwen2MoeConfig(**sizes, **inner, num_experts_per_tok=2, **changes)
    config._attn_implementation = "sdpa"
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", ["qwen2_moe", "mixtral"])
def test_a_routers_auxiliary_loss_is_refused_by_name_and_routers_without_it_are_told(tmp_path, caplog, kind):
    with refusal(ConfigError, what="output_router_logits", got="true", expected="false"):
        trainer_of(tmp_path, sessions_of(0), model=experts(kind, output_router_logits=True), settings=BOTH)
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    trainer_of(tmp_path, sessions_of(0), model=experts(kind), settings=BOTH, peft_config=lora)
    assert "router" not in caplog.text
    one = {"arguments_changes": {"max_steps": 1}, "settings": BOTH}
    trainer = trainer_of(tmp_path, sessions_of(0, 1), model=experts(kind), **one)
    [warning] = [each.getMessage() for each in caplog.records if "router" in each.getMessage()]
    assert re.search(r"\b2 weights\b.*\bgate\b", warning)
    trainer.train()
    assert of(trainer, "loss/sdpo_kl")[0] > 0


def test_a_wrong_layer_for_an_adapter_is_named_with_the_key_and_the_layers_there_are(tmp_path):
    lora = LoraConfig(r=2, target_modules=["query_key_value"])
    with pytest.raises(ConfigError, match=r"query_key_value.*down_proj, gate_proj, k_proj.*train\.adapter\.targets"):
        trainer_of(tmp_path, sessions_of(0), settings=BOTH, peft_config=lora)
