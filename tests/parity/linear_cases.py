"""Cases for the fused functions, and the dense computation each must equal: logits first, then one row at a time."""

from dataclasses import dataclass, field, replace

import reference
import torch
from closeness import assert_gradient, assert_value

from composer_replication.loss import JSD, CrossEntropyToTeacher, EntropyGate, StudentTopK
from composer_replication.loss.linear import LinearHead, TeacherTerm, linear_divergence

N, V, H = 7, 19, 5

# name -> (the package's divergence, the reference of one row)
DIVERGENCES = {
    "jsd": (JSD(), lambda s, t: reference.jsd_row(s, t)),
    "kl_ts": (JSD(beta=0.0), lambda s, t: reference.jsd_row(s, t, beta=0)),
    "kl_st": (JSD(beta=1.0, temperature=1.7), lambda s, t: reference.jsd_row(s, t, beta=1, temperature=1.7)),
    "jsd_skewed": (JSD(beta=0.2, temperature=0.8), lambda s, t: reference.jsd_row(s, t, beta=0.2, temperature=0.8)),
    "jsd_top_k": (JSD(beta=0.5, top_k=6), lambda s, t: reference.jsd_row(s, t, beta=0.5, top_k=6)),
    "kl_st_top_k": (JSD(beta=1.0, top_k=6), lambda s, t: reference.jsd_row(s, t, beta=1, top_k=6)),
    "student_top_k": (StudentTopK(top_k=6), lambda s, t: reference.student_top_k_row(s, t, top_k=6)),
    "student_top_k_jsd": (
        StudentTopK(beta=0.5, top_k=6),
        lambda s, t: reference.student_top_k_row(s, t, beta=0.5, top_k=6),
    ),
    "student_top_k_no_tail": (
        StudentTopK(beta=0.0, top_k=6, add_tail=False),
        lambda s, t: reference.student_top_k_row(s, t, beta=0, top_k=6, add_tail=False),
    ),
    "cross_entropy": (CrossEntropyToTeacher(), reference.cross_entropy_to_teacher_row),
    "soft_gate": (EntropyGate(temperature=1.3), lambda s, t: reference.soft_gate_row(s, t, temperature=1.3)),
    "soft_gate_h_max": (EntropyGate(h_max=2.0), lambda s, t: reference.soft_gate_row(s, t, h_max=2.0)),
    "hard_gate": (EntropyGate(gate="hard", tau=2.0), lambda s, t: reference.hard_gate_row(s, t, tau=2.0)),
    "hard_gate_top_k": (
        EntropyGate(gate="hard", tau=1.0, top_k=4),
        lambda s, t: reference.hard_gate_row(s, t, tau=1.0, top_k=4),
    ),
}


@dataclass(frozen=True)
class Head:
    """The tensors and numbers of a head, before they become a LinearHead."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def fused(self):
        return LinearHead(self.weight, bias=self.bias, scale=self.scale, softcap=self.softcap)

    def logits(self, hidden):
        return reference.linear_logits(hidden, self.weight, self.bias, self.scale, self.softcap)


@dataclass(frozen=True)
class Case:
    hidden: torch.Tensor
    head: Head
    teachers: list = field(default_factory=list)  # (hidden, Head, coefficient)
    student_coefficient: float | None = None

    def terms(self):
        own = [] if self.student_coefficient is None else [TeacherTerm.student(self.student_coefficient)]
        return own + [TeacherTerm(hidden, head.fused(), coefficient=c) for hidden, head, c in self.teachers]

    def dense_logits(self):
        student = self.head.logits(self.hidden)
        teacher = sum((c * head.logits(hidden) for hidden, head, c in self.teachers), torch.zeros_like(student))
        if self.student_coefficient is not None:
            teacher = teacher + self.student_coefficient * student
        return student, teacher.detach()

    def leaves(self):
        """A copy whose student tensors ask for gradients; hidden, weight and bias are its leaves."""
        hidden = self.hidden.detach().clone().requires_grad_(True)
        bias = None if self.head.bias is None else self.head.bias.detach().clone().requires_grad_(True)
        head = replace(self.head, weight=self.head.weight.detach().clone().requires_grad_(True), bias=bias)
        return replace(self, hidden=hidden, head=head)

    def gradients(self):
        names = {"hidden": self.hidden, "weight": self.head.weight, "bias": self.head.bias}
        return {name: leaf.grad for name, leaf in names.items() if leaf is not None}


def random(seed, *shape, dtype=torch.float64, scale=1.0):
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def make_head(seed, dtype, *, width=H, bias=True, scale=1.0, softcap=None):
    return Head(random(seed, V, width, dtype=dtype), random(seed + 1, V, dtype=dtype) if bias else None, scale, softcap)


def make_case(dtype=torch.float64, *, seed=0, rows=N, coefficients=(1.0,), student=None, **head):
    """Teachers have their own head and their own width, and their temper differs from row to row."""
    tempers = torch.linspace(0.2, 1.6, max(rows, 1), dtype=torch.float64)[:rows, None]
    teachers = [
        ((random(seed + 10 * i, rows, H + i) * tempers).to(dtype), make_head(seed + 10 * i + 1, dtype, width=H + i), c)
        for i, c in enumerate(coefficients, start=1)
    ]
    return Case(random(seed, rows, H, dtype=dtype), make_head(seed + 1, dtype, **head), teachers, student)


def dense(case, row_fn, *, row_weights=None, token_clip=None):
    """(loss, row values) of the dense computation."""
    student, teacher = case.dense_logits()
    values = torch.stack([row_fn(s, t) for s, t in zip(student, teacher, strict=True)])
    weights = torch.full_like(values, 1 / len(values)) if row_weights is None else row_weights.double()
    return (weights * reference.cap(values, token_clip)).sum(), values.detach()


def assert_fused_is_dense(case, name, dtype, *, tile_rows=3, upstream=1.0, **settings):
    """Value, row values and the gradients by hidden, weight and bias."""
    divergence, row_fn = DIVERGENCES[name]
    ours, theirs = case.leaves(), case.leaves()
    result = linear_divergence(
        ours.hidden, ours.head.fused(), ours.terms(), divergence, tile_rows=tile_rows, **settings
    )
    expected, expected_rows = dense(theirs, row_fn, **settings)
    assert_value(result.loss, expected, dtype)
    assert_value(result.row_values, expected_rows, dtype)
    assert not result.row_values.requires_grad
    (upstream * result.loss).backward()
    (upstream * expected).backward()
    expected_gradients = theirs.gradients()
    for leaf, gradient in ours.gradients().items():
        assert_gradient(gradient, expected_gradients[leaf], dtype)
