"""A first member that is slow to say its weights: the comparison is made later, or it is said that it was not made."""

from __future__ import annotations

import functools
import threading
import time
from dataclasses import replace

import pytest
import torch
from test_equal_weights import AnotherMachine
from toy_replicas import QUICK, ToyLoop, in_threads

from composer_replication.diloco.rounds.manager import ObjectStoreManager
from composer_replication.diloco.rounds.patience import StateUnreadable
from composer_replication.diloco.rounds.records import pack
from composer_replication.diloco.store import MemoryStore
from refusals import refusal

OPTIONS = {**QUICK, "state_every": 3, "grace_s": 0.3, "timeout_s": 20.0, "min_replicas": 2, "world_size": 2}
SUM = "g000000/sums/00000003"
DIFFERENT = {"taken", "unpublished", "overtaken", "other"}
NOT_COMPARED = {"late", "gone", "failed"}


def told(caplog, step=3) -> set[str]:
    """What was logged to have come of comparisons of rank 1's weights of a step with those of rank 0."""
    records = [record for record in caplog.records if hasattr(record, "comparison")]
    return {record.comparison for record in records if record.args[:3] == (step, 1, 0)}


class SlowToSay:
    """A store whose caller is held up before it says what its weights are at step 3."""

    def __init__(self, store: MemoryStore) -> None:
        self._store, self.may_say, self.asked = store, threading.Event(), threading.Event()

    def __getattr__(self, name):
        return getattr(self._store, name)

    def create(self, key, data):
        if key == SUM:
            self.asked.set()
            assert self.may_say.wait(20)
        return self._store.create(key, data)


def replica(store, rank, *, kind=ToyLoop, **options) -> ToyLoop:
    return kind(ObjectStoreManager(store, rank=rank, **{**OPTIONS, **options}))


def set_later(loop: ToyLoop, **changed) -> None:
    """Other limits from now on."""
    member = loop.manager._membership
    member.settings = member._state.settings = replace(member.settings, **changed)


def run_to(loop: ToyLoop, step: int) -> ToyLoop:
    while loop.manager.current_step() < step:
        loop.round()
    return loop


def both_at(step, *, kind=ToyLoop, first_store=None, **options):
    """Two replicas that have made so many rounds together, and nothing since."""
    store = MemoryStore()
    stores = [first_store(store) if first_store else store, store]
    begin = [functools.partial(replica, stores[rank], rank, kind=(ToyLoop, kind)[rank], **options) for rank in range(2)]
    loops = in_threads([lambda each=each: run_to(each(), step) for each in begin])
    return stores[0], *loops


@pytest.mark.parametrize("kind", [ToyLoop, AnotherMachine])
def test_what_the_first_member_says_after_the_grace_is_compared_after_the_round(kind, caplog):
    store, first, second = both_at(3, kind=kind, first_store=SlowToSay)
    in_threads([first.round, functools.partial(second.round, between=store.may_say.set)])
    assert not DIFFERENT & told(caplog)
    second.manager.start_quorum()
    assert ("taken" in told(caplog)) == (kind is AnotherMachine)
    assert not NOT_COMPARED & told(caplog)
    weights = first.globals[0]  # after the one commit that the second applied to the first one's weights of step 3
    up = torch.tensor(torch.inf)
    assert torch.equal(second.globals[0], torch.nextafter(weights, up) if kind is AnotherMachine else weights)
    assert second.manager.current_step() == 4
    assert second.manager._membership.healing == (kind is AnotherMachine)


def test_at_the_end_a_first_member_that_lives_is_waited_for(caplog):
    _, first, second = both_at(4, kind=AnotherMachine)
    assert not torch.equal(first.globals[0], second.globals[0])
    began = time.monotonic()
    threading.Timer(1.5, first.manager.agree_on_weights).start()  # five graces, and more than two leases
    second.manager.agree_on_weights()
    assert 1.4 < time.monotonic() - began < 10
    assert torch.equal(first.globals[0], second.globals[0])
    assert "taken" in told(caplog, step=4)


def test_closing_waits_for_a_comparison_that_is_open(caplog):
    store, first, second = both_at(3, kind=AnotherMachine, first_store=SlowToSay)
    opens = threading.Thread(target=first.manager.start_quorum, daemon=True)
    opens.start()
    second.manager.start_quorum()
    threading.Timer(1.0, store.may_say.set).start()
    second.manager.close()
    opens.join(10)
    assert "taken" in told(caplog)
    assert torch.equal(first.globals[0], second.globals[0])


def test_a_first_member_that_slept_says_what_its_weights_were_before_it_catches_up(caplog):
    store, first, second = both_at(3)
    set_later(second, min_replicas=1)
    run_to(second, 5)
    assert store.size(SUM) is None
    first.manager.start_quorum()
    assert store.size(SUM) is not None
    assert first.manager.current_step() > 3
    second.manager.start_quorum()
    assert not second.manager._membership._comparisons._open
    assert caplog.text == ""


def at_the_end(loop, bound_s: float) -> float:
    began = time.monotonic()
    loop.manager.agree_on_weights()
    seconds = time.monotonic() - began
    assert seconds < bound_s
    loop.manager.close()
    assert time.monotonic() - began < bound_s + 2, "what was said once is not waited for again"
    return seconds


