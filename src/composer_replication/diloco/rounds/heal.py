"""Publish the global state of a run, and load it into replicas that have fallen behind.

`TorchftFollower` applies the commits that followed a loaded state, so that restarted replicas continue from the last
commit. Without a follower only the outer loop itself can apply commits, one in each of its rounds.
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

_MAX_SLOTS = 100  # for the record that names the first state; a slot is used when all earlier ones are damaged

StateFns = MutableMapping[str, tuple[Callable[[Any], None], Callable[[], Any]]]


@dataclass
class GlobalState:
    """The state that all replicas share: what the registered state functions return and load."""

    layout: Layout
    settings: RoundSettings
    functions: StateFns
    _readable: set[str] = field(default_factory=set)

    def saved(self) -> Flat:
        """Return the current state of the registered functions."""
        return flatten({key: value() for key, (_, value) in sorted(self.functions.items())})

    def begin(self, store: PatientStore, position: RunPosition) -> tuple[RunPosition, bool]:
        """Return the position at which a replica joins, and whether its weights were replaced.

        They are replaced by the newest state or, before there is one, by the first state of the run, which is that of
        rank 0, or of another replica if rank 0 does not join in time.
        """
        # `newest` never loads a state of step 0: the record "genesis" names the first state of a run.
        newest = self.newest(store, replace(position, step=0), margin=0)
        if newest is not None:
            return newest, True
        mine = published.describe(self.saved(), name=_state_name(position, 0), step=0)
        first = self._agree_on_first_state(store, position, mine)
        if first.digest == mine.digest:
            return replace(position, base=first.digest), False
        if self._load(store, first):
            return replace(position, base=first.digest), True
        return self.wait_for_newer(store, position), True

    def wait_for_newer(self, store: PatientStore, position: RunPosition) -> RunPosition:
        """Request a state, and load it as soon as one is published that is newer than mine.

        Raises StateUnreadable when the time is up, or when all replicas that could publish one have finished. If the
        number of commits of the run is unknown, those replicas get a grace period to return.
        """
        began = time.monotonic()
        alone_since: float | None = None
        while True:
            # Checked before looking for a state, because a replica publishes its last state before its goodbye.
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
                got = "no newer state to load, and a round whose mean was deleted"
                expected = "a newer state, or an unfinished replica that could publish it"
                another = f"begin again with generation={self.layout.generation + 1}"
                fix = f"Use the model of a replica that has finished, or {another}."
                raise StateUnreadable(explain(what, got=got, expected=expected, fix=fix))
            store.put(self.layout.key("wanted", f"{position.rank:05d}"), b"")
            time.sleep(self.settings.poll_s)
        return newer

    def _is_alone(self, store: PatientStore, position: RunPosition) -> bool:
        """Return whether all other replicas that ever joined have finished with the commits that this one needs."""
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
        """Return the position of a replica that has loaded a state."""
        # The next round waits for the members of the last commit before the state.
        last = read_commit(store, self.layout, state.step - 1)
        first_trial = position.first_trial if state.step == position.step else 0
        loaded = replace(position, step=state.step, base=state.base, last=last[1] if last else None)
        return replace(loaded, first_trial=first_trial)

    def weights_digest(self, position: RunPosition) -> str:
        """Return a digest of all bits of my weights."""
        return published.describe(
            self.saved(), name=_state_name(position, position.step), step=position.step
        ).tensor_digest

    def load_matching(self, store: PatientStore, position: RunPosition, weights_digest: str) -> RunPosition | None:
        """Load the published state of this step whose tensors have this digest; return None if there is none."""
        for name in published_states(store, self.layout):
            if step_of(name) == position.step:
                state = published.read_state(store, self.layout, name)
                if state is not None and state.tensor_digest == weights_digest and self._load(store, state):
                    return self._position_after_load(store, position, state)
        return None

    def publish(self, store: PatientStore, position: RunPosition) -> None:
        """Publish the state of this step, unless it or a later one is published."""
        if self.newest_step(store) >= position.step:
            return
        flat = self.saved()
        state = published.describe(flat, name=_state_name(position, position.step), step=position.step)
        published.publish(store, self.layout, flat, replace(state, base=position.base))

    def is_due(self, store: PatientStore, position: RunPosition, every: int) -> bool:
        """Return whether to publish a state: after `every` steps, or earlier if a replica has requested one."""
        steps_since = position.step - max(0, self.newest_step(store))
        # Requests are deleted as soon as they are read, so that each leads to a single state.
        request_keys = store.keys(self.layout.key("wanted")) if 0 < steps_since < every else []
        store.delete(request_keys)
        return steps_since >= every or bool(request_keys)

    def readable_names(self, store: PatientStore) -> list[str]:
        """Return the names of the states whose records can be read, newest first.

        The record is read because a name is no proof: a stray object with a later step in its name would keep newer
        states from being published.
        """
        names = published_states(store, self.layout)
        self._readable &= set(names)
        self._readable |= {
            name for name in names if name not in self._readable and published.read_state(store, self.layout, name)
        }
        return [name for name in names if name in self._readable]

    def newest_step(self, store: PatientStore) -> int:
        """Return the step of the newest state whose record can be read; -1 if there is none."""
        names = self.readable_names(store)
        return step_of(names[0]) if names else -1

    def _agree_on_first_state(
        self, store: PatientStore, position: RunPosition, mine: published.PublishedState
    ) -> published.PublishedState:
        """Return the run's first state. If none is named in time, this replica publishes and names its own."""
        now = time.monotonic()
        until, rank_0_until = now + self.settings.timeout_s, now + (self.settings.first_grace_s if position.rank else 0)
        while True:
            first, slot = self._read_genesis(store)
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
                # If the record cannot be read back, the next iteration uses the next slot.
                if self._read_genesis(store)[0] is not None:
                    continue
            time.sleep(self.settings.poll_s)

    def _readable_first_state(self, store: PatientStore) -> str | None:
        """Return the name of a published state of step 0, in case only the record that names it is damaged."""
        return next((name for name in sorted(self.readable_names(store)) if step_of(name) == 0), None)

    def _read_genesis(self, store: PatientStore) -> tuple[published.PublishedState | None, int]:
        """Return the run's first state, or None, and the slot of the record that names it or that should be written."""
        for slot in range(_MAX_SLOTS):
            key = self.layout.genesis(slot)
            name = self._read_genesis_name(store, key)
            first = None if name is None else published.read_state(store, self.layout, name)
            if first is not None or store.size(key) is None:
                return first, slot
        return None, _MAX_SLOTS

    def _read_genesis_name(self, store: PatientStore, key: str) -> str | None:
        def unpack_name(at: str, data: bytes) -> str:
            content = unpack_fields("genesis", at, data, "name")
            with as_record_error("genesis"):
                if parse_state(stated := checked_text(content["name"])) is None:
                    raise ValueError(f"{stated[:40]!r}, which is not the name of a state")
                return stated

        return read_record(store, self.layout, key, unpack_name)

    def _load(self, store: PatientStore, state: published.PublishedState) -> bool:
        """Load a state into the registered functions. Returns False, and loads nothing, if it cannot be read."""
        content = published.fetch(store, self.layout, state, self.saved().outline())
        if content is None:
            return False
        for key, (load_fn, _) in self.functions.items():
            load_fn(content[key])
        return True


def _state_name(position: RunPosition, step: int) -> str:
    return f"{step:08d}.{position.rank:05d}.{position.claim}"


class Follower(Protocol):
    """The part of an outer loop with which a manager applies commits between two rounds."""

    def blanks(self, step: int) -> list[Tensor]:
        """Return uninitialized tensors in the shapes that a round of this step averages."""
        ...

    def apply(self, step: int, means: Sequence[Tensor]) -> None:
        """Make one outer step with these means, starting from the global weights, as after a round."""
        ...

    def restore(self) -> None:
        """Copy the global weights into the model."""
        ...


class TorchftFollower:
    """Applies commits with torchft's DiLoCo, by the same calls as its `perform_sync`."""

    def __init__(self, diloco: Any) -> None:
        self._fragments: list[Any] = diloco._fragments

    def blanks(self, step: int) -> list[Tensor]:
        originals = self._fragment(step).original_parameters
        return [torch.empty_like(tensor) for tensor in originals.values()]

    def apply(self, step: int, means: Sequence[Tensor]) -> None:
        fragment = self._fragment(step)
        # Training may have changed the parameters, but an outer step starts from the global weights.
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
