"""The store: no sum passes the cap, whoever asks; replies are kept; what a dead process held stays spent."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.errors import ArtefactCorruptError
from composer_replication.teacher_replay.ledger import TeacherStore
from composer_replication.teacher_replay.tables import NoRoom, RequestRefused
from refusals import refusal

SRC = Path(__file__).parents[3] / "src"
REPLY = (b"k", "t", {"message": {"content": "yes"}})


def test_a_reply_is_kept_with_its_cost(tmp_path):
    with TeacherStore(tmp_path / "s.sqlite") as store:
        intent = store.reserve(b"k", "t", 100, 1000)
        assert store.meter().committed == 100
        assert store.reply(b"k") is None
        store.settle(intent, 40, reply=REPLY)
        assert store.meter()[:3] == (40, 0, 0)
    with TeacherStore(tmp_path / "s.sqlite") as store:
        assert store.reply(b"k") == REPLY[2]
        assert store.meter()[:3] == (40, 0, 0)
        assert store.num_replies() == 1


def test_what_could_pass_the_cap_is_refused_and_says_by_how_much():
    with TeacherStore() as store:
        first = store.reserve(b"a", "t", 600, 1000)
        refused = store.reserve(b"b", "t", 1001, 1000)
        assert isinstance(refused, RequestRefused)
        assert refused.reason.startswith("budget: ")
        assert re.findall(r"\$[\d.]+", refused.reason) == ["$0.000001", "$0.000001"]
        assert isinstance(store.reserve(b"c", "t", 401, 1000), NoRoom)  # it fits where the first one costs less
        assert isinstance(store.reserve(b"c", "t", 400, 1000), int)
        store.settle(first, 0, reply=None)
        assert isinstance(store.reserve(b"d", "t", 600, 1000), int)


def test_nobody_knows_means_all_of_it():
    with TeacherStore() as store:
        store.settle(store.reserve(b"a", "t", 600, 1000), None, reply=None)
        assert store.meter()[:4] == (0, 0, 600, 1)
        assert isinstance(store.reserve(b"b", "t", 401, 1000), RequestRefused)


def test_a_teacher_that_takes_more_than_was_due_stops_everything_by_name():
    with TeacherStore() as store:
        store.settle(store.reserve(b"a", "dear/teacher", 10**9, 10**10), 2 * 10**9, reply=REPLY)
        refused = store.reserve(b"b", "other", 1, 10**10)
        assert isinstance(refused, RequestRefused)
        assert refused.reason.startswith("stopped: dear/teacher")
        assert re.findall(r"\$[\d.]+", refused.reason) == ["$2.000000", "$1.000000"]
        assert store.reply(b"k") == REPLY[2]
        store.resume_after_overrun()
        assert not isinstance(store.reserve(b"b", "other", 1, 10**10), RequestRefused)


@given(st.lists(st.tuples(st.integers(0, 400), st.one_of(st.none(), st.integers(0, 400))), max_size=40))
def test_whatever_is_asked_the_sum_of_bounds_stays_under_the_cap(asked):
    with TeacherStore() as store:
        billed = 0
        for number, (bound, cost) in enumerate(asked):
            intent = store.reserve(bytes([number]), "t", bound, 1000)
            if isinstance(intent, RequestRefused):
                assert store.meter().committed + bound > 1000
                continue
            taken = None if cost is None else min(cost, bound)
            billed += bound if taken is None else taken
            store.settle(intent, taken, reply=None)
            assert store.meter().committed == billed <= 1000


def test_many_threads_of_several_stores_on_one_file_never_pass_the_cap(tmp_path):
    path = tmp_path / "s.sqlite"
    TeacherStore(path).close()

    def ask(number):
        with TeacherStore(path) as store:
            taken = 0
            for question in range(40):
                intent = store.reserve(f"{number}-{question}".encode(), "t", 100, 10_000)
                if isinstance(intent, int):
                    taken += 1
                    store.settle(intent, 100, reply=None)
            return taken

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(ask, range(6))) == 100
    with TeacherStore(path) as store:
        assert store.meter()[:3] == (10_000, 0, 0)


WORKER = """
import sys, time
from composer_replication.teacher_replay.ledger import TeacherStore
store = TeacherStore(sys.argv[1])
print(store.reserve(b"held", "t", 700, 1000), flush=True)
time.sleep(60)
"""


def test_what_a_killed_process_held_stays_spent_and_a_living_one_keeps_its_own(tmp_path):
    path = tmp_path / "s.sqlite"
    environment = os.environ | {"PYTHONPATH": str(SRC)}
    command = [sys.executable, "-c", WORKER, str(path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "1"
        with TeacherStore(path) as store:  # it lives: its reservation is in flight
            assert store.meter()[:4] == (0, 700, 0, 0)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with TeacherStore(path) as store:
        assert store.meter()[:4] == (0, 0, 700, 1)
        assert isinstance(store.reserve(b"x", "t", 301, 1000), RequestRefused)
    assert not list(tmp_path.glob("*.lock"))


def test_a_file_that_is_no_store_is_named(tmp_path):
    path = tmp_path / "s.sqlite"
    path.write_bytes(b"not a database, by far" * 100)
    with pytest.raises(ArtefactCorruptError, match=r"s\.sqlite"):
        TeacherStore(path)
    other = tmp_path / "later.sqlite"
    connection = sqlite3.connect(other)
    connection.execute("PRAGMA user_version = 9")
    connection.close()
    with refusal(ArtefactCorruptError, what=str(other), got="9"):
        TeacherStore(other)


def test_asking_and_settling_is_cheap(tmp_path, note):
    with TeacherStore(tmp_path / "s.sqlite") as store:
        begin = time.process_time()
        for number in range(1000):
            key = number.to_bytes(32, "big")
            store.settle(store.reserve(key, "t", 10, 10**9), 5, reply=(key, "t", {"message": {"content": "x" * 500}}))
        each_ms = time.process_time() - begin
    note(f"store: {each_ms:.2f} ms CPU for a reservation and its settlement")
    assert each_ms < 2.0
