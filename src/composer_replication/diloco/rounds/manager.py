"""The manager that torchft's DiLoCo is given: its rounds are held over an object store."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_replication.diloco.payload import ErrorFeedback, PayloadKind
from composer_replication.diloco.rounds.heal import Follower
from composer_replication.diloco.rounds.membership import Membership
from composer_replication.diloco.rounds.patience import RoundError, Traffic
from composer_replication.diloco.rounds.records import MOST_WEIGHT
from composer_replication.diloco.rounds.running import Ended, RoundSettings, RunPosition
from composer_replication.diloco.store import ObjectStore, open_store
from composer_replication.errors import InputError, explain

_RAISED_AGAIN = (
    RuntimeError,
    ValueError,
    OSError,
    TypeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    MemoryError,
)
StateFns = tuple[Callable[[Any], None], Callable[[], Any]]


class Count(int):
    """A number that may be called, as torchft's manager has it, or read, as the known one has."""

    def __call__(self) -> int:
        return int(self)


class ObjectStoreManager:
    """Rounds of averaging over a store, in the form that torchft's DiLoCo takes for its manager.

    `store` is an ObjectStoreAllReduce (which knows rank, world and time limit), an ObjectStore, or a URI. A round ends
    within `timeout_s`, with a commit or with RoundTimeout, which names the ranks that are missing. The mean of `int8`
    and `int4` offers travels in bf16, unless `mean_payload` says otherwise.
    """

    _use_async_quorum = False

    def __init__(
        self,
        store: Any,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        generation: int | None = None,
        min_replicas: int | None = None,
        grace_s: float = 30.0,
        first_grace_s: float | None = None,
        timeout_s: float | None = None,
        poll_s: float | None = None,
        lease_s: float = 20.0,
        takeover: bool = False,
        payload: PayloadKind = "fp32",
        mean_payload: PayloadKind | None = None,
        weight: float | Callable[[], float] = 1.0,
        shard_bytes: int = 64 * 2**20,
        parallel: int = 4,
        state_every: int = 10,
        keep_rounds: int = 2,
    ) -> None:
        where = _find_place(store, rank, world_size, timeout_s, poll_s)
        sizes = (shard_bytes, parallel)
        self._settings = settings_of(where, min_replicas, (grace_s, first_grace_s), (payload, mean_payload), sizes)
        check(where.rank, self._settings, state_every, keep_rounds)
        self.rank, self.world_size, self.weight = where.rank, where.world_size, weight
        self.traffic = Traffic()
        self.history: list[Ended] = []
        self._objects = where.objects
        self._state_dict_fns: dict[str, StateFns] = {}
        self._pool = self._settings.threads()
        self._membership = self._outside(generation or 0, lease_s, takeover, state_every, keep_rounds)
        self._feedback: dict[int, ErrorFeedback] = {}
        self._round: _Round | None = None

    def _outside(
        self, generation: int, lease_s: float, takeover: bool, state_every: int, keep_rounds: int
    ) -> Membership:
        """My place in the run before I have joined it."""
        return Membership(
            objects=self._objects,
            traffic=self.traffic,
            settings=self._settings,
            generation=generation,
            place=RunPosition(self.rank, -1),
            functions=self._state_dict_fns,
            pool=self._pool,
            lease_s=lease_s,
            takeover=takeover,
            state_every=state_every,
            keep_rounds=keep_rounds,
        )

    # What DiLoCo calls.

    def register_state_dict_fn(self, key: str, load_fn: Callable[[Any], None], value: Callable[[], Any]) -> None:
        """Part of the global state: saved when it is published, loaded by a replica that is behind."""
        self._state_dict_fns[key] = (load_fn, value)

    def allow_state_dict_read(self) -> None:
        """A state is read in `start_quorum`, by the thread that trains: nothing to allow."""

    def disallow_state_dict_read(self) -> None:
        """See `allow_state_dict_read`."""

    def start_quorum(self, **_options: Any) -> None:
        """Open a round: join the run if this is the first, catch up with the others, publish a state that is due."""
        self._membership.begin_round()
        self._round = _Round()

    def wait_quorum(self) -> None:
        """Who takes part is decided when offers are in: nothing to wait for before."""

    def allreduce(self, tensor: Tensor, **_options: Any) -> RoundWork:
        """Average a tensor in place, with all others of its round; `payload` says in how many bits."""
        if self._round is None:
            self.start_quorum()
        assert self._round is not None
        if self._round.thread is not None:
            raise InputError("all-reduce after the round's tensors were complete: start_quorum() opens another")
        self._round.tensors.append(tensor)
        if len(self._round.tensors) == self._membership.num_tensors():
            self._round.start(self._run)
        return RoundWork(self)

    def should_commit(self, **_options: Any) -> bool:
        """Whether the round's mean is in its tensors; then the step advances."""
        ended = self._finish_round()
        self._round = None
        return self._membership.end_round(ended)

    def current_step(self) -> int:
        return self._membership.place.step

    @property
    def _step(self) -> int:
        return self._membership.place.step

    @property
    def num_participants(self) -> Count:
        last = self._membership.place.last
        return Count(self.world_size if last is None else len(last.members))

    def is_leader(self) -> bool:
        return self.rank == 0

    # What our own loop calls besides.

    def follow(self, follower: Follower) -> None:
        """Join the run now and begin where it stands; later, catch up without training in between."""
        self._membership.follower = follower
        self._membership.join()

    def end_after(self, commits: int) -> None:
        """Hold no round once the run has this many commits, also where this replica learns of them inside a round."""
        self._membership.end_after(commits)

    def agree_on_weights(self) -> None:
        """After the last round: the global weights of all replicas are equal to the bit, whatever their machines."""
        self._membership.agree_on_weights()

    def close(self) -> None:
        """Say goodbye, so that nobody waits for this replica, and publish the last state if that is its task.

        A replica that is closed while an exception is handled, as in a `finally`, or before the commits of `end_after`,
        has not finished: the others wait for it as for any that may be started again.
        """
        self._close(failed=sys.exc_info()[0] is not None)

    def _close(self, *, failed: bool) -> None:
        try:
            self._membership.leave(failed=failed)
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> ObjectStoreManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        self._close(failed=kind is not None)

    def _run(self, tensors: list[Tensor]) -> Ended:
        weight = self.weight() if callable(self.weight) else self.weight
        if not 0 < weight <= MOST_WEIGHT:
            raise InputError(explain("weight of a replica", got=weight, expected=f"above 0, at most {MOST_WEIGHT:g}"))
        membership = self._membership
        if membership.is_over:
            return Ended("over")
        weight = 0.0 if membership.healing else weight
        running = membership.running(membership.store, membership.vector(tensors), weight=weight)
        running.feedback = self._feedback_of(membership.place.step)
        return membership.hold(running)

    def _feedback_of(self, step: int) -> ErrorFeedback | None:
        if self._settings.payload == "fp32":
            return None
        return self._feedback.setdefault(step % self._membership.num_fragments, ErrorFeedback())

    def _finish_round(self) -> Ended:
        if self._round is None:
            self.start_quorum()
        assert self._round is not None
        ended = self._round.result(self._run)
        if not self._round.counted:
            self._round.counted = True
            self.history.append(ended)
            if ended.result == "heal":
                self._membership.heal()
        return ended


