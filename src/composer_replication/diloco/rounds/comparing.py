"""Whether my weights are those of the first member, to the bit.

Means are equal everywhere; what each machine makes of them may not be. The first member of a commit says a digest of
its weights before it offers anything to the next round, so whoever sees it go on, or gone, and then no digest, knows
that there will be none. Until then a comparison stays open; one that can never be made is said in the log. Of several
the latest decides: whoever is the first member there may have said its weights without regard to an earlier one.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from composer_replication.diloco.rounds.claims import Pulse
from composer_replication.diloco.rounds.heal import GlobalState
from composer_replication.diloco.rounds.patience import PatientStore, StateUnreadable
from composer_replication.diloco.rounds.reading import newest_claim, read_goodbye, read_record
from composer_replication.diloco.rounds.records import (
    fields_of,
    pack,
    parse_offer,
    refusing,
    sha256_of,
)
from composer_replication.diloco.rounds.running import RunPosition
from composer_replication.errors import explain

T = TypeVar("T")
_log = logging.getLogger(__name__)
Verdict = Literal["equal", "other", "open", "never"]
_WHYS = {
    "late": "did not say them in time, or does not live",
    "gone": "went on, left or was replaced without saying them",
    "failed": "had not said them when this replica failed",
}


@dataclass(frozen=True)
class StateComparison:
    """One that was begun: my weights at a step, and whose they have to be."""

    step: int
    first: tuple[int, int]  # rank and claim
    numbers: str


def judge(mine: str, said: str | None, *, is_over: bool, later_is_open: bool = False) -> Verdict:
    """What a look at a comparison comes to. `is_over` must have been looked at before `said` was.

    Mine are not replaced by those of this step while a later comparison is open: that one was begun with mine.
    """
    if said is None:
        return "never" if is_over else "open"
    if said == mine:
        return "equal"
    return "open" if later_is_open else "other"


@dataclass
class Comparisons:
    """Those of one replica that could not be made yet, and the last step at which its weights were a first member's."""

    state: GlobalState
    lease_s: float
    agreed: int = -1
    _open: list[StateComparison] = field(default_factory=list)
    _apart: StateComparison | None = None  # my weights are others, and nobody published those that I should have

    def say(self, store: PatientStore, place: RunPosition) -> None:
        """As the first member: what my weights are, to the bit; and those weights, for whoever has others."""
        key = self._key(place.step)
        record = pack("sum", self.state.layout.address(key), {"numbers": self.state.numbers(place)})
        if not store.settle(key, record) and self._said(store, place.step) is None:
            store.put_whole(key, record)  # what is there belongs elsewhere, and nobody else may say it
        self.state.publish(store, place)
        self.agreed = place.step

    def begin(self, store: PatientStore, place: RunPosition, first: tuple[int, int], *, wait_s: float) -> None:
        """As another member: wait a little for what the first one says; `look` compares, now or later."""
        self._open.append(StateComparison(place.step, first, self.state.numbers(place)))
        read_numbers = functools.partial(self._said, store, place.step)
        is_gone = functools.partial(self._is_gone, store, first)
        _wait(read_numbers, seconds=wait_s, poll_s=self.state.settings.poll_s / 4, is_over=is_gone)

    def look(self, store: PatientStore, place: RunPosition, *, follows: bool) -> RunPosition | None:
        """Compare what can be compared by now. Where mine are others: the first member's, loaded, and their place.

        `follows`: whether commits since an earlier step can be applied to the weights of that step.
        """
        later_is_open = False
        for comparison in sorted(self._open, key=lambda comparison: -comparison.step):
            is_over = self._is_over(store, place, comparison)
            first_numbers = self._said(store, comparison.step)
            verdict = judge(comparison.numbers, first_numbers, is_over=is_over, later_is_open=later_is_open)
            if verdict == "open":
                later_is_open |= comparison.step > self.agreed
                continue
            self._open.remove(comparison)
            if verdict == "equal":
                self.agreed = max(self.agreed, comparison.step)
            elif verdict == "never":
                self._say_not_compared(place, comparison, "gone")
            elif (loaded := self._take(store, place, comparison, first_numbers or "", follows=follows)) is not None:
                return loaded
        return None

    def finish(self, store: PatientStore, place: RunPosition, *, follows: bool) -> RunPosition | None:
        """At the end of a run: wait for what is still open while the member that it needs lives, and then say so."""
        until = time.monotonic() + self.state.settings.timeout_s
        loaded: RunPosition | None = None
        for comparison in sorted(self._open, key=lambda comparison: -comparison.step):
            if comparison in self._open and comparison.step > self.agreed:  # else a later comparison has decided
                self._wait_for_the_last_word(store, comparison, until)
                loaded = self.look(store, place, follows=follows) or loaded
                self._give_up(place, "late", since=comparison.step)  # an earlier one may decide then
        loaded = self.look(store, place, follows=follows) or loaded
        self._give_up(place, "late")
        if self._apart is not None and self._apart.step > self.agreed:
            what = f"weights of rank {place.rank} at step {self._apart.step} in {store.uri}"
            expected = f"those of rank {self._apart.first[0]} to the bit, and nobody published them"
            another = f"make the run again with generation={self.state.layout.generation + 1}"
            fix = f"Take the model of a replica that ended without this error; where there is none, {another}."
            raise StateUnreadable(explain(what, got="others", expected=expected, fix=fix))
        return loaded

    def abandon(self, place: RunPosition) -> None:
        """This replica failed: nothing is waited for, and what was not compared is said."""
        self._give_up(place, "failed")

    def _take(
        self,
        store: PatientStore,
        position: RunPosition,
        compared: StateComparison,
        first_numbers: str,
        *,
        follows: bool,
    ) -> RunPosition | None:
        where = (compared.step, position.rank, compared.first[0])
        differ = "step %d: the weights of rank %d are not those of rank %d to the bit; "
        if compared.step <= self.agreed:
            _warn("overtaken", differ + "since step %d they are agreed on", *where, self.agreed)
            return None
        if self._apart is not None and compared.step < self._apart.step:
            _warn("other", differ + "nor are those of step %d, which count", *where, self._apart.step)
            return None
        loaded = None
        if follows or compared.step == position.step:
            load = functools.partial(self.state.load_those, store, replace(position, step=compared.step), first_numbers)
            until = time.monotonic() + self.state.settings.timeout_s / 2
            is_past = functools.partial(self._is_past, store, compared)
            loaded = self._wait_while_it_lives(store, compared, load, until=until, is_over=is_past)
        if loaded is not None:
            self.agreed = compared.step
            _warn("taken", differ + "taking those", *where)
        else:
            self._apart = compared
            _warn("unpublished", differ + "those cannot be loaded, and the next comparison decides", *where)
        return loaded

    def _wait_while_it_lives(
        self,
        store: PatientStore,
        compared: StateComparison,
        look: Callable[[], T | None],
        *,
        until: float,
        is_over: Callable[[], bool],
    ) -> T | None:
        """Look until there is something, it is over, or the first member does not live any more."""
        pulse = Pulse(store, self.state.layout, *compared.first, self.lease_s)
        return _wait(
            look,
            seconds=until - time.monotonic(),
            poll_s=self.state.settings.poll_s,
            is_over=lambda: is_over() or self._is_gone(store, compared.first) or not pulse.beats(),
        )

    def _wait_for_the_last_word(self, store: PatientStore, compared: StateComparison, until: float) -> None:
        """Whoever ends later than I do says nothing at my last step: seen by its offer there, a grace later.

        Not at once, for with a delay an offer may be under way when a run ends.
        """
        offered_at: list[float] = []

        def went_on() -> bool:
            if not offered_at and self._has_offered(store, compared):
                offered_at.append(time.monotonic())
            return bool(offered_at) and time.monotonic() - offered_at[0] >= self.state.settings.grace_s

        read_numbers = functools.partial(self._said, store, compared.step)
        self._wait_while_it_lives(store, compared, read_numbers, until=until, is_over=went_on)

    def _is_past(self, store: PatientStore, compared: StateComparison) -> bool:
        """Whether a state of a later step is published: nobody publishes the earlier one then."""
        return self.state.newest_step(store) > compared.step

    def _is_over(self, store: PatientStore, position: RunPosition, compared: StateComparison) -> bool:
        """Whether the first member has said what its weights were by now, or never will."""
        members = {member.id[:2] for member in position.last.members} if position.last else set()
        return (position.step > compared.step and compared.first in members) or self._is_gone(store, compared.first)

    def _is_gone(self, store: PatientStore, first: tuple[int, int]) -> bool:
        layout, (rank, claim) = self.state.layout, first
        is_replaced = newest_claim(store, layout, rank, after=claim) is not None
        return is_replaced or read_goodbye(store, layout, rank, claim) is not None

    def _has_offered(self, store: PatientStore, compared: StateComparison) -> bool:
        keys = store.keys(self.state.layout.round(compared.step, "offer"))
        offers = (parse_offer(key.rpartition("/")[2]) for key in keys)
        return any(offer is not None and offer[:2] == compared.first for offer in offers)

    def _said(self, store: PatientStore, step: int) -> str | None:
        return read_record(store, self.state.layout, self._key(step), _numbers)

    def _key(self, step: int) -> str:
        return self.state.layout.key("sums", f"{step:08d}")

    def _give_up(self, position: RunPosition, why: str, *, since: int = 0) -> None:
        """Those of this step and of later ones will not be compared any more."""
        for comparison in self._open:
            if comparison.step >= since:
                agreed = f"; since step {self.agreed} they are agreed on" if self.agreed > comparison.step else ""
                self._say_not_compared(position, comparison, why, agreed)
        self._open = [comparison for comparison in self._open if comparison.step < since]

    def _say_not_compared(self, position: RunPosition, compared: StateComparison, why: str, agreed: str = "") -> None:
        what = "step %d: the weights of rank %d were not compared with those of rank %d, which %s"
        _warn(why, what, compared.step, position.rank, compared.first[0], f"{_WHYS[why]}{agreed}")


def _warn(came_of_it: str, text: str, *values: object) -> None:
    """Log what came of a comparison, in words and by one name, as `comparison` of the record."""
    _log.warning(text, *values, extra={"comparison": came_of_it})


def _wait(
    look: Callable[[], T | None], *, seconds: float, poll_s: float, is_over: Callable[[], bool] = lambda: False
) -> T | None:
    until = time.monotonic() + seconds
    while True:
        over = time.monotonic() >= until or is_over()  # before the look: what came last is not missed
        if (finding := look()) is not None or over:
            return finding
        time.sleep(poll_s)


def _numbers(at: str, data: bytes) -> str:
    content = fields_of("sum", at, data, "numbers")
    with refusing("sum"):
        return sha256_of(content["numbers"])
