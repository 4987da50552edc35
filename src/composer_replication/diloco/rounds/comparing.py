"""Compare the weights of replicas to the bit.

Means are equal everywhere, but what each machine computes from them may differ. The first member of a commit writes a
digest of its weights before it offers anything to the next round. So a replica that sees it offer there, or sees its
goodbye, and no digest, knows that there will be none. Until then a comparison stays open, and one that can never be
made is logged. If several are open the latest decides: the first member of a later step may have written its digest
without regard to an earlier one.
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
from composer_replication.diloco.rounds.records import as_record_error, checked_sha256, pack, parse_offer, unpack_fields
from composer_replication.diloco.rounds.settings import RunPosition
from composer_replication.errors import explain

T = TypeVar("T")
_log = logging.getLogger(__name__)
Verdict = Literal["equal", "other", "open", "never"]
_REASONS = {
    "late": "did not publish a digest in time, or is not alive",
    "gone": "continued, left or was replaced without publishing a digest",
    "failed": "had not published a digest when this replica failed",
}


@dataclass(frozen=True)
class _StateComparison:
    """A begun comparison: the digest of my weights at a step, and the member that should have the same."""

    step: int
    first: tuple[int, int]  # rank and claim
    numbers: str


def _judge(mine: str, first_digest: str | None, *, is_over: bool, later_is_open: bool = False) -> Verdict:
    """Return the verdict on a comparison. `is_over` must have been looked at before the first member's digest.

    While a later comparison is open, my weights are not replaced by those of this step: it was begun with mine.
    """
    if first_digest is None:
        return "never" if is_over else "open"
    if first_digest == mine:
        return "equal"
    return "open" if later_is_open else "other"


@dataclass
class Comparisons:
    """The open comparisons of one replica, and the last step at which its weights equaled a first member's."""

    state: GlobalState
    lease_s: float
    agreed: int = -1
    _open: list[_StateComparison] = field(default_factory=list)
    _unresolved: _StateComparison | None = None  # my weights differ, and nobody has published those that I should have

    def publish_digest(self, store: PatientStore, position: RunPosition) -> None:
        """Write a digest of my weights as the first member, and publish those weights for replicas that differ."""
        key = self._key(position.step)
        record = pack("sum", self.state.layout.address(key), {"numbers": self.state.numbers(position)})
        if not store.create_verified(key, record) and self._first_digest(store, position.step) is None:
            # The record there belongs elsewhere, and nobody else may write this one.
            store.put_verified(key, record)
        self.state.publish(store, position)
        self.agreed = position.step

    def begin(self, store: PatientStore, position: RunPosition, first: tuple[int, int], *, wait_s: float) -> None:
        """Begin a comparison as another member: wait a little for the digest of the first one. `look` compares."""
        self._open.append(_StateComparison(position.step, first, self.state.numbers(position)))
        read_digest = functools.partial(self._first_digest, store, position.step)
        is_gone = functools.partial(self._is_gone, store, first)
        _wait(read_digest, seconds=wait_s, poll_s=self.state.settings.poll_s / 4, is_over=is_gone)

    def look(self, store: PatientStore, position: RunPosition, *, follows: bool) -> RunPosition | None:
        """Compare what can be compared by now.

        If my weights differ, load those of the first member and return where this replica is then; otherwise return
        None. `follows`: whether the commits since an earlier step can be applied to the weights of that step.
        """
        later_is_open = False
        # Newest first: a later comparison that is decided makes earlier ones pointless.
        for comparison in sorted(self._open, key=lambda comparison: -comparison.step):
            is_over = self._is_over(store, position, comparison)
            first_digest = self._first_digest(store, comparison.step)
            verdict = _judge(comparison.numbers, first_digest, is_over=is_over, later_is_open=later_is_open)
            if verdict == "open":
                later_is_open |= comparison.step > self.agreed
                continue
            self._open.remove(comparison)
            if verdict == "equal":
                self.agreed = max(self.agreed, comparison.step)
            elif verdict == "never":
                self._warn_not_compared(position, comparison, "gone")
            elif (loaded := self._take(store, position, comparison, first_digest or "", follows=follows)) is not None:
                return loaded
        return None

    def finish(self, store: PatientStore, position: RunPosition, *, follows: bool) -> RunPosition | None:
        """Wait for open comparisons while their first members are alive, and log those that were never made."""
        until = time.monotonic() + self.state.settings.timeout_s
        loaded: RunPosition | None = None
        for comparison in sorted(self._open, key=lambda comparison: -comparison.step):
            # Skipped if a later comparison has decided meanwhile.
            if comparison in self._open and comparison.step > self.agreed:
                self._wait_for_digest(store, comparison, until)
                loaded = self.look(store, position, follows=follows) or loaded
                # After this one is given up, an earlier comparison may decide.
                self._give_up(position, "late", since=comparison.step)
        loaded = self.look(store, position, follows=follows) or loaded
        self._give_up(position, "late")
        if self._unresolved is not None and self._unresolved.step > self.agreed:
            what = f"weights of rank {position.rank} at step {self._unresolved.step} in {store.uri}"
            expected = f"those of rank {self._unresolved.first[0]} to the bit, which were not published"
            another = f"repeat the run with generation={self.state.layout.generation + 1}"
            fix = f"Use the model of a replica that ended without this error; if there is none, {another}."
            raise StateUnreadable(explain(what, got="different weights", expected=expected, fix=fix))
        return loaded

    def abandon(self, position: RunPosition) -> None:
        """Log the open comparisons without waiting, because this replica failed."""
        self._give_up(position, "failed")

    def _take(
        self,
        store: PatientStore,
        position: RunPosition,
        compared: _StateComparison,
        first_digest: str,
        *,
        follows: bool,
    ) -> RunPosition | None:
        """Load the first member's weights after a difference; return None if they do not count or are missing."""
        where = (compared.step, position.rank, compared.first[0])
        differ = "step %d: the weights of rank %d differ from those of rank %d; "
        if compared.step <= self.agreed:
            _warn("overtaken", differ + "they have been equal since step %d", *where, self.agreed)
            return None
        if self._unresolved is not None and compared.step < self._unresolved.step:
            _warn("other", differ + "the difference at step %d decides", *where, self._unresolved.step)
            return None
        loaded = None
        # Without a follower, the commits since an earlier step cannot be applied to its weights.
        if follows or compared.step == position.step:
            load = functools.partial(
                self.state.load_matching, store, replace(position, step=compared.step), first_digest
            )
            until = time.monotonic() + self.state.settings.timeout_s / 2
            is_past = functools.partial(self._is_past, store, compared)
            loaded = self._wait_while_alive(store, compared, load, until=until, is_over=is_past)
        if loaded is not None:
            self.agreed = compared.step
            _warn("taken", differ + "loading those", *where)
        else:
            self._unresolved = compared
            _warn("unpublished", differ + "those cannot be loaded, so the next comparison decides", *where)
        return loaded

    def _wait_while_alive(
        self,
        store: PatientStore,
        compared: _StateComparison,
        look: Callable[[], T | None],
        *,
        until: float,
        is_over: Callable[[], bool],
    ) -> T | None:
        """Call `look` until it returns something, `is_over` is true, or the first member is not alive any more."""
        pulse = Pulse(store, self.state.layout, *compared.first, self.lease_s)
        return _wait(
            look,
            seconds=until - time.monotonic(),
            poll_s=self.state.settings.poll_s,
            is_over=lambda: is_over() or self._is_gone(store, compared.first) or not pulse.beats(),
        )

    def _wait_for_digest(self, store: PatientStore, compared: _StateComparison, until: float) -> None:
        """Wait until the first member has written its digest, or certainly will not.

        A member that ends later than this replica writes none at my last step. Its offer to the next round shows that,
        but only a grace later: with a delay, an offer may be under way when a run ends.
        """
        offered_at: list[float] = []

        def has_continued() -> bool:
            if not offered_at and self._has_offered(store, compared):
                offered_at.append(time.monotonic())
            return bool(offered_at) and time.monotonic() - offered_at[0] >= self.state.settings.grace_s

        read_digest = functools.partial(self._first_digest, store, compared.step)
        self._wait_while_alive(store, compared, read_digest, until=until, is_over=has_continued)

    def _is_past(self, store: PatientStore, compared: _StateComparison) -> bool:
        """Return whether a state of a later step is published: then nobody will publish this one."""
        return self.state.newest_step(store) > compared.step

    def _is_over(self, store: PatientStore, position: RunPosition, compared: _StateComparison) -> bool:
        """Return whether the first member has written its digest by now, or never will."""
        members = {member.id[:2] for member in position.last.members} if position.last else set()
        return (position.step > compared.step and compared.first in members) or self._is_gone(store, compared.first)

    def _is_gone(self, store: PatientStore, first: tuple[int, int]) -> bool:
        layout, (rank, claim) = self.state.layout, first
        # A replaced process must not write any more, so it counts as gone without a goodbye.
        is_replaced = newest_claim(store, layout, rank, after=claim) is not None
        return is_replaced or read_goodbye(store, layout, rank, claim) is not None

    def _has_offered(self, store: PatientStore, compared: _StateComparison) -> bool:
        keys = store.keys(self.state.layout.round(compared.step, "offer"))
        offers = (parse_offer(key.rpartition("/")[2]) for key in keys)
        return any(offer is not None and offer[:2] == compared.first for offer in offers)

    def _first_digest(self, store: PatientStore, step: int) -> str | None:
        return read_record(store, self.state.layout, self._key(step), _numbers)

    def _key(self, step: int) -> str:
        return self.state.layout.key("sums", f"{step:08d}")

    def _give_up(self, position: RunPosition, why: str, *, since: int = 0) -> None:
        """Log that the comparisons of this step and of later ones will not be made."""
        for comparison in self._open:
            if comparison.step >= since:
                agreed = f"; they have been equal since step {self.agreed}" if self.agreed > comparison.step else ""
                self._warn_not_compared(position, comparison, why, agreed)
        self._open = [comparison for comparison in self._open if comparison.step < since]

    def _warn_not_compared(self, position: RunPosition, compared: _StateComparison, why: str, agreed: str = "") -> None:
        what = "step %d: the weights of rank %d were not compared with those of rank %d, which %s"
        _warn(why, what, compared.step, position.rank, compared.first[0], f"{_REASONS[why]}{agreed}")


def _warn(result: str, text: str, *values: object) -> None:
    """Log the result of a comparison; the record has its key as the attribute `comparison`."""
    _log.warning(text, *values, extra={"comparison": result})


def _wait(
    look: Callable[[], T | None], *, seconds: float, poll_s: float, is_over: Callable[[], bool] = lambda: False
) -> T | None:
    until = time.monotonic() + seconds
    while True:
        # Checked before the look, so that an answer that comes last is not missed.
        over = time.monotonic() >= until or is_over()
        if (finding := look()) is not None or over:
            return finding
        time.sleep(poll_s)


def _numbers(at: str, data: bytes) -> str:
    content = unpack_fields("sum", at, data, "numbers")
    with as_record_error("sum"):
        return checked_sha256(content["numbers"])
