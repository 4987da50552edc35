"""What channel 2 did to a model, in figures that a control can contradict.

Every figure is a *drop*: log-prob under the start weights less log-prob after training, both without a hint; above 0
means less likely. An erring call is to become less likely. A good call of the same session, which the model makes
because a rule stands in its context, is to stay as it is. Their difference takes away what merely breaks the model
(difference in differences). Each is taken of the whole call and at its decision, the one token the rule is about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean

import torch
from torch import Tensor, nn

from obedient_model.tasks import Kind, ToySession, answering_turn
from obedient_model.teaching import TeacherName, Training, erring_logprobs, site_batches, teachers_of, train
from obedient_model.world import World

NUM_SESSIONS = 16
HINTS = {"right": "hint", "shuffled": "shuffled_hint", "irrelevant": "irrelevant_hint"}


@dataclass(frozen=True, slots=True)
class CallPlace:
    """Where a call stands in its session's ids, and the token of it that a rule decides."""

    start: int
    end: int
    decision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A session's ids with its erring call and its good ones in them."""

    ids: list[int]
    erring: CallPlace
    good: tuple[CallPlace, ...]


def probe(world: World, session: ToySession) -> Probe:
    erring = _place(world, session, session.turn_id, session.kind, session.file, session.kind.right)
    good = [_place(world, session, task.turn_id, task.kind, task.file, task.kind.habit) for task in session.good_tasks]
    return Probe(ids=world.rendered(session)[0].ids, erring=erring, good=tuple(good))


def _place(world: World, session: ToySession, turn_id: str, kind: Kind, file: str, otherwise: str) -> CallPlace:
    """The decision is the first token that another value would have changed."""
    conversation = session.conversation
    at = next(index for index, turn in enumerate(conversation.turns) if turn.id == turn_id)
    changed = replace(conversation, turns=(*conversation.turns[:at], answering_turn(turn_id, kind, file, otherwise)))
    (as_logged,), (as_changed,) = world.renderer.render(conversation), world.renderer.render(changed)
    span = next(span for span in as_logged.spans if span.turn_id == turn_id)
    assert span.call_start is not None
    assert span.call_end is not None
    decision = next(
        place for place, (ours, other) in enumerate(zip(as_logged.ids, as_changed.ids, strict=False)) if ours != other
    )
    assert span.call_start <= decision < span.call_end
    return CallPlace(span.call_start, span.call_end, decision)


@torch.no_grad()
def token_logprobs(model: nn.Module, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Log-prob of every token given those before it, (S, T); 0 for the first and behind a sequence's end."""
    width = max(len(ids) for ids in sequences)
    ids_ST = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in sequences])
    logprobs = model(input_ids=ids_ST).logits[:, :-1].double().log_softmax(-1)
    found = logprobs.gather(-1, ids_ST[:, 1:, None])[..., 0]
    inside = torch.arange(1, width) < torch.tensor([[len(ids)] for ids in sequences])
    return torch.nn.functional.pad(found * inside, (1, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLogprobs:
    """Of every erring call and every good one of some sessions, whole and at the decision."""

    erring_call: Tensor
    erring_decision: Tensor
    good_call: Tensor
    good_decision: Tensor


def call_logprobs(model: nn.Module, probes: Sequence[Probe]) -> CallLogprobs:
    rows = token_logprobs(model, [each.ids for each in probes])
    erring = [(row, each.erring) for row, each in zip(rows, probes, strict=True)]
    good = [(row, place) for row, each in zip(rows, probes, strict=True) for place in each.good]
    sums = [
        torch.tensor([float(row[place.start : place.end].sum()) for row, place in calls]) for calls in (erring, good)
    ]
    decisions = [torch.tensor([float(row[place.decision]) for row, place in calls]) for calls in (erring, good)]
    return CallLogprobs(
        erring_call=sums[0], erring_decision=decisions[0], good_call=sums[1], good_decision=decisions[1]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Mean drops over some sessions, in nats; nothing for good calls where the sessions have none."""

    erring_call: float
    erring_decision: float
    good_call: float | None
    good_decision: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One training run in one world: what it did to the sessions it saw and to others."""

    training: Drop
    held_out: Drop
    erring_calls_held_out: tuple[float, ...]


@cache
def _material(world: World, seed: int, num_good_tasks: int) -> list[tuple[list[Probe], CallLogprobs]]:
    """Of the sessions to train on and of those held out: where their calls are, and the start weights' log-probs."""
    made = []
    for sessions in world.split(seed, NUM_SESSIONS, num_tasks_before=num_good_tasks):
        probes = [probe(world, session) for session in sessions]
        made.append((probes, call_logprobs(world.model, probes)))
    return made


def outcome(
    world: World, seed: int, *, hint: str, teacher: TeacherName, how: Training, num_good_tasks: int = 1
) -> Outcome:
    """Channel 2 alone (kl_st) with one sort of hint, from the world's start weights."""
    sessions = world.split(seed, NUM_SESSIONS, num_tasks_before=num_good_tasks).training
    batches = site_batches(world, sessions, [getattr(each, HINTS[hint]) for each in sessions])
    model = world.new_model()
    train(model, batches, seed, how, alpha_sdpo=1.0, sdpo_jsd_beta=1.0, sdpo_teachers=teachers_of(world, teacher))
    trained, unseen = (_drops(model, *part) for part in _material(world, seed, num_good_tasks))
    return Outcome(
        training=_mean(trained), held_out=_mean(unseen), erring_calls_held_out=tuple(unseen.erring_call.tolist())
    )


def _drops(model: nn.Module, probes: Sequence[Probe], start: CallLogprobs) -> CallLogprobs:
    end = call_logprobs(model, probes)
    return CallLogprobs(**{name: getattr(start, name) - getattr(end, name) for name in CallLogprobs.__slots__})


def _mean(drops: CallLogprobs) -> Drop:
    columns = {name: getattr(drops, name) for name in CallLogprobs.__slots__}
    return Drop(**{name: float(column.mean()) if len(column) else None for name, column in columns.items()})


def start_logprobs(world: World, seed: int) -> dict[str, float]:
    """What the untrained model, which is the teacher, makes of the erring calls: without a hint and with each sort."""
    sessions = world.split(seed, NUM_SESSIONS, num_tasks_before=1).training
    found = {"no hint": mean(erring_logprobs(world, world.model, sessions).tolist())}
    for name, attribute in HINTS.items():
        each = [erring_logprobs(world, world.model, [session], getattr(session, attribute)) for session in sessions]
        found[name] = float(torch.cat(each).mean())
    return found
