"""A trainer with bf16 runs every pass in an autocast of its own: weights are still cast once a generation."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from kept_rows import new_tokens, padded, random_rows, small_model
from torch.utils._python_dispatch import TorchDispatchMode

from composer_replication.rollouts.generation import generator as generator_module
from composer_replication.rollouts.generation import recorded_talks
from composer_replication.rollouts.generation.generator import RolloutGenerator
from composer_replication.rollouts.generation.passes import Casts as HeldCasts
from composer_replication.rollouts.generation.passes import casts_kept
from composer_replication.rollouts.generation.recorded_talks import RecordedTalking
from scripted_talk import Scripted

ROWS = random_rows((18, 15, 11))


class Casts(TorchDispatchMode):
    """How often each of these tensors is cast to another type."""

    def __init__(self, tensors: dict[int, str]) -> None:
        super().__init__()
        self._names, self.counts = tensors, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self._names:
            self.counts[self._names[args[0].data_ptr()]] += 1
        return func(*args, **(kwargs or {}))


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
    sample(model)  # whether rows can be kept is tried once a model
    names = {value.data_ptr(): name for name, value in model.named_parameters()}
    with Casts(names) as kept:
        tokens = sample(model)
    assert len(kept.counts) >= 14
    assert set(kept.counts.values()) == {1}
    for module in (generator_module, recorded_talks):
        monkeypatch.setattr(module, "casts_kept", lambda _model: torch.no_grad())
    with Casts(names) as made_again:
        assert sample(model) == tokens
    assert min(made_again.counts.values()) >= 10, "the count could have failed"
    with Casts(names) as later:
        model(input_ids=torch.tensor([ROWS[0]])).logits.sum().backward()
    assert set(later.counts.values()) >= {1}, "no copy is left that a training would take for the weights"
    assert model.lm_head.weight.grad is not None


def test_copies_are_held_though_another_thread_gives_them_back() -> None:
    """An autocast that ends in any thread empties what all have in common."""
    model = as_a_trainer_wraps_it()

    def elsewhere() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            pass

    with torch.no_grad(), casts_kept(model):
        with HeldCasts(model) as first:
            model(input_ids=torch.tensor([ROWS[0]]))
        with HeldCasts(model) as second:
            model(input_ids=torch.tensor([ROWS[0]]))
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        with HeldCasts(model) as third:
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
