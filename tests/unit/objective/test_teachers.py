"""Who teaches channel 2: live, frozen, averaged, adapter off, and mixtures of logits; on flat sequences and trees."""

from __future__ import annotations

import copy

import pytest
import torch
import wrapped_worker as worker

from composer_replication import compose_loss
from composer_replication.errors import InputError
from composer_replication.trainer.objective.row_weighting import WeightedTeacher
from refusals import refusal

BATCHES = {"tree": worker.session(0), "flat": worker.flat(0)}


def other_weights(model, seed=3):
    other = copy.deepcopy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return other.requires_grad_(False)


def logits_of(model, teacher_side):
    """Of the rows that predict the target, by the model's own forward."""
    flat = worker.flat(0)
    ids = flat["ctx_teacher_input_ids" if teacher_side else "input_ids"]
    rows = flat["sdpo_teacher_index" if teacher_side else "sdpo_student_index"][:, 1]
    return model(input_ids=ids).logits[0, rows].double()


def kl_st(student, teacher):
    log_s, log_t = student.log_softmax(-1), teacher.detach().log_softmax(-1)
    return (log_s.exp() * (log_s - log_t)).sum(-1).mean()


def channel_2(model, batch, teachers):
    components = compose_loss(model, batch, alpha_sdpo=1.0, beta_replay=0.0, sdpo_jsd_beta=1.0, sdpo_teachers=teachers)
    assert "sdpo_jsd" in components.active
    return components.sdpo_jsd


@pytest.mark.parametrize("form", BATCHES)
@pytest.mark.parametrize("live", [0.0, 0.01, 0.4, 1.0])
def test_logits_of_several_teachers_are_added_up(form, live):
    model = worker.build(lora=False).eval()
    reference = other_weights(model)
    shares = [WeightedTeacher(reference, 1.0 - live), WeightedTeacher(coefficient=live)]
    teachers = [each for each in shares if each.coefficient]
    got = channel_2(model, BATCHES[form], teachers)
    wanted = kl_st(logits_of(model, False), (1.0 - live) * logits_of(reference, True) + live * logits_of(model, True))
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-8)
    parameters = list(model.parameters())
    ours, theirs = (torch.autograd.grad(each, parameters) for each in (got, wanted))
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).norm() <= 1e-5 * other.norm() + 1e-10
    assert all(parameter.grad is None for parameter in reference.parameters())


@pytest.mark.parametrize("form", BATCHES)
def test_an_adapter_that_is_off_teaches_as_the_weights_below_it(form):
    model = worker.build(lora=True).eval()
    mixed = [WeightedTeacher(None, 0.9, without_adapter=True), WeightedTeacher(None, 0.1)]
    got = channel_2(model, BATCHES[form], mixed)
    with model.disable_adapter():
        below = logits_of(model, True).detach()
    wanted = kl_st(logits_of(model, False), 0.9 * below + 0.1 * logits_of(model, True))
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-8)
    assert not torch.allclose(got, channel_2(model, BATCHES[form], None))


@pytest.mark.parametrize("form", BATCHES)
def test_the_live_teacher_is_the_default(form):
    model = worker.build(lora=False).eval()
    wanted = channel_2(model, BATCHES[form], None)
    torch.testing.assert_close(channel_2(model, BATCHES[form], [WeightedTeacher()]), wanted, rtol=0, atol=0)
    again = channel_2(model, BATCHES[form], [WeightedTeacher(model, 0.5), WeightedTeacher(None, 0.5)])
    torch.testing.assert_close(again, wanted, rtol=1e-9, atol=1e-12)


def test_a_hundredth_of_a_share_is_not_rounded_away_in_half_precision():
    model = worker.build(lora=True).to(torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(3.0)
    shares = [WeightedTeacher(None, 0.9, without_adapter=True), WeightedTeacher(None, 0.1)]
    got = float(channel_2(model, BATCHES["flat"], shares).detach())
    with torch.no_grad(), model.disable_adapter():
        below = logits_of(model, True)
    with torch.no_grad():
        student, live = logits_of(model, False), logits_of(model, True)
    mixed, alone = (float(kl_st(student, teacher)) for teacher in (0.9 * below + 0.1 * live, below))
    assert abs(got - mixed) < 0.5 * abs(mixed - alone)


def test_frozen_adapters_stay_frozen_and_merged_ones_are_refused():
    model = worker.build(lora=True).eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    before = {name: each.requires_grad for name, each in model.named_parameters()}
    channel_2(model, BATCHES["flat"], [WeightedTeacher(without_adapter=True)])
    assert {name: each.requires_grad for name, each in model.named_parameters()} == before
    model.merge_adapter()
    with refusal(InputError, what="adapter", fix="unmerge_adapter"):
        channel_2(model, BATCHES["flat"], [WeightedTeacher(without_adapter=True)])


def test_everything_wrong_is_said_before_the_first_pass():
    model = worker.build(lora=False)
    passes = []
    model.model.register_forward_hook(lambda *_: passes.append(1))
    no_references = worker.SessionTargets()
    no_references.add_pair([1, 2, 3], 1, [1, 4], 1)
    wrong = [
        (no_references.build(), {"beta_replay": 0.5}),
        (BATCHES["tree"], {"denominators": {"lm_ce": 0}}),
        (BATCHES["flat"], {"denominators": {"sdpo_jsd": 0}}),
        (BATCHES["tree"], {"sdpo_teachers": [WeightedTeacher(without_adapter=True)]}),
    ]
    for batch, options in wrong:
        with pytest.raises(InputError):
            compose_loss(model, batch, **options)
    assert passes == []


def test_dropout_is_off_for_every_teacher_and_back_on_afterwards():
    model = worker.build(lora=False)
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    frozen = other_weights(model)
    model.train()
    frozen.train()
    torch.manual_seed(0)
    first = channel_2(model, BATCHES["flat"], [WeightedTeacher(frozen)])
    frozen.eval()
    torch.manual_seed(0)
    second = channel_2(model, BATCHES["flat"], [WeightedTeacher(frozen)])
    torch.testing.assert_close(first, second, rtol=1e-9, atol=0)
    assert model.training


@pytest.mark.parametrize(
    "teachers",
    [[], [WeightedTeacher(coefficient=0.5)], [WeightedTeacher(coefficient=1.5), WeightedTeacher(coefficient=-0.5)]],
)
def test_shares_must_add_up_to_one(teachers):
    with refusal(InputError, what="sdpo_teachers", got=str([teacher.coefficient for teacher in teachers])):
        channel_2(worker.build(lora=False), BATCHES["flat"], teachers)


def test_a_model_without_an_adapter_has_none_to_switch_off():
    with refusal(InputError, what="model", got="Qwen2ForCausalLM", expected="PEFT"):
        channel_2(worker.build(lora=False), BATCHES["flat"], [WeightedTeacher(without_adapter=True)])
