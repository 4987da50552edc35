"""A step with the values that the configs ship (dynamic batches, top-k, kl_st), against whole rows in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_replication.recipes.verl.channel_loss import ChannelLoss, EngineChannels, read_settings
from composer_replication.recipes.verl.engine import StepChannels
from recipes.plain_losses import Losses, gradients, load_start, plain_grpo, relative_gap
from recipes.recorded_steps import Batch, fixed_batch
from recipes.verl.cpu_engine import data_proto, new_engine, step_data
from recipes.verl.scripted_server import load_config
from recipes.verl.test_engine_steps import DRIFT, assert_close, one_step

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]
MOST_TOKENS = 900
"""Of a micro-batch; the shipped 8192 would be one of all rows of the recorded batch."""


def exact_losses(model: Any, batch: Batch, settings: EngineChannels, temperature: float) -> Losses:
    """As `plain_losses`, at the start weights; rollouts were sampled at `temperature`, channel 2 has its own."""
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    sampled = (logits / temperature).log_softmax(-1)[:, -batch.completion_ids.shape[1] - 1 : -1]
    now = sampled.gather(-1, batch.completion_ids[..., None])[..., 0]
    grpo = plain_grpo(now, batch)
    rows, _, _ = batch.index_pairs()
    place = rows[:, 1] + 1 - batch.prompt_ids.shape[1]
    assert settings.sdpo_is_clip is not None
    weight = (now.detach() - batch.old_logprobs)[rows[:, 0], place].exp().clamp(max=settings.sdpo_is_clip)
    student = (logits[rows[:, 0], rows[:, 1]] / settings.sdpo_temperature).softmax(-1)
    sdpo = (weight * kl_st(student, hinted(model, batch, settings.sdpo_temperature), settings.teacher_top_k)).mean()
    return Losses(grpo, sdpo, grpo + settings.alpha_sdpo * sdpo)


@torch.no_grad()
def hinted(model: Any, batch: Batch, temperature: float) -> Tensor:
    """(N, V) probabilities; policy and reference are still one model, and so is their mixture."""
    logits = [
        model(input_ids=site.teacher_ids[None], use_cache=False).logits[0, site.teacher_start - 1 :][
            : site.end - site.start
        ]
        for site in batch.sites
    ]
    return (torch.cat(logits) / temperature).softmax(-1)


def kl_st(student: Tensor, teacher: Tensor, top_k: int | None) -> Tensor:
    assert top_k is not None
    best = teacher.topk(top_k, dim=-1).indices
    listed = torch.zeros_like(teacher, dtype=torch.bool).scatter(-1, best, True)
    s, t = (
        torch.cat([each.gather(-1, best), each.masked_fill(listed, 0.0).sum(-1, keepdim=True)], -1)
        for each in (student, teacher)
    )
    return (s * (s / t).log()).sum(-1)


@pytest.mark.parametrize(("temperature", "own_temperature"), [(None, None), (0.7, 1.3)])
def test_the_shipped_values_make_the_step_of_the_formulas(
    monkeypatch: pytest.MonkeyPatch, temperature: float | None, own_temperature: float | None
) -> None:
    shipped = load_config("composer_1_gpu").actor_rollout_ref
    settings = read_settings(shipped)
    if own_temperature is not None:
        settings = replace(settings, sdpo_temperature=own_temperature)
    assert (settings.sdpo_jsd_beta, shipped.actor.use_dynamic_bsz, shipped.model.use_remove_padding) == (
        1.0,
        True,
        True,
    )
    batch = fixed_batch(drift=DRIFT)
    sampled_at = shipped.rollout.temperature if temperature is None else temperature
    engine = new_engine(use_remove_padding=True)
    engine.channels = StepChannels(settings, new_engine(use_remove_padding=True))
    data = step_data(
        data_proto(batch),
        use_remove_padding=True,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=MOST_TOKENS,
        temperature=sampled_at,
    )
    orders = watched_orders(monkeypatch)
    metrics, found = one_step(engine, data, 8, moves=False)
    assert len(orders) > 1
    assert (
        sorted(row for order in orders for row in order) == list(range(8)) != [row for each in orders for row in each]
    )
    model = load_start().double()
    exact = exact_losses(model, batch, settings, sampled_at)
    assert_close(metrics["actor/pg_loss"], exact.grpo.item(), "grpo")
    assert_close(metrics["composer/sdpo_kl"], exact.sdpo.item(), "sdpo")
    assert_close(metrics["loss"], exact.total.item(), "total")
    wanted = gradients(exact.total, model)
    assert relative_gap({name: each.double() for name, each in found.items()}, wanted) < 5e-5


def watched_orders(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The rows of each micro-batch that channel 2 sees."""
    orders: list[list[int]] = []
    rows = ChannelLoss._rows

    def watched(self: ChannelLoss, data: Any) -> Any:
        orders.append(data["composer_row"].tolist())
        return rows(self, data)

    monkeypatch.setattr(ChannelLoss, "_rows", watched)
    return orders
