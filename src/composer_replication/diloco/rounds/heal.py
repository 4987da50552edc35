"""The global state of a run: published by one replica, loaded by those that are behind; and the commits since.

Without a follower a commit can only be applied by the outer loop itself, one for each of its own rounds. A follower
applies it at once, so that a restarted replica, or a whole group of them, begins where the last commit left off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from composer_replication.diloco.rounds import published
from composer_replication.diloco.rounds.patience import PatientStore, RoundTimeout, StateUnreadable
from composer_replication.diloco.rounds.published import Flat, flatten
from composer_replication.diloco.rounds.reading import (
    published_states,
    ranks_that_joined,
    ranks_that_left,
    read_commit,
    read_record,
    step_of,
)
from composer_replication.diloco.rounds.records import (
    Layout,
    fields_of,
    pack,
    parse_state,
    refusing,
    text,
)
from composer_replication.diloco.rounds.running import RoundSettings, RunPosition
from composer_replication.errors import explain

_MOST_SLOTS = 100  # of records that name the first state, in which all before are damaged

StateFns = MutableMapping[str, tuple[Callable[[Any], None], Callable[[], Any]]]


@dataclass
class GlobalState:
    layout: Layout
    settings: RoundSettings
    functions: StateFns
    _readable: set[str] = field(default_factory=set)

    def saved(self) -> Flat:
        return flatten({key: value() for key, (_, value) in sorted(self.functions.items())})

    def begin(self, store: PatientStore, place: RunPosition) -> tuple[RunPosition, bool]:
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

    def wait_for_newer(self, store: PatientStore, place: RunPosition) -> RunPosition:
        """Ask for a state and load it as soon as somebody has published one that is newer than mine.

        Raises StateUnreadable when the time is up, or when everybody who could publish one has finished and, where
        nobody knows how many commits the run needs, does not come back within a grace.
        """
        began = time.monotonic()
        alone_since: float | None = None
        while True:
            # Looked at first: whoever leaves has published before.
            is_alone, now = self._is_alone(store, place), time.monotonic()
            alone_since = (now if alone_since is None else alone_since) if is_alone else None
            is_left = alone_since is not None and now - alone_since >= self.settings.return_grace_s(place.commits)
            is_over = not self.functions or is_left or now - began >= self.settings.timeout_s
            if (newer := self.newest(store, place, margin=0)) is not None:
                break
            if is_over:
                what = f"round {place.step} of generation {self.layout.generation} at {store.uri}"
                got = "no newer state to load, and a round that cannot be followed any more"
                expected = "one, or a replica that has not finished and could publish it"
                another = f"begin again with generation={self.layout.generation + 1}"
                fix = f"Take the model of a replica that has finished, or {another}."
                raise StateUnreadable(explain(what, got=got, expected=expected, fix=fix))
            store.put(self.layout.key("wanted", f"{place.rank:05d}"), b"")
            time.sleep(self.settings.poll_s)
        return newer

    def _is_alone(self, store: PatientStore, position: RunPosition) -> bool:
        """Return whether every other replica that ever joined has finished, with all the commits that I need."""
        other_ranks = ranks_that_joined(store, self.layout) - {position.rank}
        return other_ranks <= ranks_that_left(store, self.layout).finished_for(position.commits)

    def newest(self, store: PatientStore, place: RunPosition, *, margin: int) -> RunPosition | None:
        """Load the newest state that is more than `margin` steps ahead; None where there is none that can be read."""
        for name in published_states(store, self.layout):
            if step_of(name) <= place.step + margin:
                return None
            state = published.read_state(store, self.layout, name)
            if state is not None and self._load(store, state):
                return self._standing(store, place, state)
        return None

    def _standing(self, store: PatientStore, position: RunPosition, state: published.PublishedState) -> RunPosition:
        last = read_commit(store, self.layout, state.step - 1)
        first_trial = position.first_trial if state.step == position.step else 0
        loaded = replace(position, step=state.step, base=state.base, last=last[1] if last else None)
        return replace(loaded, first_trial=first_trial)

    def numbers(self, place: RunPosition) -> str:
        """A digest of my weights, to the bit."""
        return published.describe(self.saved(), name=_name(place, place.step), step=place.step).numbers

    def load_those(self, store: PatientStore, place: RunPosition, numbers: str) -> RunPosition | None:
        """Load the published state of this very step that has these numbers; None where there is none."""
        for name in published_states(store, self.layout):
            if step_of(name) == place.step:
                state = published.read_state(store, self.layout, name)
                if state is not None and state.numbers == numbers and self._load(store, state):
                    return self._standing(store, place, state)
        return None

    def publish(self, store: PatientStore, place: RunPosition) -> None:
        """The state of a step, unless somebody has published it."""
        if self.newest_step(store) >= place.step:
            return
        flat = self.saved()
        state = published.describe(flat, name=_name(place, place.step), step=place.step)
        published.publish(store, self.layout, flat, replace(state, base=place.base))

    def is_due(self, store: PatientStore, place: RunPosition, every: int) -> bool:
        """Every so many steps, and when a replica that is behind asks for one."""
        behind = place.step - max(0, self.newest_step(store))
        request_keys = store.keys(self.layout.key("wanted")) if 0 < behind < every else []
        store.delete(request_keys)
        return behind >= every or bool(request_keys)

    def readable(self, store: PatientStore) -> list[str]:
        """Return the names of the states whose records can be read, the newest first.

        A name alone says nothing: a copy of a record under a later name would keep newer states from being published.
        """
        names = published_states(store, self.layout)
        self._readable &= set(names)
        self._readable |= {
            name for name in names if name not in self._readable and published.read_state(store, self.layout, name)
        }
        return [name for name in names if name in self._readable]

    def newest_step(self, store: PatientStore) -> int:
        """Return the step of the newest state whose record can be read; -1 where there is none."""
        names = self.readable(store)
        return step_of(names[0]) if names else -1

    def _first(
        self, store: PatientStore, position: RunPosition, mine: published.PublishedState
    ) -> published.PublishedState:
        now = time.monotonic()
        until, rank_0_until = now + self.settings.timeout_s, now + (self.settings.first_grace_s if position.rank else 0)
        while True:
            first, slot = self._genesis(store)
            if first is not None:
                return first
            if time.monotonic() >= until:
                raise RoundTimeout(
                    f"{store.uri}: nobody published a first state of generation {self.layout.generation}"
                )
            if time.monotonic() >= rank_0_until:
                chosen = self._first_that_was_chosen(store)
                if chosen is None:
                    published.publish(store, self.layout, self.saved(), mine)
                key = self.layout.genesis(slot)
                store.settle(key, pack("genesis", self.layout.address(key), {"name": chosen or mine.name}))
                if self._genesis(store)[0] is not None:
                    continue
            time.sleep(self.settings.poll_s)

    def _first_that_was_chosen(self, store: PatientStore) -> str | None:
        """Return the first state that others began with, where only the record that names it is damaged."""
        return next((name for name in sorted(self.readable(store)) if step_of(name) == 0), None)

    def _genesis(self, store: PatientStore) -> tuple[published.PublishedState | None, int]:
        """Return the run's first state, if it can be read, and the slot of the record that names it or would."""
        for slot in range(_MOST_SLOTS):
            key = self.layout.genesis(slot)
            name = self._named(store, key)
            first = None if name is None else published.read_state(store, self.layout, name)
            if first is not None or store.size(key) is None:
                return first, slot
        return None, _MOST_SLOTS

    def _named(self, store: PatientStore, key: str) -> str | None:
        def name(at: str, data: bytes) -> str:
            content = fields_of("genesis", at, data, "name")
            with refusing("genesis"):
                if parse_state(stated := text(content["name"])) is None:
                    raise ValueError(f"{stated[:40]!r}, which is no name of a state")
                return stated

        return read_record(store, self.layout, key, name)

    def _load(self, store: PatientStore, state: published.PublishedState) -> bool:
        content = published.fetch(store, self.layout, state, self.saved().outline())
        if content is None:
            return False
        for key, (load_fn, _) in self.functions.items():
            load_fn(content[key])
        return True


def _name(position: RunPosition, step: int) -> str:
    return f"{step:08d}.{position.rank:05d}.{position.claim}"


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
