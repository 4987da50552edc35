"""Trying again, with growing pauses, until a deadline."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TypeVar

from composer_replication.diloco.store.objects import StoreUnavailable

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
REQUESTS_IN_DEADLINE = 3
"""A request may take a third of the deadline, so that one that hangs is tried again within it."""

Answer = TypeVar("Answer")


class TryAgain(Exception):
    """An answer that another try may better; `kind` says in a word what was wrong with this one."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def persist(call: Callable[[], Answer], *, deadline_s: float, uri: str, key: str) -> Answer:
    """What `call` answers, as soon as it does not ask to try again; StoreUnavailable when the time is up.

    No request begins after the deadline, so all is over after `deadline_s` and the time of one request.
    """
    start, pause, tries = time.monotonic(), _FIRST_PAUSE_S, 0
    while True:
        tries += 1
        try:
            return call()
        except TryAgain as unusable:
            kind = unusable.kind
        # Half of each pause is drawn, so that replicas that failed together do not come back together.
        pause_s = pause * (0.5 + secrets.randbelow(1000) / 2000)
        if time.monotonic() + pause_s - start > deadline_s:
            what = f"no usable answer in {time.monotonic() - start:.1f} s and {tries} tries; the last: {kind}"
            raise StoreUnavailable(what, uri=uri, key=key, cause_kind=kind)
        time.sleep(pause_s)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
