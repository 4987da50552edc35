"""Which channels run, what they cost in forward passes, and that nothing is silently zero."""

from __future__ import annotations

import dataclasses
import inspect
import math

import dense_reference as dense
import pytest
import torch

from composer_replication import compose_loss
from composer_replication.config import LossConfig
from composer_replication.errors import InputError
from composer_replication.trainer.objective.reference import reference_logprobs
from refusals import refusal
from tiny_models import build, random_batch

HINT = ("ctx_teacher_input_ids", "sdpo_student_index", "sdpo_teacher_index")


def without(batch, *keys):
    return {key: value for key, value in batch.items() if key not in keys}


def pair_keys(batch):
    return [key for key in batch if key.startswith("dpo_")]


@pytest.fixture(scope="module")
def model():
    return build("qwen2-tied")


def test_a_channel_with_weight_zero_or_without_keys_is_reported_inactive(model):
    batch = random_batch()
    assert compose_loss(model, batch, alpha_sdpo=0.0).active == ("lm_ce", "trace_replay_dpo")
    assert compose_loss(model, batch, beta_replay=0.0).active == ("lm_ce", "sdpo_jsd")
    assert compose_loss(model, without(batch, *HINT)).active == ("lm_ce", "trace_replay_dpo")
    components = compose_loss(model, without(batch, *HINT, *pair_keys(batch)))
    assert components.active == ("lm_ce",)
    assert components.sdpo_jsd.item() == components.trace_replay_dpo.item() == 0.0
    assert components.total.item() == components.lm_ce.item()


def test_empty_tensors_count_as_absent(model):
    batch = random_batch()
    empty = {key: value[:0] for key, value in batch.items() if key in HINT or key.startswith("dpo_")}
    assert compose_loss(model, {**batch, **empty}).active == ("lm_ce",)
    no_sites = {key: batch[key][:0] for key in ("sdpo_student_index", "sdpo_teacher_index")}
    assert compose_loss(model, {**batch, **no_sites}).active == ("lm_ce", "trace_replay_dpo")


def test_an_all_masked_batch_is_an_exact_zero_with_zero_gradients(model):
    batch = random_batch(pairs=False)
    batch = without(batch, *HINT) | {"response_mask": torch.zeros_like(batch["response_mask"])}
    components = compose_loss(model, batch)
    assert components.active == ()
    assert components.total.item() == 0.0
    gradients = torch.autograd.grad(components.total, list(model.parameters()), allow_unused=True)
    assert all(g is None or not g.any() for g in gradients)
    assert any(g is not None for g in gradients)  # still attached: a trainer can call backward


def test_channels_that_share_rows_share_one_student_forward(model):
    calls = []
    hook = model.model.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    try:
        compose_loss(model, random_batch())  # the head is probed once per model, on the first call
        calls.clear()
        compose_loss(model, random_batch())
    finally:
        hook.remove()
    assert calls == [True, False, True]  # student, hinted teacher without gradient, both sides of the pairs at once


def test_the_head_module_is_never_run_over_a_sequence(model):
    compose_loss(model, random_batch())
    hook = model.lm_head.register_forward_pre_hook(lambda *_: pytest.fail("full logits were computed"))
    try:
        compose_loss(model, random_batch()).total.backward()
    finally:
        hook.remove()
        model.zero_grad()


def test_the_teacher_has_no_dropout_and_every_modules_mode_is_put_back():
    model = build("gpt2")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    model.train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    seen = []
    body = model.transformer.register_forward_pre_hook(
        lambda module, *_: seen.append((torch.is_grad_enabled(), module.training, module.drop.training))
    )
    compose_loss(model, random_batch())
    body.remove()
    assert (False, False, False) in seen
    assert (True, True, True) in seen
    assert all(not training for grad, training, _ in seen if not grad)
    assert [module.training for module in model.modules()] == modes


def test_channel_2_moves_the_student_toward_the_hinted_teacher():
    model, batch = build("llama-untied"), random_batch(pairs=False)
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    values = []
    for _ in range(5):
        components = compose_loss(model, batch, alpha_sdpo=1.0)
        optimizer.zero_grad()
        components.total.backward()
        optimizer.step()
        values.append(components.sdpo_jsd.item())
    assert values[-1] < 0.7 * values[0]


def test_micro_batches_with_common_denominators_add_up_to_the_batch():
    model, batch = build("qwen2-untied").double(), random_batch(7)
    whole = compose_loss(model, batch, alpha_sdpo=0.7, beta_replay=0.3)
    want = torch.autograd.grad(whole.total, list(model.parameters()))
    total, gradients = 0.0, [torch.zeros_like(w) for w in want]
    for row in range(2):
        part = one_sequence(batch, row)
        components = compose_loss(model, part, alpha_sdpo=0.7, beta_replay=0.3, denominators=whole.counts)
        total += components.total.item()
        for sum_, grad in zip(gradients, torch.autograd.grad(components.total, list(model.parameters())), strict=True):
            sum_ += grad
    assert total == pytest.approx(whole.total.item(), abs=1e-12)
    for got, wanted in zip(gradients, want, strict=True):
        assert torch.allclose(got, wanted, atol=1e-12)


def test_the_counts_of_a_step_are_denominators_even_where_a_channel_did_not_run(model):
    batch = without(random_batch(), *HINT)
    components = compose_loss(model, batch)
    again = compose_loss(model, batch, denominators=components.counts)
    assert again.detached() == components.detached()
    with refusal(InputError, what="denominators['sdpo_jsd']", got="0", expected="10"):
        compose_loss(model, random_batch(), denominators=components.counts)


def test_reference_logprobs_make_the_first_dpo_loss_log_2():
    model = build("gpt2").double().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    batch = without(random_batch(), "dpo_chosen_ref_logprobs", "dpo_rejected_ref_logprobs")
    batch |= reference_logprobs(model, batch)
    assert model.training
    assert batch["dpo_chosen_ref_logprobs"].shape == (2,)
    loss = compose_loss(model.eval(), batch, beta_replay=1.0).trace_replay_dpo
    assert loss.item() == pytest.approx(math.log(2), abs=1e-12)
    want = dense.sequence_logprobs(model, batch, "chosen")[0]
    assert torch.allclose(batch["dpo_chosen_ref_logprobs"], want, atol=1e-10)
    with pytest.raises(ValueError, match="dpo_chosen"):
        reference_logprobs(model, without(batch, *pair_keys(batch)))


def one_sequence(batch, row):
    part = {key: value[row : row + 1] for key, value in batch.items() if "index" not in key}
    kept = batch["sdpo_student_index"][:, 0] == row
    for key in ("sdpo_student_index", "sdpo_teacher_index"):
        part[key] = batch[key][kept] - torch.tensor([row, 0])
    return part


GIVEN = ("denominators", "sdpo_teachers", "sdpo_weighting")  # what only code can give, and no config file


def test_the_config_section_has_the_knobs_and_defaults_of_the_function():
    parameters = inspect.signature(compose_loss).parameters
    knobs = {name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY and name not in GIVEN}
    assert {field.name: getattr(LossConfig(), field.name) for field in dataclasses.fields(LossConfig)} == knobs
