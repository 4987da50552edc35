"""Estimate the requests and the cost of a replay before anything is sent."""

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

# For the low estimate: prompts have about four bytes per token, and the answers of coding agents are short.
_BYTES_PER_TOKEN, _USUAL_ANSWER_TOKENS = 4, 120


class PlannedState(NamedTuple):
    """A state to ask about. `keys` holds the request key for each teacher; a key is empty if the request cannot be
    built.
    """

    state_id: str
    session: str
    flags: list[str]
    keys: tuple[bytes, ...]


@dataclass(kw_only=True)
class PriceRange:
    """The number of calls to send, the number of cached calls, and the range of the total price of the calls to send.

    `spent_usd` is the cost of earlier replays. `left_nano` is the rest of the cap in nano-dollars, which suffices for
    about `num_fitting` calls. `cheapest_nano` is the maximum cost of the cheapest call; None if there is no call to
    send.
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
    """Builds the requests for all states, scans them for secrets, and adds up the costs of those without a reply in the
    store.

    `finds` are texts that look like secrets, each listed once, at the first state that contains it.
    """

    def __init__(
        self, teachers: Sequence[Teacher], options: ReplayOptions, store: TeacherStore, gate: LastGate
    ) -> None:
        self._builders = [RequestBuilder(teacher, options.settings) for teacher in teachers]
        self._teachers, self._store, self._gate = teachers, store, gate
        self._max_costs, self._usual_costs = array("q"), array("q")  # of calls to send
        self._num_cached = 0
        self.finds: dict[bytes, Find] = {}

    def add_state(self, state: TraceState) -> PlannedState:
        """Add the requests about a state to the survey."""
        keys: list[bytes] = []
        for teacher, builder in zip(self._teachers, self._builders, strict=True):
            try:
                request = request_of(builder, state)
            except InputError:  # the replay reports this as the call's result, at no cost
                keys.append(b"")
                continue
            keys.append(request.key)
            if self._store.reply(request.key) is not None:
                self._num_cached += 1
                continue
            for find in self._gate.in_request(request.body, request.label):
                self.finds.setdefault(find.digest, find)
            self._max_costs.append(request.bound_nano)
            self._usual_costs.append(teacher.price.bound(len(request.body) // _BYTES_PER_TOKEN, _USUAL_ANSWER_TOKENS))
        return PlannedState(state["state_id"], session_of(state), flags(state["messages"]), tuple(keys))

    def price(self, spent: int, remaining: int) -> PriceRange:
        """Return the estimated and the maximum price of all calls whose replies are not in the store."""
        return PriceRange(
            num_calls=len(self._max_costs),
            num_cached=self._num_cached,
            num_fitting=self._count_fitting(remaining),
            cheapest_nano=min(self._max_costs, default=None),
            left_nano=remaining,
            low_usd=to_dollars(sum(self._usual_costs)),
            high_usd=to_dollars(sum(self._max_costs)),
            spent_usd=to_dollars(spent),
        )

    def _count_fitting(self, remaining: int) -> int:
        """Estimate how many calls fit into `remaining` if each reserves its maximum cost and is billed its usual
        cost.
        """
        num_fitting = 0
        for max_cost, usual_cost in zip(self._max_costs, self._usual_costs, strict=True):
            if max_cost <= remaining:
                remaining, num_fitting = remaining - usual_cost, num_fitting + 1
        return num_fitting
