"""Edges of the dense losses and the TAID schedule that a review found open."""

from __future__ import annotations

import json

import pytest
import torch

from composer_replication.canonical_json import encode
from composer_replication.distillation import TAIDScheduler, dpo_loss
from composer_replication.errors import InputError, NonFiniteError, ShapeError
from composer_replication.loss.entropy_opd import teacher_entropy
from composer_replication.loss.jsd import generalized_jsd_loss
from refusals import refusal


def test_boolean_labels_are_refused_since_no_bool_is_minus_one_hundred():
    logits = torch.randn(1, 3, 5)
    with refusal(InputError, what="labels", got="bool"):
        generalized_jsd_loss(logits, logits, labels=torch.ones(1, 3, dtype=torch.bool))


def test_the_entropy_of_nan_logits_raises():
    with pytest.raises(NonFiniteError, match="teacher_entropy"):
        teacher_entropy(torch.tensor([[[0.0, float("nan")]]]))


def test_the_reference_of_dpo_gets_no_gradient():
    chosen, rejected, ref_chosen, ref_rejected = (torch.randn(3, requires_grad=True) for _ in range(4))
    dpo_loss(chosen, rejected, ref_chosen, ref_rejected).backward()
    assert chosen.grad is not None
    assert ref_chosen.grad is None
    assert ref_rejected.grad is None


def test_dpo_without_a_reference_is_a_typed_error():
    with refusal(ShapeError, what="ref_chosen_logprobs", got="NoneType"):
        dpo_loss(torch.zeros(2), torch.zeros(2), None, None)


def test_a_schedule_that_has_seen_no_loss_can_be_checkpointed():
    fresh, restored = TAIDScheduler(10), TAIDScheduler(10)
    restored.load_state_dict(json.loads(encode(fresh.state_dict(), where="checkpoint")))
    for step, loss in enumerate([2.0, 1.5, 1.4]):
        assert fresh.update_t(loss, step) == restored.update_t(loss, step)
    assert fresh.t == restored.t


def test_a_loss_that_is_not_finite_changes_nothing_after_the_start_either():
    plain, disturbed = TAIDScheduler(20, alpha=0.1), TAIDScheduler(20, alpha=0.1)
    for step, loss in enumerate([2.0, 1.5, 1.2]):
        plain.update_t(loss, step)
        disturbed.update_t(loss, step)
        assert disturbed.update_t(float("nan"), step) is None
    assert plain.state_dict() == disturbed.state_dict()


@pytest.mark.parametrize("disable_adaptive", [False, True])
def test_t_stays_inside_its_range_beyond_the_planned_steps_and_through_wild_losses(disable_adaptive):
    scheduler = TAIDScheduler(4, disable_adaptive=disable_adaptive)
    for step, loss in enumerate([1e-30, 1e30, 3.0, 2.0, 1.0, 0.5, 0.4]):
        scheduler.update_t(loss, step)
        assert 0.4 <= scheduler.t <= 1.0
    scheduler.load_state_dict(scheduler.state_dict())
    assert scheduler.t == 1.0


@pytest.mark.parametrize("broken", [{"t": float("nan")}, {"momentum": float("inf")}, {"t": 1.5}, {"momentum": None}])
def test_a_broken_schedule_state_is_refused(broken):
    scheduler = TAIDScheduler(4)
    with pytest.raises(InputError, match="state"):
        scheduler.load_state_dict({**scheduler.state_dict(), **broken})
