"""What every object store promises: whole objects, one creator of a key, sizes looked at first, named failures."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from composer_replication.diloco.store import (
    MemoryStore,
    MissingObject,
    ObjectTooLarge,
    StoreCannotCreate,
    StoreDenied,
    StoreFull,
    StoreUnavailable,
    open_store,
)
from composer_replication.errors import InputError
from refusals import refusal


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else open_store(str(tmp_path / "bucket"))


def test_an_object_is_what_was_put_last(store):
    store.put("g0/a", b"one")
    store.put("g0/a", b"twice")
    assert (store.get("g0/a", most_bytes=5), store.size("g0/a")) == (b"twice", 5)


def test_the_first_creator_wins_and_its_bytes_stay(store):
    assert [store.create("g0/members", data) for data in (b"first", b"second")] == [True, False]
    assert store.get("g0/members", most_bytes=99) == b"first"


def test_a_missing_object_is_named_and_has_no_size(store):
    with pytest.raises(MissingObject, match="g0/none") as caught:
        store.get("g0/none", most_bytes=9)
    assert (caught.value.key, caught.value.uri, store.size("g0/none")) == ("g0/none", store.uri, None)
    store.put("g0/object", b"")
    assert store.size("g0/object/below") is None


def test_an_object_above_the_limit_is_not_read(store):
    store.put("big", bytes(11))
    with pytest.raises(ObjectTooLarge, match=r"\b11 bytes\b.*\b10\b"):
        store.get("big", most_bytes=10)


def test_a_listing_is_sorted_and_keeps_to_its_folder(store):
    for key in ("g1/b", "g1/a/x", "g10/a", "g1.x/a", "top"):
        store.put(key, b".")
    assert store.keys("g1") == store.keys("g1/") == ["g1/a/x", "g1/b"]
    assert store.keys("") == ["g1.x/a", "g1/a/x", "g1/b", "g10/a", "top"]
    assert store.keys("none") == []


def test_what_is_deleted_is_gone_and_deleting_it_again_is_fine(store):
    store.put("g1/a/x", b".")
    store.put("g1/b", b".")
    store.delete(["g1/a/x", "g1/none", "none/none"])
    store.delete(["g1/a/x"])
    assert store.keys("") == ["g1/b"]
    assert store.create("g1/a/x", b"again")


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", ".a", "a/.b", "a b", "a\\b", "é", "a" * 513])
def test_a_key_that_leads_elsewhere_is_refused(store, key):
    for call in (
        lambda: store.put(key, b""),
        lambda: store.create(key, b""),
        lambda: store.get(key, most_bytes=1),
        lambda: store.size(key),
        lambda: store.delete([key]),
    ):
        with refusal(InputError, what="key", expected="[A-Za-z0-9._-]"):
            call()


def test_of_threads_at_once_one_creates(store):
    for number in range(20):
        start, won = threading.Barrier(6), []

        def race(name: int, start=start, won=won, number=number) -> None:
            start.wait()
            if store.create(f"round/{number}", str(name).encode()):
                won.append(name)

        threads = [threading.Thread(target=race, args=(name,)) for name in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert won == [int(store.get(f"round/{number}", most_bytes=9))]


def test_a_folder_may_be_removed_while_another_writes_into_it(tmp_path):
    store = open_store(str(tmp_path))
    stop = threading.Event()

    def sweep() -> None:
        while not stop.is_set():
            store.delete(["round/deep/a"])

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        for number in range(100):
            store.put("round/deep/a", b"x")
            assert store.create(f"round/deep/{number}", b"y")
            store.delete([f"round/deep/{number}"])
    finally:
        stop.set()
        sweeper.join()


def test_links_pipes_and_foreign_names_are_not_objects(tmp_path):
    store = open_store(str(tmp_path / "bucket"))
    secret = tmp_path / "secret"
    secret.write_bytes(b"not yours")
    root = tmp_path / "bucket"
    (root / "link").symlink_to(secret)
    (root / "folder").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    (root / "a name").write_bytes(b"foreign")
    (root / ".half.1.abc.tmp").write_bytes(b"left behind")
    assert store.keys("") == []
    for key in ("link", "pipe"):
        assert store.size(key) is None
        with pytest.raises(MissingObject):
            store.get(key, most_bytes=99)


@pytest.mark.parametrize(
    ("number", "named"),
    [
        (errno.EACCES, StoreDenied),
        (errno.EROFS, StoreDenied),
        (errno.ENOSPC, StoreFull),
        (errno.EDQUOT, StoreFull),
        (errno.EIO, StoreUnavailable),
    ],
)
def test_what_the_disk_refuses_has_a_name_and_leaves_nothing(tmp_path, monkeypatch, number, named):
    store = open_store(str(tmp_path))

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    for write in (store.put, store.create):
        with pytest.raises(named) as caught:
            write("g0/a", b"x")
        assert caught.value.cause_kind == errno.errorcode[number]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_file_system_without_links_is_refused_when_it_is_opened(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreCannotCreate) as caught:
        open_store(str(tmp_path))
    assert caught.value.cause_kind == "no_links"


def test_a_link_whose_answer_was_lost_is_still_won(tmp_path, monkeypatch):
    store = open_store(str(tmp_path))
    link = os.link

    def link_twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    assert store.create("a", b"mine")
    assert not store.create("a", b"yours")


def test_a_file_uri_is_a_path(tmp_path):
    folder = tmp_path / "a b"
    open_store(folder.as_uri()).put("x", b"1")
    assert (folder / "x").read_bytes() == b"1"
    assert open_store(str(folder)).uri == folder.as_uri()


@pytest.mark.parametrize("uri", ["s3://key:SECRET@bucket/a", "az://box/a?sig=SECRET", "file:///tmp/a#SECRET"])
def test_a_uri_with_a_credential_is_refused_without_repeating_it(uri):
    with refusal(InputError, what="URI", got=uri.partition("//")[0], expected="scheme://") as caught:
        open_store(uri)
    assert "SECRET" not in str(caught.value)


def test_a_folder_takes_no_options_and_a_deadline_is_a_time(tmp_path):
    with refusal(InputError, what="options", got="['region']"):
        open_store(str(tmp_path), options={"region": "x"})
    with refusal(InputError, what="deadline_s", got="0"):
        open_store(str(tmp_path), deadline_s=0)


def test_a_folder_that_goes_away_while_it_is_made_is_made_again(tmp_path, monkeypatch):
    """pathlib looks whether what stands in its way is a folder; by then it may be gone."""
    store, make, calls = open_store(str(tmp_path)), Path.mkdir, []

    def make_late(path, *args, **options):
        calls.append(path)
        if len(calls) == 1:
            raise FileExistsError(17, "File exists", str(path))
        make(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", make_late)
    store.put("round/deep/a", b"x")
    assert store.get("round/deep/a", most_bytes=9) == b"x"
    assert len(calls) >= 2
