"""Published states that lie: no chunk is larger than one may be, and each number of each tensor comes exactly once."""

from __future__ import annotations

import functools
import hashlib
import json
import pickle
import random
import struct
import tracemalloc

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_replicas import QUICK, ToyLoop, check_run, in_threads, layout_of, run_replica

from composer_replication.diloco.rounds import states
from composer_replication.diloco.rounds.manager import ObjectStoreManager
from composer_replication.diloco.rounds.patience import PatientStore, Traffic
from composer_replication.diloco.rounds.records import Layout, RecordError, pack, unpack
from composer_replication.diloco.rounds.states import _flatten
from composer_replication.diloco.store import MemoryStore

NAME, LAYOUT = "00000003.00000.0", Layout(0)
RECORD = LAYOUT.key("states", NAME)


def saved() -> dict:
    weights = {"a": torch.arange(12.0).view(3, 4), "b": torch.tensor(5.0), "none": torch.empty(0)}
    return {"weights": weights, "optimizer": {0: {"step": torch.tensor([7]), "lr": 0.5, "more": [None, (True, "x")]}}}


@pytest.fixture
def published(monkeypatch):
    """A state in chunks of 16 bytes, and what is needed to read it."""
    monkeypatch.setattr(states, "CHUNK_BYTES", 16)
    objects = MemoryStore()
    store = PatientStore(objects, Traffic(), patience_s=5)
    flat = _flatten(saved())
    states._publish_state(store, LAYOUT, flat, states._describe_state(flat, name=NAME, step=3))
    return objects, store, flat.outline()


def read(store, outline):
    state = states.read_state(store, LAYOUT, NAME)
    return None if state is None else states._fetch_state(store, LAYOUT, state, outline)


def test_a_state_comes_back_as_it_was_saved(published):
    objects, store, outline = published
    content = read(store, outline)
    expected = saved()
    assert torch.equal(content["weights"]["a"], expected["weights"]["a"])
    assert content["weights"]["b"] == 5
    assert content["weights"]["none"].shape == (0,)
    assert content["optimizer"][0]["more"] == [None, (True, "x")]
    assert len(objects.keys(LAYOUT.key("statedata"))) == 4


HUGE = 10**15
RECORDS = {
    "a step of another name": lambda c: c.update(step=4),
    "a chunk of many terabytes": lambda c: c["chunks"][0].__setitem__(0, HUGE),
    "a chunk above the size of one": lambda c: c["chunks"][0].__setitem__(0, 2**22),
    "a chunk of no bytes": lambda c: c["chunks"][0].__setitem__(0, 0),
    "many more chunks than there are numbers": lambda c: c.update(chunks=c["chunks"] * 1000),
    "a checksum that is none": lambda c: c["chunks"][0].__setitem__(1, "x"),
    "a shape below nothing": lambda c: c["spec"][0].__setitem__(0, [-1, 4]),
    "a shape of many terabytes": lambda c: c["spec"][0].__setitem__(0, [HUGE, HUGE]),
    "a shape of nothing times terabytes": lambda c: c["spec"][2].__setitem__(0, [0, *[2**49] * 5]),
    "a shape of nothing times less than nothing": lambda c: c["spec"][2].__setitem__(0, [0, -(2**63)]),
    "a shape of more dimensions than a tensor has": lambda c: c["spec"][2].__setitem__(0, [0, *[1] * 64]),
    "a shape of text": lambda c: c["spec"][0].__setitem__(0, "34"),
    "a type nobody knows": lambda c: c["spec"][0].__setitem__(1, "torch.complex64"),
    "a tensor twice": lambda c: c.update(structure={"list": [{"tensor": 0}] * 4}),
    "a tensor in no place": lambda c: c.update(structure={"list": [{"tensor": 0}]}),
    "a tensor that is not there": lambda c: c.update(structure={"list": [{"tensor": n} for n in (0, 1, 2, 9)]}),
    "a tag nobody knows": lambda c: c.update(structure={"pickle": "x"}),
    "two tags": lambda c: c.update(structure={"list": [], "tensor": 0}),
    "a structure that is none": lambda c: c.update(structure=5),
    "a key that is none": lambda c: c.update(structure={"dict": [[None, {"tensor": 0}]]}),
    "a structure without end": lambda c: c.update(
        structure=functools.reduce(lambda inner, _: {"list": [inner]}, range(120), {"tensor": 0})
    ),
    "a field too many": lambda c: c.update(more=1),
    "a base that is none": lambda c: c.update(base=[]),
}


