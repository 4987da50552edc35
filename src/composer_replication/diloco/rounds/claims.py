"""Decide which process holds a rank, and which run is stored under a generation (the number of a run in the store).

The process with the highest claim on a rank holds it. A living holder cannot be replaced, but a dead one can. The
holder increments a counter (a heartbeat). A process that wants the rank watches this counter for the length of a lease,
measured by its own clock: if the counter changes, the holder is alive. Clocks of different machines are never compared.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from composer_replication.canonical_json import encode
from composer_replication.diloco.rounds.patience import (
    GenerationRefused,
    PatientStore,
    RankTaken,
    Replaced,
    RoundTimeout,
)
from composer_replication.diloco.rounds.reading import claim_numbers, newest_claim, read_goodbye, read_record
from composer_replication.diloco.rounds.records import (
    MAX_COUNTER,
    MAX_RANKS,
    MAX_RECORD_BYTES,
    Layout,
    OldRecord,
    RecordError,
    as_record_error,
    checked_int,
    pack,
    unpack,
    unpack_fields,
)
from composer_replication.diloco.store import MissingObject, ObjectStore, ObjectTooLarge, StoreError
from composer_replication.errors import explain

_BEATS_IN_A_LEASE = 4
_PAUSE_S = 0.05
# "gpu-node-3.local"; not "host\x1b[31m", which a terminal would act on
_HOST, _MAX_PID = re.compile(r"[A-Za-z0-9._-]{1,255}"), 2**32


def claim_rank(
    store: PatientStore,
    layout: Layout,
    rank: int,
    *,
    lease_s: float,
    takeover: bool,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Claim a rank, and return the number of the claim.

    Raises RankTaken if a living process holds the rank, and RoundTimeout if the claim cannot be read back within the
    store's time limit. With `takeover`, the previous holder is assumed to be dead.
    """
    nonce = uuid.uuid4().hex
    holder = {"nonce": nonce, "host": socket.gethostname(), "pid": os.getpid()}
    while True:
        numbers = sorted(claim_numbers(store, layout, rank), reverse=True)
        number = next((claim for claim in numbers if _is_real_claim(store, layout, rank, claim)), None)
        if number is not None and not takeover and read_goodbye(store, layout, rank, number) is None:
            _refuse_living_holder(store, layout, rank, number, lease_s, sleep)
        # Greater than the number of every earlier claim, including unreadable ones.
        mine = 1 + max(numbers, default=-1)
        key = layout.claim(rank, mine)
        store.create(key, pack("claim", layout.address(key), holder))
        # The answer to a create may be lost, so only the record itself shows which process won.
        record = read_record(store, layout, key, functools.partial(unpack, "claim"))
        if record is not None and record.get("nonce") == nonce:
            return mine
        if store.time_is_up:
            what = f"claim {mine} on rank {rank} at {store.uri}"
            got = "an unreadable claim" if record is None else "a claim of another process"
            raise RoundTimeout(explain(what, got=got, expected="the claim of this process", fix="Check the store."))
        sleep(_PAUSE_S)


def _is_real_claim(store: PatientStore, layout: Layout, rank: int, number: int) -> bool:
    """Return whether a process made this claim, which is certain if its record or its heartbeat can be read."""
    is_readable = read_record(store, layout, layout.claim(rank, number), functools.partial(unpack, "claim")) is not None
    return is_readable or _read_heartbeat(store, layout, rank, number) is not None


def refuse_if_replaced(store: PatientStore, layout: Layout, rank: int, claim: int) -> None:
    """Raise Replaced if another process has claimed the rank after this claim, which happens if this process was
    paused for longer than a lease.
    """
    newest = newest_claim(store, layout, rank, after=claim)
    if newest is not None:
        fix = "This process was paused for longer than its lease and has been replaced. End it."
        what = f"rank {rank} at {store.uri}"
        raise Replaced(explain(what, got=f"claim {newest} of another process", expected=f"claim {claim}", fix=fix))


def _refuse_living_holder(
    store: PatientStore, layout: Layout, rank: int, number: int, lease_s: float, sleep: Callable[[float], None]
) -> None:
    first = _read_heartbeat(store, layout, rank, number)
    until = time.monotonic() + lease_s
    # The counter is read twice as often as it is written, so that no heartbeat of a living holder is missed.
    while time.monotonic() < until:
        sleep(lease_s / (2 * _BEATS_IN_A_LEASE))
        now = _read_heartbeat(store, layout, rank, number)
        first = now if first is None else first
        is_alive = first is not None and now is not None and now > first
        if is_alive or newest_claim(store, layout, rank, after=number) is not None:
            holder = read_record(store, layout, layout.claim(rank, number), functools.partial(unpack, "claim")) or {}
            fix = "Give each replica its own rank, or end that process."
            what, got = f"rank {rank} at {store.uri}", f"a rank held by {_describe_holder(holder)}"
            raise RankTaken(explain(what, got=got, expected="a rank that no living process holds", fix=fix))


def _describe_holder(holder: Mapping[str, Any]) -> str:
    """Describe the holder of a rank. The record is not trusted: a malformed pid or host is not shown."""
    pid, host = holder.get("pid"), holder.get("host")
    process = f"pid {pid}" if type(pid) is int and 0 < pid < _MAX_PID else "without a valid pid"
    host_name = host if isinstance(host, str) and _HOST.fullmatch(host) else "a host without a valid name"
    return f"a living process, {process} on {host_name}"


