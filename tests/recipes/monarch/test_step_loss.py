"""The loss of a batch against the formulas written out, and against itself in pieces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_replication.batch.model_folder import load_tokenizer
from composer_replication.envs.student import student_folder
from composer_replication.errors import InputError
from composer_replication.recipes.monarch.policy_trainer import (
    LossSettings,
    _batch_totals,
    _completion_logprobs,
    _split_batch,
    _step_terms,
    _StepTerms,
)
from composer_replication.trainer.objective.channels import LossKnobs
from composer_replication.trainer.objective.compose import compose_loss
from composer_replication.trainer.objective.reference import reference_logprobs
from composer_replication.trainer.objective.row_weighting import WeightedTeacher
from composer_replication.trainer.objective.smoke_chat import build_batch
from recipes.monarch.recorded import LOSS, step_batch
from recipes.plain_losses import completion_logprobs as plain_logprobs
from recipes.plain_losses import frozen, gradients, load_start, plain_losses, relative_gap
from recipes.recorded_steps import SETTINGS, Batch, fixed_batch
from refusals import refusal

ALPHA, DRIFT = 0.1, 0.3
PER_TOKEN = ("completion_ids", "completion_mask", "tool_mask", "old_logprobs")

pytestmark = pytest.mark.full  # in `make test-monarch` always


@pytest.fixture(scope="module")
def start() -> Any:
    return frozen(load_start())


@pytest.fixture
def model(start: Any) -> Any:
    """The start weights with a little noise: the live share of the teacher then differs from the start's."""
    live = load_start()
    torch.manual_seed(3)
    with torch.no_grad():
        for each in live.parameters():
            each.add_(torch.randn_like(each) * 1e-3 * each.abs().mean())
    return live


def teachers(start: Any) -> list[WeightedTeacher]:
    share = SETTINGS["live_share"]
    return [WeightedTeacher(start, 1 - share), WeightedTeacher(None, share)]


def rows_of(batch: Batch, rows: list[int], *, most: int | None = None) -> Batch:
    """Some rows of a batch, with at most so many tokens of each completion, and the sites that are left.

    The whole batch takes many times as long; its losses are compared with the record in `test_policy_trainer`.
    """
    ends = [batch.prompt_length(row) + (batch.completion_ids.shape[1] if most is None else most) for row in rows]
    whole = {name: getattr(batch, name)[rows] for name in ("prompt_ids", "prompt_mask", "advantages")}
    cut = {name: getattr(batch, name)[rows, :most] for name in PER_TOKEN}
    places = {row: place for place, row in enumerate(rows)}
    sites = [each._replace(row=places[each.row]) for each in batch.sites if each.row in places]
    return replace(batch, **whole, **cut, sites=tuple(each for each in sites if each.end <= ends[each.row]))


def terms_of(model: Any, batch: Any, start: Any, settings: LossSettings = LOSS) -> list[_StepTerms]:
    totals = _batch_totals(batch, settings)
    return [
        _step_terms(model, micro_batch, settings, totals, alpha=ALPHA, teachers=teachers(start))
        for micro_batch in _split_batch(batch, totals)
    ]


