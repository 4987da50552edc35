"""Check whether the weights of all replicas are bit-identical.

All replicas apply the same means, but different machines may compute different weights from them. So the first member
of a commit (the one with the lowest rank) writes a digest of its weights before it offers anything to the next round,
and each other member compares that digest with its own. A comparison stays open until the digest is written, or until
it is certain that it never will be, because the first member has made an offer to the next round or has left; in that
case, a warning is logged. If several comparisons are open, the latest one decides, because its first member may have
written its digest without resolving the earlier comparisons.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from composer_replication.diloco.rounds.claims import HeartbeatMonitor
from composer_replication.diloco.rounds.patience import PatientStore, StateUnreadable
from composer_replication.diloco.rounds.reading import newest_claim, read_goodbye, read_record
from composer_replication.diloco.rounds.records import as_record_error, checked_sha256, pack, parse_offer, unpack_fields
from composer_replication.diloco.rounds.settings import RunPosition
from composer_replication.diloco.rounds.states import GlobalState
from composer_replication.errors import explain

T = TypeVar("T")
_log = logging.getLogger(__name__)
Verdict = Literal["equal", "other", "open", "never"]  # "other": my weights differ
_REASONS = {
    "late": "did not publish a digest in time, or is not alive",
    "gone": "continued, left or was replaced without publishing a digest",
    "failed": "had not published a digest when this replica failed",
}


@dataclass(frozen=True)
class _StateComparison:
    """An open comparison: a step, the digest of this replica's weights at that step, and the first member, whose
    weights should be equal.
    """

    step: int
    first: tuple[int, int]  # rank and claim
    weights_digest: str


def _compare_digests(
    my_digest: str, first_digest: str | None, *, is_over: bool, later_is_open: bool = False
) -> Verdict:
    """Return the verdict on a comparison.

    `is_over` says whether the first member can no longer write its digest; the caller must determine it before reading
    `first_digest`. If a later comparison is open, this comparison stays open even if the digests differ, because
    replacing the weights would invalidate the later one.
    """
    if first_digest is None:
        return "never" if is_over else "open"
    if first_digest == my_digest:
        return "equal"
    return "open" if later_is_open else "other"


@dataclass
class Comparisons:
    """The open comparisons of one replica, and the last step at which its weights were equal to those of a first
    member.
    """

    state: GlobalState
    lease_s: float
    agreed: int = -1
    _open: list[_StateComparison] = field(default_factory=list)
    _unresolved: _StateComparison | None = None  # my weights differ, but the first member's could not be loaded

    def publish_digest(self, store: PatientStore, position: RunPosition) -> None:
        """Write a digest of this replica's weights, and publish the weights for replicas whose weights differ.
        Called by the first member.
        """
        key = self._key(position.step)
        record = pack("sum", self.state.layout.address(key), {"numbers": self.state.weights_digest(position)})
        if not store.create_verified(key, record) and self._first_digest(store, position.step) is None:
            # The object at this key is not such a record. It can be replaced, because only this replica may write it.
            store.put_verified(key, record)
        self.state.publish(store, position)
        self.agreed = position.step

    def begin(self, store: PatientStore, position: RunPosition, first: tuple[int, int], *, wait_s: float) -> None:
        """Begin a comparison, and wait up to `wait_s` seconds for the first member's digest. Called by the other
        members.
        """
        self._open.append(_StateComparison(position.step, first, self.state.weights_digest(position)))
        read_digest = functools.partial(self._first_digest, store, position.step)
        is_gone = functools.partial(self._is_gone, store, first)
        _wait(read_digest, seconds=wait_s, poll_s=self.state.settings.poll_s / 4, is_over=is_gone)

    def resolve(self, store: PatientStore, position: RunPosition, *, follows: bool) -> RunPosition | None:
        """Resolve all open comparisons that can be decided now.

        If this replica's weights differ, load those of the first member, and return the replica's new position in the
        run; otherwise, return None. `follows` says whether later commits can be applied to the weights of an earlier
        step.
        """
        later_is_open = False
        # Newest first, because the verdict of a later comparison makes earlier ones unnecessary.
        for comparison in sorted(self._open, key=lambda comparison: -comparison.step):
            is_over = self._is_over(store, position, comparison)
            first_digest = self._first_digest(store, comparison.step)
            verdict = _compare_digests(
                comparison.weights_digest, first_digest, is_over=is_over, later_is_open=later_is_open
            )
            if verdict == "open":
                later_is_open |= comparison.step > self.agreed
                continue
            self._open.remove(comparison)
            if verdict == "equal":
                self.agreed = max(self.agreed, comparison.step)
            elif verdict == "never":
                self._warn_not_compared(position, comparison, "gone")
            elif (
                loaded := self._load_first_members_weights(
                    store, position, comparison, first_digest or "", follows=follows
                )
            ) is not None:
                return loaded
        return None

    def finish(self, store: PatientStore, position: RunPosition, *, follows: bool) -> RunPosition | None:
        """Wait for the open comparisons while their first members are alive, and log those that cannot be resolved."""
        until = time.monotonic() + self.state.settings.timeout_s
        loaded: RunPosition | None = None
        for comparison in sorted(self._open, key=lambda comparison: -comparison.step):
            # An earlier comparison is skipped if a later one has been decided meanwhile.
            if comparison in self._open and comparison.step > self.agreed:
                self._wait_for_digest(store, comparison, until)
                loaded = self.resolve(store, position, follows=follows) or loaded
                # Once this comparison is given up, an earlier one may decide.
                self._give_up(position, "late", since=comparison.step)
        loaded = self.resolve(store, position, follows=follows) or loaded
        self._give_up(position, "late")
        if self._unresolved is not None and self._unresolved.step > self.agreed:
            what = f"weights of rank {position.rank} at step {self._unresolved.step} in {store.uri}"
            expected = f"the weights of rank {self._unresolved.first[0]}, which were not published"
            another = f"repeat the run with generation={self.state.layout.generation + 1}"
            fix = f"Use the model of a replica that ended without this error; if there is none, {another}."
            raise StateUnreadable(explain(what, got="different weights", expected=expected, fix=fix))
        return loaded

    def abandon(self, position: RunPosition) -> None:
        """Log the open comparisons without waiting for them, because this replica failed."""
        self._give_up(position, "failed")

    def _load_first_members_weights(
        self,
        store: PatientStore,
        position: RunPosition,
        comparison: _StateComparison,
        first_digest: str,
        *,
        follows: bool,
    ) -> RunPosition | None:
        """Load the first member's weights, because this replica's weights differ. Returns None if they are outdated
        or unavailable.
        """
        where = (comparison.step, position.rank, comparison.first[0])
        differ = "step %d: the weights of rank %d differ from those of rank %d; "
        if comparison.step <= self.agreed:
            _warn("overtaken", differ + "they have been equal since step %d", *where, self.agreed)
            return None
        if self._unresolved is not None and comparison.step < self._unresolved.step:
            _warn("other", differ + "the difference at step %d decides", *where, self._unresolved.step)
            return None
        loaded = None
        # Without a follower, the commits since an earlier step cannot be applied to its weights.
        if follows or comparison.step == position.step:
            load = functools.partial(
                self.state.load_matching, store, replace(position, step=comparison.step), first_digest
            )
            until = time.monotonic() + self.state.settings.timeout_s / 2
            is_past = functools.partial(self._is_past, store, comparison)
            loaded = self._wait_while_alive(store, comparison, load, until=until, is_over=is_past)
        if loaded is not None:
            self.agreed = comparison.step
            _warn("taken", differ + "loading those", *where)
        else:
            self._unresolved = comparison
            _warn("unpublished", differ + "those cannot be loaded, so the next comparison decides", *where)
        return loaded

    def _wait_while_alive(
        self,
        store: PatientStore,
        comparison: _StateComparison,
        read: Callable[[], T | None],
        *,
        until: float,
        is_over: Callable[[], bool],
    ) -> T | None:
        """Call `read` repeatedly until it returns a value, `is_over` returns True, the first member is no longer
        alive, or the time is up.
        """
        monitor = HeartbeatMonitor(store, self.state.layout, *comparison.first, self.lease_s)
        return _wait(
            read,
            seconds=until - time.monotonic(),
            poll_s=self.state.settings.poll_s,
            is_over=lambda: is_over() or self._is_gone(store, comparison.first) or not monitor.is_alive(),
        )

    def _wait_for_digest(self, store: PatientStore, comparison: _StateComparison, until: float) -> None:
        """Wait until the first member has written its digest, or until it is certain that it never will.

        If the run has ended for this replica but the first member continues to train, the first member writes no digest
        for this step. Its offer to the next round shows this, but only after a grace period: with delayed exchanges, a
        replica may make such an offer although its run is ending.
        """
        offered_at: list[float] = []

        def has_continued() -> bool:
            if not offered_at and self._has_offered(store, comparison):
                offered_at.append(time.monotonic())
            return bool(offered_at) and time.monotonic() - offered_at[0] >= self.state.settings.grace_s

        read_digest = functools.partial(self._first_digest, store, comparison.step)
        self._wait_while_alive(store, comparison, read_digest, until=until, is_over=has_continued)

    def _is_past(self, store: PatientStore, comparison: _StateComparison) -> bool:
        """Return whether a state of a later step has been published. If so, no replica will publish the state of
        this step.
        """
        return self.state.newest_step(store) > comparison.step

    def _is_over(self, store: PatientStore, position: RunPosition, comparison: _StateComparison) -> bool:
        """Return whether the first member has already written its digest, or is certain never to write it."""
        members = {member.id[:2] for member in position.last.members} if position.last else set()
        return (position.step > comparison.step and comparison.first in members) or self._is_gone(
            store, comparison.first
        )

    def _is_gone(self, store: PatientStore, first: tuple[int, int]) -> bool:
        layout, (rank, claim) = self.state.layout, first
        # A replaced process must not write anything, so it counts as gone even without a goodbye.
        is_replaced = newest_claim(store, layout, rank, after=claim) is not None
        return is_replaced or read_goodbye(store, layout, rank, claim) is not None

    def _has_offered(self, store: PatientStore, comparison: _StateComparison) -> bool:
        keys = store.keys(self.state.layout.round(comparison.step, "offer"))
        offers = (parse_offer(key.rpartition("/")[2]) for key in keys)
        return any(offer is not None and offer[:2] == comparison.first for offer in offers)

    def _first_digest(self, store: PatientStore, step: int) -> str | None:
        return read_record(store, self.state.layout, self._key(step), _unpack_digest)

    def _key(self, step: int) -> str:
        return self.state.layout.key("sums", f"{step:08d}")

    def _give_up(self, position: RunPosition, why: str, *, since: int = 0) -> None:
        """Drop and log the open comparisons at step `since` and later."""
        for comparison in self._open:
            if comparison.step >= since:
                agreed = f"; they have been equal since step {self.agreed}" if self.agreed > comparison.step else ""
                self._warn_not_compared(position, comparison, why, agreed)
        self._open = [comparison for comparison in self._open if comparison.step < since]

    def _warn_not_compared(
        self, position: RunPosition, comparison: _StateComparison, why: str, agreed: str = ""
    ) -> None:
        what = "step %d: the weights of rank %d were not compared with those of rank %d, which %s"
        _warn(why, what, comparison.step, position.rank, comparison.first[0], f"{_REASONS[why]}{agreed}")


def _warn(result: str, text: str, *values: object) -> None:
    """Log a warning about a comparison. The log record stores `result` in its attribute `comparison`."""
    _log.warning(text, *values, extra={"comparison": result})


def _wait(
    read: Callable[[], T | None], *, seconds: float, poll_s: float, is_over: Callable[[], bool] = lambda: False
) -> T | None:
    until = time.monotonic() + seconds
    while True:
        # Checked before the read, so that what is written last is not missed.
        over = time.monotonic() >= until or is_over()
        if (value := read()) is not None or over:
            return value
        time.sleep(poll_s)


def _unpack_digest(at: str, data: bytes) -> str:
    content = unpack_fields("sum", at, data, "numbers")
    with as_record_error("sum"):
        return checked_sha256(content["numbers"])
