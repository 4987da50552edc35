"""What a round asks of its store: how many requests, which of them at once, and none ahead of what was allowed."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from dataclasses import asdict, replace

import pytest
import torch
from toy_replicas import QUICK, in_threads

from composer_replication.diloco.rounds import reading
from composer_replication.diloco.rounds.manager import ObjectStoreManager
from composer_replication.diloco.rounds.patience import PatientStore, Traffic
from composer_replication.diloco.rounds.reading import Offer, RoundReader, RoundView
from composer_replication.diloco.rounds.records import (
    Layout,
    Member,
    OfferId,
    RoundOutcome,
    Seal,
    pack,
)
from composer_replication.diloco.store import MemoryStore
from composer_replication.diloco.store.objects import StoreUnavailable

SHARDS, PARALLEL, PATIENCE_S = 8, 2, 10.0


class WatchedStore:
    """A replica's way to a store: what it asks for by kind, how much of it at once, and calls that wait for others."""

    def __init__(self, store, *, waits=None):
        self.store, self.uri = store, store.uri
        self.waits = waits or {}
        self.calls, self.under_way, self.most, self.missed = Counter(), Counter(), Counter(), []
        self._changed = threading.Condition()

    def __getattr__(self, name):
        if name not in ("put", "create", "get", "size", "keys", "delete"):
            raise AttributeError(name)

        def call(key, *values, **named):
            kind = f"{name} {kind_of(key)}"
            with self._changed:
                self.calls[kind] += 1
                self.under_way[kind] += 1
                self.most[kind] = max(self.most[kind], self.under_way[kind])
                self._changed.notify_all()
                if kind in self.waits and not self._changed.wait_for(lambda: self.waits[kind](self.calls), PATIENCE_S):
                    self.missed.append(kind)
            try:
                return getattr(self.store, name)(key, *values, **named)
            finally:
                with self._changed:
                    self.under_way[kind] -= 1

        return call


def kind_of(key):
    parts = key.split("/") if isinstance(key, str) else [""]
    return parts[3] if parts[1:2] == ["r"] and len(parts) > 3 else "/".join(parts[1:2])


def two_rounds(store, rank, world):
    """The mean that both rounds end with; what was asked for is that of the second."""
    manager = ObjectStoreManager(store, rank=rank, world_size=world, shard_bytes=2048, parallel=PARALLEL, **QUICK)
    for _ in range(2):
        vector = torch.full((SHARDS * 512,), float(rank))
        manager.start_quorum()
        if isinstance(store, WatchedStore):
            store.calls.clear()
        manager.allreduce(vector).wait()
        asked = Counter(store.calls) if isinstance(store, WatchedStore) else Counter()
        assert manager.should_commit()
    return vector, Counter({kind: count for kind, count in asked.items() if "beats" not in kind})


def test_a_round_makes_no_request_that_another_has_answered():
    _, asked = two_rounds(WatchedStore(MemoryStore()), 0, 1)
    assert asked == {
        "keys r": 3,  # before the offer, for the offers, for the means
        "keys left": 1,
        "put d": SHARDS,
        "put offer": 1,
        "get offer": 1,
        "create seal": 1,
        "get seal": 1,  # read back by its own creator, and then known
        "put mean": SHARDS,
        "create out": 1,
        "get out": 1,
        "get mean": SHARDS,  # the first ones while the outcome is created, and not again
    }


@pytest.mark.parametrize(
    ("call", "waits_for"),
    [
        ("keys r", lambda calls: calls["keys left"]),
        ("create seal", lambda calls: calls["get d"] == PARALLEL),
        ("put mean", lambda calls: calls["get d"] > PARALLEL),
        ("create out", lambda calls: calls["get mean"] == PARALLEL),
    ],
    ids=[
        "who left beside the listing",
        "offers before the seal",
        "offers while a mean goes out",
        "means before the outcome",
    ],
)
def test_requests_that_need_not_wait_for_each_other_are_under_way_at_once(call, waits_for):
    """`call` answers only when the other requests have been made: in turn, nothing would come of it in time."""
    shared = MemoryStore()
    watched = WatchedStore(shared, waits={call: waits_for})
    runs = [functools.partial(two_rounds, watched if rank == 0 else shared, rank, 2) for rank in range(2)]
    means = [mean for mean, _ in in_threads(runs)]
    assert all(torch.equal(mean, torch.full((SHARDS * 512,), 0.5)) for mean in means)
    assert watched.missed == []


