"""Several processes that ask the same: each makes its attempts once, and none waits for ever or in silence."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest
from replay_pieces import KEY, TEACHERS

from composer_replication.ingestion.last_gate import OpenGate
from composer_replication.teacher_replay import ask_and_retry as ask
from composer_replication.teacher_replay.ask_and_retry import Asker, Patience
from composer_replication.teacher_replay.endpoint.outcome import Failure
from composer_replication.teacher_replay.requests import Request
from composer_replication.teacher_replay.store.ledger import TeacherStore
from composer_replication.teacher_replay.teachers import read_teachers


class Failing:
    """A client whose endpoint is always overloaded."""

    def __init__(self):
        self.num_sent = 0

    async def send(self, _request):
        self.num_sent += 1
        await asyncio.sleep(0.002)
        return Failure("HTTP 503: overloaded", True, "none")


def asker(client, store, **patience):
    given = Patience(max_attempts=4, first_wait_s=0.001, longest_wait_s=0.002, **patience)
    return Asker(client, store, cap_nano=10**12, gate=OpenGate(), patience=given, seed=1)


def a_request():
    (teacher,) = read_teachers(TEACHERS[:1], environment={}, api_key=KEY, base_url="http://127.0.0.1:1/v1")
    return Request(teacher, b"k", b"{}", 700)


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
    monkeypatch.setattr(ask, "_SAID_AFTER_S", 0.05)
    with TeacherStore(tmp_path / "s.sqlite") as one, TeacherStore(tmp_path / "s.sqlite") as other:
        assert isinstance(other.reserve(b"k", "t", 700, 10_000), int)
        client = Failing()
        answer = asyncio.run(asker(client, one, longest_claim_s=0.3).ask(a_request()))
        lock = tmp_path / f"s.sqlite.{other._owner_name}.lock"
        assert lock.exists()
    named = f"process {os.getpid()} on {socket.gethostname()}"
    for said in (answer.error, caplog.text):
        assert named in said
        assert f"remove {lock}" in said
    assert len(caplog.records) == 1
    assert answer.was_refused
    assert client.num_sent == 0
    assert 0.3 <= answer.latency_s < 3
