"""The fused kernels on a GPU against the dense formulas there, TF32 off (make test-gpu; skipped without CUDA)."""

from __future__ import annotations

import gc

import pytest
import torch

from composer_replication.errors import InputError, NonFiniteError
from composer_replication.loss import JSD, CrossEntropyToTeacher, EntropyGate, StudentTopK
from composer_replication.loss.linear import (
    LinearHead,
    TeacherTerm,
    linear_cross_entropy,
    linear_divergence,
    linear_token_logprobs,
)
from composer_replication.loss.lm_ce import TokenCrossEntropy
from composer_replication.loss.rows import cap_rows

pytestmark = pytest.mark.gpu

NUM_ROWS, HIDDEN, VOCAB = 300, 96, 9001  # neither a multiple of a tile nor of a block
DIVERGENCES = [
    JSD(beta=0.0),
    JSD(beta=0.5),
    JSD(beta=0.3, temperature=1.7),
    JSD(beta=1.0),
    JSD(beta=0.5, top_k=16),
    StudentTopK(beta=1.0, top_k=20),
    StudentTopK(beta=0.5, top_k=20, add_tail=False),
    CrossEntropyToTeacher(),
    EntropyGate(),
    EntropyGate(gate="hard"),
]
HEADS = {"plain": {}, "softcap": {"scale": 0.7, "softcap": 8.0}}


@pytest.fixture(autouse=True)
def exact_fp32():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def leaf(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).requires_grad_()


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-4), (got - want).abs().max()


