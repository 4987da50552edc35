"""A trainer with bf16 runs every pass in an autocast of its own: weights are still cast once a generation."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from kept_rows import new_tokens, padded, random_rows, small_model

from composer_replication.rollouts.generation import generator as generator_module
from composer_replication.rollouts.generation import recorded_talks
from composer_replication.rollouts.generation.generator import RolloutGenerator
from composer_replication.rollouts.generation.passes import Casts, casts_kept
from composer_replication.rollouts.generation.recorded_talks import RecordedTalking
from scripted_talk import Scripted

ROWS = random_rows((18, 15, 11))


def as_a_trainer_wraps_it() -> Any:
    model = small_model()
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    return model


def generated(model: Any) -> Any:
    ids = RolloutGenerator().generate(model, **padded(ROWS), max_new_tokens=12, do_sample=False)
    return new_tokens(ids, ROWS)


def talked(model: Any) -> Any:
    talks = [Scripted(number, number % 3) for number in range(5)]
    RecordedTalking(model, ends=[2], places=3, room=120, temperature=0.0).run(talks)
    return [talk.heard for talk in talks]


@pytest.mark.parametrize("sample", [generated, talked])
def test_every_weight_is_cast_once_and_the_tokens_stay(sample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = as_a_trainer_wraps_it()
    with Casts(model) as a_pass:
        model(input_ids=torch.tensor([ROWS[0]]))
    assert len(a_pass.held) >= 14
    sample(model)  # whether rows can be kept is tried once a model
    with Casts(model) as kept:
        tokens = sample(model)
    assert len(kept.held) == len(a_pass.held)
    for module in (generator_module, recorded_talks):
        monkeypatch.setattr(module, "casts_kept", lambda _model: torch.no_grad())
    with Casts(model) as made_again:
        assert sample(model) == tokens
    assert len(made_again.held) >= 10 * len(a_pass.held), "the count could have failed"
    with Casts(model) as later:
        model(input_ids=torch.tensor([ROWS[0]])).logits.sum().backward()
    assert len(later.held) == len(a_pass.held), "no copy is left that a training would take for the weights"
    assert model.lm_head.weight.grad.abs().sum() > 0


def test_copies_are_held_though_another_thread_gives_them_back() -> None:
    """An autocast that ends in any thread empties what all have in common."""
    model = as_a_trainer_wraps_it()

    def elsewhere() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            pass

    with torch.no_grad(), casts_kept(model):
        with Casts(model) as first:
            model(input_ids=torch.tensor([ROWS[0]]))
        with Casts(model) as second:
            model(input_ids=torch.tensor([ROWS[0]]))
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        with Casts(model) as third:
            model(input_ids=torch.tensor([ROWS[0]]))
    assert len(first.held) == len(third.held) >= 14
    assert not second.held
    copied = {tuple(each.shape): each for each in first.held}
    weight = model.lm_head.weight
    assert torch.equal(copied[tuple(weight.shape)], weight.detach().bfloat16())


@pytest.mark.parametrize("is_on", [True, False])
def test_an_autocast_around_it_stays_as_it_is(is_on: bool) -> None:
    model = small_model()
    with torch.autocast("cpu", torch.float16, enabled=is_on):
        with casts_kept(model):
            assert torch.is_autocast_enabled("cpu") is is_on
            assert not is_on or torch.get_autocast_dtype("cpu") == torch.float16
        assert torch.is_autocast_enabled("cpu") is is_on
