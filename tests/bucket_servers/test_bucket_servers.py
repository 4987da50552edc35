"""The same promises on servers of others: S3 by moto, Azure by azurite. GCS's emulator breaks them, and is refused."""

from __future__ import annotations

import os

import pytest

import store_race
from bucket_servers import servers
from composer_replication.diloco.store import MissingObject, ObjectTooLarge, StoreCannotCreate, open_store

pytestmark = pytest.mark.diloco
pytest.importorskip("obstore")

ROUNDS = {"ci": {4: 40}, "full": {2: 1000, 8: 1000}}[os.environ.get("CRF_TEST_PROFILE", "ci")]


@pytest.fixture(scope="module", params=["moto", "azurite"])
def place(request):
    with getattr(servers, request.param)() as opened:
        yield opened


def test_the_objects_of_a_real_bucket(place):
    uri, options = place
    store = open_store(uri, options=options)
    store.put("g0/a", b"one")
    store.put("g0/a", b"twice")
    store.put("g0/empty", b"")
    assert (store.get("g0/a", most_bytes=5), store.get("g0/empty", most_bytes=0)) == (b"twice", b"")
    assert [store.create("g0/m", data) for data in (b"first", b"second", b"first")] == [True, False, False]
    assert store.keys("g0") == ["g0/a", "g0/empty", "g0/m"]
    assert (store.size("g0/m"), store.size("g0/none"), store.keys("none")) == (5, None, [])
    with pytest.raises(ObjectTooLarge):
        store.get("g0/m", most_bytes=4)
    store.delete(["g0/a", "g0/none", "g0/empty", "g0/m"])
    assert store.keys("") == []
    with pytest.raises(MissingObject):
        store.get("g0/a", most_bytes=5)


def test_an_object_of_many_parts_comes_back_whole(place):
    uri, options = place
    store = open_store(uri, options=options)
    data = os.urandom(1 << 20) * 33
    store.put("big", data)
    assert store.size("big") == len(data)
    assert store.get("big", most_bytes=len(data)) == data


@pytest.mark.parametrize("racers", sorted(ROUNDS))
def test_no_round_of_a_real_bucket_has_two_winners(place, note, racers):
    uri, options = place
    result = store_race.race(uri, rounds=ROUNDS[racers], racers=racers, options=options)
    note(f"race to create, {uri}: {result}")
    assert (result["double"], result["none"], result["wrong"]) == (0, 0, 0)
    assert result["winners"] > 1  # else they did not race


def test_the_emulator_of_gcs_is_refused_because_it_ignores_the_condition():
    with servers.gcs() as (uri, options), pytest.raises(StoreCannotCreate) as caught:
        open_store(uri, options=options, deadline_s=6)
    assert caught.value.cause_kind == "not_atomic"
