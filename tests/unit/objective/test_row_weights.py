"""Weights of target tokens, worked by hand, and the tiled pass that finds what they look at."""

from __future__ import annotations

import math

import pytest
import torch

from composer_replication.errors import InputError, ShapeError
from composer_replication.loss import JSD, CrossEntropyToTeacher, EntropyGate
from composer_replication.loss.linear import LinearHead, TeacherTerm, linear_divergence
from composer_replication.loss.linear.logprobs import linear_row_stats
from composer_replication.trainer.objective.channels import (
    _position_decay,
    _sigmoid_gate,
    _teacher_certainty,
    _with_mean_one,
)

N, V, H = 7, 19, 5


def numbers(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_the_gate_is_one_where_both_agree_and_half_as_much_again_where_the_teacher_finds_a_third():
    student = torch.tensor([-1.0, -1.0, -1.0]).double()
    teacher = student + torch.tensor([0.0, -1.0, 1.0]).double() * math.log(3)
    torch.testing.assert_close(_sigmoid_gate(student, teacher, 1.0), torch.tensor([1.0, 1.5, 0.5]).double())
    # tau = 1/2: nine to one instead of three to one
    torch.testing.assert_close(_sigmoid_gate(student, teacher, 0.5), torch.tensor([1.0, 1.8, 0.2]).double())


def test_a_teacher_that_wavers_between_two_of_four_counts_half():
    entropies = torch.tensor([0.0, math.log(2), math.log(4), math.log(4) + 1e-9]).double()
    torch.testing.assert_close(_teacher_certainty(entropies, 4), torch.tensor([1.0, 0.5, 0.0, 0.0]).double())
    assert _teacher_certainty(torch.zeros(1), 1).item() == 1.0


def test_the_jth_token_counts_decay_to_the_j():
    position = torch.tensor([0, 1, 2, 0, 1])
    wanted = torch.tensor([1.0, 0.5, 0.25, 1.0, 0.5])
    assert torch.equal(_position_decay(position, 0.5, torch.float32), wanted)
    assert torch.equal(_position_decay(position, 1.0, torch.float64), torch.ones(5).double())


def test_normalised_weights_have_mean_one_and_weights_of_zero_stay_zero():
    assert torch.equal(_with_mean_one(torch.tensor([1.0, 3.0])), torch.tensor([0.5, 1.5]))
    assert torch.equal(_with_mean_one(torch.zeros(3)), torch.zeros(3))
    assert _with_mean_one(torch.zeros(0)).shape == (0,)


def test_no_gradient_flows_through_a_weight():
    student, entropy = (numbers(seed, 3).requires_grad_() for seed in (0, 1))
    assert not _sigmoid_gate(student, student - 1, 0.7).requires_grad
    assert not _teacher_certainty(entropy, 9).requires_grad


@pytest.mark.parametrize("tau", [0.0, -1.0, math.nan, math.inf])
def test_a_gate_needs_a_positive_temper(tau):
    with pytest.raises(InputError, match="tau"):
        _sigmoid_gate(torch.zeros(1), torch.zeros(1), tau)


@pytest.mark.parametrize("decay", [0.0, -0.5, 1.01, math.nan])
def test_a_decay_lies_above_zero_and_does_not_grow(decay):
    with pytest.raises(InputError, match="decay"):
        _position_decay(torch.zeros(1, dtype=torch.long), decay, torch.float32)


class Case:
    """A student and teachers with heads of their own kinds; `logits` are the dense ones."""

    def __init__(self, coefficients=(1.0, 1.3, -1.3), student_share=0.0, dtype=torch.float64):
        self.hidden = numbers(1, N, H, dtype=dtype).requires_grad_()
        self.head = LinearHead(numbers(2, V, H, dtype=dtype).requires_grad_(), numbers(3, V, dtype=dtype))
        heads = [
            LinearHead(numbers(4, V, H, dtype=dtype)),
            LinearHead(numbers(5, V, H + 1, dtype=dtype), numbers(6, V, dtype=dtype), scale=0.5),
            LinearHead(numbers(7, V, H, dtype=dtype), softcap=2.0),
        ]
        rows = [numbers(10 + at, N, head.weight.shape[1], dtype=dtype) for at, head in enumerate(heads)]
        shares = zip(rows, heads, coefficients, strict=True)
        self.terms = [TeacherTerm(*share) for share in shares]
        self.terms += [TeacherTerm.student(student_share)] if student_share else []
        self.student_share = student_share

    def logits(self):
        student = self.head.logits(self.hidden)
        summed = [c.coefficient * c.head.logits(c.hidden) for c in self.terms if c.head is not None]
        return student, sum(summed).detach() + self.student_share * student.detach()


TOKENS = torch.tensor([3, 0, 18, 7, 7, 11, 4])


@pytest.mark.parametrize("tile_rows", [None, 1, 3])
@pytest.mark.parametrize("student_share", [0.0, 1.0])
def test_the_tiled_pass_finds_the_log_probs_and_the_entropy_of_the_dense_logits(tile_rows, student_share):
    case = Case(student_share=student_share)
    found = linear_row_stats(case.hidden, case.head, case.terms, TOKENS, tile_rows=tile_rows)
    student, teacher = (logits.log_softmax(-1) for logits in case.logits())
    chosen = torch.arange(N), TOKENS
    torch.testing.assert_close(found.student_logprobs, student[chosen].detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.teacher_logprobs, teacher[chosen], rtol=1e-10, atol=1e-10)
    entropy = torch.stack([-sum(p * p.log() for p in row.exp()) for row in teacher])
    torch.testing.assert_close(found.teacher_entropy, entropy, rtol=1e-10, atol=1e-10)
    assert not any(each.requires_grad for each in found)


def test_half_precision_rows_are_summed_up_in_fp32():
    case = Case(dtype=torch.bfloat16)
    found = linear_row_stats(case.hidden, case.head, case.terms, TOKENS)
    wide = [
        TeacherTerm(
            t.hidden.double(),
            LinearHead(t.head.weight.double(), _double(t.head.bias), t.head.scale, t.head.softcap),
            t.coefficient,
        )
        for t in case.terms
    ]
    head = LinearHead(case.head.weight.double(), _double(case.head.bias))
    exact = linear_row_stats(case.hidden.double(), head, wide, TOKENS)
    for mine, theirs in zip(found, exact, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


def _double(values):
    return None if values is None else values.double()


def test_a_token_outside_the_vocabulary_cannot_be_weighed_and_no_rows_are_no_numbers():
    case = Case()
    wrong = TOKENS.clone()
    wrong[2] = V
    found = linear_row_stats(case.hidden, case.head, case.terms, wrong)
    assert torch.isnan(found.teacher_logprobs).tolist() == [row == 2 for row in range(N)]
    with pytest.raises(ShapeError, match="token_ids"):
        linear_row_stats(case.hidden, case.head, case.terms, TOKENS[:-1])
    none = [TeacherTerm(t.hidden[:0], t.head, t.coefficient) for t in case.terms]
    assert linear_row_stats(case.hidden[:0], case.head, none, TOKENS[:0]).teacher_entropy.shape == (0,)


DIVERGENCES = {
    "kl_st": JSD(beta=1.0, temperature=1.3),
    "jsd": JSD(beta=0.3),
    "cross_entropy": CrossEntropyToTeacher(),
    "entropy_gate": EntropyGate(),
}


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("student_share", [0.0, 1.0])
def test_terms_may_be_taken_away_values_and_gradients_are_the_dense_ones(name, student_share):
    """A contrast has the coefficients 1, c and -c; nothing in the kernels may take them for shares of a mixture."""
    case, divergence = Case((1.0, 2.5, -2.5), student_share), DIVERGENCES[name]
    weights = torch.linspace(0.1, 1.7, N, dtype=torch.float64)
    got = linear_divergence(case.hidden, case.head, case.terms, divergence, row_weights=weights, tile_rows=3)
    student, teacher = case.logits()
    values = divergence(student, teacher)
    torch.testing.assert_close(got.row_values, values.detach(), rtol=1e-10, atol=1e-10)
    leaves = (case.hidden, case.head.weight)
    ours, theirs = (torch.autograd.grad(each, leaves) for each in (got.loss, (weights * values).sum()))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-10)
