"""Who holds a rank: the process with the highest claim. A living holder is not pushed aside; a dead one is replaced.

The holder writes a counter now and then. Whoever wants its rank looks at that counter for the length of a lease, by its
own clock: one that moves belongs to a living process, whatever the two clocks say.
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
from composer_replication.diloco.rounds.reading import (
    claim_numbers,
    newest_claim,
    read_goodbye,
    read_record,
)
from composer_replication.diloco.rounds.records import (
    MOST_RANKS,
    MOST_RECORD_BYTES,
    MOST_TRIALS,
    Layout,
    OldRecord,
    RecordError,
    fields_of,
    pack,
    refusing,
    unpack,
    whole,
)
from composer_replication.diloco.store import (
    MissingObject,
    ObjectStore,
    ObjectTooLarge,
    StoreError,
)
from composer_replication.errors import explain

_BEATS_IN_A_LEASE = 4
_PAUSE_S = 0.05
_HOST, _MOST_PID = re.compile(r"[A-Za-z0-9._-]{1,255}"), 2**32


def take_rank(
    store: PatientStore,
    layout: Layout,
    rank: int,
    *,
    lease_s: float,
    takeover: bool,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """The number of a claim of mine on a rank. RankTaken where a living process holds it; RoundTimeout where mine
    cannot be read until the store's patience is over.

    `takeover`: whoever started this process knows that the one before is dead.
    """
    nonce = uuid.uuid4().hex
    holder = {"nonce": nonce, "host": socket.gethostname(), "pid": os.getpid()}
    while True:
        numbers = sorted(claim_numbers(store, layout, rank), reverse=True)
        number = next((claim for claim in numbers if _was_made(store, layout, rank, claim)), None)
        if number is not None and not takeover and read_goodbye(store, layout, rank, number) is None:
            _refuse_a_living_holder(store, layout, rank, number, lease_s, sleep)
        mine = 1 + max(numbers, default=-1)  # past what is there and cannot be read
        key = layout.claim(rank, mine)
        store.create(key, pack("claim", layout.address(key), holder))
        # The answer of a create may be lost: what is there says who won.
        won = read_record(store, layout, key, functools.partial(unpack, "claim"))
        if won is not None and won.get("nonce") == nonce:
            return mine
        if store.time_is_up:
            what = f"claim {mine} on rank {rank} at {store.uri}"
            got = "one that cannot be read" if won is None else "that of another process"
            raise RoundTimeout(explain(what, got=got, expected="mine, in time", fix="Look at the store."))
        sleep(_PAUSE_S)


def _was_made(store: PatientStore, layout: Layout, rank: int, number: int) -> bool:
    """Return whether some process made this claim: one of its two records can be read."""
    is_claim = read_record(store, layout, layout.claim(rank, number), functools.partial(unpack, "claim")) is not None
    return is_claim or _beat(store, layout, rank, number) is not None


def refuse_if_replaced(store: PatientStore, layout: Layout, rank: int, claim: int) -> None:
    """A process that was away for longer than a lease may have been replaced: then it must not go on."""
    newest = newest_claim(store, layout, rank, after=claim)
    if newest is not None:
        fix = "This process was away for longer than its lease; end it."
        what = f"rank {rank} at {store.uri}"
        raise Replaced(explain(what, got=f"claim {newest} of another process", expected=f"claim {claim}", fix=fix))


def _refuse_a_living_holder(
    store: PatientStore, layout: Layout, rank: int, number: int, lease_s: float, sleep: Callable[[float], None]
) -> None:
    first = _beat(store, layout, rank, number)
    until = time.monotonic() + lease_s
    while time.monotonic() < until:
        sleep(lease_s / (2 * _BEATS_IN_A_LEASE))
        now = _beat(store, layout, rank, number)
        first = now if first is None else first
        is_alive = first is not None and now is not None and now > first
        if is_alive or newest_claim(store, layout, rank, after=number) is not None:
            holder = read_record(store, layout, layout.claim(rank, number), functools.partial(unpack, "claim")) or {}
            fix = "Give each replica a rank of its own, or end that process."
            raise RankTaken(explain(f"rank {rank} at {store.uri}", got=_named(holder), expected="nobody", fix=fix))


def _named(holder: Mapping[str, Any]) -> str:
    """Who holds a rank, in words. Anybody may have written it into the bucket: text for a terminal is none of it."""
    pid, host = holder.get("pid"), holder.get("host")
    process = f"pid {pid}" if type(pid) is int and 0 < pid < _MOST_PID else "of no usable pid"
    host_name = host if isinstance(host, str) and _HOST.fullmatch(host) else "a host of no usable name"
    return f"a living process, {process} on {host_name}"


def _beat(store: PatientStore, layout: Layout, rank: int, number: int) -> int | None:
    """The counter of a claim's holder; None where it cannot be read, which says nothing about its holder."""

    def count(at: str, data: bytes) -> int:
        content = fields_of("beat", at, data, "count")
        with refusing("beat"):
            return whole(content["count"], below=MOST_TRIALS)

    return read_record(store, layout, layout.beat(rank, number), count)


