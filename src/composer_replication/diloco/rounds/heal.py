"""The global state of a run: published by one replica, loaded by those that are behind; and the commits since.

Without a follower a commit can only be applied by the outer loop itself, one for each of its own rounds. A follower
applies it at once, so that a restarted replica, or a whole group of them, begins where the last commit left off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from composer_replication.diloco.rounds.failures import RoundTimeout, StateUnreadable
from composer_replication.diloco.rounds.patience import PatientStore
from composer_replication.diloco.rounds.reading import published_states, read_commit, read_record, step_of
from composer_replication.diloco.rounds.records import Layout, fields_of, pack, parse_state, refusing, text
from composer_replication.diloco.rounds.running import Place, Settings
from composer_replication.diloco.rounds.states import published
from composer_replication.diloco.rounds.states.structures import Flat, flatten

StateFns = MutableMapping[str, tuple[Callable[[Any], None], Callable[[], Any]]]


@dataclass
class GlobalState:
    layout: Layout
    settings: Settings
    functions: StateFns

    def saved(self) -> Flat:
        return flatten({key: value() for key, (_, value) in sorted(self.functions.items())})

    def begin(self, store: PatientStore, place: Place) -> tuple[Place, bool]:
        """Where a replica begins, and whether its weights were replaced: with the newest state, or the run's first.

        The first state is that of whoever says so first: rank 0, unless it stays away.
        """
        newest = self.newest(store, replace(place, step=0), margin=0)
        if newest is not None:
            return newest, True
        mine = published.describe(self.saved(), name=_name(place, 0), step=0)
        first = self._first(store, place, mine)
        if first.digest == mine.digest:
            return replace(place, base=first.digest), False
        if self._load(store, first):
            return replace(place, base=first.digest), True
        return self.wait_for_newer(store, place), True

    def wait_for_newer(self, store: PatientStore, place: Place) -> Place:
        """Ask for a state and load it as soon as somebody has published one that is newer than mine."""
        until = time.monotonic() + self.settings.timeout_s
        while (newer := self.newest(store, place, margin=0)) is None:
            if not self.functions or time.monotonic() >= until:
                what = f"round {place.step} of generation {self.layout.generation} at {store.uri}"
                raise StateUnreadable(f"{what} cannot be followed any more, and there is no newer state to load")
            store.put(self.layout.key("wanted", f"{place.rank:05d}"), b"")
            time.sleep(self.settings.poll_s)
        return newer

    def newest(self, store: PatientStore, place: Place, *, margin: int) -> Place | None:
        """Load the newest state that is more than `margin` steps ahead; None where there is none that can be read."""
        for name in published_states(store, self.layout):
            if step_of(name) <= place.step + margin:
                return None
            state = published.read_state(store, self.layout, name)
            if state is not None and self._load(store, state):
                return self._standing(store, place, state)
        return None

    def _standing(self, store: PatientStore, place: Place, state: published.PublishedState) -> Place:
        last = read_commit(store, self.layout, state.step - 1)
        first_trial = place.first_trial if state.step == place.step else 0
        loaded = replace(place, step=state.step, base=state.base, last=last[1] if last else None)
        return replace(loaded, first_trial=first_trial)

    def numbers(self, place: Place) -> str:
        """A digest of my weights, to the bit."""
        return published.describe(self.saved(), name=_name(place, place.step), step=place.step).numbers

    def load_those(self, store: PatientStore, place: Place, numbers: str) -> Place | None:
        """Load the published state of this very step that has these numbers; None where there is none."""
        for name in published_states(store, self.layout):
            if step_of(name) == place.step:
                state = published.read_state(store, self.layout, name)
                if state is not None and state.numbers == numbers and self._load(store, state):
                    return self._standing(store, place, state)
        return None

    def publish(self, store: PatientStore, place: Place) -> None:
        """The state of a step, unless somebody has published it."""
        names = published_states(store, self.layout)
        if names and step_of(names[0]) >= place.step:
            return
        flat = self.saved()
        state = published.describe(flat, name=_name(place, place.step), step=place.step)
        published.publish(store, self.layout, flat, replace(state, base=place.base))

    def is_due(self, store: PatientStore, place: Place, every: int) -> bool:
        """Every so many steps, and when a replica that is behind asks for one."""
        names = published_states(store, self.layout)
        behind = place.step - (step_of(names[0]) if names else 0)
        wanted = store.keys(self.layout.key("wanted")) if 0 < behind < every else []
        store.delete(wanted)
        return behind >= every or bool(wanted)

    def _first(self, store: PatientStore, place: Place, mine: published.PublishedState) -> published.PublishedState:
        now = time.monotonic()
        until, rank_0_until = now + self.settings.timeout_s, now + (self.settings.first_grace_s if place.rank else 0)
        while True:
            name = self._genesis(store)
            if name and (first := published.read_state(store, self.layout, name)) is not None:
                return first
            if time.monotonic() >= until:
                raise RoundTimeout(
                    f"{store.uri}: nobody published a first state of generation {self.layout.generation}"
                )
            if name is None and time.monotonic() >= rank_0_until:
                published.publish(store, self.layout, self.saved(), mine)
                store.settle(self.layout.key("genesis"), pack("genesis", {"name": mine.name}))
                if self._genesis(store) is not None:
                    continue
            time.sleep(self.settings.poll_s)

    def _genesis(self, store: PatientStore) -> str | None:
        def name(data: bytes) -> str:
            content = fields_of("genesis", data, "name")
            with refusing("genesis"):
                if parse_state(stated := text(content["name"])) is None:
                    raise ValueError(f"{stated[:40]!r}, which is no name of a state")
                return stated

        return read_record(store, self.layout.key("genesis"), name)

    def _load(self, store: PatientStore, state: published.PublishedState) -> bool:
        content = published.fetch(store, self.layout, state, self.saved().outline())
        if content is None:
            return False
        for key, (load_fn, _) in self.functions.items():
            load_fn(content[key])
        return True


def _name(place: Place, step: int) -> str:
    return f"{step:08d}.{place.rank:05d}.{place.claim}"


class Follower(Protocol):
    """What an outer loop lets its manager do between two rounds."""

    def blanks(self, step: int) -> list[Tensor]:
        """Tensors of the shapes that a round of that step averages."""
        ...

    def apply(self, step: int, means: Sequence[Tensor]) -> None:
        """One outer step from the global weights with these means, as if the round had been waited for."""
        ...

    def restore(self) -> None:
        """Training goes on from the global weights."""
        ...


class TorchftFollower:
    """A torchft DiLoCo, stepped as its own `perform_sync` does after a commit."""

    def __init__(self, diloco: Any) -> None:
        self._fragments: list[Any] = diloco._fragments

    def blanks(self, step: int) -> list[Tensor]:
        originals = self._fragment(step).original_parameters
        return [torch.empty_like(tensor) for tensor in originals.values()]

    def apply(self, step: int, means: Sequence[Tensor]) -> None:
        fragment = self._fragment(step)
        fragment.restore_parameters()
        parameters = dict(fragment._model_fragment.named_parameters())
        fragment._grads = {
            name: mean.to(parameters[name].device)
            for name, mean in zip(fragment.original_parameters, means, strict=True)
        }
        fragment._set_grads()
        fragment._outer_optimizer.step()
        fragment.save_parameters()
        fragment._outer_optimizer.zero_grad()

    def restore(self) -> None:
        for fragment in self._fragments:
            fragment.restore_parameters()

    def _fragment(self, step: int) -> Any:
        return self._fragments[step % len(self._fragments)]
