"""The recipe's steps by the engine's formulas, beside ours: values, gradients and weights on recorded rollouts."""

from __future__ import annotations

import asyncio
import os
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from composer_replication.batch.render.renderer import Renderer
from composer_replication.envs.student import load_student
from composer_replication.loss.grpo import grpo_loss
from composer_replication.loss.sdpo import sdpo_loss
from composer_replication.recipes.prime_rl.composer_loss import loss_fn
from composer_replication.recipes.prime_rl.hinted_turns import HintedTurns
from composer_replication.trainer.rollouts.hint_distillation import ErringTurnFinder
from recipes.plain_losses import assert_same_gradient, gradients, load_start, logprobs_in, optimiser_of
from recipes.prime_rl.engine_records import (
    LossInputs,
    Sample,
    default_loss,
    engine_loss,
    give_advantages,
    samples_of,
    trainer_logprobs,
)
from recipes.prime_rl.recorded_traces import Pool, give_logprobs, own_traces
from recipes.recorded_steps import ROWS, Batch, fixed_batch, one_group, recorded_batches

ALPHA = 0.1
IS_WHOLE = os.environ.get("CRF_TEST_PROFILE") == "full"

pytestmark = pytest.mark.full  # in `make test-prime` always


def checked(batch: Batch) -> Batch:
    """One group of a batch, 4 of its 8 rows; the full profile takes all of them."""
    return batch if IS_WHOLE else one_group(batch)


@cache
def finder() -> ErringTurnFinder:
    return ErringTurnFinder(Renderer(load_student()[1]))


class Scored(NamedTuple):
    """A batch's rollouts as the trainer gets them, and its log-probs of their tokens, with a gradient."""

    samples: list[Sample]
    logprobs: list[Tensor]


def scored(batch: Batch, model: Any) -> Scored:
    """Through the orchestrator: log-probs of these weights, advantages, and the live policy's references."""
    traces = own_traces(finder().renderer.tokenizer, batch)
    logprobs = [trainer_logprobs(model, trace.branches[0].token_ids) for trace in traces]
    give_logprobs(traces, [each.tolist() for each in logprobs])
    give_advantages(traces, batch.group.tolist())
    hinted, pool = HintedTurns(finder(), ALPHA), Pool(model)
    for trace in traces:
        asyncio.run(hinted.annotate(trace, trace.branches, pool.score))
    return Scored(list(samples_of(traces)), logprobs)


def by_our_loss(inputs: LossInputs) -> Tensor:
    return loss_fn(inputs).loss