class Pulse:
    """Whether the holder of a claim lives, seen from outside: one whose counter did not move for a lease does not."""

    def __init__(self, store: PatientStore, layout: Layout, rank: int, claim: int, lease_s: float) -> None:
        self._look = functools.partial(_beat, store, layout, rank, claim)
        self._lease_s, self._count, self._moved = lease_s, self._look(), time.monotonic()

    def beats(self) -> bool:
        count = self._look()
        if count is not None and count != self._count:
            self._count, self._moved = count, time.monotonic()
        return time.monotonic() - self._moved < self._lease_s


class Heart:
    """A thread that says that its process lives. What it cannot write, it writes the next time."""

    def __init__(self, store: ObjectStore, layout: Layout, rank: int, claim: int, lease_s: float) -> None:
        self._store, self._every_s = store, lease_s / _BEATS_IN_A_LEASE
        self._key = layout.beat(rank, claim)
        self._address = layout.address(self._key)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="diloco-heart", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _beat(self) -> None:
        count = 1
        while not self._stopped.wait(self._every_s):
            try:
                self._store.put(self._key, pack("beat", self._address, {"count": count}))
            except StoreError:
                continue
            count += 1


# Which run a place in the store holds: an id that every record carries, and what all replicas agreed on.
#
# Stored three times; the majority of readable copies wins. A joining replica restores missing copies. Where there is no
# majority the run is refused: two replicas must never follow two ids.

COPIES = 3
_LOOKS, _IDENTITY_PAUSE_S = 2, 0.5  # where copies differ: another replica may be writing them
_RUN = re.compile(r"[0-9a-f]{32}")  # "9f86d081884c7d659a2feaa0c55ad015"


class _RunIdentity(NamedTuple):
    """A run that was begun: where its records are, and what its replicas agreed on."""

    layout: Layout
    settings: Mapping[str, Any]

    @property
    def world_size(self) -> int:
        return self.settings["world_size"]


def find_run(store: PatientStore, layout: Layout) -> _RunIdentity | None:
    """Return the run that this place holds; None where no copy of what it is can be read.

    Raises GenerationRefused for a run of an earlier version of this package, and where readable copies differ and none
    has a majority.
    """
    copies: list[dict[str, Any]] = []
    for look in range(_LOOKS):
        if look:
            time.sleep(_IDENTITY_PAUSE_S)
        copies = [about for copy in range(COPIES) if (about := _read(store, layout, copy)) is not None]
        if not copies:
            _refuse_an_old_run(store, layout)
            return None
        counts = Counter(encode(about, where="about") for about in copies)
        about = max(copies, key=lambda about: counts[encode(about, where="about")])
        if 2 * counts[encode(about, where="about")] > len(copies):
            return _RunIdentity(replace(layout, run=about["run"]), about)
    got = f"{len(copies)} readable copies of what the run is, of runs {', '.join(about['run'] for about in copies)}"
    fix = f"Delete the copies of the other runs ({layout.about(0)}*), or begin another generation."
    where = f"generation {layout.generation} at {store.uri}"
    raise GenerationRefused(explain(where, got=got, expected="a majority that is equal", fix=fix))


def agree_on_run(store: PatientStore, layout: Layout, settings: Mapping[str, Any]) -> _RunIdentity | None:
    """Return the run that this place holds, which begins with these settings if there is none; None as `find_run`."""
    run = find_run(store, layout)
    about = {**settings, "run": uuid.uuid4().hex} if run is None else run.settings
    for copy in range(COPIES):
        if (there := _read(store, layout, copy)) is None:
            store.settle(layout.about(copy), pack("about", layout.address(layout.about(copy)), dict(about)))
            there = _read(store, layout, copy)
        if run is None and there is not None:
            about = there  # whoever wrote the first readable copy has drawn the id
    return find_run(store, layout)


def _read(store: PatientStore, layout: Layout, copy: int) -> dict[str, Any] | None:
    def checked(at: str, data: bytes) -> dict[str, Any]:
        content = unpack("about", at, data)
        with refusing("about"):
            whole(content["world_size"], below=MOST_RANKS)
            if not _RUN.fullmatch(str(content["run"])):
                raise ValueError("no id of a run")
        return content

    return read_record(store, layout, layout.about(copy), checked)


def _refuse_an_old_run(store: PatientStore, layout: Layout) -> None:
    key = layout.about(0)
    try:
        unpack("about", layout.address(key), store.get(key, most_bytes=MOST_RECORD_BYTES))
    except OldRecord as error:
        fix = "End the run with the version that began it, or begin another one in another generation."
        where = f"generation {layout.generation} at {store.uri}"
        expected = "records that hold their own address"
        got = "a run that an earlier version of this package began"
        raise GenerationRefused(explain(where, got=got, expected=expected, fix=fix)) from error
    except (RecordError, MissingObject, ObjectTooLarge):
        return
