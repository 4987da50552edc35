"""SDPO against the slow reference: values and gradients, fp64 and fp32."""

import pytest
import reference
import torch
from batches import DTYPES, keep_mask, logprobs, pair
from closeness import assert_gradient, assert_value, value_and_gradients

from composer_replication.distillation import sdpo_loss

MASK = keep_mask(11)
TOKEN_IDS = (torch.arange(8).reshape(2, 4) * 5) % 19


def check(dtype, seed=0, mask=MASK, **settings):
    student, teacher = pair(seed, dtype=dtype)
    value, (gradient,) = value_and_gradients(lambda s: sdpo_loss(s, teacher, mask, **settings), student)
    expected, (expected_gradient,) = value_and_gradients(
        lambda s: reference.sdpo(s, teacher, mask, **settings), student
    )
    assert_value(value, expected, dtype)
    assert_gradient(gradient, expected_gradient, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("add_tail", [True, False])
@pytest.mark.parametrize("top_k", [None, 1, 6, 12])
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_sdpo_is_the_reference_for_every_beta_and_top_k(beta, top_k, add_tail, dtype):
    check(dtype, beta=beta, top_k=top_k, add_tail=add_tail)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_sdpo_is_the_reference_with_the_lightest_tail(beta):
    """One entry in the bucket: in fp32 log(1 - sum p) has too few digits left for a gradient test."""
    check(torch.float64, beta=beta, top_k=18)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("top_k", [None, 6])
@pytest.mark.parametrize("is_clip", [0.5, 2.0, 1e12])
def test_the_importance_weight_is_the_reference_and_is_detached(is_clip, top_k, dtype):
    old = logprobs(12, 2, 4, dtype=dtype)
    check(dtype, seed=1, top_k=top_k, token_ids=TOKEN_IDS, old_logprobs=old, is_clip=is_clip)


def test_the_log_ratio_is_clamped_at_20():
    # An old log-probability of -60 gives a log ratio above 20: the weight is e^20, below the clip of 1e12.
    old = torch.full((2, 4), -60.0, dtype=torch.float64)
    student, teacher = pair(1)
    weighted = sdpo_loss(student, teacher, MASK, token_ids=TOKEN_IDS, old_logprobs=old, is_clip=1e12)
    plain = sdpo_loss(student, teacher, MASK)
    assert_value(weighted / torch.exp(torch.tensor(20.0, dtype=torch.float64)), plain, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_clip", [None, 2.0])
def test_the_sampled_token_form_is_the_reference(is_clip, dtype):
    old = logprobs(13, 2, 4, dtype=dtype)
    check(dtype, seed=2, token_ids=TOKEN_IDS, sampled_token=True, old_logprobs=old, is_clip=is_clip)


def test_the_sampled_token_gradient_is_kl_st_on_average():
    # sum_v p_v * gradient(token v) = gradient of kl_st: the form is unbiased, which (logS - logT) alone is not.
    student, teacher = pair(3, num_rows=1, num_tokens=1)
    probabilities = torch.exp(reference.log_probs(student[0, 0]))
    mean = torch.zeros_like(student)
    for v in range(19):
        ids = torch.tensor([[v]])
        _, (gradient,) = value_and_gradients(
            lambda s, ids=ids: sdpo_loss(s, teacher, torch.ones(1, 1), token_ids=ids, sampled_token=True), student
        )
        mean += probabilities[v] * gradient
    _, (expected,) = value_and_gradients(lambda s: reference.sdpo(s, teacher, torch.ones(1, 1)), student)
    assert_gradient(mean, expected, torch.float64)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32], ids=str)
def test_the_mask_may_be_boolean_integer_or_float(mask_dtype):
    check(torch.float64, seed=4, mask=MASK.to(mask_dtype))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_top_k_of_the_whole_vocabulary_is_the_full_divergence(beta):
    student, teacher = pair(5)
    full = sdpo_loss(student, teacher, MASK, beta=beta)
    assert_value(sdpo_loss(student, teacher, MASK, beta=beta, top_k=19), full, torch.float64)
    assert_value(sdpo_loss(student, teacher, MASK, beta=beta, top_k=19, add_tail=False), full, torch.float64)


def test_the_teacher_receives_no_gradient():
    student, teacher = (x.requires_grad_(True) for x in pair(6))
    sdpo_loss(student, teacher, MASK, top_k=6).backward()
    assert teacher.grad is None or int(torch.count_nonzero(teacher.grad)) == 0
    assert float(student.grad.norm()) > 0
