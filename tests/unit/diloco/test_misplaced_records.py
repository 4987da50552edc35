"""Records at wrong keys, of other runs, cut off or overwritten: every run finishes, and every mean is the exact one."""

from __future__ import annotations

import functools
import random
import re
import threading

import pytest
from toy_replicas import QUICK, check_run, in_threads, layout_of, run_replica

from composer_replication.diloco.rounds.patience import RoundError
from composer_replication.diloco.rounds.records import (
    Layout,
    RecordError,
    RoundOutcome,
    parse_outcome,
    parse_state,
    unpack_outcome,
)
from composer_replication.diloco.store import MemoryStore

WORLD, STEPS = 2, 5
NUM_COPIES = 20
KINDS = {  # a part of the keys of each kind of object
    "about": "/about",
    "claim": "/claims/",
    "beat": "/beats/",
    "goodbye": "/left/",
    "back again": "/here/",
    "offer": "/offer/",
    "shard": "g000000/d/",
    "seal": "/seal/",
    "mean": "/mean/",
    "outcome": "/out/",
    "first state": "/genesis",
    "state": "/states/",
    "chunk of a state": "/statedata/",
    "sum": "/sums/",
    "wanted": "/wanted/",
}
FORMS = ("copy", "copy", "copy", "another run", "cut", "empty", "garbage")
_NUMBER = re.compile(r"(?<=[/.])\d{1,8}(?=[/.-]|$)")  # the step, rank, attempt, ... in "r/00000003/out/0"