def our_components(model: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Our GRPO (dapo, unscaled), our sampled-token kl_st on the erring turns, and the KL that it estimates."""
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    logprobs = logprobs_in(logits, batch)
    credited = batch.loss_mask & (batch.advantages != 0)[:, None]
    grpo = grpo_loss(logprobs, logprobs.detach(), batch.advantages, credited, loss_type="dapo").loss
    student, _, tokens = batch.index_pairs()
    hinted = []
    with torch.no_grad():
        for site in batch.sites:
            rows = model(input_ids=site.teacher_ids[None], use_cache=False).logits[0]
            hinted.append(rows[site.teacher_start - 1 :][: site.end - site.start])
    rows, teacher = logits[student[:, 0], student[:, 1]], torch.cat(hinted)
    every = torch.ones_like(tokens, dtype=torch.bool)
    sdpo = sdpo_loss(rows, teacher, every, token_ids=tokens, sampled_token=True)
    chosen = [each.log_softmax(-1).gather(-1, tokens[:, None]) for each in (rows.detach(), teacher)]
    return grpo, sdpo, (chosen[0] - chosen[1]).mean()


class OnTheFixedBatch(NamedTuple):
    model: Any
    scored: Scored
    grpo: Tensor
    sdpo: Tensor
    divergence: Tensor
    grpo_gradient: dict[str, Tensor]


@pytest.fixture(scope="module")
def fixed() -> OnTheFixedBatch:
    """Theirs and ours on the start weights, made once."""
    model, batch = load_start(), checked(fixed_batch())
    grpo, sdpo, divergence = our_components(model, batch)
    return OnTheFixedBatch(model, scored(batch, model), grpo, sdpo, divergence, gradients(grpo, model))


@pytest.mark.parametrize("rl_loss", [by_our_loss, default_loss], ids=["loss_fn", "default"])
def test_values_and_gradients_of_channel_1_are_ours_on_the_fixed_batch(fixed: OnTheFixedBatch, rl_loss: Any) -> None:
    found = engine_loss(*fixed.scored, rl_loss)
    torch.testing.assert_close(found.rl, fixed.grpo, rtol=1e-5, atol=1e-5)
    assert_same_gradient(gradients(found.rl, fixed.model), fixed.grpo_gradient)


def test_values_and_gradients_of_channel_2_are_ours_on_the_fixed_batch(fixed: OnTheFixedBatch, note: Any) -> None:
    note(f"PRIME-RL's formulas: {len(fixed.scored.samples)} of {ROWS} rows of a batch")
    found = engine_loss(*fixed.scored)
    # The engine's surrogate is -sg(reference - trainer) r: on the sampling weights its value is the KL's estimate.
    torch.testing.assert_close(found.ref_kl, ALPHA * fixed.divergence, rtol=1e-5, atol=1e-5)
    assert_same_gradient(gradients(found.ref_kl, fixed.model), gradients(ALPHA * fixed.sdpo, fixed.model))
    assert float(fixed.divergence) > 0.01


def test_two_steps_change_the_weights_as_ours_do() -> None:
    """Each on rollouts whose log-probs are those of the weights at hand, as on-policy training has them."""
    theirs, ours = load_start(), load_start()
    optimisers = optimiser_of(theirs), optimiser_of(ours)
    start = {name: value.detach().clone() for name, value in ours.named_parameters()}
    for batch in map(checked, recorded_batches()[:2]):
        for optimiser in optimisers:
            optimiser.zero_grad()
        engine_loss(*scored(batch, theirs), by_our_loss).total.backward()
        grpo, sdpo, _ = our_components(ours, batch)
        (grpo + ALPHA * sdpo).backward()
        for optimiser in optimisers:
            optimiser.step()
        for (name, one), other in zip(theirs.named_parameters(), ours.parameters(), strict=True):
            moved = (other - start[name]).norm().item()
            assert (one - other).norm().item() <= 1e-5 + 0.01 * moved, name
            assert (one - other).norm().item() <= 1e-5 * max(1.0, other.norm().item()), name
            assert moved > 0, name


def test_a_reference_in_the_custom_loss_teaches_the_erring_turns_alone(fixed: OnTheFixedBatch) -> None:
    """The other way to channel 2: one loss over all rl tokens, where 0 says that nobody scored a token."""
    sample, logprobs = next(each for each in zip(*fixed.scored, strict=True) if each[0].ref_logprobs is not None)
    trainer = logprobs.detach().requires_grad_()
    reference = torch.tensor(sample.ref_logprobs)
    fields = (trainer, torch.tensor(sample.logprobs), reference, torch.tensor(sample.advantages))
    inputs = LossInputs(*fields, torch.tensor(sample.mask))
    plain, taught = loss_fn(inputs), loss_fn(inputs, alpha_sdpo=ALPHA)
    (change,) = torch.autograd.grad(taught.loss - plain.loss, trainer)
    erring = torch.tensor(sample.ref_kl_weights) != 0
    assert int(change[~erring].count_nonzero()) == 0
    torch.testing.assert_close(change[erring], ALPHA * (trainer - reference)[erring].detach(), rtol=1e-4, atol=1e-5)
    assert int(taught.metrics["sdpo_tokens"]) == int(erring.sum())
    assert 0 < int(erring.sum()) < sum(sample.mask)
