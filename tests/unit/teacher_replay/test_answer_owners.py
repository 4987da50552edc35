"""Paid answers stay with the sessions that stay; what nobody is known to own is said, and goes only when asked to."""

from __future__ import annotations

import sqlite3

import pytest

from composer_replication.runs import RunDir
from composer_replication.teacher_replay.forget import AnswerCounts, count_answers, forget
from composer_replication.teacher_replay.ledger import TeacherStore


def add(store, key, *sessions, cost=40):
    first, *others = sessions or ("",)
    data = {"message": {"content": f"said {key.decode()}"}}
    store.settle(store.reserve(key, "t", 100, 10**9), cost, reply=(key, "t", data), session=first)
    for session in others:
        store.add_reply_session(key, session)


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path / "run")


@pytest.fixture
def path(run):
    with TeacherStore(run.path("teacher_cache")) as store:
        add(store, b"one", "a")
        add(store, b"two", "b")
        add(store, b"shared", "a", "b")
    return run.path("teacher_cache")


def keys(path):
    with TeacherStore(path) as store:
        return {key for key in (b"one", b"two", b"shared", b"old") if store.reply(key)}


def test_answers_of_other_sessions_and_shared_ones_stay(run, path):
    assert count_answers(run, {"b"}, {"a"}) == AnswerCounts(num_kept=2, num_removed=1, num_unowned=0)
    # Nobody forgot `a`: it may have gone on under another id, and what was paid for it stays.
    assert count_answers(run, {"b"}, {"c"}) == AnswerCounts(num_kept=2, num_removed=0, num_unowned=1)
    forget(run, set(), {"b"})
    assert keys(path) == {b"two", b"shared"}
    assert b"said one" not in path.read_bytes()
    forget(run, set(), set())
    assert keys(path) == set()
    assert b"said" not in path.read_bytes()


def test_what_was_spent_stays_spent(run, path):
    forget(run, set(), set())
    with TeacherStore(path) as store:
        assert store.meter()[:3] == (120, 0, 0)


def test_an_answer_of_a_session_that_is_no_longer_known_is_nobodys(run, path):
    assert count_answers(run, {"b", "c"}, set()) == AnswerCounts(2, 0, 1)
    assert count_answers(run, {"c"}, {"a"}) == AnswerCounts(0, 2, 1)
    assert count_answers(run, {"c"}, {"a", "b"}) == AnswerCounts(0, 3, 0)


def test_counting_changes_nothing(run, path):
    before = path.read_bytes()
    count_answers(run, {"a"}, {"b"})
    assert path.read_bytes() == before


def as_of_version_1(path):
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("DROP TABLE reply_owners")
    connection.execute("PRAGMA user_version = 1")
    connection.close()


def test_a_store_of_the_version_before_owns_nothing_until_it_is_used_again(run, path):
    as_of_version_1(path)
    assert count_answers(run, {"a", "b"}, set()) == AnswerCounts(0, 0, 3)
    with TeacherStore(path) as store:
        assert store.meter()[:3] == (120, 0, 0)
        store.add_reply_session(b"one", "a")
    assert count_answers(run, {"a", "b"}, set()) == AnswerCounts(1, 0, 2)


def test_a_file_that_is_no_store_is_none(run):
    run.path("teacher_cache").write_bytes(b"by no means a database" * 50)
    assert count_answers(run, set(), set()) is None
