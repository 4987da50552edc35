"""Records that are none: each reader has bounds, and what is outside of them ends in a RecordError or a named error."""

from __future__ import annotations

import functools
import hashlib
import re
import time
from dataclasses import asdict

import pytest
import torch
from toy_replicas import QUICK, ToyLoop, check_run, in_threads, run_replica

from composer_replication.diloco.rounds.manager import ObjectStoreManager
from composer_replication.diloco.rounds.patience import GenerationRefused, PatientStore, Traffic
from composer_replication.diloco.rounds.progress import read_progress
from composer_replication.diloco.rounds.reading import read_record
from composer_replication.diloco.rounds.records import (
    MAX_MAGNITUDE,
    MAX_RANKS,
    MAX_SHARDS,
    Layout,
    Manifest,
    Member,
    OfferId,
    RecordError,
    RoundOutcome,
    Seal,
    Shard,
    digest,
    pack,
    unpack,
    unpack_manifest,
    unpack_outcome,
    unpack_seal,
)
from composer_replication.diloco.rounds.shards import RoundVector
from composer_replication.diloco.store import MemoryStore
from composer_replication.errors import InputError
from refusals import refusal

SHA, AT = "0" * 64, "run:key"
MEMBER = [[0, 0, 0], SHA, 1.0]
MANIFEST = {"id": [0, 0, 0], "base": "b", "spec": "s", "weight": 1.0, "shards": [{"bytes": 9, "sha256": SHA}]}
MANIFEST |= {"largest": 0.5}
SEAL = {"base": "b", "spec": "s", "num_shards": 1, "members": [MEMBER]}
OUTCOME = {"result": "commit", "base": "b", "spec": "s", "members": [MEMBER], "means": [SHA], "bad": []}
OUTCOME |= {"reason": "", "seconds": 0.5, "num_bytes": 9}
READERS = {"manifest": (unpack_manifest, MANIFEST), "seal": (unpack_seal, SEAL), "outcome": (unpack_outcome, OUTCOME)}


def line_of(text: bytes) -> bytes:
    """A line with a right checksum, whatever it holds."""
    return hashlib.sha256(text).hexdigest().encode() + b" " + text + b"\n"


@pytest.mark.parametrize("kind", READERS)
def test_a_record_is_read_back(kind):
    reader, content = READERS[kind]
    assert reader(AT, pack(kind, AT, content)) is not None


@pytest.mark.parametrize("text", [b"no json", b"[1]", b'"text"', b"{", b"[" * 5000, b"\xff\xfe", b"null"], ids=str)
@pytest.mark.parametrize("kind", [*READERS, "about", "claim", "genesis"])
def test_a_line_with_a_right_checksum_that_is_no_json_object_is_refused_by_name(kind, text):
    reader = READERS[kind][0] if kind in READERS else functools.partial(unpack, kind)
    with refusal(RecordError, what=kind):
        reader(AT, line_of(text))


LONG, LAST = "\x01" * 500, 10**9 - 1  # the text and the numbers with the most bytes
OFFERS = [OfferId(rank, LAST, LAST) for rank in range(MAX_RANKS)]
MEMBERS = tuple(Member(offer, "f" * 64, 1.2345678901234567e-300) for offer in OFFERS)
SHARDS = (Shard(2**50 - 1, "f" * 64),) * MAX_SHARDS
LARGEST = {
    "manifest": (unpack_manifest, Manifest(OFFERS[-1], LONG, LONG, 1e-300, SHARDS, MAX_MAGNITUDE)),
    "seal": (unpack_seal, Seal(LONG, LONG, MAX_SHARDS - 1, MEMBERS)),
    "outcome": (
        unpack_outcome,
        RoundOutcome("commit", LONG, LONG, MEMBERS, ("f" * 64,) * MAX_SHARDS, tuple(OFFERS), LONG, 1e-300, 2**50 - 1),
    ),
}


@pytest.mark.parametrize("kind", LARGEST)
def test_a_record_with_every_field_at_its_bound_can_be_read(kind):
    reads, record = LARGEST[kind]
    store = PatientStore(MemoryStore(), Traffic(), patience_s=5)
    layout = Layout(0, run="f" * 32)
    key = layout.mean(10**8 - 1, 10**9 - 1, MAX_SHARDS - 1, SHA, "")  # the longest of all
    store.put(key, pack(kind, layout.address(key), asdict(record)))
    assert read_record(store, layout, key, reads) == record


