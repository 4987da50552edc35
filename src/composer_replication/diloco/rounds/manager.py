"""Provide a manager for torchft's DiLoCo that averages weights in rounds over an object store.

`ObjectStoreManager` has the methods of torchft's manager that DiLoCo calls, and a few more for our own outer loop. Each
round runs in its own thread, so that training may continue while tensors are exchanged.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from composer_replication.diloco.payload import ErrorFeedback, PayloadKind
from composer_replication.diloco.rounds.patience import RoundError, Traffic
from composer_replication.diloco.rounds.records import MAX_WEIGHT
from composer_replication.diloco.rounds.replica_lifecycle import Follower, Membership
from composer_replication.diloco.rounds.round import RoundResult
from composer_replication.diloco.rounds.settings import RoundSettings, RunPosition
from composer_replication.diloco.store import ObjectStore, open_store
from composer_replication.errors import InputError, explain

# The exceptions of a round that are raised again in the thread that waits for it.
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


class _Count(int):
    """An int that can also be called, because `num_participants` is a method in torchft's manager but a property in
    other managers.
    """

    def __call__(self) -> int:
        return int(self)


class ObjectStoreManager:
    """A manager for torchft's DiLoCo that averages tensors in rounds over an object store.

    `store` is an ObjectStoreAllReduce (which provides rank, world size and time limit), an ObjectStore, or a URI. A
    round ends within `timeout_s`, either with a commit or with RoundTimeout, which names the missing ranks. Means of
    `int8` and `int4` offers are stored in bf16 unless `mean_payload` says otherwise.
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
        self._objects, self.rank, self.world_size = _find_store(store, rank, world_size)
        self._settings = RoundSettings.with_defaults(
            self.world_size,
            timeout_s=getattr(store, "timeout_s", 1800.0) if timeout_s is None else timeout_s,
            poll_s=getattr(store, "poll_interval_s", 1.0) if poll_s is None else poll_s,
            min_replicas=min_replicas,
            grace_s=grace_s,
            first_grace_s=first_grace_s,
            payload=payload,
            mean_payload=mean_payload,
            shard_bytes=shard_bytes,
            parallel=parallel,
        )
        if not 0 <= self.rank < self.world_size:
            raise InputError(explain("rank", got=self.rank, expected=f"0 to {self.world_size - 1}"))
        for name, value in (("state_every", state_every), ("keep_rounds", keep_rounds), ("parallel", parallel)):
            if value < 1:
                raise InputError(explain(name, got=value, expected="at least 1"))
        self.weight = weight
        self.traffic = Traffic()
        self.history: list[RoundResult] = []
        self._state_dict_fns: dict[str, StateFns] = {}
        self._pool = self._settings.make_pool()
        self._membership = Membership(
            objects=self._objects,
            traffic=self.traffic,
            settings=self._settings,
            generation=generation or 0,
            position=RunPosition(self.rank, -1),
            functions=self._state_dict_fns,
            pool=self._pool,
            lease_s=lease_s,
            takeover=takeover,
            state_every=state_every,
            keep_rounds=keep_rounds,
        )
        self._feedback: dict[int, ErrorFeedback] = {}
        self._round: _Round | None = None

    # Called by DiLoCo.

    def register_state_dict_fn(self, key: str, load_fn: Callable[[Any], None], value: Callable[[], Any]) -> None:
        """Register a part of the global state: `value` returns it for publishing, and `load_fn` loads it when the
        replica has to load a newer state.
        """
        self._state_dict_fns[key] = (load_fn, value)

    def allow_state_dict_read(self) -> None:
        """Do nothing, because the training thread itself reads states, in `start_quorum`."""

    def disallow_state_dict_read(self) -> None:
        """Do nothing, for the same reason as `allow_state_dict_read`."""

    def start_quorum(self, **_options: Any) -> None:
        """Begin a round: join the run if needed, catch up with the others, and publish a state if one is due."""
        self._membership.begin_round()
        self._round = _Round()

    def wait_quorum(self) -> None:
        """Do nothing, because the members of a round are decided only after the offers have been made."""

    def allreduce(self, tensor: Tensor, **_options: Any) -> RoundWork:
        """Average a tensor in place, in the same round as all other tensors passed since `start_quorum`. Returns a
        handle to wait for.
        """
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
        """Wait for the round to end, and return whether it was committed. If so, its tensors now hold the mean."""
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
    def num_participants(self) -> _Count:
        """The number of members of the last commit; before the first commit, the world size."""
        last = self._membership.position.last
        return _Count(self.world_size if last is None else len(last.members))

    def is_leader(self) -> bool:
        """Return whether this replica has rank 0."""
        return self.rank == 0

    # Called by our own outer loop and by trainers.

    def follow(self, follower: Follower) -> None:
        """Join the run now, and continue from its current weights. `follower` applies commits between rounds."""
        self._membership.follower = follower
        self._membership.join()

    def end_after(self, commits: int) -> None:
        """Set the number of commits after which the run ends. The limit also applies to a round that is already
        under way.
        """
        self._membership.end_after(commits)

    def agree_on_weights(self) -> None:
        """Make the global weights of all replicas bit-identical. Call this after the last round."""
        self._membership.agree_on_weights()

    def close(self) -> None:
        """Leave the run, so that the other replicas do not wait for this one. The first member also publishes the last
        state.

        A replica that is closed during exception handling, or before it has the number of commits set by `end_after`,
        counts as unfinished: the other replicas expect that it may be restarted.
        """
        self._close(failed=sys.exc_info()[0] is not None)

    def _close(self, *, failed: bool) -> None:
        try:
            self._membership.leave(failed=failed)
        finally:
            # Cancels prefetched reads that are not needed any more.
            self._pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> ObjectStoreManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        self._close(failed=kind is not None)

    def _run(self, tensors: list[Tensor]) -> RoundResult:
        weight = self.weight() if callable(self.weight) else self.weight
        if not 0 < weight <= MAX_WEIGHT:
            raise InputError(
                explain("weight of a replica", got=weight, expected=f"a number above 0, and at most {MAX_WEIGHT:g}")
            )
        membership = self._membership
        # If the run has ended during the training before this round, the tensors remain unchanged.
        if membership.is_over:
            return RoundResult("over")
        # What was trained from other weights than the global ones must not be averaged.
        weight = 0.0 if membership.healing else weight
        vector, feedback = membership.make_vector(tensors), self._get_feedback(membership.position.step)
        return membership.run_round(membership.new_round(membership.store, vector, weight=weight, feedback=feedback))

    def _get_feedback(self, step: int) -> ErrorFeedback | None:
        """Return the error feedback for the fragment that is exchanged at this step, or None if payloads are not
        rounded.
        """
        if self._settings.payload == "fp32":
            return None
        return self._feedback.setdefault(step % self._membership.num_fragments, ErrorFeedback())

    def _finish_round(self) -> RoundResult:
        if self._round is None:
            self.start_quorum()
        assert self._round is not None
        ended = self._round.result(self._run)
        # DiLoCo may call `wait` or `should_commit` first; only the first call records the result.
        if not self._round.is_recorded:
            self._round.is_recorded = True
            self.history.append(ended)
            if ended.result == "heal":
                self._membership.heal()
        return ended


