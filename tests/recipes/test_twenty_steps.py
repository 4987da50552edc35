"""The record is what our trainer in TRL does with those rollouts, and what the formulas say without it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.plain_losses import (
    completion_logprobs,
    frozen,
    gradients,
    load_start,
    optimiser_of,
    plain_losses,
    relative_gap,
)
from recipes.recorded_steps import (
    GROUP,
    ITERATIONS,
    ROWS,
    SETTINGS,
    STEPS,
    Batch,
    Site,
    Step,
    fixed_batch,
    parameter_names,
    recorded_batches,
    recorded_steps,
    start_weights,
    weight_sums,
)

IS_FULL = os.environ.get("CRF_TEST_PROFILE") == "full"
BY_TRAINER, BY_FORMULAS = (STEPS, STEPS) if IS_FULL else (3, 2)
"""Steps that are made again; the full profile makes all of them. The first two train on one batch of rollouts, the
second of them with ratios that are not 1; before the third the trainer takes rollouts of the weights it has by then."""
DRIFT = 0.3


def close(found: float, wanted: float) -> bool:
    return abs(found - wanted) <= 1e-5 + 1e-5 * abs(wanted)


def assert_same_step(found: Step, wanted: Step) -> None:
    for name in ("alpha", "grpo", "sdpo", "total", "grad_norm"):
        assert close(getattr(found, name), getattr(wanted, name)), (name, found, wanted)
    torch.testing.assert_close(found.weights[:, :2], wanted.weights[:, :2], rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(found.weights[:, 2], wanted.weights[:, 2], rtol=1e-3, atol=1e-6)


def test_our_trainer_still_makes_the_recorded_steps(tmp_path: Path, note: Any) -> None:
    pytest.importorskip("trl")
    from recipes.trl_steps import recorded_rollouts, run

    batches, steps = recorded_batches(), recorded_steps()
    note(f"twenty recorded steps: {BY_TRAINER} made again")
    recorder, names = run(tmp_path, most_steps=BY_TRAINER, rollout_function=recorded_rollouts(batches))
    assert names == parameter_names()
    assert len(recorder.steps) == BY_TRAINER
    for found, wanted in zip(recorder.steps, steps, strict=False):
        assert_same_step(found, wanted)
    for found, wanted in zip(recorder.batches, batches, strict=False):
        assert_same_rollouts(found, wanted)


def assert_same_rollouts(found: Batch, wanted: Batch) -> None:
    for name in ("prompt_ids", "completion_ids", "completion_mask", "tool_mask", "rewards", "advantages", "place"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    torch.testing.assert_close(found.old_logprobs, wanted.old_logprobs, rtol=1e-5, atol=1e-4)
    assert [_plain(each) for each in found.sites] == [_plain(each) for each in wanted.sites]


def _plain(site: Site) -> Site:
    return site._replace(teacher_ids=site.teacher_ids.tolist())  # type: ignore[arg-type]


def test_the_record_has_what_the_checks_need() -> None:
    """Groups that differ, sites in every batch, ratios that the clip holds, a channel whose weight falls to 0."""
    batches, steps = recorded_batches(), recorded_steps()
    assert (len(batches), len(steps)) == (STEPS // ITERATIONS, STEPS)
    for batch in batches:
        assert batch.prompt_ids.shape[0] == ROWS
        assert batch.sites
        for group in range(ROWS // GROUP):
            rewards = batch.rewards[batch.group == group]
            torch.testing.assert_close(batch.advantages[batch.group == group], rewards - rewards.mean())
        student, teacher, tokens = batch.index_pairs()
        assert torch.equal(batch.input_ids[student[:, 0], student[:, 1] + 1], tokens)
        assert [int(batch.sites[n].teacher_ids[row + 1]) for n, row in teacher.tolist()] == tokens.tolist()
        assert bool(batch.loss_mask[student[:, 0], student[:, 1] + 1 - batch.prompt_ids.shape[1]].all())
    assert steps[0].alpha == SETTINGS["alpha_sdpo"]
    assert steps[-1].alpha == 0.0
    moved = [float(step.weights[:, 2].norm()) for step in steps]
    assert moved == sorted(moved)
    assert moved[0] > 1e-3


@pytest.mark.full
def test_the_formulas_make_the_recorded_steps(note: Any) -> None:
    model = load_start()
    start, before = frozen(model), start_weights(model)
    optimiser, batches, worst = optimiser_of(model), recorded_batches(), 0.0
    for number, wanted in enumerate(recorded_steps()[:BY_FORMULAS]):
        optimiser.zero_grad()
        found = plain_losses(model, start, batches[number // ITERATIONS], wanted.alpha)
        found.total.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS["max_grad_norm"])
        optimiser.step()
        pairs = [(getattr(found, name).item(), getattr(wanted, name)) for name in ("grpo", "sdpo", "total")]
        worst = max(worst, *(abs(one - other) for one, other in [*pairs, (float(norm), wanted.grad_norm)]))
        sums = weight_sums(model, before)
        torch.testing.assert_close(sums[:, 2], wanted.weights[:, 2], rtol=1e-3, atol=1e-6)
    note(f"twenty recorded steps by their formulas: {BY_FORMULAS} made, largest difference {worst:.1e}")
    assert worst < 1e-4


@pytest.fixture(scope="module")
def trained_values(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """The fixed batch in our trainer: channel values and the gradient of their sum."""
    pytest.importorskip("trl")
    from recipes.trl_steps import trainer_values

    return trainer_values(tmp_path_factory.mktemp("fixed"), fixed_batch(drift=DRIFT), alpha=SETTINGS["alpha_sdpo"])


def test_the_fixed_batch_has_the_same_values_and_gradients_in_our_trainer_and_by_the_formulas(
    trained_values: tuple[dict[str, float], dict[str, torch.Tensor]],
) -> None:
    values, found = trained_values
    model = load_start()
    plain = plain_losses(model, frozen(model), fixed_batch(drift=DRIFT), SETTINGS["alpha_sdpo"])
    for name in ("grpo", "sdpo", "total"):
        assert close(values[name], getattr(plain, name).item()), name
    assert relative_gap(found, gradients(plain.total, model)) < 2e-5


def test_the_drift_clips_some_ratios_on_either_side() -> None:
    model, batch = load_start(), fixed_batch(drift=DRIFT)
    with torch.no_grad():
        ratio = (completion_logprobs(model, batch) - batch.old_logprobs)[batch.loss_mask].exp()
    advantage = batch.advantages[:, None].expand_as(batch.loss_mask)[batch.loss_mask]
    epsilon = SETTINGS["epsilon"]
    high, low = (ratio > 1 + epsilon) & (advantage > 0), (ratio < 1 - epsilon) & (advantage < 0)
    assert int(high.sum()) > 10
    assert int(low.sum()) > 10
    assert int((~high & ~low).sum()) > 100