def test_a_vector_has_as_many_shards_as_its_records_may_list_and_no_more():
    piece = 128  # numbers of the smallest shard
    whole = torch.zeros(1).expand(piece * MAX_SHARDS)
    cuts = RoundVector([whole[: piece * (MAX_SHARDS - 1)]], parties=1, shard_elements=piece)
    assert cuts.num_shards == MAX_SHARDS - 1
    with refusal(InputError, got=f"{MAX_SHARDS:,} shards", expected=f"{MAX_SHARDS:,}", fix="shard_bytes"):
        RoundVector([whole], parties=1, shard_elements=piece)


def test_a_record_that_nobody_could_read_is_not_written():
    with refusal(InputError, what="state", got=" bytes", expected="16,777,216") as caught:
        pack("state", AT, {"spec": ["f" * 64] * 90_000})
    assert re.match(r"1\d,\d{3},\d{3} ", caught.value.got)


def test_a_world_whose_members_no_record_can_list_is_refused():
    with refusal(InputError, what="world_size", got=f"{MAX_RANKS:,}"):
        ObjectStoreManager(MemoryStore(), rank=0, world_size=MAX_RANKS)


HUGE, DEEP = 10**15, [[[[]]]]
BAD_FIELDS = [
    ("manifest", {"id": [0, 0]}),
    ("manifest", {"id": ["0", 0, 0]}),
    ("manifest", {"id": [HUGE, 0, 0]}),
    ("manifest", {"id": [0, -1, 0]}),
    ("manifest", {"id": [0, True, 0]}),
    ("manifest", {"weight": -1.0}),
    ("manifest", {"weight": "1"}),
    ("manifest", {"weight": 1e300}),
    ("manifest", {"largest": 3e38}),
    ("manifest", {"largest": None}),
    ("manifest", {"base": 5}),
    ("manifest", {"base": "b" * 10_000}),
    ("manifest", {"shards": "x"}),
    ("manifest", {"shards": [{"bytes": -1, "sha256": SHA}]}),
    ("manifest", {"shards": [{"bytes": HUGE * HUGE // HUGE * 8, "sha256": SHA}]}),
    ("manifest", {"shards": [{"bytes": 1, "sha256": "../../x"}]}),
    ("manifest", {"shards": [5]}),
    ("seal", {"num_shards": HUGE}),
    ("seal", {"num_shards": -1}),
    ("seal", {"num_shards": 1.5}),
    ("seal", {"members": []}),
    ("seal", {"members": [MEMBER, MEMBER]}),
    ("seal", {"members": [[[1, 0, 0], SHA, 1.0], MEMBER]}),
    ("seal", {"members": {"0": MEMBER}}),
    ("seal", {"members": DEEP}),
    ("seal", {"spec": None}),
    ("outcome", {"result": "won"}),
    ("outcome", {"result": ["commit"]}),
    ("outcome", {"members": []}),
    ("outcome", {"result": "void", "members": []}),
    ("outcome", {"means": ["x"]}),
    ("outcome", {"means": [SHA] * (MAX_SHARDS + 1)}),
    ("outcome", {"means": SHA}),
    ("outcome", {"bad": [[0, 0]]}),
    ("outcome", {"reason": 3}),
    ("outcome", {"seconds": -2}),
    ("outcome", {"num_bytes": HUGE * HUGE // HUGE * 8}),
]


@pytest.mark.parametrize(("kind", "wrong"), BAD_FIELDS, ids=lambda value: str(value)[:60])
def test_a_field_outside_of_its_bounds_is_refused_by_name(kind, wrong):
    reader, content = READERS[kind]
    with refusal(RecordError, what=kind) as caught:
        reader(AT, pack(kind, AT, {**content, **wrong}))
    assert len(str(caught.value)) < 400


ABOUT = {"world_size": 1, "payload": "fp32", "mean_payload": "fp32", "shard_bytes": 64 * 2**20}


def tensors_of_a_toy():
    loop = ToyLoop(manager(MemoryStore()))
    return digest(loop.manager._membership._state.saved().outline().spec)


def manager(store, rank=0, world=1, **options):
    return ObjectStoreManager(store, rank=rank, world_size=world, **{**QUICK, **options})


@pytest.mark.parametrize("num_shards", [10**15, 99_999, 0])
def test_a_seal_with_a_number_of_shards_that_the_vectors_do_not_have_is_passed_over(num_shards):
    store = MemoryStore()
    loop = ToyLoop(manager(store, grace_s=0.2))
    place = loop.manager._membership.position
    spec = loop.manager._membership.new_round(loop.manager._membership.store, loop.manager._membership.make_vector(
        loop.blanks(0)), weight=1.0).spec  # fmt: skip
    seal = {"base": place.base, "spec": spec, "num_shards": num_shards, "members": [MEMBER]}
    key = "g000000/r/00000000/seal/0"
    store.put(key, pack("seal", loop.manager._membership.layout.address(key), seal))
    assert loop.round()
    check_run(store, [loop])


@pytest.mark.parametrize("wrong", [None, {"result": "won"}], ids=["text", "result"])
def test_an_outcome_that_is_none_is_passed_over(wrong):
    store = MemoryStore()
    loop = ToyLoop(manager(store))
    key = "g000000/r/00000000/out/0"
    at = loop.manager._membership.layout.address(key)
    store.put(key, line_of(b"no json") if wrong is None else pack("outcome", at, {**OUTCOME, **wrong}))
    assert loop.round()
    check_run(store, [loop])


@pytest.mark.parametrize("key", ["offer/00001.0.0", "seal/0", "here/99999999999999999999", "mean/0/x", "offer/x"])
def test_lines_that_are_no_records_do_not_end_a_round(key):
    store = MemoryStore()
    store.put(f"g000000/r/00000000/{key}", line_of(b"no json"))
    loops = in_threads([functools.partial(run_replica, store, rank, 2, 2, grace_s=0.3) for rank in range(2)])
    assert len(check_run(store, loops)) == 2


def test_a_claim_and_a_beat_that_are_none_do_not_keep_a_rank():
    store = MemoryStore()
    store.put(f"g000000/claims/00000/{'9' * 300}", b"foreign")
    store.put("g000000/claims/00000/4", b"dead")
    store.put("g000000/beats/00000.4", line_of(b'{"kind":"beat","format":3,"count":"many"}'))
    began = time.monotonic()
    assert run_replica(store, 0, 1, 1).manager._membership.position.claim == 5
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("world", [10**15, "2", True, None])
@pytest.mark.parametrize("copies", [1, 3])
def test_settings_that_are_none_are_passed_over_while_a_copy_is_left(world, copies):
    store, layout = MemoryStore(), Layout(0)
    for key in map(layout.about, range(copies)):
        content = {"run": "0" * 32, **({} if world is None else {"world_size": world})}
        store.put(key, pack("about", layout.address(key), content))
    with pytest.raises(GenerationRefused):
        read_progress(store)
    if copies == 1:
        assert ToyLoop(manager(store)).round()
        return
    with pytest.raises(GenerationRefused):
        ToyLoop(manager(store))


def test_copies_of_two_runs_without_a_majority_are_refused():
    store, layout = MemoryStore(), Layout(0)
    for copy, run in enumerate(("a" * 32, "b" * 32)):
        content = {**ABOUT, "run": run, "tensors": tensors_of_a_toy()}
        store.put(layout.about(copy), pack("about", layout.address(layout.about(copy)), content))
    store.put(layout.about(2), b"damaged")
    for start in (lambda: ToyLoop(manager(store)), lambda: read_progress(store)):
        with pytest.raises(GenerationRefused):
            start()
    store.put(layout.about(2), pack("about", layout.address(layout.about(2)), content))
    assert ToyLoop(manager(store)).manager._membership.layout.run == "b" * 32


def test_a_run_of_an_earlier_version_is_refused_and_nothing_is_written_there():
    store = MemoryStore()
    old = b'{"format":2,"kind":"about","mean_payload":"fp32","payload":"fp32","shard_bytes":4096,"world_size":1}'
    store.put("g000000/about", 3 * line_of(old))
    for begin in (lambda: ToyLoop(manager(store)), lambda: read_progress(store)):
        with refusal(GenerationRefused, what="generation 0", got="version", fix="version"):
            begin()
    assert store.keys("g000000") == ["g000000/about"]


@pytest.mark.parametrize("name", ["../x", "x" * 400, 7, "00000000.00000.0"])
def test_a_first_state_that_is_none_is_passed_over(name):
    store, layout, run = MemoryStore(), Layout(0), "0" * 32
    settings = {**ABOUT, "run": run, "tensors": tensors_of_a_toy()}
    for key in map(layout.about, range(3)):
        store.put(key, pack("about", layout.address(key), settings))
    store.put(layout.genesis(), pack("genesis", Layout(0, run=run).address(layout.genesis()), {"name": name}))
    loop = ToyLoop(manager(store))
    assert loop.round()
    check_run(store, [loop])