def test_no_more_pieces_are_under_way_than_is_allowed():
    shared = MemoryStore()
    watched = [WatchedStore(shared) for _ in range(4)]
    in_threads([functools.partial(two_rounds, store, rank, 4) for rank, store in enumerate(watched)])
    for store in watched:
        assert 0 < store.most["get d"] <= PARALLEL + 1  # one is being added while the next are asked for
        assert 0 < store.most["put mean"] <= PARALLEL
        assert 0 < max(store.most["put d"], store.most["get mean"]) <= 2 * PARALLEL


def offer(rank):
    return Offer(OfferId(rank, 0, 0), "m" * 64, "base", "spec", 1.0, 1, 1.0)


def member(rank):
    return Member(OfferId(rank, 0, 0), "a" * 64, 1.0)


SEEN = RoundView(expected=frozenset({0, 1}), offers=frozenset({offer(0), offer(1)}))
SEAL_AT, OUTCOME_AT = (Layout(0).address(key) for key in (Layout(0).seal(0, 0), Layout(0).outcome(0, 0)))
BOTH = Seal("base", "spec", 1, (member(0), member(1)))


def reader(records):
    store, layout = MemoryStore(), Layout(0)
    for name, record in records.items():
        store.put(getattr(layout, name)(0, 0), record)
    return RoundReader(PatientStore(store, Traffic(), patience_s=1.0), layout, 0, 2, None, "spec", 1)


def test_who_left_is_asked_again_after_an_answer_that_failed(monkeypatch):
    """A reader without threads kept a promise that nobody was left to keep, and the next look waited for ever."""
    left = reading._Departures(frozenset({1}))
    answers = iter([StoreUnavailable("no answer", uri="memory:"), left])

    def who_left(*_asked):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(reading, "read_departures", who_left)
    one = reader({})
    with pytest.raises(StoreUnavailable):
        one.read()
    assert one._request_departures().result(timeout=1) == left


def test_who_lost_a_seal_goes_on_with_the_one_that_is_there():
    seen = reader({"seal": pack("seal", SEAL_AT, asdict(BOTH))}).view_after_seal(SEEN, my_record=None)
    assert seen == replace(SEEN, seal=BOTH)


def test_a_seal_with_a_member_that_was_not_seen_has_to_be_looked_at_anew():
    """Its manifest was not read: the offer would count as unreadable, and a good attempt would be aborted."""
    alone = replace(SEEN, offers=frozenset({offer(0)}))
    assert reader({"seal": pack("seal", SEAL_AT, asdict(BOTH))}).view_after_seal(alone, my_record=None) is None


@pytest.mark.parametrize("records", [{}, {"seal": b"damaged", "outcome": b"damaged"}], ids=["gone", "damaged"])
def test_a_record_that_cannot_be_read_has_to_be_looked_at_anew(records):
    assert reader(records).view_after_seal(SEEN, my_record=None) is None
    assert reader(records).view_after_outcome(SEEN, my_record=None) is None


def test_a_seal_of_mine_that_does_not_fit_is_not_taken():
    """Its mean would have more shards than my vector: whoever reads it from the store refuses it, too."""
    assert (
        reader({}).view_after_seal(SEEN, my_record=pack("seal", SEAL_AT, asdict(replace(BOTH, num_shards=2)))) is None
    )


def test_after_a_commit_its_members_follow_and_after_an_abort_the_next_attempt_is_read():
    seen = replace(SEEN, seal=BOTH)
    commit = RoundOutcome("commit", "base", "spec", BOTH.members, ("b" * 64,))
    abort = RoundOutcome("abort", "base", "spec", BOTH.members, bad=(BOTH.members[0].id,), reason="unreadable")
    after_commit = reader({"outcome": pack("outcome", OUTCOME_AT, asdict(commit))})
    assert after_commit.view_after_outcome(seen, my_record=None) == replace(seen, outcome=commit)
    after_abort = reader({"outcome": pack("outcome", OUTCOME_AT, asdict(abort))})
    assert after_abort.view_after_outcome(seen, my_record=None) is None
