"""Replicas without a model: what each gives to a round is a known function, so that every mean can be computed anew.

A toy outer loop has global weights in fragments and a momentum, as DiLoCo has, and training weights that drift from
them. It gives `noise(rank, claim, step)` plus the distance between its global and its training weights before training:
zero, unless it trained from old weights, and then every check below fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from composer_replication.diloco.rounds.claims import find_run
from composer_replication.diloco.rounds.manager import ObjectStoreManager
from composer_replication.diloco.rounds.patience import PatientStore, Traffic
from composer_replication.diloco.rounds.reading import read_commit
from composer_replication.diloco.rounds.records import Layout, RoundOutcome

SIZES = (300, 77)  # elements of each fragment's two tensors
QUICK: dict[str, Any] = {"poll_s": 0.02, "grace_s": 1.0, "first_grace_s": 20.0, "timeout_s": 30.0, "lease_s": 0.6}


def noise(rank: int, claim: int, step: int) -> np.ndarray:
    numbers = np.random.default_rng((rank, claim, step)).standard_normal(sum(SIZES))
    return numbers.astype(np.float32)


def weight_of(rank: int) -> float:
    return float(3 + rank)


class Final(NamedTuple):
    """Where a replica ended."""

    rank: int
    step: int
    weights: list[torch.Tensor]


class ToyLoop:
    """What torchft's DiLoCo does with a manager, in the same order, on vectors."""

    def __init__(self, manager: ObjectStoreManager, *, num_fragments: int = 1, follows: bool = True) -> None:
        self.manager = manager
        manager.weight = weight_of(manager.rank)
        start = torch.full((sum(SIZES),), float(manager.rank))  # each begins elsewhere: the first state is one of them
        self.globals = [start.clone() for _ in range(num_fragments)]
        self.training = [start.clone() for _ in range(num_fragments)]
        self.momentum = [torch.zeros(sum(SIZES)) for _ in range(num_fragments)]
        for index in range(num_fragments):
            key = f"StreamingDiLoCoFragment_{index}"
            manager.register_state_dict_fn(
                key, lambda state, at=index: self._load(at, state), lambda at=index: self._save(at)
            )
        if follows:
            manager.follow(self)

    def _save(self, at: int) -> dict[str, Any]:
        first, second = self.globals[at].split(SIZES)
        return {"original_parameters": {"a": first, "b": second}, "outer_optimizer": {0: self.momentum[at]}}

    def _load(self, at: int, state: dict[str, Any]) -> None:
        original = state["original_parameters"]
        self.globals[at].copy_(torch.cat([original["a"], original["b"]]))
        self.momentum[at].copy_(state["outer_optimizer"][0])

    def blanks(self, step: int) -> list[torch.Tensor]:
        return [torch.empty(size) for size in SIZES]

    def apply(self, step: int, means: Sequence[torch.Tensor]) -> None:
        at = step % len(self.globals)
        outer_step(self.globals[at], self.momentum[at], torch.cat(list(means)))
        self.training[at].copy_(self.globals[at])

    def restore(self) -> None:
        for ours, training in zip(self.globals, self.training, strict=True):
            training.copy_(ours)

    def final(self) -> Final:
        return Final(self.manager.rank, self.manager.current_step(), self.globals)

    def round(self, between: Callable[[], None] = lambda: None) -> bool:
        """One round; `between` is called where training would go on while the round is under way."""
        manager = self.manager
        manager.start_quorum()
        at = manager.current_step() % len(self.globals)
        place = manager._membership.position
        drift = self.globals[at] - self.training[at]
        given = drift + torch.from_numpy(noise(place.rank, place.claim, place.step))
        parts = given.split(SIZES)
        works = [manager.allreduce(part) for part in parts]
        between()
        for work in works:
            work.wait()
        self.training[at].copy_(self.globals[at])
        if not manager.should_commit():
            return False
        self.apply(place.step, parts)
        return True


def outer_step(weights: torch.Tensor, momentum: torch.Tensor, mean: torch.Tensor) -> None:
    momentum.mul_(0.5).add_(mean)
    weights.sub_(momentum)


def run_replica(store: Any, rank: int, world: int, steps: int, *, num_fragments: int = 1, **options: Any) -> ToyLoop:
    """Rounds until a step; the manager is closed at the end, not when something is raised."""
    follows = options.pop("follows", True)
    manager = ObjectStoreManager(store, rank=rank, world_size=world, **{**QUICK, **options})
    loop = ToyLoop(manager, num_fragments=num_fragments, follows=follows)
    while manager.current_step() < steps:
        loop.round()
    manager.close()
    return loop


def in_threads(calls: Sequence[Callable[[], Any]], *, timeout_s: float = 60.0) -> list[Any]:
    """What each call returns or raises; AssertionError if one is not back in time."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for index, thread in enumerate(threads):
        thread.join(timeout_s)
        assert not thread.is_alive(), f"call {index} is not back after {timeout_s} s"
    return results


def layout_of(store: Any, generation: int = 0) -> Layout:
    """Return where the records of the run in a store are, with the id of the run."""
    run = find_run(PatientStore(store, Traffic(), patience_s=5), Layout(generation))
    assert run is not None
    return run.layout


def commits(store: Any, generation: int = 0) -> Iterator[RoundOutcome]:
    """The commits of a run in their order, as the store has them."""
    layout, patient, step = layout_of(store, generation), PatientStore(store, Traffic(), patience_s=5), 0
    while (commit := read_commit(patient, layout, step)) is not None:
        yield commit[1]
        step += 1


def mean_of(outcome: RoundOutcome, step: int) -> np.ndarray:
    """Worked out here, in the order of members, from what they are known to have given."""
    counted = [member for member in outcome.members if member.weight]
    assert all(member.weight == weight_of(member.id.rank) for member in counted)
    weights = [member.weight for member in counted]
    weights = weights if len(set(weights)) > 1 else [1.0] * len(weights)
    total = np.zeros(sum(SIZES), np.float32)
    for weight, member in zip(weights, counted, strict=True):
        total += noise(member.id.rank, member.id.claim, step) * np.float32(weight)
    return total / np.float32(sum(weights))


def check_run(
    store: Any,
    ends: Sequence[ToyLoop | Final],
    *,
    starter: int = 0,
    num_fragments: int = 1,
    history: list[RoundOutcome] | None = None,
) -> list[RoundOutcome]:
    """Every commit's mean worked out anew, and with them the weights of each replica at the step where it stands.

    `history`: the commits as they were written, where those in the store were damaged later.
    """
    history = list(commits(store)) if history is None else history
    weights = [torch.full((sum(SIZES),), float(starter)) for _ in range(num_fragments)]
    momentum = [torch.zeros(sum(SIZES)) for _ in range(num_fragments)]
    at_step = [[each.clone() for each in weights]]
    for step, outcome in enumerate(history):
        ranks = [member.id.rank for member in outcome.members]
        assert ranks == sorted(set(ranks))
        at = step % num_fragments
        outer_step(weights[at], momentum[at], torch.from_numpy(mean_of(outcome, step)))
        at_step.append([each.clone() for each in weights])
    for end in ends:
        rank, step, ours = end.final() if isinstance(end, ToyLoop) else end
        for weights_there, expected in zip(ours, at_step[step], strict=True):
            assert torch.equal(weights_there, expected), f"rank {rank} at step {step}"
    return history
