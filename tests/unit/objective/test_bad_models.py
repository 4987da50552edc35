"""Models the loss cannot take apart, and weights that are not finite: refused by name, never trained on."""

from __future__ import annotations

import re

import pytest
import torch

from composer_replication import compose_loss
from composer_replication.errors import NonFiniteError, UnsupportedModelError
from refusals import refusal
from tiny_models import build, random_batch


def test_nan_weights_raise_instead_of_training():
    model = build("llama-untied")
    compose_loss(model, random_batch())
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(NonFiniteError, match="row 0"):
        compose_loss(model, random_batch())


def test_a_model_without_a_head_is_refused():
    with refusal(UnsupportedModelError, what="model", got="Linear", expected="get_decoder"):
        compose_loss(torch.nn.Linear(3, 3), random_batch())


def test_a_head_that_is_not_a_plain_linear_layer_is_refused():
    class Scaled(torch.nn.Linear):
        def forward(self, hidden):
            return 2.0 * super().forward(hidden)

    model = build("qwen2-untied")
    model.lm_head = Scaled(32, 97, bias=False)
    with pytest.raises(UnsupportedModelError, match="Scaled"):
        compose_loss(model, random_batch())


def test_logits_that_no_scale_or_cap_reproduces_are_refused():
    model = build("llama-untied")
    forward = type(model).forward

    class Odd(type(model)):
        def forward(self, *args, **kwargs):
            outputs = forward(self, *args, **kwargs)
            outputs.logits = outputs.logits + 0.5 * outputs.logits.square()
            return outputs

    model.__class__ = Odd
    with refusal(UnsupportedModelError, what="Odd", expected="softcap") as caught:
        compose_loss(model, random_batch())
    assert re.findall(r"\d+", caught.value.got) == ["0", "1"]  # fits, and the scales and soft-caps that were tried


def test_a_wrapped_model_is_refused_with_the_way_out():
    wrapped = torch.nn.Module()
    wrapped.module = build("qwen2-tied")
    with pytest.raises(UnsupportedModelError, match=r"model\.module"):
        compose_loss(wrapped, random_batch())


def test_prompt_learning_is_refused_since_its_virtual_tokens_would_be_skipped():
    model = build("qwen2-tied")
    model.active_peft_config = type("Config", (), {"is_prompt_learning": True})()
    with refusal(UnsupportedModelError, what="PEFT", fix="LoRA"):
        compose_loss(model, random_batch())


def test_nan_weights_of_a_freshly_loaded_model_are_called_what_they_are():
    model = build("llama-untied")
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    with refusal(NonFiniteError, what="LlamaForCausalLM", got="nan"):
        compose_loss(model, random_batch())
