"""Which losses have a kernel, and what the backend switch refuses."""

from __future__ import annotations

import pytest
import torch

from composer_replication.errors import InputError
from composer_replication.loss import JSD, CrossEntropyToTeacher, EntropyGate, StudentTopK
from composer_replication.loss.linear import LinearHead, TeacherTerm, linear_divergence
from composer_replication.loss.linear.head import plan_tiles
from composer_replication.loss.linear.weighted import _divergence_kernel

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("divergence", "mode"),
    [
        (JSD(beta=0.0), "kl_ts"),
        (JSD(beta=1.0), "kl_st"),
        (JSD(beta=0.4), "jsd"),
        (CrossEntropyToTeacher(), "cross_entropy"),
        (EntropyGate(), "entropy_soft"),
        (EntropyGate(gate="hard"), None),
        (JSD(top_k=8), None),
        (StudentTopK(), None),
    ],
    ids=str,
)
def test_each_divergence_gets_the_kernel_of_its_formula(divergence, mode):
    kernel = _divergence_kernel(divergence, vocab=100)
    assert (kernel.mode if kernel else None) == mode


def test_asking_for_triton_on_a_cpu_tensor_is_refused():
    head = LinearHead(torch.randn(5, 3))
    with pytest.raises(InputError, match='backend="triton"'):
        linear_divergence(torch.randn(2, 3), head, [TeacherTerm(torch.randn(2, 3), head)], JSD(), backend="triton")


@pytest.mark.parametrize("num_rows", [0, 1, 255, 1024, 1025, 5000])
@pytest.mark.parametrize("device", [torch.device("cpu"), CUDA])
def test_tiles_and_slabs_cover_every_row_once(num_rows, device):
    plan = plan_tiles(num_rows, 50_000, device=device, element_bytes=4, has_kernel=True, tile_rows=None)
    rows = [row for slab in plan.slabs() for tile in plan.tiles(slab) for row in range(tile.start, tile.stop)]
    assert rows == list(range(num_rows))


def test_tile_memory_is_bounded_whatever_the_vocabulary_and_the_rows():
    for vocab in (1_000, 50_000, 250_000, 10_000_000):
        plan = plan_tiles(10**6, vocab, device=torch.device("cpu"), element_bytes=4, has_kernel=False, tile_rows=None)
        assert plan.tile_rows * vocab * 4 <= max(16 * 2**20, 4 * vocab)


def test_autocast_rounds_the_operands_and_returns_gradients_in_the_parameters_dtype():
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 16, requires_grad=True), torch.randn(40, 16, requires_grad=True)
    teacher = torch.randn(6, 16)

    def run(hidden, weight, teacher):
        head = LinearHead(weight)
        loss = linear_divergence(hidden, head, [TeacherTerm(teacher, head)], JSD(beta=0.5)).loss
        return [loss, *torch.autograd.grad(loss, (hidden, weight))]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(hidden, weight, teacher)
    rounded = [x.detach().bfloat16().float() for x in (hidden, weight, teacher)]
    want = run(rounded[0].requires_grad_(), rounded[1].requires_grad_(), rounded[2])
    assert all(tensor.dtype == torch.float32 for tensor in got)
    for ours, theirs in zip(got, want, strict=True):
        assert (ours - theirs).norm() <= 1e-2 * theirs.norm()
    assert torch.allclose(got[0], want[0], rtol=1e-5)
