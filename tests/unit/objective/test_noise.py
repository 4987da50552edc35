"""Noise is what the modules are set to, from the first step on; a live teacher has none of it."""

from __future__ import annotations

import pytest
import torch
from peft import LoHaConfig, LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, FalconConfig, GPTNeoXConfig, MixtralConfig
from transformers.integrations.neftune import activate_neftune, deactivate_neftune

from composer_replication import compose_loss
from composer_replication.batch.tree_batch import SessionTargets
from composer_replication.trainer.objective.compose import _is_noisy
from composer_replication.trainer.objective.row_weighting import WeightedTeacher
from tiny_models import build as tiny

SIZE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def of(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).train()


def adapted(dropout):
    torch.manual_seed(0)
    return get_peft_model(
        tiny("qwen2-tied"), LoraConfig(r=4, lora_dropout=dropout, target_modules=["q_proj", "v_proj"])
    )


def moved(model):
    """As an optimiser would have left it: B is no longer 0."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "lora_B" in name:
                each.normal_(0, 0.2)
    return model


def test_dropout_of_a_fresh_adapter_is_noticed_and_random_numbers_stay_as_they_were():
    before = torch.random.get_rng_state()
    model = adapted(0.1).train()
    torch.random.set_rng_state(before)
    assert _is_noisy(model)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not _is_noisy(model.eval())
    assert not _is_noisy(adapted(0.0).train())


def test_functional_dropout_is_noticed_on_a_module_and_in_its_config():
    model = tiny("qwen2-tied").train()
    assert not _is_noisy(model)
    model.model.layers[1].self_attn.attention_dropout = 0.5
    assert _is_noisy(model)
    falcon = FalconConfig(**SIZE, hidden_dropout=0.1, attention_dropout=0.0)  # read from the config at every call
    assert _is_noisy(of(falcon))
    assert not _is_noisy(of(FalconConfig(**SIZE, hidden_dropout=0.0, attention_dropout=0.0)))


def test_a_classifiers_rate_is_not_a_language_models():
    config = GPTNeoXConfig(**SIZE, intermediate_size=32, classifier_dropout=0.1)
    assert not _is_noisy(of(config))


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_one_rate_an_adapter_and_a_routers_jitter_are_noticed(rate):
    layers = LoHaConfig(r=2, module_dropout=rate, target_modules=["q_proj"])
    assert _is_noisy(get_peft_model(tiny("qwen2-tied"), layers).train()) == (rate > 0)
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 4}
    config = MixtralConfig(**SIZE, intermediate_size=32, **experts, router_jitter_noise=rate)
    assert _is_noisy(of(config)) == (rate > 0)


def test_noise_on_the_embeddings_is_noticed_while_it_is_on():
    model = tiny("qwen2-tied").train()
    handle = activate_neftune(model, 5.0)
    assert _is_noisy(model)
    deactivate_neftune(model, handle)
    assert not _is_noisy(model)


def test_a_dropout_module_with_a_rate_of_0_is_no_noise():
    model = tiny("qwen2-tied").train()
    model.model.layers[0].mlp = nn.Sequential(nn.Dropout(0.0), model.model.layers[0].mlp)
    assert not _is_noisy(model)
    model.model.layers[0].mlp[0].p = 0.3
    assert _is_noisy(model)


def channel_2(model, teachers, hint):
    ids = [3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25]
    targets = SessionTargets()
    targets.add_site(ids, 8, 12, [*ids[:6], *hint, *ids[6:]], 8 + len(hint))
    torch.manual_seed(7)
    with torch.no_grad():
        return compose_loss(model, targets.build(), alpha_sdpo=1.0, sdpo_teachers=teachers).sdpo_jsd.item()


@pytest.mark.parametrize("kind", ["live", "trust region"])
def test_a_run_and_the_same_run_resumed_have_one_teacher(kind):
    both = [WeightedTeacher(None, 0.99, without_adapter=True), WeightedTeacher(None, 0.01)]
    teachers = None if kind == "live" else both
    begun = adapted(0.3).train()
    channel_2(begun, teachers, [2, 4])  # the first look, while B is 0
    assert channel_2(moved(begun), teachers, [2, 4]) == channel_2(moved(adapted(0.3).train()), teachers, [2, 4])


def test_the_live_teacher_is_free_of_the_students_noise():
    """Without a hint a clean teacher differs from its noisy student; a teacher with the same noise would not."""
    model = adapted(0.5).train()
    assert channel_2(model, None, []) == pytest.approx(0.0, abs=1e-7)  # B is 0: there is no noise yet
    assert channel_2(moved(model), None, []) > 1e-4
    assert channel_2(model.eval(), None, []) == pytest.approx(0.0, abs=1e-7)
