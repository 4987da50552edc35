"""Objects as commits to a repository of the Hub, with the Hub's own client on a loopback server."""

from __future__ import annotations

import threading
import time

import pytest

from composer_replication.diloco.store import (
    MissingObject,
    ObjectTooLarge,
    StoreCannotCreate,
    StoreDenied,
    StoreUnavailable,
    open_store,
)
from composer_replication.errors import InputError
from hub_loopback import serving
from refusals import refusal

TOKEN = "hf_IN_NO_MESSAGE"


@pytest.fixture
def repository():
    with serving() as served:
        yield served


@pytest.fixture
def store(repository, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return opened(repository)


def opened(repository, uri="hf://owner/runs/a", deadline_s=30.0, slowest_mb_s=1.0):
    return open_store(
        uri, deadline_s=deadline_s, slowest_mb_s=slowest_mb_s, options={"endpoint": repository.url, "token": TOKEN}
    )


def test_the_objects_of_a_repository(store, repository):
    store.put("g0/a", b"one")
    store.put("g0/a", b"twice")
    assert (store.get("g0/a", most_bytes=5), store.size("g0/a"), store.size("g0/b")) == (b"twice", 5, None)
    assert [store.create("g0/m", data) for data in (b"first", b"second", b"first")] == [True, False, False]
    assert (store.keys("g0"), store.keys("none")) == (["g0/a", "g0/m"], [])
    assert sorted(repository.commits[-1][2]) == ["a/g0/a", "a/g0/m"]
    with pytest.raises(ObjectTooLarge):
        store.get("g0/a", most_bytes=4)
    store.delete(["g0/a", "g0/none"])
    with pytest.raises(MissingObject):
        store.get("g0/a", most_bytes=5)


def test_a_large_object_is_given_the_time_that_its_bytes_need(store, repository):
    slow = opened(repository, deadline_s=1.5, slowest_mb_s=0.5)
    asked = []

    def late(method, path):
        asked.append(path)
        if "/commit/" in path or "/resolve/" in path:
            time.sleep(0.8)  # more than a request without bytes may take
        return ""

    repository.judge = late
    data = bytes(range(250)) * 4000
    slow.put("g0/big", data)
    assert slow.get("g0/big", most_bytes=len(data)) == data
    assert sum("/commit/" in path for path in asked) == 1


def test_a_create_on_a_head_that_moved_is_tried_on_the_new_one(store, repository):
    left = ["412"]
    repository.judge = lambda method, path: left.pop() if left and "/commit/" in path else ""
    assert store.create("g0/m", b"mine")


def test_a_create_of_a_key_that_came_in_between_is_lost(store, repository):
    left = [None]

    def intrude(_method: str, path: str) -> str:
        if left and "/preupload/" in path:
            left.pop()
            _, _, files = repository.commits[-1]
            repository.commits.append(("2" * 40, "theirs", files | {"a/g0/m": b"mine"}))
        return ""

    repository.judge = intrude
    assert not store.create("g0/m", b"mine")  # the same bytes: the client makes no commit and calls it done


def test_a_create_whose_answer_was_lost_is_won(store, repository):
    left = ["lost"]
    repository.judge = lambda method, path: left.pop() if left and "/commit/" in path else ""
    assert store.create("g0/m", b"mine")
    assert not store.create("g0/m", b"mine")


def test_of_threads_at_once_one_creates(store):
    won, start = [], threading.Barrier(3)

    def race(name: int) -> None:
        start.wait()
        if store.create("g0/m", str(name).encode()):
            won.append(name)

    threads = [threading.Thread(target=race, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [int(store.get("g0/m", most_bytes=9))]


@pytest.mark.parametrize(
    ("fault", "named"),
    [("403", StoreDenied), ("401", StoreDenied), ("400", StoreUnavailable), ("hang", StoreUnavailable)],
)
def test_a_failure_has_a_name_and_no_secret(store, repository, fault, named):
    hasty = opened(repository, deadline_s=1.5)
    repository.judge = lambda method, path: fault
    with pytest.raises(named) as caught:
        hasty.size("g0/a")
    assert TOKEN not in str(caught.value)
    assert repository.url not in str(caught.value)


def test_a_server_that_ignores_the_parent_is_refused_when_it_is_opened(store, repository):
    repository.ignores_parents = True
    with pytest.raises(StoreCannotCreate) as caught:
        opened(repository)
    assert caught.value.cause_kind == "not_atomic"


def test_a_repository_that_is_not_there_is_refused_when_it_is_opened(store, repository):
    with pytest.raises(StoreDenied) as caught:
        opened(repository, "hf://owner/others/a")
    assert (caught.value.uri, caught.value.cause_kind) == ("hf://owner/others/a", "404")


def test_a_uri_without_a_repository_and_foreign_options_are_refused():
    with refusal(InputError, got="hf://owner", expected="owner/name"):
        open_store("hf://owner", options={"endpoint": "http://127.0.0.1:9"})
    with refusal(InputError, what="options", got="['region']"):
        open_store("hf://owner/runs", options={"region": "x"})
