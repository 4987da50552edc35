"""The recipe's steps by the engine's formulas, beside ours: values, gradients and weights on recorded rollouts."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_replication.batch.render.renderer import Renderer
from composer_replication.envs.student import load_student
from composer_replication.loss.grpo import grpo_loss
from composer_replication.loss.sdpo import sdpo_loss
from composer_replication.recipes.prime_rl.composer_loss import loss_fn
from composer_replication.recipes.prime_rl.hinted_turns import HintedTurns
from composer_replication.rollouts.sites import RolloutSites
from recipes.plain_losses import assert_same_gradient, completion_logprobs, gradients, load_start, optimiser_of
from recipes.prime_rl.engine_records import (
    LossInputs,
    Trace,
    default_loss,
    engine_loss,
    give_advantages,
    samples_of,
    trainer_logprobs,
)
from recipes.prime_rl.recorded_traces import Pool, give_logprobs, own_traces
from recipes.recorded_steps import Batch, fixed_batch, recorded_batches

ALPHA = 0.1


@cache
def finder() -> RolloutSites:
    return RolloutSites(Renderer(load_student()[1]))


def annotated(batch: Batch, model: Any) -> list[Trace]:
    """A batch's rollouts as the orchestrator hands them on: log-probs, advantages, and the live policy's references."""
    traces = own_traces(finder().renderer.tokenizer, batch)
    give_logprobs(traces, model)
    give_advantages(traces, batch.group.tolist())
    hinted, pool = HintedTurns(finder(), ALPHA), Pool(model)
    for trace in traces:
        asyncio.run(hinted.annotate(trace, trace.branches, pool.score))
    return traces


def engine_components(model: Any, traces: list[Trace], rl_loss: Any) -> Any:
    samples = list(samples_of(traces))
    return engine_loss(samples, [trainer_logprobs(model, each.token_ids) for each in samples], rl_loss)


def by_our_loss(inputs: LossInputs) -> Tensor:
    return loss_fn(inputs).loss


def our_components(model: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Our GRPO (dapo, unscaled), our sampled-token kl_st on the erring turns, and the KL that it estimates."""
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    logprobs = completion_logprobs(model, batch)
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


@pytest.mark.parametrize("rl_loss", [by_our_loss, default_loss], ids=["loss_fn", "default"])
def test_channel_values_and_gradients_are_ours_on_the_fixed_batch(rl_loss: Any) -> None:
    model, batch = load_start(), fixed_batch()
    traces = annotated(batch, model)
    found = engine_components(model, traces, rl_loss)
    grpo, sdpo, divergence = our_components(model, batch)
    torch.testing.assert_close(found.rl, grpo, rtol=1e-5, atol=1e-5)
    # The engine's surrogate is -sg(reference - trainer) r: on the sampling weights its value is the KL's estimate.
    torch.testing.assert_close(found.ref_kl, ALPHA * divergence, rtol=1e-5, atol=1e-5)
    assert_same_gradient(gradients(found.rl, model), gradients(grpo, model))
    assert_same_gradient(gradients(found.ref_kl, model), gradients(ALPHA * sdpo, model))
    assert float(divergence) > 0.01


def test_two_steps_change_the_weights_as_ours_do() -> None:
    """Each on rollouts whose log-probs are those of the weights at hand, as on-policy training has them."""
    theirs, ours = load_start(), load_start()
    optimisers = optimiser_of(theirs), optimiser_of(ours)
    start = {name: value.detach().clone() for name, value in ours.named_parameters()}
    for batch in recorded_batches()[:2]:
        for optimiser in optimisers:
            optimiser.zero_grad()
        engine_components(theirs, annotated(batch, theirs), by_our_loss).total.backward()
        grpo, sdpo, _ = our_components(ours, batch)
        (grpo + ALPHA * sdpo).backward()
        for optimiser in optimisers:
            optimiser.step()
        for (name, one), other in zip(theirs.named_parameters(), ours.parameters(), strict=True):
            moved = (other - start[name]).norm().item()
            assert (one - other).norm().item() <= 1e-5 + 0.01 * moved, name
            assert (one - other).norm().item() <= 1e-5 * max(1.0, other.norm().item()), name
            assert moved > 0, name


def test_a_reference_in_the_custom_loss_teaches_the_erring_turns_alone() -> None:
    """The other way to channel 2: one loss over all rl tokens, where 0 says that nobody scored a token."""
    model, batch = load_start(), fixed_batch()
    sample = next(each for each in samples_of(annotated(batch, model)) if each.ref_logprobs is not None)
    trainer = trainer_logprobs(model, sample.token_ids).detach().requires_grad_()
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
