"""What must hold for every loss, whatever the batch: zeros, signs, end points and invariances."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from loss_cases import DIVERGENCES, LOSSES, TOP_K, WITH_REDUCTION, WITH_TAIL, assert_close, batches, value_and_gradient

from composer_replication.distillation import sdpo_loss, taid_loss
from composer_replication.loss.jsd import generalized_jsd_loss

EVERY_LOSS = pytest.mark.parametrize("name", LOSSES)
EVERY_DIVERGENCE = pytest.mark.parametrize("name", DIVERGENCES)
BETA = st.one_of(st.just(0.0), st.just(1.0), st.floats(0.0, 1.0))


def tolerance(name):
    return 1e-7 if name in WITH_TAIL else 1e-9


def kl(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@EVERY_DIVERGENCE
@given(batch=batches())
def test_a_divergence_is_zero_where_student_and_teacher_agree(name, batch):
    value, gradient = value_and_gradient(DIVERGENCES[name], batch.teacher, batch.teacher, batch.keep)
    assert abs(float(value)) < 1e-12
    assert float(gradient.abs().max()) < 1e-10


@EVERY_DIVERGENCE
@given(batch=batches())
def test_a_divergence_is_never_negative(name, batch):
    assert float(DIVERGENCES[name](batch.student, batch.teacher, batch.keep)) >= -1e-12


@given(batch=batches(), beta=BETA, top_k=st.sampled_from([None, 1, TOP_K]))
def test_jsd_is_never_negative_for_any_beta(batch, beta, top_k):
    values = generalized_jsd_loss(batch.student, batch.teacher, beta=beta, top_k=top_k, reduction="none")
    assert float(values.min()) >= -1e-12


@given(batch=batches(), beta=BETA, top_k=st.sampled_from([1, TOP_K]), add_tail=st.booleans())
def test_sdpo_is_never_negative_for_any_beta_with_or_without_the_tail(batch, beta, top_k, add_tail):
    loss = sdpo_loss(batch.student, batch.teacher, batch.keep, beta=beta, top_k=top_k, add_tail=add_tail)
    assert float(loss) >= -1e-12


@given(batch=batches(), beta=st.sampled_from([0.0, 0.5, 1.0]))
def test_merging_the_tail_into_a_bucket_never_raises_the_divergence(batch, beta):
    full = sdpo_loss(batch.student, batch.teacher, batch.keep, beta=beta)
    merged = sdpo_loss(batch.student, batch.teacher, batch.keep, beta=beta, top_k=TOP_K)
    assert float(merged) <= float(full) + 1e-9


@given(batch=batches())
def test_the_ends_of_beta_are_kl_ts_and_kl_st(batch):
    log_s, log_t = batch.student.log_softmax(-1), batch.teacher.log_softmax(-1)
    at_0 = generalized_jsd_loss(batch.student, batch.teacher, beta=0.0, reduction="none")
    at_1 = generalized_jsd_loss(batch.student, batch.teacher, beta=1.0, reduction="none")
    assert_close(at_0, kl(log_t, log_s))
    assert_close(at_1, kl(log_s, log_t))


@given(batch=batches())
def test_near_its_ends_jsd_is_beta_kl_ts_and_one_minus_beta_kl_st(batch):
    """The documented jump: JSD itself goes to 0 at both ends, where the end points are whole KLs."""
    tiny, student, teacher = 1e-6, batch.student / 4, batch.teacher / 4
    low, high = (generalized_jsd_loss(student, teacher, beta=b, reduction="none") for b in (tiny, 1 - tiny))
    at_0, at_1 = (generalized_jsd_loss(student, teacher, beta=b, reduction="none") for b in (0.0, 1.0))
    torch.testing.assert_close(low / tiny, at_0, rtol=1e-3, atol=1e-8)
    torch.testing.assert_close(high / tiny, at_1, rtol=1e-3, atol=1e-8)


@given(batch=batches())
def test_jsd_with_student_and_teacher_exchanged_is_jsd_at_one_minus_beta(batch):
    for beta in (0.0, 0.2, 0.5):
        there = generalized_jsd_loss(batch.student, batch.teacher, beta=beta)
        assert_close(there, generalized_jsd_loss(batch.teacher, batch.student, beta=1 - beta))


@given(batch=batches())
def test_a_kl_step_toward_the_teacher_lowers_the_loss(batch):
    student, teacher = batch.student / 2, batch.teacher / 2
    value, gradient = value_and_gradient(generalized_jsd_loss, student, teacher, beta=1.0, reduction="sum")
    assume(float(gradient.norm()) > 1e-4)
    after = generalized_jsd_loss(student - 0.01 * gradient, teacher, beta=1.0, reduction="sum")
    assert float(after) < float(value)


@given(batch=batches())
def test_taid_at_0_is_the_students_own_entropy_without_a_pull(batch):
    log_q = batch.student.log_softmax(-1)
    entropy = -(log_q.exp() * log_q).sum(-1)[batch.keep].mean()
    value, gradient = value_and_gradient(LOSSES["taid_0"], batch.student, batch.teacher, batch.keep)
    assert_close(value, entropy)
    assert float(gradient.abs().max()) < 1e-12


@given(batch=batches())
def test_taid_at_1_is_kl_ts_plus_the_teachers_entropy(batch):
    log_p = batch.teacher.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)[batch.keep].mean()
    value, gradient = value_and_gradient(LOSSES["taid_1"], batch.student, batch.teacher, batch.keep)
    kl_ts, kl_gradient = value_and_gradient(DIVERGENCES["jsd_0"], batch.student, batch.teacher, batch.keep)
    assert_close(value, kl_ts + entropy)
    assert_close(gradient, kl_gradient)


@given(batch=batches(), t=st.floats(0.0, 1.0))
def test_taid_has_no_pull_where_student_and_teacher_agree(batch, t):
    _, gradient = value_and_gradient(taid_loss, batch.teacher, batch.teacher, t=t)
    assert float(gradient.abs().max()) < 1e-12


@EVERY_LOSS
@given(batch=batches(), seed=st.integers(0, 2**31))
def test_a_constant_added_to_a_row_of_logits_changes_nothing(name, batch, seed):
    generator = torch.Generator().manual_seed(seed)
    shifts = [10 * torch.randn(*batch.keep.shape, 1, generator=generator, dtype=torch.float64) for _ in range(2)]
    before, gradient = value_and_gradient(LOSSES[name], batch.student, batch.teacher, batch.keep)
    after, moved = value_and_gradient(LOSSES[name], batch.student + shifts[0], batch.teacher + shifts[1], batch.keep)
    assert_close(after, before, tolerance(name))
    assert_close(moved, gradient, tolerance(name))


@EVERY_LOSS
@given(batch=batches())
def test_the_gradient_of_a_row_sums_to_zero(name, batch):
    _, gradient = value_and_gradient(LOSSES[name], batch.student, batch.teacher, batch.keep)
    assert float(gradient.sum(-1).abs().max()) < tolerance(name)


@EVERY_LOSS
@given(batch=batches(), seed=st.integers(0, 2**31))
def test_the_order_of_the_vocabulary_does_not_matter(name, batch, seed):
    order = torch.randperm(batch.student.shape[-1], generator=torch.Generator().manual_seed(seed))
    before, gradient = value_and_gradient(LOSSES[name], batch.student, batch.teacher, batch.keep)
    after, moved = value_and_gradient(LOSSES[name], batch.student[..., order], batch.teacher[..., order], batch.keep)
    assert_close(after, before, tolerance(name))
    assert_close(moved, gradient[..., order], tolerance(name))


@pytest.mark.parametrize("name", WITH_REDUCTION)
@given(batch=batches())
def test_batchmean_is_the_sum_over_the_kept_tokens(name, batch):
    loss, args = WITH_REDUCTION[name], (batch.student, batch.teacher, batch.keep)
    values = loss(*args, reduction="none")
    assert values.shape == batch.keep.shape
    assert int(torch.count_nonzero(values[~batch.keep])) == 0
    assert_close(loss(*args, reduction="sum"), values.sum())
    assert_close(loss(*args, reduction="batchmean"), values.sum() / batch.keep.sum())
