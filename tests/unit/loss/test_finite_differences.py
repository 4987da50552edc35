"""Every gradient against finite differences in float64.

Where a loss stops a gradient on purpose (TAID's target, the importance weight, the sampled-token gap, ref_kl's gap) the
stopped factor is held fixed in the function that is differentiated, so that finite differences see what autograd sees.
"""

from types import SimpleNamespace

import pytest
import torch
from loss_cases import LOSSES, TOP_K
from torch.autograd import gradcheck

from composer_replication.distillation import dpo_loss, sdpo_loss, simpo_loss, taid_loss
from composer_replication.loss import JSD, CrossEntropyToTeacher, EntropyGate, StudentTopK
from composer_replication.loss.linear import (
    LinearHead,
    TeacherTerm,
    linear_cross_entropy,
    linear_divergence,
    linear_token_logprobs,
)
from composer_replication.loss.preference import avg_sequence_logprob
from composer_replication.recipes.prime_rl.composer_loss import loss_fn

KEEP = torch.tensor([[True, False, True], [True, True, False]])
# The capped loss scales a gradient whose value stands still, and TAID's target follows the student: both below.
PLAIN = [name for name in LOSSES if name not in ("jsd_capped", "taid_0", "taid_0.4")]


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaf(seed, *shape):
    return random(seed, *shape).requires_grad_(True)


def central_differences(fn, x, step=1e-6):
    gradient = torch.zeros_like(x)
    for i in range(x.numel()):
        up, down = x.detach().clone(), x.detach().clone()
        up.view(-1)[i] += step
        down.view(-1)[i] -= step
        gradient.view(-1)[i] = (fn(up) - fn(down)) / (2 * step)
    return gradient


