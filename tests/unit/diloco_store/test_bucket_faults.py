"""A bucket that is ill: each failure has a name, a deadline and no secret in it; what can be repeated is repeated."""

from __future__ import annotations

import time
import traceback

import pytest

from refusals import refusal

pytest.importorskip("obstore")

from composer_replication.diloco.store import (
    MissingObject,
    ObjectTooLarge,
    StoreCannotCreate,
    StoreDenied,
    StoreFull,
    StoreUnavailable,
    buckets,
    open_store,
)
from composer_replication.errors import InputError
from s3_loopback import serving

PATIENT_S, DEADLINE_S = 30.0, 1.5


@pytest.fixture(scope="module")
def served():
    with serving() as bucket:
        yield bucket


@pytest.fixture
def bucket(served):
    served.judge = lambda method, key: ""
    served.objects.clear()
    served.requests.clear()
    return served


@pytest.fixture
def store(bucket):
    return open_store("s3://box/runs/a", deadline_s=PATIENT_S, options=bucket.options)


@pytest.fixture
def hasty(bucket):
    return open_store("s3://box/runs/a", deadline_s=DEADLINE_S, options=bucket.options)


def test_the_objects_of_a_bucket(store, bucket):
    assert store.uri == "s3://box/runs/a"
    store.put("g0/a", b"one")
    store.put("g0/a", b"twice")
    store.put("g0/empty", b"")
    assert (store.get("g0/a", most_bytes=5), store.get("g0/empty", most_bytes=0)) == (b"twice", b"")
    assert [store.create("g0/m", data) for data in (b"first", b"second")] == [True, False]
    assert (store.size("g0/m"), store.size("g0/none")) == (5, None)
    for name in "bcdefgh":  # the server lists three to a page
        store.put(f"g0/{name}", b".")
    bucket.objects["runs/a/g0/a name"] = bucket.objects["runs/a/g00/x"] = bucket.objects["other"] = (b"foreign", {})
    assert store.keys("g0") == [f"g0/{name}" for name in ("a", "b", "c", "d", "e", "empty", "f", "g", "h", "m")]
    assert "g00/x" in store.keys("")
    store.delete(["g0/a", "g0/none"])
    with pytest.raises(MissingObject):
        store.get("g0/a", most_bytes=5)
    with pytest.raises(ObjectTooLarge, match=r"\b5 bytes\b.*\b4\b"):
        store.get("g0/m", most_bytes=4)


def test_a_large_object_travels_in_parts_and_comes_back_whole(store, bucket, monkeypatch):
    monkeypatch.setattr(buckets, "PART_BYTES", 5 << 20)
    data = bytes(range(256)) * (1 << 16)  # 16 MiB
    store.put("g0/big", data)
    bucket.requests.clear()
    assert store.get("g0/big", most_bytes=len(data)) == data
    assert len(bucket.requests) == 4


def test_parts_travel_at_once(store, bucket, monkeypatch, note):
    data, seen = bytes(20_000_000), {}
    bucket.connection_mb_s = 15.0
    try:
        for name, part_bytes in (("single", 1 << 40), ("parts", 5 << 20)):
            monkeypatch.setattr(buckets, "PART_BYTES", part_bytes)
            bucket.most_at_once, start = 0, time.monotonic()
            store.put("g0/big", data)
            put_at_once, bucket.most_at_once = bucket.most_at_once, 0
            assert store.get("g0/big", most_bytes=len(data)) == data
            seen[name] = put_at_once, bucket.most_at_once
            note(f"20 MB there and back at 15 MB/s a connection, {name}: {time.monotonic() - start:.2f} s")
    finally:
        bucket.connection_mb_s = 0.0
    assert seen["single"] == (1, 1)
    assert min(seen["parts"]) >= 2


def test_an_object_that_changes_while_its_parts_are_read_is_read_again(store, bucket, monkeypatch):
    monkeypatch.setattr(buckets, "PART_BYTES", 1000)
    store.put("big", b"a" * 999)
    bucket.objects["runs/a/big"] = (b"a" * 5000, {})
    later = iter(range(99))

    def change(_method: str, _key: str) -> str:
        if next(later) == 3:
            bucket.objects["runs/a/big"] = (b"b" * 5000, {})
        return ""

    bucket.judge = change
    assert store.get("big", most_bytes=5000) == b"b" * 5000


@pytest.mark.parametrize("part_bytes", [1 << 40, 400_000], ids=["whole", "parts"])
def test_a_slow_line_is_given_the_time_that_the_bytes_need(bucket, monkeypatch, part_bytes):
    """1 MB at 1 MB/s for each connection: two to three times what a request without bytes may take."""
    monkeypatch.setattr(buckets, "PART_BYTES", part_bytes)
    slow = open_store("s3://box/runs/a", deadline_s=1.0, slowest_mb_s=0.5, options=bucket.options)
    data = bytes(1_000_000)
    bucket.connection_mb_s = 1.0 if part_bytes > len(data) else 0.4
    try:
        slow.put("g0/big", data)
        assert slow.get("g0/big", most_bytes=len(data)) == data
        assert slow.create("g0/new", data)
    finally:
        bucket.connection_mb_s = 0.0
    assert len(bucket.requests) < 20  # none of them had to be made again


