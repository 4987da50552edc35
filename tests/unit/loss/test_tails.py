"""The tail bucket where student or teacher is sure, against whole rows in fp64 whose tail is a sum of its entries."""

import pytest
import torch

from composer_replication.loss import EntropyGate, StudentTopK
from composer_replication.loss.sdpo import entries_with_tail, with_tail_bucket

VOCAB, TOP_K = 400, 8
BETAS = [0.0, 0.3, 1.0]
GAPS = [6.0, 14.0, 19.0, 25.0, 60.0]
"""How far the listed logits are above the others: the tail is 1e-1 of the row at the first, 1e-25 at the last."""


def sure_row(gap, seed):
    torch.manual_seed(seed)
    row = 0.3 * torch.randn(1, VOCAB)
    row[0, :TOP_K] += gap
    return row


def merged(log_probs):
    """Probabilities of the first entries and of all others together."""
    others = log_probs[:, TOP_K:].exp().sum(-1, keepdim=True)
    return torch.cat([log_probs[:, :TOP_K].exp(), others], -1)


def kl(p, q):
    return (p * (p / q).log()).sum(-1)


def jsd(student, teacher, beta):
    if beta in (0.0, 1.0):
        return kl(teacher, student) if beta == 0.0 else kl(student, teacher)
    middle = (1 - beta) * student + beta * teacher
    return beta * kl(teacher, middle) + (1 - beta) * kl(student, middle)


def value_and_gradients(function, student, teacher):
    """The value, the gradient on the listed logits, and what it adds up to on the others."""
    student = student.clone().requires_grad_()
    value = function(student, teacher).sum()
    (gradient,) = torch.autograd.grad(value, student)
    return value.double().detach(), gradient[0, :TOP_K].double(), gradient[0, TOP_K:].double().sum()


def assert_same(found, wanted):
    for name, one, other in zip(("value", "gradient", "tail's gradient"), found, wanted, strict=True):
        # An entry's gradient is a difference of numbers up to 1, or up to the value where the student weighs it.
        scale = max(1.0, float(wanted[0]))
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-6 * scale), (name, one, other)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("gap", GAPS)
def test_a_sure_student_is_still_taught_by_its_tail(gap, beta):
    student, teacher = sure_row(gap, 0), sure_row(6.0, 1)
    found = value_and_gradients(StudentTopK(beta=beta, top_k=TOP_K), student, teacher)

    def whole_row(student, teacher):
        return jsd(merged(student.log_softmax(-1)), merged(teacher.log_softmax(-1)), beta)

    wanted = value_and_gradients(whole_row, student.double(), teacher.double())
    assert_same(found, wanted)
    if beta == 0.0:
        assert wanted[2] < -1e-2  # what 1 - sum p in fp32 had none of


@pytest.mark.parametrize("gap", GAPS)
def test_a_sure_teacher_has_its_own_tail(gap):
    student, teacher = sure_row(6.0, 0), sure_row(gap, 1)
    found = value_and_gradients(StudentTopK(beta=1.0, top_k=TOP_K), student, teacher)

    def whole_row(student, teacher):
        return kl(merged(student.log_softmax(-1)), merged(teacher.log_softmax(-1)))

    assert_same(found, value_and_gradients(whole_row, student.double(), teacher.double()))


@pytest.mark.parametrize("gap", GAPS)
def test_the_hard_gate_teaches_a_sure_student_too(gap):
    student, teacher = sure_row(gap, 0), sure_row(6.0, 1)
    found = value_and_gradients(EntropyGate(gate="hard", tau=0.5, top_k=TOP_K), student, teacher)

    def whole_rows(student, teacher):
        log_s, log_t = student.log_softmax(-1), teacher.log_softmax(-1)
        assert float(-(log_t.exp() * log_t).sum()) > 0.5
        return kl(log_s.exp(), log_t.exp()) + kl(merged(log_t), merged(log_s))

    assert_same(found, value_and_gradients(whole_rows, student.double(), teacher.double()))


def test_a_tail_of_nothing_is_the_one_of_masses_and_has_no_gradient():
    rows = torch.tensor([[1.0, 0.5, -torch.inf, -torch.inf]]).log_softmax(-1).requires_grad_()
    for ids in (torch.tensor([[1, 0]]), torch.tensor([[0, 1, 2, 3]])):
        found = entries_with_tail(rows, ids)
        torch.testing.assert_close(found, with_tail_bucket(rows.gather(-1, ids)))
        (gradient,) = torch.autograd.grad(found[0, -1], rows, retain_graph=True)
        assert gradient.tolist() == [[0.0] * 4]


def test_both_tails_agree_where_there_is_much_in_them():
    rows = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(2)).log_softmax(-1)
    ids = rows.topk(TOP_K, -1).indices
    torch.testing.assert_close(entries_with_tail(rows, ids), with_tail_bucket(rows.gather(-1, ids)))
