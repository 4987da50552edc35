"""Every loss a trainer computes, beside the reference's, value and gradient by token."""

from __future__ import annotations

from typing import Any

import torch

from rollouts.reference_loss import reference_loss
from rollouts.trainers import spy

Watched = tuple[dict[str, Any], torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def watch_losses(trainer: Any) -> list[Watched]:
    """For each micro-batch: inputs, loss, loss by the reference, both gradients by token, and the log-probabilities."""
    scored, watched = spy(trainer, "_get_per_token_logps_and_entropies"), []
    original = trainer._compute_loss

    def compute(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        loss = original(model, inputs)
        logps, entropies, _ = next(result for *_, result in reversed(scored) if result[0].requires_grad)
        expected = reference_loss(
            trainer.args, inputs, logps, entropies, num_accumulated=trainer.current_gradient_accumulation_steps
        )
        gradients = [torch.autograd.grad(each, logps, retain_graph=True)[0] for each in (loss, expected)]
        watched.append((inputs, loss.detach(), expected.detach(), *gradients, logps.detach()))
        return loss

    trainer._compute_loss = compute
    return watched


def assert_losses_agree(watched: list[Watched]) -> None:
    assert watched, "no loss was computed"
    for _, loss, expected, gradient, expected_gradient, _ in watched:
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-6)
