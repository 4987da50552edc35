"""What a manager is given, as the settings of its rounds: defaults that follow from the rest, and what is refused."""

from __future__ import annotations

from typing import Any, NamedTuple

from composer_replication.diloco.payload import PayloadKind
from composer_replication.diloco.rounds.running import Settings
from composer_replication.diloco.store import ObjectStore, open_store
from composer_replication.errors import InputError, explain

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


def find_place(
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
) -> Settings:
    """What all replicas agree on, with what follows from the rest where nobody said otherwise."""
    (grace_s, first_grace_s), (payload, mean_payload), (shard_bytes, parallel) = graces_s, payloads, sizes
    return Settings(
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


def check(rank: int, settings: Settings, state_every: int, keep_rounds: int) -> None:
    if not 0 <= rank < settings.world_size:
        raise InputError(explain("rank", got=rank, expected=f"0 to {settings.world_size - 1}"))
    if not 1 <= settings.min_replicas <= settings.world_size:
        expected = f"1 to {settings.world_size}"
        raise InputError(explain("min_replicas", got=settings.min_replicas, expected=expected))
    for name, value in (("state_every", state_every), ("keep_rounds", keep_rounds), ("parallel", settings.parallel)):
        if value < 1:
            raise InputError(explain(name, got=value, expected="at least 1"))
