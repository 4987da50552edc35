"""The generalised JSD against the slow reference: values and gradients, fp64 and fp32."""

import pytest
import reference
import torch
from batches import DTYPES, keep_mask, pair
from closeness import assert_gradient, assert_value, value_and_gradients

from composer_replication.loss.jsd import generalized_jsd_loss

BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)


def check(dtype, labels=None, seed=0, **settings):
    student, teacher = pair(seed, dtype=dtype)
    value, (gradient,) = value_and_gradients(lambda s: generalized_jsd_loss(s, teacher, labels, **settings), student)
    expected, (expected_gradient,) = value_and_gradients(
        lambda s: reference.jsd(s, teacher, labels, **settings), student
    )
    assert_value(value, expected, dtype)
    assert_gradient(gradient, expected_gradient, dtype)


def labels_of(seed):
    """-100 where ignored; 0, 1 and large ids where kept: only -100 is special."""
    keep = keep_mask(seed)
    return torch.where(keep, torch.arange(8).reshape(2, 4) * 1000, torch.full((2, 4), -100))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("top_k", [None, 1, 5, 19])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("beta", BETAS)
def test_jsd_is_the_reference_for_every_beta_temperature_and_top_k(beta, temperature, top_k, dtype):
    check(dtype, labels_of(1), beta=beta, temperature=temperature, top_k=top_k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["batchmean", "sum", "mean", "none"])
@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("top_k", [None, 5])
def test_jsd_is_the_reference_for_every_reduction(reduction, labelled, top_k, dtype):
    check(dtype, labels_of(2) if labelled else None, seed=2, reduction=reduction, top_k=top_k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("token_clip", [0.05, 0.2, 1.0, 100.0])
def test_the_token_cap_is_the_reference(token_clip, beta, dtype):
    check(dtype, labels_of(3), seed=3, beta=beta, token_clip=token_clip)
    check(dtype, labels_of(3), seed=3, beta=beta, token_clip=token_clip, reduction="none")


def test_the_token_cap_of_these_cases_cuts_some_tokens_and_leaves_others():
    for beta, token_clip in ((0.0, 1.0), (0.5, 0.2), (1.0, 1.0)):
        values = generalized_jsd_loss(*pair(3), beta=beta, reduction="none")
        assert bool((values > token_clip).any())
        assert bool((values < token_clip).any())


@pytest.mark.parametrize("beta", BETAS)
def test_the_token_cap_never_turns_the_gradient(beta):
    student, teacher = pair(4)
    _, (free,) = value_and_gradients(lambda s: generalized_jsd_loss(s, teacher, beta=beta, reduction="sum"), student)
    _, (capped,) = value_and_gradients(
        lambda s: generalized_jsd_loss(s, teacher, beta=beta, reduction="sum", token_clip=0.05), student
    )
    cosine = (free * capped).sum(-1) / (free.norm(dim=-1) * capped.norm(dim=-1))
    assert_value(cosine, torch.ones(2, 4), torch.float64)


def test_the_teacher_receives_no_gradient():
    student, teacher = pair(5)
    student.requires_grad_(True)
    teacher.requires_grad_(True)
    generalized_jsd_loss(student, teacher).backward()
    assert teacher.grad is None or int(torch.count_nonzero(teacher.grad)) == 0
    assert float(student.grad.norm()) > 0


@pytest.mark.parametrize("beta", BETAS)
def test_probabilities_are_the_logits_they_came_from(beta):
    student, teacher = (0.3 * x for x in pair(6))
    student_log_probs, teacher_log_probs = (
        torch.stack([torch.stack([reference.log_probs(row) for row in rows]) for rows in x]) for x in (student, teacher)
    )
    loss = generalized_jsd_loss(student_log_probs.exp(), teacher_log_probs.exp(), beta=beta, logits_are_probs=True)
    assert_value(loss, reference.jsd(student, teacher, beta=beta), torch.float64)


def test_extreme_logits_stay_finite_and_exact():
    # S = (1, 0), T = (0, 1) up to e^-600: kl_st = 600, kl_ts = 600, JSD(1/2) = ln 2.
    student = torch.tensor([[[300.0, -300.0]]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[[-300.0, 300.0]]], dtype=torch.float64)
    for beta, expected in ((0.0, 600.0), (1.0, 600.0), (0.5, 0.69314718055994530942)):
        loss = generalized_jsd_loss(student, teacher, beta=beta)
        (gradient,) = torch.autograd.grad(loss, student)
        assert_value(loss, torch.tensor(expected, dtype=torch.float64), torch.float64)
        assert bool(torch.isfinite(gradient).all())