def test_a_first_member_that_died_is_not_waited_for_longer_than_a_lease_and_that_is_said(caplog):
    _, first, second = both_at(4)
    first.manager._membership._heartbeat.stop()
    at_the_end(second, 8)
    assert "late" in told(caplog, step=4)


def test_one_that_lives_and_says_nothing_is_waited_for_until_the_time_is_up_and_that_is_said(caplog):
    _, _first, second = both_at(4)
    set_later(second, timeout_s=2.0)
    assert at_the_end(second, 12) > 2.0
    assert NOT_COMPARED & told(caplog, step=4)


def test_one_that_left_without_a_word_is_not_waited_for_and_that_is_said(caplog):
    _, first, second = both_at(4)
    first.manager.close()
    at_the_end(second, 5)
    assert "gone" in told(caplog, step=4)


def test_one_that_trains_on_says_nothing_at_my_last_step_and_is_waited_for_a_grace(caplog):
    _, first, second = both_at(4)
    set_later(first, min_replicas=1)
    trains = threading.Thread(target=run_to, args=(first, 5), daemon=True)
    trains.start()
    at_the_end(second, 8)
    trains.join(10)
    assert NOT_COMPARED & told(caplog, step=4)


@pytest.mark.parametrize("kind", [ToyLoop, AnotherMachine])
def test_a_comparison_that_a_later_one_has_overtaken_is_made_for_the_record(kind, caplog):
    store, first, second = both_at(3, kind=kind, first_store=SlowToSay)
    set_later(second, min_replicas=1)
    opens = threading.Thread(target=first.manager.start_quorum, daemon=True)
    opens.start()
    assert store.asked.wait(10)
    run_to(second, 6)
    second.manager.start_quorum()  # it is the first member by now, and says what its weights are
    assert store.keys("g000000/sums") == ["g000000/sums/00000006"]
    store.may_say.set()
    opens.join(10)
    weights = second.globals[0].clone()
    second.manager.agree_on_weights()
    assert torch.equal(second.globals[0], weights)
    assert ("overtaken" in told(caplog)) == (kind is AnotherMachine)
    assert [record.args[3] for record in caplog.records if record.args[3:]] == [6] * (kind is AnotherMachine)
    assert not NOT_COMPARED & told(caplog)


@pytest.mark.parametrize("is_said", ["in the last round of the others", "between the ends of the others"])
def test_an_earlier_comparison_does_not_undo_a_later_one(is_said, caplog):
    """Rank 0 is another machine, and says its weights of step 3 when the others have gone on without it."""
    base = MemoryStore()
    slow, options = SlowToSay(base), {"world_size": 3}
    first, second, third = in_threads(
        [
            lambda: run_to(replica(slow, 0, kind=AnotherMachine, **options), 3),
            lambda: run_to(replica(base, 1, **options), 3),
            lambda: run_to(replica(base, 2, **options), 3),
        ]
    )
    opens = threading.Thread(target=first.manager.start_quorum, daemon=True)
    opens.start()
    assert slow.asked.wait(10)

    have_begun = threading.Barrier(2)  # else one takes the weights of step 3 before its round, and has others in it

    def say():
        slow.may_say.set()
        opens.join(10)

    def say_when_both_have_begun():
        have_begun.wait(10)
        say()

    between = say_when_both_have_begun if "round" in is_said else lambda: None
    in_threads([functools.partial(each.round, between=between) for each in (second, third)])
    assert [each.manager.current_step() for each in (second, third)] == [4, 4]
    assert torch.equal(second.globals[0], third.globals[0])
    second.manager.agree_on_weights()
    say()
    third.manager.agree_on_weights()
    assert torch.equal(second.globals[0], third.globals[0])
    assert torch.equal(second.momentum[0], third.momentum[0])
    assert ("taken" in told(caplog)) == ("round" in is_said)  # what was said before the end, the end regards


def test_other_weights_that_nobody_published_are_an_error_at_the_end(caplog):
    store, first, second = both_at(3)
    first.manager._membership._heartbeat.stop()
    store.put(SUM, pack("sum", first.manager._membership.layout.address(SUM), {"numbers": "f" * 64}))
    parts = {"what": "rank 1", "expected": "rank 0", "fix": "generation=1"}
    with refusal(StateUnreadable, **parts):
        second.manager.agree_on_weights()
    assert "unpublished" in told(caplog)
    with refusal(StateUnreadable, **parts):
        second.manager.close()  # not: start it again, for of a run that has ended no replica is
    assert len(store.keys("g000000/left")) == 1  # it has said goodbye all the same


def test_a_replica_that_fails_waits_for_nobody_and_says_what_was_not_compared(caplog):
    store, first, second = both_at(3, first_store=SlowToSay)
    opens = threading.Thread(target=first.manager.start_quorum, daemon=True)
    opens.start()
    second.manager.start_quorum()
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError), second.manager:
        raise ZeroDivisionError
    assert time.monotonic() - began < 2
    assert "failed" in told(caplog)
    store.may_say.set()
    opens.join(10)
