"""The Triton kernels in Triton's interpreter, on CPU: the code a GPU compiles, against the torch formulas.

The interpreter is chosen when the kernels are first imported, so the cases run in a process of their own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (it has no build for this platform)"
)

CASES = """
import itertools, os, torch
from composer_replication.loss import JSD, CrossEntropyToTeacher, EntropyGate
from composer_replication.loss.linear import kernels
from composer_replication.loss.linear.tile_losses import _values_and_grad_by_autograd
from composer_replication.loss.linear.weighted import _divergence_kernel
from composer_replication.loss.lm_ce import TokenCrossEntropy

torch.manual_seed(0)
checked = 0

def error_of(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()

def close(got, want, tolerance):
    global checked
    assert error_of(got, want) <= tolerance, (error_of(got, want), tolerance)
    checked += 1

def exact(divergence, student, teacher, weights, cap, dtype=torch.float64):
    student, teacher = student.to(dtype), teacher.to(dtype)
    grad = torch.empty_like(student)
    values = _values_and_grad_by_autograd(lambda x: divergence(x, teacher), student, weights, cap, grad)
    return values, grad

DIVERGENCES = [JSD(beta=0.0), JSD(beta=1.0), JSD(beta=0.5), JSD(beta=0.3, temperature=1.7), CrossEntropyToTeacher(),
               EntropyGate(), EntropyGate(h_max=2.0, temperature=0.8)]
# one block, one entry over a block, several blocks with a ragged end; large logits test the online normaliser
is_full = os.environ.get("CRF_TEST_PROFILE") == "full"
largest = 20000 if is_full else 9000
for vocab, scale in [(97, 1.0), (4097, 3.0), (largest, 12.0)]:
    student, weights = torch.randn(3, vocab) * scale, torch.rand(3)
    teacher = student + 1.5 * torch.randn(3, vocab)  # a relative: the gradient of unrelated peaks is all rounding
    dtypes = (torch.float32, torch.bfloat16) if is_full or vocab < largest else (torch.float32,)
    for divergence, cap, dtype in itertools.product(DIVERGENCES, (None, 0.2), dtypes):
        kernel = _divergence_kernel(divergence, vocab)
        grad = torch.full((3, vocab), float("nan"), dtype=dtype)
        values = kernel(student, teacher, weights, cap, grad)
        want, want_grad = exact(divergence, student, teacher, weights, cap)
        close(values, want, 1e-5)
        # Logits of +-40 lose digits in any fp32 formula: the kernel may lose no more than torch's own does.
        torch_grad = exact(divergence, student, teacher, weights, cap, torch.float32)[1]
        allowed = max(2e-5, 2 * error_of(torch_grad, want_grad))
        close(grad, want_grad, allowed if dtype == torch.float32 else max(allowed, 1e-2))
        assert torch.equal(kernel(student, teacher, weights, cap, None), values)
    ids = torch.tensor([0, vocab - 1, vocab // 2])
    stats = kernels.token_stats(student, ids)
    close(stats.log_z, student.logsumexp(-1), 1e-6)
    close(stats.chosen, student[range(3), ids], 0.0)
    close(stats.mean_logit, student.mean(-1), 1e-4)
    for smoothing in (0.0, 0.1):
        grad, want_grad = torch.full((3, vocab), float("nan")), torch.empty(3, vocab)
        kernels.write_token_grad(student, ids, stats.log_z, weights, smoothing, grad)
        loss = TokenCrossEntropy(label_smoothing=smoothing)
        _values_and_grad_by_autograd(lambda x: loss(x, ids), student, weights, None, want_grad)
        close(grad, want_grad, 2e-5 if scale < 10 else 1e-4)  # one fp32 normaliser near 55 has an ulp of 4e-6
print(checked)
"""


def test_the_kernels_agree_with_the_torch_formulas():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", CASES]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stderr[-2000:]
    in_bf16 = 3 if os.environ.get("CRF_TEST_PROFILE") == "full" else 2  # vocabularies, of three
    assert int(result.stdout) == 7 * 2 * 2 * (3 + in_bf16) + 3 * (3 + 2)
