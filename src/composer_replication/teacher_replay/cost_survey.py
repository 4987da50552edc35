"""What a replay would ask and cost, computed before anything is sent."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from composer_replication.errors import InputError
from composer_replication.privacy.outgoing import Find, LastGate
from composer_replication.teacher_replay.ask_and_retry import session_of
from composer_replication.teacher_replay.ledger import TeacherStore
from composer_replication.teacher_replay.replay import ReplayOptions, request_of
from composer_replication.teacher_replay.requests import RequestBuilder, flags
from composer_replication.teacher_replay.teachers import Teacher, to_dollars
from composer_replication.types import TraceState

# Real prompts have about four bytes per token and the answers of coding agents are short: the low end of the cost.
_BYTES_PER_TOKEN, _USUAL_ANSWER = 4, 120


class PlannedState(NamedTuple):
    """A state that is asked about; `keys` are those of its requests by teacher, empty if no request
    can hold the state.
    """

    state_id: str
    session: str
    flags: list[str]
    keys: tuple[bytes, ...]


@dataclass(kw_only=True)
class PriceRange:
    """The calls to send, the calls in the store, and the range of prices, before anything is spent.

    `spent_usd` is the cost of earlier replays, `left_nano` the rest of the cap, which suffices for about `num_fitting`
    calls. `cheapest_nano` is the highest possible cost of the cheapest call, None if there is none to send.
    """

    num_calls: int = 0
    num_cached: int = 0
    num_fitting: int = 0
    cheapest_nano: int | None = None
    left_nano: int = 0
    low_usd: float = 0.0
    high_usd: float = 0.0
    spent_usd: float = 0.0


class Survey:
    """Builds the requests of all states, checks their bytes, and adds up the cost of those that are not in the store.

    `finds` are texts that look like secrets, each once, at the first state that contains it.
    """

    def __init__(
        self, teachers: Sequence[Teacher], options: ReplayOptions, store: TeacherStore, gate: LastGate
    ) -> None:
        self._builders = [RequestBuilder(teacher, options.settings) for teacher in teachers]
        self._teachers, self._store, self._gate = teachers, store, gate
        self._bounds, self._usual = array("q"), array("q")  # of calls to send
        self._num_cached = 0
        self.finds: dict[bytes, Find] = {}

    def look_at(self, state: TraceState) -> PlannedState:
        keys: list[bytes] = []
        for teacher, builder in zip(self._teachers, self._builders, strict=True):
            try:
                request = request_of(builder, state)
            except InputError:  # the call will fail with this error, at no cost
                keys.append(b"")
                continue
            keys.append(request.key)
            if self._store.reply(request.key) is not None:
                self._num_cached += 1
                continue
            for find in self._gate.in_request(request.body, request.label):
                self.finds.setdefault(find.digest, find)
            self._bounds.append(request.bound_nano)
            self._usual.append(teacher.price.bound(len(request.body) // _BYTES_PER_TOKEN, _USUAL_ANSWER))
        return PlannedState(state["state_id"], session_of(state), flags(state["messages"]), tuple(keys))

    def price(self, spent: int, remaining: int) -> PriceRange:
        """Return the lowest and highest price of asking every teacher once, without cached replies."""
        return PriceRange(
            num_calls=len(self._bounds),
            num_cached=self._num_cached,
            num_fitting=self._fitting(remaining),
            cheapest_nano=min(self._bounds, default=None),
            left_nano=remaining,
            low_usd=to_dollars(sum(self._usual)),
            high_usd=to_dollars(sum(self._bounds)),
            spent_usd=to_dollars(spent),
        )

    def _fitting(self, remaining: int) -> int:
        """Return about how many calls fit in order: each needs its highest cost reserved, and then
        costs what is usual.
        """
        number = 0
        for bound, usual in zip(self._bounds, self._usual, strict=True):
            if bound <= remaining:
                remaining, number = remaining - usual, number + 1
        return number
