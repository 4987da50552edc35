"""The manager that this package gives to torchft's DiLoCo. It holds its rounds over an object store.

`ObjectStoreManager` has the methods of torchft's manager that DiLoCo calls, and some more for our own outer loop. A
round runs in a thread of its own, so that training may continue while its tensors are exchanged.
"""

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
from composer_replication.diloco.rounds.records import MAX_WEIGHT
from composer_replication.diloco.rounds.running import Ended, RoundSettings, RunPosition
from composer_replication.diloco.store import ObjectStore, open_store
from composer_replication.errors import InputError, explain

# What a round raises. The thread that waits for the round raises it again.
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
    """A number that can also be called: torchft's manager has `num_participants` as a method, others as a property."""

    def __call__(self) -> int:
        return int(self)


class ObjectStoreManager:
    """Averages tensors in rounds over an object store, as the manager of torchft's DiLoCo.

    `store` is an ObjectStoreAllReduce (which knows rank, world size and time limit), an ObjectStore, or a URI. A round
    ends within `timeout_s`: with a commit, or with RoundTimeout, which names the missing ranks. Means of `int8` and
    `int4` offers are stored in bf16 unless `mean_payload` says otherwise.
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
        """Return the membership of this replica before it has joined the run."""
        return Membership(
            objects=self._objects,
            traffic=self.traffic,
            settings=self._settings,
            generation=generation,
            position=RunPosition(self.rank, -1),
            functions=self._state_dict_fns,
            pool=self._pool,
            lease_s=lease_s,
            takeover=takeover,
            state_every=state_every,
            keep_rounds=keep_rounds,
        )

    # Called by DiLoCo.

    def register_state_dict_fn(self, key: str, load_fn: Callable[[Any], None], value: Callable[[], Any]) -> None:
        """Register a part of the global state: `value` returns it to be published, `load_fn` loads it after a heal."""
        self._state_dict_fns[key] = (load_fn, value)

    def allow_state_dict_read(self) -> None:
        """Do nothing: a state is read in `start_quorum`, by the thread that trains."""

    def disallow_state_dict_read(self) -> None:
        """Do nothing; see `allow_state_dict_read`."""

    def start_quorum(self, **_options: Any) -> None:
        """Begin a round: join the run before the first one, catch up with the others, publish a state if one is due."""
        self._membership.begin_round()
        self._round = _Round()

    def wait_quorum(self) -> None:
        """Do nothing: the members of a round are decided when the offers are in."""

    def allreduce(self, tensor: Tensor, **_options: Any) -> RoundWork:
        """Average a tensor in position, together with all others of its round, in the payload kind of the manager."""
        if self._round is None:
            self.start_quorum()
        assert self._round is not None
        if self._round.thread is not None:
            raise InputError(
                "allreduce() called after the last tensor of the round; call start_quorum() to begin the next round"
            )
        self._round.tensors.append(tensor)
        if len(self._round.tensors) == self._membership.num_tensors():
            self._round.start(self._run)
        return RoundWork(self)

    def should_commit(self, **_options: Any) -> bool:
        """Wait for the round. Returns whether its mean is in its tensors; if so, the step has advanced."""
        ended = self._finish_round()
        self._round = None
        return self._membership.end_round(ended)

    def current_step(self) -> int:
        """Return the number of commits so far."""
        return self._membership.position.step

    @property
    def _step(self) -> int:
        return self._membership.position.step

    @property
    def num_participants(self) -> Count:
        """The number of members of the last commit; of the whole world before the first one."""
        last = self._membership.position.last
        return Count(self.world_size if last is None else len(last.members))

    def is_leader(self) -> bool:
        """Return whether this is rank 0."""
        return self.rank == 0

    # Called by our own outer loop and by trainers.

    def follow(self, follower: Follower) -> None:
        """Join the run now and continue from its weights; `follower` applies commits without training in between."""
        self._membership.follower = follower
        self._membership.join()

    def end_after(self, commits: int) -> None:
        """Hold no round once the run has this many commits, even if this replica learns of them within a round."""
        self._membership.end_after(commits)

    def agree_on_weights(self) -> None:
        """Make the global weights of all replicas equal to the bit; call it after the last round."""
        self._membership.agree_on_weights()

    def close(self) -> None:
        """Write a goodbye, so that nobody waits for this replica, and publish the last state if that is its task.

        A replica that is closed while an exception is handled, as in a `finally`, or before the commits of `end_after`,
        has not finished: the others wait for it, because it may be started again.
        """
        self._close(failed=sys.exc_info()[0] is not None)

    def _close(self, *, failed: bool) -> None:
        try:
            self._membership.leave(failed=failed)
        finally:
            # Prefetched reads that nobody needs are dropped.
            self._pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> ObjectStoreManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        self._close(failed=kind is not None)

    def _run(self, tensors: list[Tensor]) -> Ended:
        weight = self.weight() if callable(self.weight) else self.weight
        if not 0 < weight <= MAX_WEIGHT:
            raise InputError(explain("weight of a replica", got=weight, expected=f"above 0, at most {MAX_WEIGHT:g}"))
        membership = self._membership
        # The run may have ended while this round was trained for; then its tensors stay as they are.
        if membership.is_over:
            return Ended("over")
        # Weights that were trained from another state than the global one must not be averaged.
        weight = 0.0 if membership.healing else weight
        running = membership.running(membership.store, membership.vector(tensors), weight=weight)
        running.feedback = self._feedback_of(membership.position.step)
        return membership.hold(running)

    def _feedback_of(self, step: int) -> ErrorFeedback | None:
        """Return the error feedback of the fragment of this step; None if nothing is rounded."""
        if self._settings.payload == "fp32":
            return None
        return self._feedback.setdefault(step % self._membership.num_fragments, ErrorFeedback())

    def _finish_round(self) -> Ended:
        if self._round is None:
            self.start_quorum()
        assert self._round is not None
        ended = self._round.result(self._run)
        # Both `wait` and `should_commit` come here, and DiLoCo may call either first.
        if not self._round.counted:
            self._round.counted = True
            self.history.append(ended)
            if ended.result == "heal":
                self._membership.heal()
        return ended


class _Round:
    """A round in its thread, which starts when all tensors are there, while training may continue."""

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
            raise RoundError("the thread of a round died; its traceback is printed above")
        return self._ended

    def _work(self, run: Callable[[list[Tensor]], Ended]) -> None:
        try:
            self._ended = run(self.tensors)
        except _RAISED_AGAIN as error:
            # Raised again by the thread that waits for the round.
            self._error = error


class RoundWork:
    """The handle that `allreduce` returns. `wait` returns when the round is over."""

    def __init__(self, manager: ObjectStoreManager) -> None:
        self._manager = manager
        self._future: torch.futures.Future[list[Tensor]] | None = None

    def wait(self, *_timeout: object) -> bool:
        self._manager._finish_round()
        if self._future is not None and not self._future.done():
            self._future.set_result([])
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future that is done when `wait` returns."""
        if self._future is None:
            self._future = torch.futures.Future()
        return self._future


