"""The head's scale and soft-cap are found by experiment, for the model as it is now."""

from __future__ import annotations

import re

import pytest
import torch

from composer_replication import compose_loss
from composer_replication.errors import UnsupportedModelError
from composer_replication.trainer.objective.model_head import get_linear_head
from refusals import refusal
from tiny_models import FAMILIES, build, random_batch

TRANSFORMS = {"granite": (0.25, None), "cohere": (0.25, None), "gemma2-tied": (1.0, 3.0), "gemma2-untied": (1.0, 3.0)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_transform_is_found(family, dtype):
    head = get_linear_head(build(family).to(dtype), random_batch()["input_ids"])
    assert (head.scale, head.softcap) == TRANSFORMS.get(family, (1.0, None))


@pytest.mark.parametrize("family", ["granite", "cohere"])
def test_a_left_padded_first_batch_does_not_hide_the_scale(family):
    """Padding embeds to zeros: a probe of such tokens would see zero logits and accept any scale."""
    model, batch = build(family), random_batch(pairs=False)
    padded = torch.nn.functional.pad(batch["input_ids"], (6, 0), value=0)
    assert get_linear_head(model, padded).scale == 0.25


def test_a_changed_config_or_head_is_probed_again():
    model, ids = build("gemma2-untied"), random_batch()["input_ids"]
    assert get_linear_head(model, ids).softcap == 3.0
    model.config.final_logit_softcapping = None
    assert get_linear_head(model, ids).softcap is None
    model.config.final_logit_softcapping = 5.0
    assert get_linear_head(model, ids).softcap == 5.0
    model.set_output_embeddings(torch.nn.Linear(32, 97))
    head = get_linear_head(model, ids)
    assert head.bias is not None
    assert head.softcap == 5.0


def test_a_head_of_zeros_is_fine_without_a_transform_and_refused_where_the_scale_cannot_be_seen():
    plain, scaled = build("llama-untied"), build("granite")
    for model in (plain, scaled):
        torch.nn.init.zeros_(model.get_output_embeddings().weight)
    assert get_linear_head(plain, random_batch()["input_ids"]).scale == 1.0
    with refusal(UnsupportedModelError, what="GraniteForCausalLM", fix="zero") as caught:
        get_linear_head(scaled, random_batch()["input_ids"])
    assert re.findall(r"\d+", caught.value.got) == ["3", "3"]  # every scale and soft-cap fits


def test_a_head_that_reads_something_else_than_the_bodys_output_is_refused():
    model = build("llama-untied")

    class Halved(type(model)):
        def forward(self, *args, **kwargs):
            hook = self.model.norm.register_forward_hook(lambda module, inputs, output: output)
            handle = self.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0] / 2,), prepend=True)
            try:
                return super().forward(*args, **kwargs)
            finally:
                hook.remove()
                handle.remove()

    model.__class__ = Halved
    with refusal(UnsupportedModelError, what="Halved", got="head"):
        get_linear_head(model, random_batch()["input_ids"])


def test_an_fp32_norm_before_a_bf16_head_works():
    model = build("llama-untied").bfloat16()
    norm = model.model.norm.float()
    norm.register_forward_hook(lambda module, inputs, output: output.float())
    model.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0].to(torch.bfloat16),))
    components = compose_loss(model, random_batch())
    components.total.backward()
    assert components.active == ("lm_ce", "sdpo_jsd", "trace_replay_dpo")
    assert model.lm_head.weight.grad.dtype == torch.bfloat16


def test_under_autocast_the_loss_is_that_of_the_rounded_model_and_the_parameters_keep_fp32_gradients():
    model, batch = build("qwen2-untied"), random_batch()
    want = compose_loss(model, batch).detached()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        components = compose_loss(model, batch)
    components.total.backward()
    for name in ("lm_ce", "sdpo_jsd"):
        assert components.detached()[name] == pytest.approx(want[name], rel=0.05), name
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_inference_mode_and_no_grad_give_the_same_values_without_gradients():
    model, batch = build("qwen2-tied"), random_batch()
    want = compose_loss(model, batch).detached()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            components = compose_loss(model, batch)
        assert components.detached() == pytest.approx(want, abs=1e-6)
        assert not components.total.requires_grad