class _Round:
    """A round and the thread that runs it. The thread starts as soon as all tensors have been passed to `allreduce`."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.thread: threading.Thread | None = None
        self.is_recorded = False
        self._ended: RoundResult | None = None
        self._error: Exception | None = None

    def start(self, run: Callable[[list[Tensor]], RoundResult]) -> None:
        self.thread = threading.Thread(target=self._run_and_store, args=(run,), name="diloco-round", daemon=True)
        self.thread.start()

    def result(self, run: Callable[[list[Tensor]], RoundResult]) -> RoundResult:
        if self.thread is None:
            self.start(run)
        assert self.thread is not None
        self.thread.join()
        if self._error is not None:
            raise self._error
        if self._ended is None:
            raise RoundError("the thread of a round died; its traceback is printed above")
        return self._ended

    def _run_and_store(self, run: Callable[[list[Tensor]], RoundResult]) -> None:
        try:
            self._ended = run(self.tensors)
        except _RAISED_AGAIN as error:
            # Raised again by the thread that waits for the round.
            self._error = error


class RoundWork:
    """The handle that `allreduce` returns. Its `wait` method returns when the round has ended."""

    def __init__(self, manager: ObjectStoreManager) -> None:
        self._manager = manager
        self._future: torch.futures.Future[list[Tensor]] | None = None

    def wait(self, *_timeout: object) -> bool:
        self._manager._finish_round()
        if self._future is not None and not self._future.done():
            self._future.set_result([])
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future that is completed by `wait`."""
        if self._future is None:
            self._future = torch.futures.Future()
        return self._future


def _find_store(store: Any, rank: int | None, world_size: int | None) -> tuple[ObjectStore, int, int]:
    """Return the store, the rank and the world size. A rank or world size of None is taken from the
    ObjectStoreAllReduce passed as `store`.
    """
    objects: ObjectStore = open_store(store) if isinstance(store, str) else getattr(store, "objects", store)
    rank = getattr(store, "rank", None) if rank is None else rank
    world_size = getattr(store, "world_size", None) if world_size is None else world_size
    if rank is None or world_size is None:
        raise InputError(
            explain("manager", got=f"rank {rank}, world_size {world_size}", expected="a rank and a world size")
        )
    return objects, rank, world_size