def _read_heartbeat(store: PatientStore, layout: Layout, rank: int, number: int) -> int | None:
    """Return the heartbeat counter of a claim, or None if it cannot be read. None does not prove that the holder is
    dead.
    """

    def unpack_count(at: str, data: bytes) -> int:
        content = unpack_fields("beat", at, data, "count")
        with as_record_error("beat"):
            return checked_int(content["count"], below=MAX_COUNTER)

    return read_record(store, layout, layout.beat(rank, number), unpack_count)


class HeartbeatMonitor:
    """Observes whether the holder of a claim is alive, that is, whether its heartbeat counter changes within a
    lease.
    """

    def __init__(self, store: PatientStore, layout: Layout, rank: int, claim: int, lease_s: float) -> None:
        self._read_count = functools.partial(_read_heartbeat, store, layout, rank, claim)
        self._lease_s, self._count, self._changed_at = lease_s, self._read_count(), time.monotonic()

    def is_alive(self) -> bool:
        """Return whether the heartbeat counter has changed within the last lease."""
        count = self._read_count()
        if count is not None and count != self._count:
            self._count, self._changed_at = count, time.monotonic()
        return time.monotonic() - self._changed_at < self._lease_s


class Heartbeat:
    """A thread that increments the counter of a claim, to show that its process is alive."""

    def __init__(self, store: ObjectStore, layout: Layout, rank: int, claim: int, lease_s: float) -> None:
        self._store, self._every_s = store, lease_s / _BEATS_IN_A_LEASE
        self._key = layout.beat(rank, claim)
        self._address = layout.address(self._key)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="diloco-heart", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        count = 1
        while not self._stopped.wait(self._every_s):
            try:
                self._store.put(self._key, pack("beat", self._address, {"count": count}))
            # The store may be back at the next beat; a process looks dead only after a whole lease without one.
            except StoreError:
                continue
            count += 1


# The identity of a run: an id that every record holds, and the settings that all replicas agreed on. It is stored three
# times. The majority of readable copies wins, and a joining replica restores missing copies. Without a majority the run
# is refused, because replicas must never disagree about its id.

COPIES = 3
_IDENTITY_READS, _IDENTITY_PAUSE_S = 2, 0.5  # if copies differ, another replica may be writing them right now
# "9f86d081884c7d659a2feaa0c55ad015"; not with dashes
_RUN = re.compile(r"[0-9a-f]{32}")


class _RunIdentity(NamedTuple):
    """The identity of a run: the layout of its records, and the settings that its replicas agreed on."""

    layout: Layout
    settings: Mapping[str, Any]

    @property
    def world_size(self) -> int:
        return self.settings["world_size"]


def find_run(store: PatientStore, layout: Layout) -> _RunIdentity | None:
    """Return the run stored under a generation, or None if no copy of its identity can be read.

    Raises GenerationRefused if the run was started by an earlier version of this package, or if the readable copies
    disagree and none has a majority.
    """
    copies: list[dict[str, Any]] = []
    for read in range(_IDENTITY_READS):
        if read:
            time.sleep(_IDENTITY_PAUSE_S)
        copies = [about for copy in range(COPIES) if (about := _read_identity(store, layout, copy)) is not None]
        if not copies:
            _refuse_old_run(store, layout)
            return None
        counts = Counter(encode(about, where="about") for about in copies)
        about = max(copies, key=lambda about: counts[encode(about, where="about")])
        if 2 * counts[encode(about, where="about")] > len(copies):
            return _RunIdentity(replace(layout, run=about["run"]), about)
    got = f"{len(copies)} readable copies of its identity, for runs {', '.join(about['run'] for about in copies)}"
    fix = f"Delete the copies of the other runs ({layout.about(0)}*), or begin another generation."
    where = f"generation {layout.generation} at {store.uri}"
    raise GenerationRefused(explain(where, got=got, expected="a majority of equal copies", fix=fix))


def agree_on_run(store: PatientStore, layout: Layout, settings: Mapping[str, Any]) -> _RunIdentity | None:
    """Return the run stored under a generation, and start it with these settings if it does not exist yet. Returns
    None if no copy of its identity can be read back.
    """
    run = find_run(store, layout)
    about = {**settings, "run": uuid.uuid4().hex} if run is None else run.settings
    # Copies are created one after the other, so that replicas that start at the same time agree on the first copy.
    for copy in range(COPIES):
        if (stored := _read_identity(store, layout, copy)) is None:
            store.create_verified(layout.about(copy), pack("about", layout.address(layout.about(copy)), dict(about)))
            stored = _read_identity(store, layout, copy)
        if run is None and stored is not None:
            # The writer of the first readable copy has chosen the id of the run.
            about = stored
    return find_run(store, layout)


def _read_identity(store: PatientStore, layout: Layout, copy: int) -> dict[str, Any] | None:
    def unpack_identity(at: str, data: bytes) -> dict[str, Any]:
        content = unpack("about", at, data)
        with as_record_error("about"):
            checked_int(content["world_size"], below=MAX_RANKS)
            if not _RUN.fullmatch(str(content["run"])):
                raise ValueError("invalid run id")
        return content

    return read_record(store, layout, layout.about(copy), unpack_identity)


def _refuse_old_run(store: PatientStore, layout: Layout) -> None:
    key = layout.about(0)
    try:
        unpack("about", layout.address(key), store.get(key, most_bytes=MAX_RECORD_BYTES))
    except OldRecord as error:
        fix = "Finish the run with the version that began it, or begin a new run with another generation."
        where = f"generation {layout.generation} at {store.uri}"
        expected = "a run in the current format"
        got = "a run that an earlier version of this package began"
        raise GenerationRefused(explain(where, got=got, expected=expected, fix=fix)) from error
    except (RecordError, MissingObject, ObjectTooLarge):
        return