def test_a_line_slower_than_the_slowest_is_named(bucket):
    slow = open_store("s3://box/runs/a", deadline_s=1.0, slowest_mb_s=10.0, options=bucket.options)
    bucket.connection_mb_s = 0.2
    start = time.monotonic()
    try:
        with pytest.raises(StoreUnavailable) as caught:
            slow.put("g0/big", bytes(1_000_000))
        assert (caught.value.cause_kind, caught.value.key) == ("no answer", "g0/big")
    finally:
        bucket.connection_mb_s = 0.0
    assert time.monotonic() - start < 6


def test_a_request_without_bytes_that_hangs_is_not_waited_for_longer_on_a_slow_line(bucket):
    slow = open_store("s3://box/runs/a", deadline_s=DEADLINE_S, slowest_mb_s=0.001, options=bucket.options)
    bucket.objects["runs/a/g0/a"] = (b"0123456789", {})
    bucket.judge = lambda method, key: "hang"
    start = time.monotonic()
    with pytest.raises(StoreUnavailable):
        slow.size("g0/a")
    assert time.monotonic() - start < DEADLINE_S * 4 / 3 + 1.5


@pytest.mark.parametrize("slowest", [0.0, -1.0, float("nan")])
def test_a_slowest_line_that_is_none_is_refused(bucket, slowest):
    with refusal(InputError, what="slowest_mb_s", got=str(slowest)):
        open_store("s3://box/runs/a", slowest_mb_s=slowest, options=bucket.options)


@pytest.mark.parametrize("fault", ["500", "503", "hang", "cut"])
def test_what_passes_is_tried_again(hasty, bucket, fault):
    bucket.objects["runs/a/g0/a"] = (b"0123456789", {})
    left = [fault, ""]
    bucket.judge = lambda method, key: left.pop(0) if left else ""
    assert hasty.get("g0/a", most_bytes=10) == b"0123456789"


@pytest.mark.parametrize(
    ("fault", "named", "kind"),
    [
        ("401", StoreDenied, "401 AsAsked"),
        ("403", StoreDenied, "403 AsAsked"),
        ("507", StoreFull, "507 AsAsked"),
        ("500", StoreUnavailable, "500 AsAsked"),
        ("503", StoreUnavailable, "503 AsAsked"),
        ("400", StoreUnavailable, "400 AsAsked"),
        ("hang", StoreUnavailable, "no answer"),
        ("cut", StoreUnavailable, "no answer"),
    ],
)
def test_what_does_not_pass_has_a_name_within_the_deadline_and_no_secret(hasty, bucket, fault, named, kind):
    bucket.objects["runs/a/g0/a"] = (b"0123456789", {})
    bucket.judge = lambda method, key: fault
    start = time.monotonic()
    with pytest.raises(named) as caught:
        hasty.get("g0/a", most_bytes=10)
    assert time.monotonic() - start < DEADLINE_S * 4 / 3 + 1.5  # of a machine with other work
    assert (caught.value.cause_kind, caught.value.key) == (kind, "g0/a")
    text = "".join(traceback.format_exception(caught.value))
    assert "IN-NO-MESSAGE" not in text
    assert bucket.url not in text  # nothing of what the client says, which may be a signed address


@pytest.mark.parametrize("fault", ["401", "507", "500"])
def test_a_refused_write_has_the_same_name(hasty, bucket, fault):
    bucket.judge = lambda method, key: fault
    for write in (hasty.put, hasty.create):
        with pytest.raises({"401": StoreDenied, "507": StoreFull, "500": StoreUnavailable}[fault]):
            write("g0/a", b"x")


def test_a_create_whose_answer_was_lost_is_won_and_the_next_one_is_not(store, bucket):
    left = ["lost"]
    bucket.judge = lambda method, key: left.pop() if left and method == "PUT" else ""
    assert store.create("g0/members", b"mine")
    assert not store.create("g0/members", b"mine")
    assert store.get("g0/members", most_bytes=9) == b"mine"


def test_a_create_whose_answer_was_lost_after_another_had_won_is_lost(store, bucket):
    store.create("g0/members", b"theirs")
    left = ["lost"]
    bucket.judge = lambda method, key: left.pop() if left and method == "PUT" else ""
    assert not store.create("g0/members", b"mine")


def test_a_conflict_over_nothing_is_tried_again(store, bucket):
    left = ["409"]
    bucket.judge = lambda method, key: left.pop() if left and method == "PUT" else ""
    assert store.create("g0/members", b"mine")


def test_a_server_that_ignores_the_condition_is_refused_when_it_is_opened():
    with serving(ignores_conditions=True) as bucket:
        with pytest.raises(StoreCannotCreate) as caught:
            open_store("s3://box/a", deadline_s=PATIENT_S, options=bucket.options)
        assert caught.value.cause_kind == "not_atomic"
        assert bucket.objects == {}


def test_a_bucket_that_is_not_there_or_not_ours_is_refused_when_it_is_opened(bucket):
    for fault in ("404", "403"):
        bucket.judge = lambda method, key, fault=fault: fault
        with pytest.raises(StoreDenied, match="s3://box/a"):
            open_store("s3://box/a", deadline_s=PATIENT_S, options=bucket.options)


def test_options_nobody_knows_are_named_without_their_values(bucket):
    with refusal(InputError, got="no_such_option") as caught:
        open_store("s3://box/a", options={"no_such_option": "SECRET"})
    assert "SECRET" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