class _Round:
    """A round in its thread: it begins when its tensors are complete, while training may go on."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.thread: threading.Thread | None = None
        self.counted = False
        self._ended: Ended | None = None
        self._error: Exception | None = None

    def start(self, run: Callable[[list[Tensor]], Ended]) -> None:
        self.thread = threading.Thread(target=self._work, args=(run,), name="diloco-round", daemon=True)
        self.thread.start()

    def result(self, run: Callable[[list[Tensor]], Ended]) -> Ended:
        if self.thread is None:
            self.start(run)
        assert self.thread is not None
        self.thread.join()
        if self._error is not None:
            raise self._error
        if self._ended is None:
            raise RoundError("the thread of a round died; its traceback is above")
        return self._ended

    def _work(self, run: Callable[[list[Tensor]], Ended]) -> None:
        try:
            self._ended = run(self.tensors)
        except _RAISED_AGAIN as error:  # by the thread that waits
            self._error = error


class RoundWork:
    """What an all-reduce returns: `wait` ends with the round."""

    def __init__(self, manager: ObjectStoreManager) -> None:
        self._manager = manager
        self._future: torch.futures.Future[list[Tensor]] | None = None

    def wait(self, *_timeout: object) -> bool:
        self._manager._finish_round()
        if self._future is not None and not self._future.done():
            self._future.set_result([])
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Done when `wait` returns."""
        if self._future is None:
            self._future = torch.futures.Future()
        return self._future