def whole_gap(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Relative L2 distance of the gradient as one vector."""
    apart = sum(float((found[name] - wanted[name]).square().sum()) for name in wanted)
    return (apart / sum(float(each.square().sum()) for each in wanted.values())) ** 0.5


def test_values_and_gradients_of_all_terms_are_those_of_the_formulas(model, start):
    batch = rows_of(fixed_batch(drift=DRIFT), [3, 4, 6], most=80)
    assert [each.row for each in batch.sites] == [0, 2]
    assert batch.advantages.sign().tolist() == [-1, 1, 1]
    (found,) = terms_of(model, step_batch(batch), start)
    wanted = plain_losses(model, start, batch, ALPHA)
    assert 0.05 < found.clipped_share < 0.95  # or the clip was not looked at
    assert found.replay is None
    assert found.sdpo is not None
    slopes = {name: gradients(getattr(wanted, name), model) for name in ("grpo", "sdpo")}
    slopes["total"] = {name: each + ALPHA * slopes["sdpo"][name] for name, each in slopes["grpo"].items()}
    for name, wanted_grown in slopes.items():
        mine = getattr(found, name)
        assert mine.item() == pytest.approx(getattr(wanted, name).item(), abs=1e-5), name
        grown = gradients(mine, model)
        assert max(float((grown[each] - wanted_grown[each]).abs().max()) for each in grown) < 1e-5, name
        assert whole_gap(grown, wanted_grown) < 1e-5, name
        assert relative_gap(grown, wanted_grown) < 5e-5, name  # of the worst tensor, in which most of it cancels


def test_the_logprobs_are_those_of_whole_logits(model):
    batch = rows_of(fixed_batch(), [2, 4])
    found = _completion_logprobs(model, step_batch(batch), 1.0)
    wanted = torch.where(batch.loss_mask, plain_logprobs(model, batch), 0.0)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_a_temperature_divides_the_logits(model):
    batch = rows_of(fixed_batch(), [2, 4])
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    width = batch.completion_ids.shape[1]
    warm = (logits[:, -width - 1 : -1].float() / 0.7).log_softmax(-1).gather(-1, batch.completion_ids[..., None])
    wanted = torch.where(batch.loss_mask, warm[..., 0], 0.0)
    torch.testing.assert_close(_completion_logprobs(model, step_batch(batch), 0.7), wanted, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def few() -> Any:
    """Two rows of it, both of which err, with the ratios moved."""
    return step_batch(rows_of(fixed_batch(drift=DRIFT), [3, 6], most=200))


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_pieces_add_up_to_the_whole(model, start, few, loss_type):
    settings = replace(LOSS, loss_type=loss_type)
    (whole,) = terms_of(model, few, start, settings)
    pieces = terms_of(model, few, start, replace(settings, rows_at_once=1))
    assert len(pieces) == 2
    assert whole.sdpo is not None
    together = torch.stack([each.total for each in pieces]).sum()
    assert together.item() == pytest.approx(whole.total.item(), rel=1e-5, abs=1e-7)
    if loss_type == "dr_grpo":
        assert relative_gap(gradients(together, model), gradients(whole.total, model)) < 2e-5


def test_without_old_logprobs_every_ratio_is_one_and_nothing_is_clipped(model, start, few):
    (free,) = terms_of(model, replace(few, old_logprobs=None), start)
    (same,) = terms_of(model, replace(few, old_logprobs=free.logprobs_BC), start)
    assert free.clipped_share == 0
    assert free.total.item() == pytest.approx(same.total.item(), abs=1e-7)
    assert relative_gap(gradients(free.total, model), gradients(same.total, model)) < 1e-5


def test_channel_3_is_that_of_compose_loss(model, start, few):
    pairs = _pairs(start)
    knobs = LossKnobs(alpha_sdpo=0.0, beta_replay=0.3)
    batch = replace(few, pairs=pairs)
    settings = replace(LOSS, knobs=knobs)
    (found,) = terms_of(model, batch, start, settings)
    ids = pairs["dpo_chosen_input_ids"]
    inputs = {"input_ids": ids, "response_mask": torch.zeros_like(ids), **pairs}
    wanted = compose_loss(model, inputs, alpha_sdpo=0.0, beta_replay=0.3).trace_replay_dpo
    assert found.sdpo is None
    assert found.replay is not None
    assert found.replay.item() == pytest.approx(wanted.item(), abs=1e-6)
    assert wanted.item() != pytest.approx(0.6931, abs=1e-5)  # the weights are not the reference's
    assert found.total.item() == pytest.approx(found.grpo.item() + 0.3 * wanted.item(), abs=1e-6)


def _pairs(start: Any) -> dict[str, Tensor]:
    smoke = build_batch(load_tokenizer(str(student_folder())))
    pairs = {name: value for name, value in smoke.items() if name.startswith("dpo_") and "ref" not in name}
    return pairs | reference_logprobs(start, pairs)


def test_what_cannot_be_done_is_said():
    with refusal(InputError, what="sdpo_wrapper", got="taid"):
        LossSettings(knobs=LossKnobs(sdpo_wrapper="taid"))
    with refusal(InputError, what="rows_at_once", got="3"):
        _batch_totals(step_batch(fixed_batch()), replace(LOSS, rows_at_once=3))
    with pytest.raises(InputError, match="loss_type"):
        replace(LOSS, loss_type="ppo")
