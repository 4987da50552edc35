"""Checks on GPU results that do not make the host wait in the middle of a step.

Reading a verdict back in the forward pass stalls the host until the GPU has caught up, and the GPU then idles until the
host has queued the backward pass: 2% of a training step, measured. So where a backward pass will follow, the verdict
travels to pinned memory beside the work and is read when that pass has been queued: late enough to be free, and still
before `backward()` returns. (An optimizer that runs inside the backward pass has then stepped already.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class PendingCheck:
    """A verdict on its way from the GPU, and what to raise when it is bad."""

    def __init__(self, passed: Tensor, complain: Callable[[], None]) -> None:
        self._complain = complain
        self._verdict = torch.empty((), dtype=torch.bool, pin_memory=True)
        self._verdict.copy_(passed, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def resolve_after_backward(self) -> None:
        """Call inside a backward function: the check runs when the whole backward pass has been queued."""
        torch.autograd.Variable._execution_engine.queue_callback(self.resolve)  # pyright: ignore

    def resolve(self) -> None:
        self._arrived.synchronize()
        if not bool(self._verdict):
            self._complain()


def check_now_or_after_backward(
    passed: Tensor, complain: Callable[[], None], *, backward_follows: bool
) -> PendingCheck | None:
    """On CPU, or without a backward pass, complain at once; else hand back a check for the backward pass to resolve."""
    if passed.is_cuda and backward_follows:
        return PendingCheck(passed, complain)
    if not bool(passed):
        complain()
    return None
