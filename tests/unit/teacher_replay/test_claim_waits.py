"""Several processes that ask the same: each makes its attempts once, and none waits for ever or in silence."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time

import pytest
from replay_pieces import KEY, TEACHERS

from composer_replication.privacy.outgoing import OpenGate
from composer_replication.teacher_replay import ask_and_retry as ask
from composer_replication.teacher_replay.ask_and_retry import BudgetedClient, RetryPolicy
from composer_replication.teacher_replay.endpoint import FailedRequest
from composer_replication.teacher_replay.ledger import TeacherStore
from composer_replication.teacher_replay.requests import Request
from composer_replication.teacher_replay.teachers import read_teachers


class Failing:
    """A client whose endpoint is always overloaded."""

    def __init__(self):
        self.num_sent = 0

    async def send(self, _request):
        self.num_sent += 1
        await asyncio.sleep(0.002)
        return FailedRequest("HTTP 503: overloaded", True, "none")


def asker(client, store, *, cap_nano=10**12, **patience):
    given = RetryPolicy(max_attempts=4, first_wait_s=0.001, longest_wait_s=0.002, **patience)
    return BudgetedClient(client, store, cap_nano=cap_nano, gate=OpenGate(), patience=given, seed=1)


def a_request(key=b"k"):
    (teacher,) = read_teachers(TEACHERS[:1], environment={}, api_key=KEY, base_url="http://127.0.0.1:1/v1")
    return Request(teacher, key, b"{}", 700)


@pytest.mark.parametrize("number", [2, 3])
def test_each_process_makes_its_attempts_once_whoever_comes_between(tmp_path, number):
    async def all_of(askers):
        return await asyncio.wait_for(asyncio.gather(*(each.ask(a_request()) for each in askers)), 20)

    client = Failing()
    stores = [TeacherStore(tmp_path / "s.sqlite") for _ in range(number)]
    answers = asyncio.run(all_of([asker(client, store) for store in stores]))
    for store in stores:
        store.close()
    assert [answer.attempts for answer in answers] == [4] * number
    assert client.num_sent == 4 * number


def test_a_wait_for_another_process_names_it_and_ends(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(ask, "_WARN_AFTER_S", 0.05)
    with TeacherStore(tmp_path / "s.sqlite") as one, TeacherStore(tmp_path / "s.sqlite") as other:
        assert isinstance(other.reserve(b"k", "t", 700, 10_000), int)
        client = Failing()
        answer = asyncio.run(asker(client, one, longest_claim_s=0.3).ask(a_request()))
        lock = tmp_path / f"s.sqlite.{other._owner_name}.lock"
        assert lock.exists()
    for said in (answer.error, caplog.text):
        assert re.search(rf"\b{os.getpid()}\b.*{re.escape(socket.gethostname())}", said)
        assert str(lock) in said
    assert len(caplog.records) == 1
    assert answer.refusal == "busy"
    assert client.num_sent == 0
    assert 0.3 <= answer.latency_s < 3


def all_but_reserved(tmp_path):
    """Two stores on one file; the other holds all of a cap of 1,000 nano-dollars but 300, for a request of its own."""
    one, other = TeacherStore(tmp_path / "s.sqlite"), TeacherStore(tmp_path / "s.sqlite")
    intent = other.reserve(b"of another process", "t", 700, 1000)
    assert isinstance(intent, int)
    return one, other, intent


def test_room_that_another_process_holds_is_waited_for_once_for_all_requests(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(ask, "_MAX_POLL_S", 0.05)
    monkeypatch.setattr(ask, "_WARN_AFTER_S", 0.1)
    one, other, _ = all_but_reserved(tmp_path)
    client = Failing()
    with one, other:
        by_us = asker(client, one, cap_nano=1000, longest_claim_s=0.4)

        async def ask_all():
            return await asyncio.gather(*(by_us.ask(a_request(key)) for key in (b"1", b"2", b"3", b"4", b"5")))

        begin = time.monotonic()
        answers = asyncio.run(ask_all())
        took_s = time.monotonic() - begin
    assert [answer.refusal for answer in answers] == ["cap"] * 5
    assert 0.4 <= took_s < 1.4  # five times 0.4 if each request waited by itself
    assert client.num_sent == 0
    assert len(caplog.records) == 1


def test_the_wait_for_room_begins_again_when_the_other_process_makes_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(ask, "_MAX_POLL_S", 0.02)
    one, other, intent = all_but_reserved(tmp_path)
    client = Failing()
    with one, other:
        by_us = asker(client, one, cap_nano=1000, longest_claim_s=0.2)

        async def ask_while_it_works():
            first = await by_us.ask(a_request(b"1"))
            other.settle(intent, 0, reply=None)
            again = other.reserve(b"its next", "t", 700, 1000)
            assert isinstance(again, int)
            asking = asyncio.create_task(by_us.ask(a_request(b"2")))
            await asyncio.sleep(0.1)
            assert not asking.done()
            other.settle(again, 0, reply=None)
            return first, await asking

        first, second = asyncio.run(ask_while_it_works())
    assert first.refusal == "cap"
    assert second.refusal is None
    assert second.attempts == 4