def assert_matches_differences(loss, frozen, x):
    """Autograd of loss(x) is the finite difference of frozen(x)."""
    (gradient,) = torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(gradient, central_differences(frozen, x), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", PLAIN)
def test_a_dense_loss_passes_gradcheck(name):
    teacher = random(1, 2, 3, 7)
    assert gradcheck(lambda s: LOSSES[name](s, teacher, KEEP), (leaf(0, 2, 3, 7),))


@pytest.mark.parametrize("t", [0.0, 0.4, 0.9])
def test_taid_is_the_derivative_with_its_target_held_fixed(t):
    student, teacher = leaf(2, 2, 3, 7), random(3, 2, 3, 7)
    target = ((1 - t) * student.detach() + t * teacher).softmax(-1)

    def frozen(s):
        return -(target * s.log_softmax(-1)).sum(-1)[KEEP].mean()

    assert_matches_differences(lambda s: taid_loss(s, teacher, KEEP.double(), t=t), frozen, student)


@pytest.mark.parametrize("is_clip", [0.3, 2.0])
def test_the_importance_weight_is_the_derivative_with_the_weight_held_fixed(is_clip):
    student, teacher, ids = leaf(4, 2, 3, 7), random(5, 2, 3, 7), torch.tensor([[0, 1, 2], [3, 4, 5]])
    old = random(6, 2, 3) - 2

    def logp(s):
        return s.log_softmax(-1).gather(-1, ids[..., None])[..., 0]

    weight = (logp(student.detach()) - old).exp().clamp(max=is_clip)

    def frozen(s):
        log_s, log_t = s.log_softmax(-1), teacher.log_softmax(-1)
        return (weight * (log_s.exp() * (log_s - log_t)).sum(-1))[KEEP].mean()

    settings = {"token_ids": ids, "old_logprobs": old, "is_clip": is_clip}
    assert_matches_differences(lambda s: sdpo_loss(s, teacher, KEEP, **settings), frozen, student)


def test_the_sampled_token_loss_is_the_derivative_with_the_gap_held_fixed():
    student, teacher, ids = leaf(7, 2, 3, 7), random(8, 2, 3, 7), torch.tensor([[0, 1, 2], [3, 4, 5]])

    def logp(x):
        return x.log_softmax(-1).gather(-1, ids[..., None])[..., 0]

    gap = logp(student.detach()) - logp(teacher)
    assert_matches_differences(
        lambda s: sdpo_loss(s, teacher, KEEP, token_ids=ids, sampled_token=True),
        lambda s: (gap * logp(s))[KEEP].mean(),
        student,
    )


def test_the_token_cap_is_the_derivative_with_the_factor_held_fixed():
    student, teacher = leaf(9, 2, 3, 7), random(10, 2, 3, 7)

    def rows(s):
        log_s, log_t = s.log_softmax(-1), teacher.log_softmax(-1)
        return (log_s.exp() * (log_s - log_t)).sum(-1)

    factor = (0.1 / rows(student.detach())).clamp(max=1.0)
    assert_matches_differences(
        lambda s: LOSSES["jsd_capped"](s, teacher, KEEP), lambda s: (factor * rows(s))[KEEP].mean(), student
    )


def test_the_preference_losses_pass_gradcheck():
    references = (random(13, 4), random(14, 4))
    assert gradcheck(lambda c, r: simpo_loss(c, r, beta=2.5, gamma=0.6), (leaf(11, 4), leaf(12, 4)))
    assert gradcheck(lambda c, r: dpo_loss(c, r, *references, beta=0.5), (leaf(11, 4), leaf(12, 4)))
    assert gradcheck(lambda x: avg_sequence_logprob(x, KEEP), (leaf(15, 2, 3),))


def prime_rl_inputs(trainer):
    return SimpleNamespace(
        trainer_logprobs=trainer,
        inference_logprobs=-1 - random(17, 12).abs(),
        ref_logprobs=-1 - random(18, 12).abs(),
        advantages=random(19, 12),
        loss_mask=random(20, 12) > -0.5,
        loss_weights=random(21, 12).abs(),
    )


def test_the_prime_rl_loss_passes_gradcheck():
    trainer = (-1 - random(16, 12).abs()).requires_grad_(True)
    assert gradcheck(lambda x: loss_fn(prime_rl_inputs(x), kl_tau=0.1).loss, (trainer,))


def test_ref_kl_is_the_derivative_with_its_gap_held_fixed():
    trainer = (-1 - random(16, 12).abs()).requires_grad_(True)
    fixed = prime_rl_inputs(trainer.detach())
    gap = fixed.ref_logprobs - trainer.detach()
    weights = fixed.loss_weights * fixed.loss_mask
    kept = (trainer.detach().exp() - fixed.inference_logprobs.exp() >= -0.2).double()

    def added(x):
        log_ratio = x - fixed.inference_logprobs
        return (weights * (-kept * gap * log_ratio.exp() + 1e-3 * log_ratio.square())).sum()

    def ours(x):
        return loss_fn(prime_rl_inputs(x), alpha_sdpo=1.0).loss - loss_fn(prime_rl_inputs(x)).loss

    assert_matches_differences(ours, added, trainer)


FUSED = [
    JSD(),
    JSD(beta=0.0),
    JSD(beta=1.0, temperature=1.3),
    JSD(top_k=TOP_K),
    StudentTopK(top_k=TOP_K),
    StudentTopK(beta=0.5, top_k=TOP_K, add_tail=False),
    CrossEntropyToTeacher(),
    EntropyGate(),
    EntropyGate(gate="hard", tau=1.0, top_k=TOP_K),
]


def fused_divergence(divergence, softcap):
    terms = [TeacherTerm(random(32, 5, 4), LinearHead(random(33, 7, 4)))]
    weights = torch.tensor([0.2, 0.0, 1.0, 0.5, 0.3], dtype=torch.float64)

    def loss(hidden, weight, bias):
        head = LinearHead(weight, bias=bias, scale=0.8, softcap=softcap)
        return linear_divergence(hidden, head, terms, divergence, row_weights=weights, tile_rows=2).loss

    return loss


def fused_token_losses(softcap):
    ids, upstream = torch.tensor([0, 6, 2, 2, 5]), random(40, 5)

    def logprobs(hidden, weight, bias):
        head = LinearHead(weight, bias=bias, scale=0.8, softcap=softcap)
        return (upstream * linear_token_logprobs(hidden, head, ids, tile_rows=2)).sum()

    def cross_entropy(hidden, weight, bias):
        head = LinearHead(weight, bias=bias, scale=0.8, softcap=softcap)
        return linear_cross_entropy(hidden, head, ids, label_smoothing=0.1, tile_rows=2).loss

    return logprobs, cross_entropy


def assert_fused_matches_differences(loss):
    """By hidden, weight and bias; one backward per forward (gradcheck runs several, which a fused loss may refuse)."""
    inputs = (leaf(34, 5, 3), leaf(35, 7, 3), leaf(36, 7))
    gradients = torch.autograd.grad(loss(*inputs), inputs)
    plain = [x.detach() for x in inputs]
    for i, gradient in enumerate(gradients):

        def of_one(x, i=i):
            return loss(*plain[:i], x, *plain[i + 1 :])

        torch.testing.assert_close(gradient, central_differences(of_one, plain[i]), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("divergence", FUSED, ids=str)
def test_a_fused_divergence_is_its_finite_differences(divergence, softcap):
    assert_fused_matches_differences(fused_divergence(divergence, softcap))


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_fused_token_losses_are_their_finite_differences(softcap):
    for loss in fused_token_losses(softcap):
        assert_fused_matches_differences(loss)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["divergence", "logprobs", "cross_entropy"])
def test_a_second_backward_through_a_kept_graph_is_right(which):
    loss = (fused_divergence(JSD(), None), *fused_token_losses(None))[which]
    inputs = (leaf(34, 5, 3), leaf(35, 7, 3), leaf(36, 7))
    value = loss(*inputs)
    first = [x.clone() for x in torch.autograd.grad(value, inputs, retain_graph=True)]
    second = torch.autograd.grad(value, inputs)
    torch.testing.assert_close(list(second), first, rtol=1e-12, atol=1e-12)