class MeddlingStore:
    """A shared store in which writes of one kind are followed by damage to a neighbouring key, or to their own."""

    def __init__(self, kind: str, seed: int, foreign: MemoryStore, *, copies: int) -> None:
        self.store, self.uri = MemoryStore(), "memory://meddled"
        self.left, self.done = copies, 0
        self.commits: dict[int, list[RoundOutcome]] = {}
        self._part, self._dice, self._foreign = KINDS[kind], random.Random(f"{kind} {seed}"), foreign
        self._lock = threading.RLock()

    def __getattr__(self, name):
        return getattr(self.store, name)

    def put(self, key, data):
        with self._lock:
            self.store.put(key, data)
            self._meddle(key, data)

    def create(self, key, data):
        with self._lock:
            created = self.store.create(key, data)
            if created and "/out/" in key:
                self._note(key, data)
            self._meddle(key, data)
            return created

    def _note(self, key: str, data: bytes) -> None:
        step = int(key.split("/")[2])
        outcome = unpack_outcome(layout_of(self.store).address(key), data)
        if outcome.result == "commit":
            self.commits.setdefault(step, []).append(outcome)

    def _meddle(self, key: str, data: bytes) -> None:
        if self._part not in key or not self.left or self._dice.random() < 0.4:
            return
        self.left -= 1
        self.done += 1
        numbers = list(_NUMBER.finditer(key.removeprefix("g000000")))
        target = key
        if numbers and self._dice.random() < 0.8:
            number, shift = self._dice.choice(numbers), len("g000000")
            value = max(0, int(number[0]) + self._dice.choice((1, 1, -1, 2)))
            text = str(value).zfill(len(number[0]))
            target = f"{key[: shift + number.start()]}{text}{key[shift + number.end() :]}"
        form = self._dice.choice(FORMS)
        if form == "another run" and (others := [each for each in self._foreign.keys("g000000") if self._part in each]):
            data = self._foreign.get(target if target in others else self._dice.choice(others), most_bytes=10**7)
        self.store.put(target, {"cut": data[: len(data) // 9], "empty": b"", "garbage": b"\x00{}"}.get(form, data))


@pytest.fixture(scope="module")
def foreign():
    """A run of the same model from the same start, in which one replica was alone: its commits are others."""
    store = MemoryStore()
    run_replica(store, 0, WORLD, STEPS, **{**QUICK, "min_replicas": 1, "first_grace_s": 0.05, "grace_s": 0.05})
    return store


def play(kind: str, seed: int, foreign: MemoryStore, *, copies: int = 3, **limits) -> MeddlingStore:
    """Two replicas in a store that meddles; AssertionError where one does not finish or a mean is not the exact one."""
    store = MeddlingStore(kind, seed, foreign, copies=copies)
    options = {"state_every": 2, "grace_s": 0.3, "first_grace_s": 5.0, "min_replicas": 1, **limits}
    runs = [functools.partial(run_replica, store, rank, WORLD, STEPS, **options) for rank in range(WORLD)]
    loops = in_threads(runs)
    assert not [each for each in loops if isinstance(each, Exception)], (kind, seed, loops)
    for step, written in store.commits.items():
        assert len({(each.base, each.members, each.means) for each in written}) == 1, (kind, seed, step)
    assert [*sorted(store.commits)] == list(range(STEPS))
    history = [written[0] for _, written in sorted(store.commits.items())]
    check_run(store.store, loops, history=history)
    return store


@pytest.mark.parametrize("kind", ["outcome", "seal", "state", "goodbye"])
def test_a_run_goes_past_records_that_belong_elsewhere(kind, foreign):
    assert play(kind, 0, foreign).done


@pytest.mark.full
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "wanted"])  # an empty mark, which these runs lack
def test_a_run_goes_past_many_records_that_belong_elsewhere(kind, foreign, note):
    done = seed = 0
    while done < NUM_COPIES and seed < 3 * NUM_COPIES:
        seed += 1
        done += play(kind, seed, foreign, lease_s=0.04 if kind == "beat" else 0.6).done
    note(f"{kind}: {done} copies in {seed} runs, all of which finished with the exact means")
    assert done >= NUM_COPIES


def test_a_run_goes_past_an_old_outcome_at_each_coming_round(foreign):
    store = MeddlingStore("wanted", 0, foreign, copies=0)
    first = functools.partial(run_replica, store, 0, 1, 2, state_every=2)
    first()
    for step in range(2, 22):
        for key in ("out/0", "out/1", "seal/0"):
            store.store.put(
                f"g000000/r/{step:08d}/{key}", store.store.get("g000000/r/00000001/out/0", most_bytes=10**6)
            )
    again = run_replica(store, 0, 1, 22, state_every=2, grace_s=0.05)
    check_run(store.store, [again])
    assert len(store.commits) == 22


def test_without_addresses_a_copied_outcome_ends_the_run(foreign, monkeypatch):
    monkeypatch.setattr(Layout, "address", lambda self, key: "anywhere")
    store = MemoryStore()
    run_replica(store, 0, 1, 2)
    store.put("g000000/r/00000002/out/0", store.get("g000000/r/00000001/out/0", most_bytes=10**6))
    with pytest.raises(RoundError):
        run_replica(store, 0, 1, 3, timeout_s=0.5)


def test_every_kind_of_object_of_a_run_is_meddled_with(foreign):
    kinds = {next((kind for kind, part in KINDS.items() if part in key), key) for key in foreign.keys("g000000")}
    assert kinds <= {*KINDS}
    assert len(kinds) >= 10


@pytest.mark.parametrize("parse", [parse_outcome, parse_state])
def test_names_of_no_record_are_foreign(parse):
    assert [parse(name) for name in ("", "x", "0.", ".1", "0.1.2.3")] == [None] * 5


def test_an_outcome_is_refused_anywhere_but_at_its_own_key(foreign):
    layout, key = layout_of(foreign), "g000000/r/00000001/out/0"
    data = foreign.get(key, most_bytes=10**6)
    assert unpack_outcome(layout.address(key), data).result == "commit"
    for other in ("g000000/r/00000002/out/0", "g000000/r/00000001/out/1", "g000000/r/00000001/out/0.1"):
        with pytest.raises(RecordError):
            unpack_outcome(layout.address(other), data)
    with pytest.raises(RecordError):
        unpack_outcome(Layout(0, run="f" * 32).address(key), data)
