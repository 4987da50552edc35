"""Publish the global state of a run, load it into replicas that have fallen behind, and apply the commits since.

Without a follower only the outer loop itself can apply a commit, one in each of its rounds. A follower applies commits
at once, so that a restarted replica, or a whole group of them, continues from the last commit.
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
    joined_ranks,
    published_states,
    read_commit,
    read_departures,
    read_record,
    step_of,
)
from composer_replication.diloco.rounds.records import (
    Layout,
    as_record_error,
    checked_text,
    pack,
    parse_state,
    unpack_fields,
)
from composer_replication.diloco.rounds.settings import RoundSettings, RunPosition
from composer_replication.errors import explain

_MAX_SLOTS = 100  # records that name the run's first state, each written because all before are damaged

StateFns = MutableMapping[str, tuple[Callable[[Any], None], Callable[[], Any]]]


@dataclass
class GlobalState:
    """The state that all replicas share: what the registered functions save and load."""

    layout: Layout
    settings: RoundSettings
    functions: StateFns
    _readable: set[str] = field(default_factory=set)

    def saved(self) -> Flat:
        """Return what the registered functions save now."""
        return flatten({key: value() for key, (_, value) in sorted(self.functions.items())})

    def begin(self, store: PatientStore, position: RunPosition) -> tuple[RunPosition, bool]:
        """Return where a replica begins, and whether its weights were replaced by the newest state or the run's first.

        The first state of a run is that of the first replica to name it: rank 0, unless it stays away.
        """
        # Step 0 is not newer than 0, so the first state of a run is found below, by the record that names it.
        newest = self.newest(store, replace(position, step=0), margin=0)
        if newest is not None:
            return newest, True
        mine = published.describe(self.saved(), name=_name(position, 0), step=0)
        first = self._first(store, position, mine)
        if first.digest == mine.digest:
            return replace(position, base=first.digest), False
        if self._load(store, first):
            return replace(position, base=first.digest), True
        return self.wait_for_newer(store, position), True

    def wait_for_newer(self, store: PatientStore, position: RunPosition) -> RunPosition:
        """Ask for a state, and load it as soon as somebody has published one that is newer than mine.

        Raises StateUnreadable when the time is up, or when all who could publish one have finished. If the number of
        commits that the run needs is unknown, those get a grace to come back.
        """
        began = time.monotonic()
        alone_since: float | None = None
        while True:
            # Check this first: a replica that leaves has published its state before its goodbye.
            is_alone, now = self._is_alone(store, position), time.monotonic()
            alone_since = (now if alone_since is None else alone_since) if is_alone else None
            grace_is_over = alone_since is not None and now - alone_since >= self.settings.return_grace_s(
                position.commits
            )
            is_over = not self.functions or grace_is_over or now - began >= self.settings.timeout_s
            if (newer := self.newest(store, position, margin=0)) is not None:
                break
            if is_over:
                what = f"round {position.step} of generation {self.layout.generation} at {store.uri}"
                got = "no newer state to load, and a round whose mean is gone"
                expected = "one, or a replica that has not finished and could publish it"
                another = f"begin again with generation={self.layout.generation + 1}"
                fix = f"Use the model of a replica that has finished, or {another}."
                raise StateUnreadable(explain(what, got=got, expected=expected, fix=fix))
            store.put(self.layout.key("wanted", f"{position.rank:05d}"), b"")
            time.sleep(self.settings.poll_s)
        return newer

    def _is_alone(self, store: PatientStore, position: RunPosition) -> bool:
        """Return whether all other replicas that ever joined have all the commits that this one needs."""
        other_ranks = joined_ranks(store, self.layout) - {position.rank}
        return other_ranks <= read_departures(store, self.layout).finished_for(position.commits)

    def newest(self, store: PatientStore, position: RunPosition, *, margin: int) -> RunPosition | None:
        """Load the newest readable state that is more than `margin` steps ahead; return None if there is none."""
        for name in published_states(store, self.layout):
            if step_of(name) <= position.step + margin:
                return None
            state = published.read_state(store, self.layout, name)
            if state is not None and self._load(store, state):
                return self._position_after_load(store, position, state)
        return None

    def _position_after_load(
        self, store: PatientStore, position: RunPosition, state: published.PublishedState
    ) -> RunPosition:
        """Return where a replica is that has loaded a state."""
        # The members of the commit before the state are those that the next round waits for.
        last = read_commit(store, self.layout, state.step - 1)
        first_trial = position.first_trial if state.step == position.step else 0
        loaded = replace(position, step=state.step, base=state.base, last=last[1] if last else None)
        return replace(loaded, first_trial=first_trial)

    def numbers(self, position: RunPosition) -> str:
        """Return a digest of my weights, exact to the bit."""
        return published.describe(self.saved(), name=_name(position, position.step), step=position.step).numbers

    def load_matching(self, store: PatientStore, position: RunPosition, numbers: str) -> RunPosition | None:
        """Load the published state of this step whose tensors have this digest; return None if there is none."""
        for name in published_states(store, self.layout):
            if step_of(name) == position.step:
                state = published.read_state(store, self.layout, name)
                if state is not None and state.numbers == numbers and self._load(store, state):
                    return self._position_after_load(store, position, state)
        return None

    def publish(self, store: PatientStore, position: RunPosition) -> None:
        """Publish the state of this step, unless somebody has published it."""
        if self.newest_step(store) >= position.step:
            return
        flat = self.saved()
        state = published.describe(flat, name=_name(position, position.step), step=position.step)
        published.publish(store, self.layout, flat, replace(state, base=position.base))

    def is_due(self, store: PatientStore, position: RunPosition, every: int) -> bool:
        """Return whether to publish a state: every so many steps, or earlier if a replica has asked for one."""
        behind = position.step - max(0, self.newest_step(store))
        # Requests are deleted as soon as they are seen, so that one request publishes one state.
        request_keys = store.keys(self.layout.key("wanted")) if 0 < behind < every else []
        store.delete(request_keys)
        return behind >= every or bool(request_keys)

    def readable(self, store: PatientStore) -> list[str]:
        """Return the names of the states whose records can be read, newest first.

        A name alone proves nothing: a copy of a record under a later name would keep newer states from being published.
        """
        names = published_states(store, self.layout)
        self._readable &= set(names)
        self._readable |= {
            name for name in names if name not in self._readable and published.read_state(store, self.layout, name)
        }
        return [name for name in names if name in self._readable]

    def newest_step(self, store: PatientStore) -> int:
        """Return the step of the newest state whose record can be read; -1 if there is none."""
        names = self.readable(store)
        return step_of(names[0]) if names else -1

    def _first(
        self, store: PatientStore, position: RunPosition, mine: published.PublishedState
    ) -> published.PublishedState:
        """Return the run's first state. This replica publishes its own as that if no other is named in time."""
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
                chosen = self._readable_first_state(store)
                if chosen is None:
                    published.publish(store, self.layout, self.saved(), mine)
                key = self.layout.genesis(slot)
                store.create_verified(key, pack("genesis", self.layout.address(key), {"name": chosen or mine.name}))
                # If the record is unreadable, the next try uses the next slot.
                if self._genesis(store)[0] is not None:
                    continue
            time.sleep(self.settings.poll_s)

    def _readable_first_state(self, store: PatientStore) -> str | None:
        """Return the first state that others began with, if only the record that names it is damaged."""
        return next((name for name in sorted(self.readable(store)) if step_of(name) == 0), None)

    def _genesis(self, store: PatientStore) -> tuple[published.PublishedState | None, int]:
        """Return the run's first state, if readable, and the slot of the record that names it or would."""
        for slot in range(_MAX_SLOTS):
            key = self.layout.genesis(slot)
            name = self._read_genesis_name(store, key)
            first = None if name is None else published.read_state(store, self.layout, name)
            if first is not None or store.size(key) is None:
                return first, slot
        return None, _MAX_SLOTS

    def _read_genesis_name(self, store: PatientStore, key: str) -> str | None:
        def name(at: str, data: bytes) -> str:
            content = unpack_fields("genesis", at, data, "name")
            with as_record_error("genesis"):
                if parse_state(stated := checked_text(content["name"])) is None:
                    raise ValueError(f"{stated[:40]!r}, which is not the name of a state")
                return stated

        return read_record(store, self.layout, key, name)

    def _load(self, store: PatientStore, state: published.PublishedState) -> bool:
        """Load a state into the registered functions. Returns False if it cannot be read; nothing is loaded then."""
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
        """Return empty tensors of the shapes that a round of that step averages."""
        ...

    def apply(self, step: int, means: Sequence[Tensor]) -> None:
        """Make one outer step from the global weights with these means, as after a round."""
        ...

    def restore(self) -> None:
        """Copy the global weights into the model."""
        ...


class TorchftFollower:
    """Follows commits with torchft's DiLoCo, in the same order of calls as its `perform_sync`."""

    def __init__(self, diloco: Any) -> None:
        self._fragments: list[Any] = diloco._fragments

    def blanks(self, step: int) -> list[Tensor]:
        originals = self._fragment(step).original_parameters
        return [torch.empty_like(tensor) for tensor in originals.values()]

    def apply(self, step: int, means: Sequence[Tensor]) -> None:
        fragment = self._fragment(step)
        # Training may have moved the parameters; an outer step starts from the global weights.
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
