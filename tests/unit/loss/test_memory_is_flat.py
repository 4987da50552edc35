"""Peak memory of the fused path at a vocabulary of 150,000, each case measured in a process that does nothing else.

The logits it must not build would be N x V x 4 bytes per side. The peak may hold the head, its gradient and a bounded
number of tiles; it must not grow when the rows double.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the peak that Linux keeps")

VOCAB, HIDDEN = 150_000, 16
LOGITS_BYTES_PER_ROW = 4 * VOCAB
# A peak is the same to a quarter of a MiB whatever the number of rows; more rows only take longer.
IS_FULL = os.environ.get("CRF_TEST_PROFILE") == "full"
FEW, MANY, MOST = (64, 256, 1024) if IS_FULL else (32, 128, 512)

MEASURE = """
import sys, torch
from composer_replication.loss import JSD, EntropyGate, StudentTopK
from composer_replication.loss.linear import (
    LinearHead, TeacherTerm, linear_cross_entropy, linear_divergence, linear_token_logprobs)

def peak_kb():
    # The kernel's figure for this program alone: ru_maxrss would begin at the peak of the process that started it.
    return int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])

def measure(case, rows, vocab, width):
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = (torch.randn(vocab, width) * 0.1).requires_grad_()
    head, ids = LinearHead(weight), torch.randint(0, vocab, (rows,))
    terms = [TeacherTerm(hidden.detach() + 0.1, head)]
    weight.grad, hidden.grad = torch.zeros_like(weight), torch.zeros_like(hidden)
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew, at what is held now
    before = peak_kb()
    loss = {
        "jsd": lambda: linear_divergence(hidden, head, terms, JSD(beta=0.5)).loss,
        "kl_st, two terms": lambda: linear_divergence(
            hidden, head, [TeacherTerm(hidden.detach(), head, 0.99), TeacherTerm(hidden.detach() + 0.1, head, 0.01)],
            JSD(beta=1.0)).loss,
        "student top-k": lambda: linear_divergence(hidden, head, terms, StudentTopK(top_k=20)).loss,
        "entropy gate": lambda: linear_divergence(hidden, head, terms, EntropyGate()).loss,
        "cross-entropy": lambda: linear_cross_entropy(hidden, head, ids).loss,
        "log-probs": lambda: linear_token_logprobs(hidden, head, ids).sum(),
        "dense": lambda: JSD(beta=0.5)(hidden @ weight.T, hidden.detach() @ weight.detach().T).mean(),
    }[case]()
    loss.backward()
    assert hidden.grad.any() and weight.grad.any()
    return 1024 * (peak_kb() - before)

torch.set_num_threads(1)
vocab, width = int(sys.argv[1]), int(sys.argv[2])
measure("jsd", 8, vocab, width)  # what torch loads at the first call is no peak of any case
for line in sys.stdin:
    case, _, rows = line.rpartition(" ")
    print(measure(case, int(rows), vocab, width), flush=True)
"""


@pytest.fixture(scope="module")
def peak_bytes() -> Iterator[Callable[[str, int], int]]:
    # Large blocks go straight back to the system when freed: the peak counts live tensors, not malloc's leftovers.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    command = [sys.executable, "-c", MEASURE, str(VOCAB), str(HIDDEN)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        asked, answers = cast("IO[str]", process.stdin), cast("IO[str]", process.stdout)

        def measured(case: str, rows: int) -> int:
            asked.write(f"{case} {rows}\n")
            asked.flush()
            return int(answers.readline())

        yield measured
        asked.close()
    assert process.returncode == 0


@pytest.mark.parametrize(
    "case", ["jsd", "kl_st, two terms", "student top-k", "entropy gate", "cross-entropy", "log-probs"]
)
def test_the_peak_does_not_grow_with_rows_times_vocabulary(case, peak_bytes):
    growth = peak_bytes(case, MANY) - peak_bytes(case, FEW)
    unbuilt = (MANY - FEW) * LOGITS_BYTES_PER_ROW  # 58 MB (full: 115): one side's logits of the added rows
    assert growth < 0.1 * unbuilt, f"{growth / 2**20:.0f} MiB more for {MANY - FEW} more rows"


def test_the_peak_stays_below_the_logits_it_must_not_build(peak_bytes, note):
    if not IS_FULL:
        note(
            f"peaks of the fused losses: {FEW}, {MANY} and {MOST} rows of {VOCAB:,} (make test-full: 64, 256 and 1024)"
        )
    assert peak_bytes("jsd", MOST) < (0.6 if IS_FULL else 1.0) * MOST * LOGITS_BYTES_PER_ROW


def test_the_measurement_sees_dense_logits(peak_bytes):
    """A sanity check of the two above: the dense formula fails both, at a quarter of the rows."""
    assert peak_bytes("dense", MANY) > 3 * MANY * LOGITS_BYTES_PER_ROW