# What a manager is given, as the settings of its rounds: defaults that follow from the rest, and what is refused.

# Feedback covers offers. A mean in integers would lose for good what is small beside its block's largest number, and
# whoever averages cannot keep that for the next one: anybody must be able to compute a damaged mean again, to the bit.
_MEAN_OF: dict[PayloadKind, PayloadKind] = {"int8": "bf16", "int4": "bf16"}


class Where(NamedTuple):
    """The store, who this replica is there, and how long a round may take."""

    objects: ObjectStore
    rank: int
    world_size: int
    timeout_s: float
    poll_s: float


def _find_place(
    store: Any, rank: int | None, world_size: int | None, timeout_s: float | None, poll_s: float | None
) -> Where:
    """Rank, world and limits of an ObjectStoreAllReduce, unless they are given."""
    objects: ObjectStore = open_store(store) if isinstance(store, str) else getattr(store, "objects", store)
    rank = getattr(store, "rank", None) if rank is None else rank
    world_size = getattr(store, "world_size", None) if world_size is None else world_size
    if rank is None or world_size is None:
        raise InputError(explain("manager", got=f"rank {rank}, world_size {world_size}", expected="both"))
    limits = (getattr(store, "timeout_s", 1800.0), getattr(store, "poll_interval_s", 1.0))
    chosen_limits = (limits[0] if timeout_s is None else timeout_s, limits[1] if poll_s is None else poll_s)
    return Where(objects, rank, world_size, *chosen_limits)


def settings_of(
    where: Where,
    min_replicas: int | None,
    graces_s: tuple[float, float | None],
    payloads: tuple[PayloadKind, PayloadKind | None],
    sizes: tuple[int, int],
) -> RoundSettings:
    """What all replicas agree on, with what follows from the rest where nobody said otherwise."""
    (grace_s, first_grace_s), (payload, mean_payload), (shard_bytes, parallel) = graces_s, payloads, sizes
    return RoundSettings(
        world_size=where.world_size,
        min_replicas=(where.world_size + 1) // 2 if min_replicas is None else min_replicas,
        grace_s=grace_s,
        first_grace_s=where.timeout_s / 2 if first_grace_s is None else first_grace_s,
        timeout_s=where.timeout_s,
        poll_s=where.poll_s,
        payload=payload,
        mean_payload=mean_payload or _MEAN_OF.get(payload, payload),
        shard_bytes=shard_bytes,
        parallel=parallel,
    )


def check(rank: int, settings: RoundSettings, state_every: int, keep_rounds: int) -> None:
    if not 0 <= rank < settings.world_size:
        raise InputError(explain("rank", got=rank, expected=f"0 to {settings.world_size - 1}"))
    if not 1 <= settings.min_replicas <= settings.world_size:
        expected = f"1 to {settings.world_size}"
        raise InputError(explain("min_replicas", got=settings.min_replicas, expected=expected))
    for name, value in (("state_every", state_every), ("keep_rounds", keep_rounds), ("parallel", settings.parallel)):
        if value < 1:
            raise InputError(explain(name, got=value, expected="at least 1"))
