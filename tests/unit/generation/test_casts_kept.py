"""A trainer with bf16 runs every pass in an autocast of its own: weights are still cast once a generation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from kept_rows import end_an_autocast_elsewhere, new_tokens, padded, random_rows, small_model
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from composer_replication.trainer.rollouts.generation import generator as generator_module
from composer_replication.trainer.rollouts.generation import row_cache
from composer_replication.trainer.rollouts.generation import talks as recorded_talks
from composer_replication.trainer.rollouts.generation.generator import RolloutGenerator
from composer_replication.trainer.rollouts.generation.row_cache import NextTokens, _Casts, _Recording, keep_casts
from composer_replication.trainer.rollouts.generation.talks import RecordedTalking
from scripted_talk import Scripted

ROWS = random_rows((18, 15, 11))


class CountedCasts(_Casts):
    """How often copies are asked for."""

    asked = 0

    def _is_cast(self, source: Tensor, kwargs: dict[str, Any]) -> bool:
        is_cast = super()._is_cast(source, kwargs)
        self.asked += is_cast
        return is_cast


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
    with CountedCasts(model) as a_pass:
        model(input_ids=torch.tensor([ROWS[0]]))
    assert a_pass.asked >= 14
    sample(model)  # whether rows can be kept is tried once a model
    with CountedCasts(model) as kept:
        tokens = sample(model)
    assert kept.asked == a_pass.asked
    for module in (generator_module, recorded_talks):
        monkeypatch.setattr(module, "keep_casts", lambda _model: torch.no_grad())
    with CountedCasts(model) as made_again:
        assert sample(model) == tokens
    assert made_again.asked >= 10 * a_pass.asked, "the count could have failed"
    with CountedCasts(model) as later:
        model(input_ids=torch.tensor([ROWS[0]])).logits.sum().backward()
    assert later.asked == a_pass.asked, "no copy is left that a training would take for the weights"
    assert model.lm_head.weight.grad.abs().sum() > 0


class ReadWeights(TorchDispatchMode):
    """The storages that products inside have read, other than the weights' own."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._own = {each.untyped_storage().data_ptr() for each in model.parameters()}
        self.read: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            storage = args[-1].untyped_storage()
            assert storage.data_ptr() not in self._own, "a product in full precision"
            self.read.append(StorageWeakRef(storage))
        return func(*args, **(kwargs or {}))


class Replayed(NamedTuple):
    replay: Callable[[], object]


def test_what_a_recording_reads_is_held_whatever_other_threads_and_passes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """No CUDA here: a recording is stood in for by its pass, run again, and by what it had read at first."""
    model, recordings = as_a_trainer_wraps_it(), []

    def record(self: NextTokens, tokens_B: Tensor, slots_B: Tensor, reach: int) -> Any:
        if len(recordings) % 2:
            end_an_autocast_elsewhere("cpu")  # between the pass before a recording and the recording
        with ReadWeights(model) as reads:
            logits = self._run_with_held(tokens_B, slots_B, reach)
        recordings.append(reads.read)
        end_an_autocast_elsewhere("cpu")
        tokens, slots = tokens_B.clone(), slots_B.clone()
        return _Recording(Replayed(lambda: logits.copy_(self._run(tokens, slots, reach))), tokens, slots, logits)

    alive: list[bool] = []
    usual = NextTokens.logits

    def logits(self: NextTokens, *given: Any) -> Tensor:
        found = usual(self, *given)
        alive.extend(not each.expired() for read in recordings for each in read)
        return found

    monkeypatch.setattr(NextTokens, "_record", record)
    monkeypatch.setattr(NextTokens, "logits", logits)
    monkeypatch.setattr(row_cache, "_no_device_sync", nullcontext)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    monkeypatch.setattr(recorded_talks, "_STRETCH", 32)
    expected = talked(model)
    talks = [Scripted(number, number % 3) for number in range(5)]
    talking = RecordedTalking(model, ends=[2], places=3, room=120, temperature=0.0)
    talking._is_on_gpu = True
    talking.run(talks)
    assert len(recordings) >= 3
    assert all(len(read) >= 14 for read in recordings)
    assert alive
    assert all(alive)
    assert len({each.cdata for read in recordings for each in read}) == len(recordings[0]), "one copy of each weight"
    assert [talk.heard for talk in talks] == expected


def test_gradients_reach_the_weights_through_a_copy_that_is_given_twice() -> None:
    model = as_a_trainer_wraps_it()
    with CountedCasts(model) as casts:
        for _ in range(2):
            model(input_ids=torch.tensor([ROWS[0]])).logits.sum().backward()
    assert casts.asked == 2 * len(casts._held)
    twice = model.lm_head.weight.grad.clone()
    model.zero_grad()
    model(input_ids=torch.tensor([ROWS[0]])).logits.sum().backward()
    assert torch.equal(twice, 2 * model.lm_head.weight.grad)


def test_views_and_other_types_have_copies_of_their_own_and_a_models_own_are_its_own() -> None:
    layer = torch.nn.Linear(4, 4)
    weight = layer.weight
    with torch.no_grad(), CountedCasts(layer) as casts:
        half = weight.to(torch.bfloat16)
        assert weight.to(torch.bfloat16).data_ptr() == half.data_ptr()
        assert torch.equal(weight.t().to(torch.bfloat16), half.t())
        assert torch.equal(weight[:2].to(torch.bfloat16), half[:2])
        for _ in range(2):
            assert torch.equal(weight.to(torch.float64).exp_(), weight.double().exp())
        free = torch.ones(3, requires_grad=True)  # which an autocast keeps, too
        assert free.to(torch.bfloat16).data_ptr() == free.to(torch.bfloat16).data_ptr()
        assert (weight + 1).to(torch.bfloat16).data_ptr() != (weight + 1).to(torch.bfloat16).data_ptr()
    assert casts.asked == 6


@pytest.mark.parametrize("is_on", [True, False])
def test_an_autocast_around_it_stays_as_it_is(is_on: bool) -> None:
    model = small_model()
    with torch.autocast("cpu", torch.float16, enabled=is_on):
        with keep_casts(model):
            assert torch.is_autocast_enabled("cpu") is is_on
            assert not is_on or torch.get_autocast_dtype("cpu") == torch.float16
        assert torch.is_autocast_enabled("cpu") is is_on