def assert_same_gradients(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for index, (ours, dense) in enumerate(zip(got, want, strict=True)):
        assert (ours - dense).norm() / dense.norm() <= 1e-4, index


def gradients(loss: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("head_options", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("num_terms", [1, 2, 3])
@pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)
def test_fused_divergence_equals_dense_on_the_gpu(divergence, num_terms, head_options, backend):
    hidden, weight, bias = leaf(NUM_ROWS, HIDDEN), leaf(VOCAB, HIDDEN, scale=0.2), leaf(VOCAB)
    head = LinearHead(weight, bias, **head_options)
    frozen = LinearHead(torch.randn(VOCAB, 64, device="cuda") * 0.2)
    teacher = torch.randn(NUM_ROWS, 64, device="cuda")
    live = torch.randn(NUM_ROWS, HIDDEN, device="cuda")
    terms = [TeacherTerm(teacher, frozen, 0.6), TeacherTerm(live, head, 0.3), TeacherTerm.student(0.1)][:num_terms]
    weights = torch.rand(NUM_ROWS, device="cuda") * (torch.arange(NUM_ROWS, device="cuda") % 3 != 0)

    fused = linear_divergence(
        hidden, head, terms, divergence, row_weights=weights, token_clip=2.0, tile_rows=64, backend=backend
    )
    got = gradients(2.5 * fused.loss, hidden, weight, bias)
    logits = head.logits(hidden)
    parts = [0.6 * frozen.logits(teacher), 0.3 * head.logits(live), 0.1 * logits][:num_terms]
    values = divergence(logits, sum(parts).detach())
    dense = (weights * cap_rows(values, 2.0)).sum()

    assert_close(fused.row_values, values)
    assert_close(fused.loss, dense)
    assert_same_gradients(got, gradients(2.5 * dense, hidden, weight, bias))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_rows", [300, 2500])
def test_one_slab_and_several_give_the_dense_gradients(num_rows, tied):
    weight = leaf(VOCAB, HIDDEN, scale=0.2)
    ids = torch.randint(0, VOCAB, (num_rows,), device="cuda")
    base = torch.randn(num_rows, HIDDEN, device="cuda")
    teacher = torch.randn(num_rows, HIDDEN, device="cuda")

    def loss(kind: str) -> torch.Tensor:
        hidden = base + weight[ids] if tied else base + weight.sum() * 0.0
        if kind == "fused":
            head = LinearHead(weight)
            return linear_divergence(hidden, head, [TeacherTerm(teacher, head)], JSD(beta=0.5)).loss
        return JSD(beta=0.5)(hidden @ weight.T, (teacher @ weight.T).detach()).mean()

    assert_close(loss("fused"), loss("dense"))
    assert_same_gradients(gradients(loss("fused"), weight), gradients(loss("dense"), weight))


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("head_options", HEADS.values(), ids=HEADS.keys())
def test_token_logprobs_and_cross_entropy_equal_dense_on_the_gpu(head_options, backend):
    hidden, weight, bias = leaf(NUM_ROWS, HIDDEN), leaf(VOCAB, HIDDEN, scale=0.2), leaf(VOCAB)
    head = LinearHead(weight, bias, **head_options)
    ids = torch.randint(0, VOCAB, (NUM_ROWS,), device="cuda")
    pull = torch.randn(NUM_ROWS, device="cuda")
    dense_values = -TokenCrossEntropy()(head.logits(hidden), ids)
    fused_values = linear_token_logprobs(hidden, head, ids, tile_rows=64, backend=backend)
    assert_close(fused_values, dense_values)
    want = gradients((dense_values * pull).sum(), hidden, weight, bias)
    assert_same_gradients(gradients((fused_values * pull).sum(), hidden, weight, bias), want)

    fused = linear_cross_entropy(hidden, head, ids, label_smoothing=0.1, tile_rows=64, backend=backend)
    dense = TokenCrossEntropy(label_smoothing=0.1)(head.logits(hidden), ids).mean()
    assert_close(fused.loss, dense)
    assert_same_gradients(gradients(fused.loss, hidden, weight, bias), gradients(dense, hidden, weight, bias))


def test_bf16_inputs_are_no_worse_than_dense_bf16():
    hidden32, weight32 = torch.randn(2048, 256, device="cuda"), torch.randn(VOCAB, 256, device="cuda") * 0.1
    teacher32 = hidden32 + 0.1 * torch.randn_like(hidden32)
    half = [x.bfloat16() for x in (hidden32, weight32, teacher32)]

    def dense(hidden, weight, teacher):
        return JSD(beta=0.5)(hidden @ weight.T, (teacher @ weight.T).detach()).mean()

    def fused(hidden, weight, teacher):
        head = LinearHead(weight)
        return linear_divergence(hidden, head, [TeacherTerm(teacher, head)], JSD(beta=0.5)).loss

    def run(function, dtype):
        hidden, weight, teacher = (x.to(dtype).detach() for x in half)
        hidden.requires_grad_(), weight.requires_grad_()
        loss = function(hidden, weight, teacher)
        return [loss.double(), *(g.double() for g in gradients(loss, hidden, weight))]

    exact, rough, ours = run(dense, torch.float64), run(dense, torch.bfloat16), run(fused, torch.bfloat16)
    for want, peer, got in zip(exact, rough, ours, strict=True):
        error, peer_error = (got - want).norm() / want.norm(), (peer - want).norm() / want.norm()
        assert error <= max(peer_error, torch.tensor(1e-6)), (error, peer_error)
        assert error <= 1e-2


@pytest.mark.parametrize("num_rows", [300, 2500])
def test_fp16_gradients_meet_the_loss_scale_before_they_are_rounded(num_rows):
    hidden32, weight32 = torch.randn(num_rows, 64, device="cuda"), torch.randn(VOCAB, 64, device="cuda") * 0.2
    hidden, weight = (x.half().requires_grad_() for x in (hidden32, weight32))
    teacher = torch.randn(num_rows, 64, device="cuda").half()
    weights = torch.full((num_rows,), 1e-6, device="cuda")
    head, scale = LinearHead(weight), 2.0**16
    loss = linear_divergence(hidden, head, [TeacherTerm(teacher, head)], JSD(), row_weights=weights).loss
    got = gradients(scale * loss, hidden, weight)
    wide = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    values = JSD()(wide[0] @ wide[1].T, (teacher.float() @ wide[1].T).detach())
    want = gradients(scale * (weights * values).sum(), *wide)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == torch.float16
        assert (ours.float() - theirs).norm() / theirs.norm() <= 5e-3


def poisoned_rows():
    hidden = torch.randn(6, 8, device="cuda")
    hidden[4, 2] = float("nan")
    return hidden.requires_grad_()


def test_nan_rows_raise_at_once_without_a_backward_pass_and_with_one_before_it_returns():
    hidden, head = poisoned_rows(), LinearHead(leaf(50, 8))
    ids = torch.zeros(6, dtype=torch.long, device="cuda")
    losses = [
        lambda: linear_divergence(hidden, head, [TeacherTerm(hidden.detach().nan_to_num(), head)], JSD()).loss,
        lambda: linear_cross_entropy(hidden, head, ids).loss,
        lambda: linear_token_logprobs(hidden, head, ids).sum(),
    ]
    for loss in losses:
        with torch.no_grad(), pytest.raises(NonFiniteError, match="row 4"):
            loss()
        pending = loss()
        with pytest.raises(NonFiniteError, match="row 4"):
            pending.backward()


def test_token_ids_out_of_range_raise_instead_of_reading_other_memory():
    hidden, head = leaf(6, 8), LinearHead(leaf(50, 8))
    ids = torch.tensor([0, 1, 50, 3, 4, 5], device="cuda")
    losses = [lambda: linear_cross_entropy(hidden, head, ids).loss, lambda: linear_token_logprobs(hidden, head, ids)]
    for loss in losses:
        with torch.no_grad(), pytest.raises(InputError, match="50"):
            loss()
        with pytest.raises(InputError, match="50"):
            loss().sum().backward()


def test_a_training_step_does_not_wait_for_the_gpu():
    hidden, head = leaf(64, 8), LinearHead(leaf(50, 8))
    teacher, ids = torch.randn(64, 8, device="cuda"), torch.zeros(64, dtype=torch.long, device="cuda")
    linear_divergence(hidden, head, [TeacherTerm(teacher, head)], JSD()).loss.backward()  # compile first
    linear_cross_entropy(hidden, head, ids).loss.backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = linear_divergence(hidden, head, [TeacherTerm(teacher, head)], JSD()).loss
        loss = loss + linear_cross_entropy(hidden, head, ids).loss
    finally:
        torch.cuda.set_sync_debug_mode("default")
    loss.backward()
    assert hidden.grad.any()


def test_a_released_loss_leaves_nothing_behind():
    hidden, head = leaf(64, 8), LinearHead(leaf(5000, 8))
    ids = torch.zeros(64, dtype=torch.long, device="cuda")
    gc.collect()
    gc.disable()
    try:
        before = None
        for _ in range(3):
            terms = [TeacherTerm(torch.randn(64, 8, device="cuda"), head)]
            loss = (
                linear_divergence(hidden * 2, head, terms, JSD()).loss
                + linear_token_logprobs(hidden * 2, head, ids).sum()
            )
            loss.backward()
            del loss, terms
            hidden.grad = head.weight.grad = None
            before = before or torch.cuda.memory_allocated()
        assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()


def test_nothing_grows_with_rows_times_vocabulary():
    vocab, hidden_size = 100_000, 64
    peaks = {}
    for num_rows in (2048, 8192):
        hidden = leaf(num_rows, hidden_size)
        weight = leaf(vocab, hidden_size)
        torch.cuda.empty_cache()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        head = LinearHead(weight)
        linear_divergence(hidden, head, [TeacherTerm(hidden, head)], JSD(beta=0.5)).loss.backward()
        peaks[num_rows] = torch.cuda.max_memory_allocated() - base
        del hidden, weight, head
    assert peaks[8192] - peaks[2048] < 0.05 * 4 * (8192 - 2048) * vocab  # under 5% of the fp32 logits it must not build
