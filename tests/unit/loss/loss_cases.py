"""What the property tests are run on: every dense loss behind one signature, and random batches for hypothesis."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from composer_replication.distillation import entropy_aware_opd_loss, sdpo_loss, taid_loss
from composer_replication.loss.jsd import generalized_jsd_loss

TOP_K = 3  # every random vocabulary is larger


def jsd(**settings):
    def loss(student, teacher, keep, reduction="batchmean"):
        labels = torch.where(keep, torch.zeros_like(keep, dtype=torch.int64), -100)
        return generalized_jsd_loss(student, teacher, labels, reduction=reduction, **settings)

    return loss


def entropy_opd(**settings):
    def loss(student, teacher, keep, reduction="batchmean"):
        labels = keep.to(torch.int64)
        return entropy_aware_opd_loss(student, teacher, labels=labels, reduction=reduction, **settings)

    return loss


def sdpo(**settings):
    return lambda student, teacher, keep: sdpo_loss(student, teacher, keep, **settings)


def taid(t):
    return lambda student, teacher, keep: taid_loss(student, teacher, keep.to(student.dtype), t=t)


# name -> loss(student_BTV, teacher_BTV, keep_BT, reduction): a mean over the kept tokens unless a reduction is named
WITH_REDUCTION = {
    "jsd_0": jsd(beta=0.0),
    "jsd_0.3": jsd(beta=0.3, temperature=1.5),
    "jsd_0.5": jsd(),
    "jsd_1": jsd(beta=1.0, temperature=0.8),
    "jsd_top_k": jsd(beta=0.5, top_k=TOP_K),
    "jsd_capped": jsd(beta=1.0, token_clip=0.1),
    "soft_gate": entropy_opd(),
    "hard_gate": entropy_opd(gate="hard", tau=1.2, top_k=TOP_K),
}
DIVERGENCES = WITH_REDUCTION | {
    "sdpo": sdpo(),
    "sdpo_tail": sdpo(top_k=TOP_K),
    "sdpo_tail_0": sdpo(beta=0.0, top_k=TOP_K),
    "sdpo_tail_0.5": sdpo(beta=0.5, top_k=TOP_K),
    "sdpo_renormalised": sdpo(beta=0.5, top_k=TOP_K, add_tail=False),
}
# log(1 - sum p) of a light tail loses digits, so these get a wider tolerance where the order of a sum changes.
WITH_TAIL = {"sdpo_tail", "sdpo_tail_0", "sdpo_tail_0.5", "hard_gate"}
LOSSES = DIVERGENCES | {"taid_0": taid(0.0), "taid_0.4": taid(0.4), "taid_1": taid(1.0)}


@dataclass(frozen=True)
class Batch:
    student: torch.Tensor
    teacher: torch.Tensor
    keep: torch.Tensor


@st.composite
def batches(draw):
    """Small float64 batches with at least one kept token; no tail is so light that upstream's clamp would bind."""
    num_rows, num_tokens = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    vocab, scale = draw(st.integers(TOP_K + 1, 9)), draw(st.sampled_from([0.1, 1.0, 2.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    student, teacher = (
        scale * torch.randn(num_rows, num_tokens, vocab, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    size = num_rows * num_tokens
    flags = draw(st.lists(st.booleans(), min_size=size, max_size=size).filter(any))
    return Batch(student, teacher, torch.tensor(flags).reshape(num_rows, num_tokens))


def value_and_gradient(loss, student, *args, **kwargs):
    leaf = student.detach().clone().requires_grad_(True)
    value = loss(leaf, *args, **kwargs)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), gradient


def assert_close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
