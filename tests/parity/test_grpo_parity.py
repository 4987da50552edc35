"""The policy gradient of `loss.grpo` against TRL's own loss, by value and by token, and against values by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_replication.errors import InputError, NonFiniteError, ShapeError
from composer_replication.loss.grpo import LOSS_TYPES, LossType, clipped_terms, group_advantages, grpo_loss
from rollouts.tiny_policy import save_policy
from rollouts.trainers import make, quick_config, spy

EPSILON, EPSILON_HIGH = 0.1, 0.28


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


def watched_losses(policy: Path, folder: Path, loss_type: LossType) -> list[dict[str, Any]]:
    """TRL's trainer over two steps of two micro-batches, each generation used twice: with our loss beside its own."""
    from trl import GRPOTrainer

    config = quick_config(
        folder,
        loss_type=loss_type,
        max_steps=2,
        num_iterations=2,
        gradient_accumulation_steps=2,
        epsilon=EPSILON,
        epsilon_high=EPSILON_HIGH,
        learning_rate=0.02,
    )
    trainer = make(GRPOTrainer, policy, config)
    scored, watched = spy(trainer, "_get_per_token_logps_and_entropies"), []
    original = trainer._compute_loss

    def compute(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        theirs = original(model, inputs)
        logprobs = next(result[0] for *_, result in reversed(scored) if result[0].requires_grad)
        ours = grpo_loss(
            logprobs,
            inputs["old_per_token_logps"],
            inputs["advantages"],
            inputs["completion_mask"],
            loss_type=loss_type,
            epsilon=EPSILON,
            epsilon_high=EPSILON_HIGH,
            max_completion_length=config.max_completion_length,
            num_items=float(inputs["num_items_in_batch"]),
            accumulation=2,
        )
        both = (theirs, ours.loss)
        gradients = [torch.autograd.grad(each, logprobs, retain_graph=True)[0] for each in both]
        watched.append({"values": [each.detach() for each in both], "gradients": gradients, "held": ours.clipped_share})
        return theirs

    trainer._compute_loss = compute
    trainer.train()
    logged = [line["clip_ratio/region_mean"] for line in trainer.state.log_history if "clip_ratio/region_mean" in line]
    assert len(logged) == 2
    return watched


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_values_and_gradients_are_those_of_trl(policy: Path, tmp_path: Path, loss_type: LossType) -> None:
    watched = watched_losses(policy, tmp_path, loss_type)
    assert len(watched) == 4
    for each in watched:
        torch.testing.assert_close(*each["values"], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(*each["gradients"], rtol=1e-6, atol=1e-6)
        assert float(each["gradients"][0].norm()) > 1e-3
    assert max(float(each["held"]) for each in watched[2:]) > 0, "no ratio was clipped: the case shows too little"


def test_a_term_is_the_smaller_of_the_free_and_the_held_one() -> None:
    """Ratios 2 and 1/2 with advantages 1 and -1, by hand: the clip holds what has gone far enough already."""
    log2 = math.log(2.0)
    now = torch.tensor([[log2, log2, -log2, -log2]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=torch.float64)
    terms, is_held = clipped_terms(now, torch.zeros_like(now), advantages, epsilon=0.2, epsilon_high=0.3)
    torch.testing.assert_close(terms, torch.tensor([[-1.3, 2.0, -0.5, 0.8]], dtype=torch.float64))
    assert is_held.tolist() == [[True, False, False, True]]
    (gradient,) = torch.autograd.grad(terms.sum(), now)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 2.0, -0.5, 0.0]], dtype=torch.float64))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_micro_batches_add_up_to_the_step(loss_type: LossType) -> None:
    generator = torch.Generator().manual_seed(0)
    now, then = (torch.randn(4, 5, generator=generator, dtype=torch.float64) * 0.2 for _ in range(2))
    mask = torch.ones(4, 5, dtype=torch.bool)  # of equal lengths, so that bnpo's own means add up too
    advantages = torch.tensor([1.0, -1.0, 0.5, 0.2], dtype=torch.float64)
    options: dict[str, Any] = {"loss_type": loss_type, "max_completion_length": 9, "num_items": 20}
    whole = grpo_loss(now, then, advantages, mask, **options).loss
    halves = [
        grpo_loss(now[part], then[part], advantages[part], mask[part], accumulation=2, **options).loss
        for part in (slice(0, 2), slice(2, 4))
    ]
    torch.testing.assert_close(halves[0] + halves[1], whole, rtol=1e-12, atol=1e-12)


def test_advantages_of_tokens_are_taken_as_they_are() -> None:
    now = torch.zeros(2, 3, dtype=torch.float64)
    advantages = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.float64)
    found = grpo_loss(now, now, advantages, torch.tensor([[1, 1, 0], [1, 0, 0]]), loss_type="bnpo")
    assert float(found.loss) == pytest.approx(-7 / 3)


def test_padding_may_hold_anything_and_a_kept_token_may_not() -> None:
    now = torch.zeros(1, 3, requires_grad=True)
    mask, advantages = torch.tensor([[1, 1, 0]]), torch.ones(1)
    broken = torch.tensor([[0.0, 0.0, math.nan]])
    loss = grpo_loss(now + broken, broken, advantages, mask).loss
    (gradient,) = torch.autograd.grad(loss, now)
    assert gradient.tolist() == [[-0.5, -0.5, 0.0]]
    with pytest.raises(NonFiniteError, match="grpo_loss"):
        grpo_loss(now + broken, broken, advantages, torch.ones(1, 3))


def test_no_sampled_token_is_a_loss_of_0() -> None:
    now = torch.zeros(2, 3, requires_grad=True)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    for loss_type in LOSS_TYPES:
        found = grpo_loss(now, now.detach(), torch.ones(2), nothing, loss_type=loss_type, max_completion_length=4)
        assert found.loss.item() == 0.0


def test_what_cannot_be_is_said() -> None:
    now, ones = torch.zeros(2, 3), torch.ones(2)
    with pytest.raises(InputError, match="max_completion_length"):
        grpo_loss(now, now, ones, now + 1, loss_type="dr_grpo")
    with pytest.raises(InputError, match="num_items"):
        grpo_loss(now, now, ones, now + 1, loss_type="dapo", accumulation=2)
    with pytest.raises(InputError, match="loss_type"):
        grpo_loss(now, now, ones, now + 1, loss_type="cispo")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="advantages"):
        grpo_loss(now, now, torch.ones(3), now + 1)
    with pytest.raises(ShapeError, match="mask"):
        grpo_loss(now, now, ones, torch.ones(2, 2))
    with pytest.raises(InputError, match="scale_rewards"):
        group_advantages(ones, 2, "std")  # type: ignore[arg-type]
