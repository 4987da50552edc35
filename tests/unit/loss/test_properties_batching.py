"""How tokens are laid out in a batch does not matter: padding, packing, order, micro-batches and ignored rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_cases import LOSSES, WITH_REDUCTION, assert_close, batches, value_and_gradient

from composer_replication.loss import JSD
from composer_replication.loss.linear import LinearHead, TeacherTerm, linear_divergence

EVERY_LOSS = pytest.mark.parametrize("name", LOSSES)


@EVERY_LOSS
@given(batch=batches(), num_left=st.integers(0, 3), num_right=st.integers(0, 3))
def test_padding_on_either_side_changes_nothing(name, batch, num_left, num_right):
    num_rows, num_tokens = batch.keep.shape

    def padded(x, fill):
        left = torch.full((num_rows, num_left, *x.shape[2:]), fill, dtype=x.dtype)
        right = torch.full((num_rows, num_right, *x.shape[2:]), fill, dtype=x.dtype)
        return torch.cat([left, x, right], dim=1)

    before, gradient = value_and_gradient(LOSSES[name], batch.student, batch.teacher, batch.keep)
    after, moved = value_and_gradient(
        LOSSES[name], padded(batch.student, 7.0), padded(batch.teacher, -3.0), padded(batch.keep, False)
    )
    assert_close(after, before)
    assert_close(moved[:, num_left : num_left + num_tokens], gradient)
    assert int(torch.count_nonzero(moved)) == int(torch.count_nonzero(moved[:, num_left : num_left + num_tokens]))


@EVERY_LOSS
@given(batch=batches())
def test_packing_all_rows_into_one_changes_nothing(name, batch):
    vocab = batch.student.shape[-1]
    before, gradient = value_and_gradient(LOSSES[name], batch.student, batch.teacher, batch.keep)
    after, moved = value_and_gradient(
        LOSSES[name],
        batch.student.reshape(1, -1, vocab),
        batch.teacher.reshape(1, -1, vocab),
        batch.keep.reshape(1, -1),
    )
    assert_close(after, before)
    assert_close(moved.reshape(gradient.shape), gradient)


@EVERY_LOSS
@given(batch=batches())
def test_the_kept_rows_alone_give_the_same_loss(name, batch):
    student, teacher = batch.student[batch.keep][None], batch.teacher[batch.keep][None]
    everything = torch.ones(student.shape[:2], dtype=torch.bool)
    before, gradient = value_and_gradient(LOSSES[name], batch.student, batch.teacher, batch.keep)
    after, selected = value_and_gradient(LOSSES[name], student, teacher, everything)
    assert_close(after, before)
    assert_close(selected[0], gradient[batch.keep])


@EVERY_LOSS
@given(batch=batches(), seed=st.integers(0, 2**31))
def test_the_order_of_rows_and_of_tokens_does_not_matter(name, batch, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(batch.keep.shape[0], generator=generator)
    tokens = torch.randperm(batch.keep.shape[1], generator=generator)

    def shuffled(x):
        return x[rows][:, tokens]

    before, gradient = value_and_gradient(LOSSES[name], batch.student, batch.teacher, batch.keep)
    after, moved = value_and_gradient(
        LOSSES[name], shuffled(batch.student), shuffled(batch.teacher), shuffled(batch.keep)
    )
    assert_close(after, before)
    assert_close(moved, shuffled(gradient))


@EVERY_LOSS
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30], ids=str)
@given(batch=batches())
def test_ignored_rows_receive_exactly_no_gradient_whatever_they_hold(name, garbage, batch):
    student, teacher = batch.student.clone(), batch.teacher.clone()
    student[~batch.keep] = garbage
    teacher[~batch.keep] = garbage
    before, gradient = value_and_gradient(LOSSES[name], batch.student, batch.teacher, batch.keep)
    after, moved = value_and_gradient(LOSSES[name], student, teacher, batch.keep)
    assert_close(after, before)
    assert int(torch.count_nonzero(moved[~batch.keep])) == 0
    assert_close(moved[batch.keep], gradient[batch.keep])


@pytest.mark.parametrize("name", WITH_REDUCTION)
@given(batch=batches(), cut=st.integers(0, 3))
def test_micro_batches_with_reduction_sum_add_up_to_the_batch(name, batch, cut):
    loss, cut = WITH_REDUCTION[name], min(cut, batch.keep.shape[1])
    whole, gradient = value_and_gradient(loss, batch.student, batch.teacher, batch.keep, reduction="sum")
    parts = [
        value_and_gradient(loss, batch.student[:, s], batch.teacher[:, s], batch.keep[:, s], reduction="sum")
        for s in (slice(0, cut), slice(cut, None))
        if batch.keep[:, s].numel()
    ]
    assert_close(sum(value for value, _ in parts), whole)
    assert_close(torch.cat([part for _, part in parts], dim=1), gradient)


@pytest.mark.parametrize("name", ["sdpo", "sdpo_tail", "taid_0.4"])
@given(batch=batches())
def test_token_means_of_the_rows_add_up_by_their_token_counts(name, batch):
    whole, gradient = value_and_gradient(LOSSES[name], batch.student, batch.teacher, batch.keep)
    total, num_kept = torch.zeros((), dtype=torch.float64), int(batch.keep.sum())
    for row in range(len(batch.keep)):
        one = slice(row, row + 1)
        share = int(batch.keep[one].sum()) / num_kept
        value, part = value_and_gradient(LOSSES[name], batch.student[one], batch.teacher[one], batch.keep[one])
        total += share * value
        assert_close(share * part, gradient[one])
    assert_close(total, whole)


@given(seed=st.integers(0, 2**31), num_rows=st.integers(2, 9), cut=st.integers(1, 8), tile_rows=st.integers(1, 10))
def test_fused_micro_batches_with_their_row_weights_add_up_to_the_batch(seed, num_rows, cut, tile_rows):
    generator = torch.Generator().manual_seed(seed)
    hidden, teacher = (torch.randn(num_rows, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    weight = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    row_weights = torch.rand(num_rows, generator=generator, dtype=torch.float64)

    def run(rows):
        head, leaf = weight.clone().requires_grad_(True), hidden[rows].clone().requires_grad_(True)
        terms = [TeacherTerm(teacher[rows], LinearHead(weight))]
        result = linear_divergence(
            leaf, LinearHead(head), terms, JSD(beta=1.0), row_weights=row_weights[rows], tile_rows=tile_rows
        )
        result.loss.backward()
        return result.loss.detach(), leaf.grad, head.grad

    whole, parts = run(slice(None)), [run(slice(0, cut)), run(slice(cut, None))]
    assert_close(parts[0][0] + parts[1][0], whole[0])
    assert_close(torch.cat([parts[0][1], parts[1][1]]), whole[1])
    assert_close(parts[0][2] + parts[1][2], whole[2])
