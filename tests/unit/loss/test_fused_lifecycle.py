"""How the fused functions live with autograd: grad mode, half precision and loss scales, retained graphs, memory."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from composer_replication.errors import InputError, NonFiniteError
from composer_replication.loss import JSD
from composer_replication.loss.linear import (
    LinearHead,
    TeacherTerm,
    linear_cross_entropy,
    linear_divergence,
    linear_token_logprobs,
)
from composer_replication.loss.linear.tile_losses import DivergenceTile

ROWS, HIDDEN, VOCAB = 6, 8, 50


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).requires_grad_()


def divergence_of(hidden, head, teacher):
    return linear_divergence(hidden, head, [TeacherTerm(teacher, head)], JSD()).loss


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return leaf(ROWS, HIDDEN), LinearHead(leaf(VOCAB, HIDDEN)), torch.randn(ROWS, HIDDEN)


def test_no_gradient_work_is_done_without_grad_mode(tensors, monkeypatch):
    hidden, head, teacher = tensors
    asked, original = [], DivergenceTile.__call__

    def watched(self, student, tile, weights, grad, scratch):
        asked.append(grad)
        return original(self, student, tile, weights, grad, scratch)

    monkeypatch.setattr(DivergenceTile, "__call__", watched)
    with torch.no_grad():
        quiet = divergence_of(hidden, head, teacher)
    assert asked == [None]
    assert not quiet.requires_grad
    assert quiet.item() == divergence_of(hidden, head, teacher).item()
    assert asked[1] is not None


def test_bad_rows_and_ids_are_reported_under_no_grad_too(tensors):
    hidden, head, teacher = tensors
    with torch.no_grad():
        with pytest.raises(NonFiniteError, match="row 2"):
            divergence_of(torch.where(torch.arange(ROWS)[:, None] == 2, float("nan"), hidden), head, teacher)
        for function in (linear_cross_entropy, linear_token_logprobs):
            with pytest.raises(InputError, match="50"):
                function(hidden, head, torch.tensor([0, 1, 50, 3, 4, 5]))


def test_row_weights_that_are_not_finite_raise(tensors):
    hidden, head, teacher = tensors
    for bad in (float("nan"), float("inf")):
        weights = torch.ones(ROWS)
        weights[3] = bad
        with pytest.raises(NonFiniteError, match="row_weights"):
            linear_divergence(hidden, head, [TeacherTerm(teacher, head)], JSD(), row_weights=weights)


@pytest.mark.parametrize("bad", [{"scale": 0.0}, {"scale": float("nan")}, {"softcap": 0.0}, {"softcap": float("inf")}])
def test_a_head_with_an_impossible_transform_is_refused(bad):
    with pytest.raises(InputError, match="LinearHead"):
        LinearHead(torch.randn(3, 2), **bad)


@pytest.mark.parametrize("scale", [1.0, 65536.0])
@pytest.mark.parametrize("denominator", [1e2, 1e6])
def test_fp16_gradients_meet_the_loss_scale_before_they_are_rounded(denominator, scale):
    """Rounded first, probabilities times 1e-6 would be zeros in fp16, and no loss scale could bring them back."""
    torch.manual_seed(1)
    hidden, weight = leaf(ROWS, HIDDEN, dtype=torch.float16), leaf(VOCAB, HIDDEN, dtype=torch.float16)
    teacher = torch.randn(ROWS, HIDDEN).half()
    row_weights = torch.full((ROWS,), 1.0 / denominator)
    terms = [TeacherTerm(teacher, LinearHead(weight))]
    loss = linear_divergence(hidden, LinearHead(weight), terms, JSD(), row_weights=row_weights, tile_rows=4).loss
    got = torch.autograd.grad(scale * loss, (hidden, weight))
    wide = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    values = JSD()(wide[0] @ wide[1].T, teacher.float() @ wide[1].detach().T)
    want = torch.autograd.grad(scale * (row_weights * values).sum(), wide)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == torch.float16
        rounded = theirs.half().float()
        assert torch.allclose(ours.float(), rounded, rtol=2e-3, atol=2e-7)


def test_a_second_backward_through_a_retained_graph_gives_the_same_gradients(tensors):
    hidden, head, teacher = tensors
    ids = torch.arange(ROWS)
    for loss in (
        divergence_of(hidden, head, teacher),
        linear_cross_entropy(hidden, head, ids).loss,
        linear_token_logprobs(hidden, head, ids).sum(),
    ):
        first = torch.autograd.grad(2.0 * loss, (hidden, head.weight), retain_graph=True)
        second = torch.autograd.grad(loss, (hidden, head.weight))
        for one, two in zip(first, second, strict=True):
            assert torch.allclose(one, 2.0 * two, rtol=1e-6)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_changing_the_head_between_forward_and_backward_is_noticed(tensors):
    hidden, head, teacher = tensors
    ids = torch.arange(ROWS)
    losses = [divergence_of(hidden, head, teacher), linear_token_logprobs(hidden, head, ids).sum()]
    with torch.no_grad():
        head.weight.add_(1.0)
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_released_loss_keeps_no_graph_alive(tensors):
    """Without the garbage collector: a cycle through a saved context would hold every activation of the step."""
    _, head, teacher = tensors
    ids = torch.arange(ROWS)
    gc.collect()
    gc.disable()
    try:
        hidden = leaf(ROWS, HIDDEN) * 2.0
        watched = weakref.ref(hidden)
        loss = divergence_of(hidden, head, teacher) + linear_token_logprobs(hidden, head, ids).sum()
        loss = loss + linear_cross_entropy(hidden, head, ids).loss
        loss.backward()
        del loss, hidden
        assert watched() is None
    finally:
        gc.enable()


def test_a_loss_kept_for_logging_keeps_no_copy_of_the_head(tensors):
    hidden, head, teacher = tensors

    def head_copies():
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        return sum(each.dtype == torch.bfloat16 and each.shape == (VOCAB, HIDDEN) for each in tensors)

    before = head_copies()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kept = divergence_of(hidden, head, teacher) + linear_token_logprobs(hidden, head, torch.arange(ROWS)).sum()
    kept.backward()
    assert head_copies() == before
