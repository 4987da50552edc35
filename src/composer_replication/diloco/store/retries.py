"""How long a request may take, and trying again, with growing pauses, until a deadline."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from composer_replication.diloco.store.denials import unreachable
from composer_replication.diloco.store.objects import StoreUnavailable
from composer_replication.errors import InputError, explain

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_SHORTEST_REQUEST_S = 1.0
REQUESTS_IN_DEADLINE = 3
"""A request may take a third of the deadline, so that one that hangs is tried again within it."""

FIRST_ANSWER_S = 8.0
"""How long an address may be silent before it is called unreachable; after its first answer the deadline holds."""

Answer = TypeVar("Answer")


class Pace:
    """How long requests may take: a third of the deadline, and what their bytes need on the slowest line there may be.

    Requests under way at once share that line, so the time is that of all of their bytes. Until the store has answered
    once (`has_answered`), a request and all its repetitions get `FIRST_ANSWER_S`: a wrong address is reported soon.
    """

    def __init__(self, deadline_s: float, slowest_mb_s: float) -> None:
        if not deadline_s > 0:
            raise InputError(explain("deadline_s of a store", got=deadline_s, expected="more than 0 seconds"))
        if not slowest_mb_s > 0:
            raise InputError(explain("slowest_mb_s of a store", got=slowest_mb_s, expected="more than 0 MB/s"))
        self.has_answered = False
        self.waits_since: float | None = None
        self._deadline_s = deadline_s
        self._bytes_per_s = slowest_mb_s * 1e6
        self._lock, self._under_way = threading.Lock(), 0

    @property
    def deadline_s(self) -> float:
        return self._deadline_s if self.has_answered else min(self._deadline_s, FIRST_ANSWER_S)

    @property
    def request_s(self) -> float:
        """The most seconds that a request without bytes may take."""
        share = self._deadline_s / REQUESTS_IN_DEADLINE
        if self.has_answered:
            return share
        waited_s = 0.0 if self.waits_since is None else time.monotonic() - self.waits_since
        return min(share, max(_SHORTEST_REQUEST_S, round(FIRST_ANSWER_S - waited_s, 1)))

    @contextmanager
    def carrying(self, num_bytes: int) -> Iterator[float]:
        """While these bytes travel; the seconds that a request with them gets beyond those of one without."""
        with self._lock:
            self._under_way += num_bytes
            more_s = self._under_way / self._bytes_per_s if num_bytes else 0.0
        try:
            yield more_s
        finally:
            with self._lock:
                self._under_way -= num_bytes


class TryAgain(Exception):
    """An answer that another try may better; `kind` says in a word what was wrong with this one."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def persist(call: Callable[[], Answer], *, pace: Pace, more_s: float, uri: str, key: str) -> Answer:
    """Return what `call` answers, as soon as it does not ask to try again; StoreUnavailable when the time is up.

    `more_s` are the seconds that the bytes of one request need. No request begins after the deadline, so all is over
    after the deadline and the time of one request.
    """
    start, pause, tries = time.monotonic(), _FIRST_PAUSE_S, 0
    pace.waits_since = start
    while True:
        tries += 1
        try:
            return call()
        except TryAgain as unusable:
            kind = unusable.kind
        # Half of each pause is drawn, so that replicas that failed together do not come back together.
        pause_s = pause * (0.5 + secrets.randbelow(1000) / 2000)
        if time.monotonic() + pause_s - start > pace.deadline_s + REQUESTS_IN_DEADLINE * more_s:
            seconds = time.monotonic() - start
            if not pace.has_answered:
                raise unreachable(uri=uri, key=key, kind=kind, seconds=seconds, tries=tries)
            what = f"no usable answer in {seconds:.1f} s and {tries} tries; the last: {kind}"
            raise StoreUnavailable(what, uri=uri, key=key, cause_kind=kind)
        time.sleep(pause_s)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
