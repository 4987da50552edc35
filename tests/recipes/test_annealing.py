"""Channel 2's weight over a run: one formula, whichever engine asks it."""

from __future__ import annotations

import pytest

from composer_replication.errors import InputError
from composer_replication.recipes.monarch.policy_trainer import LossSettings, TrainerSettings
from composer_replication.recipes.verl.channel_loss import EngineChannels
from composer_replication.trainer.objective.channels import ChannelSettings, LossKnobs, annealed_weight

STEPS = range(7)  # two more than the run has


def test_the_weight_falls_in_a_line_and_stays_at_its_end() -> None:
    fallen = [annealed_weight(0.2, "linear", step=step, total_steps=5, end=0.5) for step in STEPS]
    assert fallen == pytest.approx([0.2, 0.175, 0.15, 0.125, 0.1, 0.1, 0.1])
    assert [annealed_weight(0.2, "none", step=step, total_steps=5, end=0.5) for step in STEPS] == [0.2] * 7
    assert annealed_weight(0.2, "linear", step=0, total_steps=1) == 0.2


@pytest.mark.parametrize("anneal", ["none", "linear"])
def test_every_engine_gives_a_step_the_same_weight(anneal) -> None:
    ours, verls = (kind(alpha_sdpo=0.3, anneal=anneal) for kind in (ChannelSettings, EngineChannels))
    loss = LossSettings(knobs=LossKnobs(alpha_sdpo=0.3))
    monarchs = TrainerSettings(model="", folder="", weights="", total_steps=5, loss=loss, anneal=anneal)
    weights = [ours.alpha_at(step, 5) for step in STEPS]
    assert weights[0] == 0.3
    assert weights[4] == (0.3 if anneal == "none" else 0.0)
    assert [verls.alpha_at(step, 5) for step in STEPS] == weights
    assert [monarchs.alpha_at(step) for step in STEPS] == weights


@pytest.mark.parametrize("kind", [ChannelSettings, EngineChannels])
@pytest.mark.parametrize("wrong", [{"anneal": "cosine"}, {"anneal_end": 1.1}, {"anneal_end": float("nan")}])
def test_what_no_schedule_can_be_is_refused(kind, wrong) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        kind(**wrong)
