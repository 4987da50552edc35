"""Define the settings of a run's rounds, with their defaults and limits, and a replica's position in its run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from composer_replication.diloco.payload import PayloadKind
from composer_replication.diloco.rounds.records import MAX_RANKS, RoundOutcome
from composer_replication.errors import InputError, explain

_MAX_RETURN_S = 4.0  # so that a late replica of a finished run ends within 5 s
# Error feedback covers offers, not means. In a mean of integers, a number that is small beside the largest of its block
# would be lost for good: the replica that averages cannot keep the residual for its next mean, because any other
# replica must be able to compute a damaged mean again, to the bit.
_DEFAULT_MEAN_PAYLOAD: dict[PayloadKind, PayloadKind] = {"int8": "bf16", "int4": "bf16"}


@dataclass(frozen=True)
class RoundSettings:
    """The settings of a run's rounds: those that all replicas agree on, and the waiting times of this replica."""

    world_size: int
    min_replicas: int
    grace_s: float
    first_grace_s: float
    timeout_s: float
    poll_s: float
    payload: PayloadKind
    mean_payload: PayloadKind
    shard_bytes: int
    parallel: int
    excludes_outliers: bool = True  # whether offers far larger than the others' get no weight

    def __post_init__(self) -> None:
        # More members would not fit into a record.
        if self.world_size >= MAX_RANKS:
            raise InputError(explain("world_size", got=f"{self.world_size:,}", expected=f"fewer than {MAX_RANKS:,}"))

    @classmethod
    def with_defaults(
        cls,
        world_size: int,
        *,
        min_replicas: int | None,
        grace_s: float,
        first_grace_s: float | None,
        timeout_s: float,
        poll_s: float,
        payload: PayloadKind,
        mean_payload: PayloadKind | None,
        shard_bytes: int,
        parallel: int,
    ) -> RoundSettings:
        """Return settings in which missing values are derived from the others. Raises InputError if the quorum is
        out of range.
        """
        settings = cls(
            world_size=world_size,
            min_replicas=(world_size + 1) // 2 if min_replicas is None else min_replicas,
            grace_s=grace_s,
            first_grace_s=timeout_s / 2 if first_grace_s is None else first_grace_s,
            timeout_s=timeout_s,
            poll_s=poll_s,
            payload=payload,
            mean_payload=mean_payload or _DEFAULT_MEAN_PAYLOAD.get(payload, payload),
            shard_bytes=shard_bytes,
            parallel=parallel,
        )
        if not 1 <= settings.min_replicas <= world_size:
            raise InputError(explain("min_replicas", got=settings.min_replicas, expected=f"1 to {world_size}"))
        return settings

    @property
    def payload_kinds(self) -> tuple[PayloadKind, PayloadKind]:
        """The payload kind of offers and that of means."""
        return self.payload, self.mean_payload

    def return_grace_s(self, commits: int | None) -> float:
        """Return how many seconds a replica waits for finished peers to return when a quorum is impossible without
        them.

        A replica that knows how many commits it needs (`commits`) does not wait, because it counts a peer as finished
        only if that peer has as many. A replica that does not know the number waits, because a peer may only be paused,
        or may be restarted for more commits.
        """
        return 0.0 if commits is not None else min(self.first_grace_s, _MAX_RETURN_S)

    def make_pool(self) -> ThreadPoolExecutor:
        """Return a thread pool for requests, with `parallel` threads for each direction of transfer."""
        return ThreadPoolExecutor(2 * self.parallel, thread_name_prefix="diloco")


@dataclass(frozen=True)
class RunPosition:
    """The position of a replica in its run: its claim, its step, and the history of commits that its weights come
    from.
    """

    rank: int
    claim: int
    step: int = 0
    base: str = ""
    last: RoundOutcome | None = None  # the commit that led to this step
    first_trial: int = 0
    commits: int | None = None  # how many the run needs; None if unknown