# Error feedback covers offers, not means. In a mean of integers, a number that is small beside the largest of its block
# would be lost for good: the replica that averages cannot keep the residual for its next mean, because any other
# replica must be able to compute a damaged mean again, to the bit.
_MEAN_OF: dict[PayloadKind, PayloadKind] = {"int8": "bf16", "int4": "bf16"}


class Where(NamedTuple):
    """The store, the rank of this replica, and how long a round may take."""

    objects: ObjectStore
    rank: int
    world_size: int
    timeout_s: float
    poll_s: float


def _find_place(
    store: Any, rank: int | None, world_size: int | None, timeout_s: float | None, poll_s: float | None
) -> Where:
    """Return the store with rank, world size and limits: the arguments, or else those of an ObjectStoreAllReduce."""
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
    """Return the settings of the rounds, with defaults that depend on other settings."""
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
    """Raise InputError for a rank or settings out of range."""
    if not 0 <= rank < settings.world_size:
        raise InputError(explain("rank", got=rank, expected=f"0 to {settings.world_size - 1}"))
    if not 1 <= settings.min_replicas <= settings.world_size:
        expected = f"1 to {settings.world_size}"
        raise InputError(explain("min_replicas", got=settings.min_replicas, expected=expected))
    for name, value in (("state_every", state_every), ("keep_rounds", keep_rounds), ("parallel", settings.parallel)):
        if value < 1:
            raise InputError(explain(name, got=value, expected="at least 1"))
