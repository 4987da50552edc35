"""Whether an endpoint is any use: one that refuses the key, or cannot be reached, ends a replay after a few requests.

Until an endpoint has given a first answer, one request at a time is under way to it: a wrong key is found out by three
calls and not by all of them, and an answer far longer than `max_tokens` allows is paid for once. Faults that pass
(busy, broken, slow) prove that an endpoint is there; they are the asker's, and change nothing here. Once an endpoint
has proved itself, only many refusals or failures to connect in a row, with no answer between them, end the replay:
credit that ran out, a network that is gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from composer_replication.teacher_replay.endpoint.outcome import Failure, Reply
from composer_replication.teacher_replay.teachers import Teacher

_FIRST_FEW = 3
_IN_A_ROW = 8
# A server that is just starting is given this long, however fast it refuses.
_STARTING_S = 2.0


@dataclass(slots=True)
class _Endpoint:
    """What is known of one address with one key. Refusals and missed connections are those since the last answer."""

    is_proven: bool = False
    num_in_flight: int = 0
    num_refused: int = 0
    num_missed: int = 0
    num_calls_missed: int = 0
    first_missed: float = 0.0
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_room(self) -> bool:
        return self.is_proven or (self.num_in_flight == 0 and self.num_refused < _FIRST_FEW)

    def answered(self) -> None:
        self.is_proven = True
        self.num_refused = self.num_missed = self.num_calls_missed = 0

    def missed(self, *, is_last_attempt: bool) -> None:
        self.first_missed = self.first_missed if self.num_missed else time.monotonic()
        self.num_missed += 1
        self.num_calls_missed += is_last_attempt

    @property
    def is_refusing(self) -> bool:
        return self.num_refused >= (_IN_A_ROW if self.is_proven else _FIRST_FEW)

    @property
    def is_away(self) -> bool:
        if self.is_proven:
            return self.num_calls_missed >= _IN_A_ROW
        has_waited = time.monotonic() - self.first_missed >= _STARTING_S or self.num_calls_missed > 0
        return self.num_missed >= _FIRST_FEW and has_waited


class Endpoints:
    """The endpoints of a replay. `given_up` is one sentence, for a person, once one of them is of no use."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str | None], _Endpoint] = {}
        self._is_over = asyncio.Event()
        self.given_up: str | None = None

    @asynccontextmanager
    async def turn(self, teacher: Teacher) -> AsyncIterator[None]:
        """A request's turn: at once, or when an endpoint that is not proven yet has room for one more."""
        endpoint = self._of(teacher)
        while not endpoint.has_room and self.given_up is None:
            endpoint.moved.clear()
            await endpoint.moved.wait()
        endpoint.num_in_flight += 1
        try:
            yield
        finally:
            endpoint.num_in_flight -= 1
            endpoint.moved.set()

    def note(self, teacher: Teacher, outcome: Reply | Failure, *, is_last_attempt: bool) -> None:
        """What came of an attempt."""
        endpoint = self._of(teacher)
        if isinstance(outcome, Failure) and outcome.concerns == "account":
            endpoint.num_refused += 1
            if endpoint.is_refusing:
                self._give_up(_refused(teacher, outcome, endpoint.num_refused))
        elif isinstance(outcome, Failure) and outcome.concerns == "connection":
            endpoint.missed(is_last_attempt=is_last_attempt)
            if endpoint.is_away:
                self._give_up(_away(teacher, outcome, endpoint.num_missed))
        else:
            endpoint.answered()
        endpoint.moved.set()

    async def pause(self, seconds: float) -> None:
        """A wait between attempts, which ends at once where there is nothing left to wait for."""
        try:
            await asyncio.wait_for(self._is_over.wait(), seconds)
        except TimeoutError:
            return

    def _of(self, teacher: Teacher) -> _Endpoint:
        return self._known.setdefault((teacher.base_url, teacher.api_key), _Endpoint())

    def _give_up(self, sentence: str) -> None:
        self.given_up = self.given_up or sentence
        self._is_over.set()
        for endpoint in self._known.values():
            endpoint.moved.set()


def _refused(teacher: Teacher, failure: Failure, times: int) -> str:
    what = f"{teacher.base_url} refused {times} requests in a row ({failure.error})"
    if failure.error.startswith("HTTP 402"):
        return f"{what}: put credit on the account"
    if teacher.api_key is None:
        return f"{what}: no key was sent; name the variable that holds it with api_key_env in the teachers' file"
    return f"{what}: look at the key in {teacher.key_name}, which was sent for {teacher.slug}"


def _away(teacher: Teacher, failure: Failure, times: int) -> str:
    what = f"{teacher.base_url} cannot be reached ({failure.error}; {times} attempts)"
    return f"{what}: look at the address and the network"