@pytest.mark.parametrize("lie", RECORDS)
def test_a_record_that_lies_is_not_read(published, lie):
    objects, store, outline = published
    content = unpack("state", LAYOUT.address(RECORD), objects.get(RECORD, most_bytes=10**6))
    RECORDS[lie](content)
    objects.put(RECORD, pack("state", LAYOUT.address(RECORD), content))
    assert read(store, outline) is None
    assert store.traffic.refused


def rewritten(objects, index, chunk: bytes) -> None:
    """A chunk in the place of another, with a record that says so."""
    content = unpack("state", LAYOUT.address(RECORD), objects.get(RECORD, most_bytes=10**6))
    content["chunks"][index] = [len(chunk), hashlib.sha256(chunk).hexdigest()]
    objects.put(LAYOUT.key("statedata", NAME, f"{index:05d}"), chunk)
    objects.put(RECORD, pack("state", LAYOUT.address(RECORD), content))


CHUNKS = {
    "a gap": {"0.0": torch.zeros(3)},
    "an overlap": {"0.0": torch.zeros(4), "0.3": torch.zeros(1)},
    "more than the tensor": {"0.0": torch.zeros(13)},
    "a later begin": {"0.1": torch.zeros(4)},
    "another tensor's part": {"1.0": torch.zeros(1)},
    "a tensor that is not there": {"0.0": torch.zeros(4), "9.0": torch.zeros(1)},
    "another type": {"0.0": torch.zeros(4, dtype=torch.float64)},
    "a negative place": {"0.-1": torch.zeros(4)},
    "a name that is none": {"x": torch.zeros(4)},
    "no piece": {"0.0": torch.zeros(0)},
}


@pytest.mark.parametrize("lie", CHUNKS)
def test_a_chunk_that_does_not_hold_its_numbers_exactly_once_is_not_read(published, lie):
    objects, store, outline = published
    rewritten(objects, 0, safetensors.torch.save(CHUNKS[lie]))
    assert read(store, outline) is None
    assert store.traffic.refused


@pytest.mark.parametrize(
    "data", [pickle.dumps([1] * 50), b"x" * 40, b"\xff" * 8 + b"{}"], ids=["pickle", "text", "length"]
)
def test_a_chunk_that_is_no_safetensors_is_not_read(published, data):
    objects, store, outline = published
    rewritten(objects, 1, data)
    assert read(store, outline) is None


def headed(header: object, body: bytes) -> bytes:
    """A file with the header as it is given, whether or not safetensors would write such a one."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def piece(dtype: object = "F32", shape: object = (4,), offsets: object = (0, 16)) -> dict:
    return {"0.0": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


TYPES = [
    "F32",
    "F64",
    "BF16",
    "BOOL",
    "U64",
    "C64",
    "F8_E4M3",
    "F8_E8M0",
    "F6_E2M3",
    "F6_E3M2",
    "F4",
    "f32",
    "",
    None,
    7,
]
SHAPES = [
    (0, 2**63 - 1),
    (0, 2**63),
    (0, 2**64 - 1),
    (2**63,),
    (2**32, 2**32),
    (2**62, 4, 0),
    (-4,),
    (-1, -4),
    (2**70,),
]
SHAPES += [(0,), (), (2, 2), (1,) * 5000, (1.5,), ("4",), None, 4]
OFFSETS = [(0, 0), (0, 15), (0, 17), (16, 0), (0, 2**64 - 1), (2**63, 2**63), (-16, 0), (0, 2**70), (1, 17), (0,), None]


def refused_quietly(published, chunk: bytes) -> None:
    objects, store, outline = published
    before = store.traffic.refused
    rewritten(objects, 0, chunk)
    tracemalloc.start()
    try:
        assert read(store, outline) is None
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert store.traffic.refused > before


@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
@pytest.mark.parametrize(("shape", "length"), [((4,), 16), ((16,), 16), ((32,), 16), ((0, 9), 0), ((0, 2**63), 0)])
def test_a_chunk_of_another_type_is_unreadable_whatever_its_shape(published, dtype, shape, length):
    refused_quietly(published, headed(piece(dtype, shape, (0, length)), b"\0" * length))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape)[:40])
@pytest.mark.parametrize("offsets", [(0, 16), (0, 0)], ids=str)
def test_a_chunk_whose_shape_no_tensor_has_is_unreadable(published, shape, offsets):
    refused_quietly(published, headed(piece("F32", shape, offsets), b"\0" * offsets[1]))


@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
def test_a_chunk_whose_offsets_do_not_fit_is_unreadable(published, offsets):
    refused_quietly(published, headed(piece("F32", (4,), offsets), b"\0" * 16))


NUMBERS = st.sampled_from([0, 1, 4, 16, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64]) | st.integers()


@given(
    st.sampled_from(TYPES),
    st.lists(NUMBERS, max_size=5),
    st.lists(NUMBERS, max_size=3),
    st.sampled_from([0, 4, 16, 24]),
)
def test_whatever_a_header_says_a_chunk_is_read_or_unreadable(dtype, shape, offsets, length):
    filling = states._Filling([torch.zeros(4)])
    chunk = headed(piece(dtype, shape, offsets), b"\0" * length)
    try:
        filling.add(chunk)
    except RecordError:
        return
    assert (dtype, shape, offsets, length) == ("F32", [4], [0, 16], 16)


@given(st.lists(NUMBERS, max_size=70), st.sampled_from([*TYPES, "torch.float32", "torch.bool", "torch.complex64"]))
def test_whatever_a_record_says_of_a_tensor_it_is_a_tensor_or_unreadable(shape, dtype):
    try:
        size = states._tensor_bytes([shape, dtype])
    except ValueError:
        return
    assert torch.Size(shape).numel() * states._DTYPES[dtype].itemsize == size
    assert torch.empty(shape, dtype=states._DTYPES[dtype], device="meta").shape == tuple(shape)


def test_chunks_in_another_order_are_not_read(published):
    objects, store, outline = published
    keys = sorted(objects.keys(LAYOUT.key("statedata")))
    chunks = [objects.get(key, most_bytes=10**6) for key in keys]
    for index in (0, 1):
        rewritten(objects, index, chunks[1 - index])
    assert read(store, outline) is None


def test_a_state_of_very_many_tensors_keeps_its_chunks_within_their_size():
    flat = _flatten([torch.tensor(float(number)) for number in range(20_000)])
    store = PatientStore(MemoryStore(), Traffic(), patience_s=5)
    states._publish_state(store, LAYOUT, flat, states._describe_state(flat, name=NAME, step=3))
    assert [float(each) for each in read(store, flat.outline())] == list(range(20_000))


def test_a_newest_state_that_lies_is_passed_over_for_the_one_before():
    store = MemoryStore()
    in_threads([functools.partial(run_replica, store, rank, 2, 5, state_every=2) for rank in range(2)])
    newest = max(store.keys("g000000/states"))
    at = layout_of(store).address(newest)
    content = unpack("state", at, store.get(newest, most_bytes=10**6))
    content["chunks"][0][0] = random.Random(0).randrange(2**40, 2**45)
    store.put(newest, pack("state", at, content))
    manager = ObjectStoreManager(store, rank=0, world_size=2, **{**QUICK, "min_replicas": 1})
    late = ToyLoop(manager)
    assert manager.current_step() == 5
    check_run(store, [late])
