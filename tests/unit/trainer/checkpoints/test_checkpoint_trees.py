"""Trees of plain values and tensors come back equal, type by type and bit by bit."""

from __future__ import annotations

import json
import struct

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from safetensors.torch import load_file

from composer_replication.errors import ArtefactCorruptError, ArtefactNotFoundError, InputError
from composer_replication.trainer.checkpoints import load_tree, save_tree
from refusals import refusal

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128, torch.float8_e8m0fnu),
]


@st.composite
def tensors(draw):
    """Of every dtype and of any bits, NaN payloads among them; scalars and empty ones too."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.tensor(list(draw(st.binary(min_size=count, max_size=count))), dtype=torch.uint8)
    data = data % 2 if dtype == torch.bool else data
    return data.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def leaves():
    return st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters()))


def keys():
    plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
    return st.one_of(plain, st.tuples(plain, plain))


TREES = st.recursive(
    st.one_of(leaves(), tensors()),
    lambda below: st.one_of(
        st.lists(below, max_size=3), st.tuples(below, below), st.dictionaries(keys(), below, max_size=3)
    ),
    max_leaves=12,
)


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if one.numel():
            assert torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))
    elif isinstance(one, float):
        assert struct.pack(">d", one) == struct.pack(">d", other)
    elif isinstance(one, dict):
        for (key, value), (other_key, other_value) in zip(one.items(), other.items(), strict=True):
            assert_same(key, other_key)
            assert_same(value, other_value)
    elif isinstance(one, list | tuple):
        for value, other_value in zip(one, other, strict=True):
            assert_same(value, other_value)
    else:
        assert one == other


@given(TREES)
def test_any_tree_comes_back_bit_for_bit(tmp_path_factory, tree):
    folder = tmp_path_factory.mktemp("tree")
    save_tree(folder, "state", tree)
    assert_same(tree, load_tree(folder, "state"))
    assert sorted(path.name for path in folder.iterdir()) == ["state.json", "state.safetensors"]


def test_an_optimiser_goes_on_from_its_tree_as_if_it_had_stayed(tmp_path):
    def stepped(parameter, optimiser, count):
        for number in range(count):
            parameter.grad = torch.full_like(parameter, number + 1.5)
            optimiser.step()
        return parameter

    def fresh():
        parameter = torch.nn.Parameter(torch.arange(4.0))
        return parameter, torch.optim.AdamW([parameter], lr=0.1)

    whole, _ = (first := fresh())
    stepped(*first, 2)
    save_tree(tmp_path, "optimizer", first[1].state_dict())
    second = fresh()
    second[0].data.copy_(whole.data)
    second[1].load_state_dict(load_tree(tmp_path, "optimizer"))
    assert torch.equal(stepped(*first, 3), stepped(*second, 3))


def test_tensors_of_one_storage_are_kept_apart_and_whole(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tree = {"whole": base, "again": base, "column": base[:, 1], "transposed": base.T, "conj": (base * 1j).conj()}
    save_tree(tmp_path, "views", tree)
    back = load_tree(tmp_path, "views")
    for name, tensor in tree.items():
        assert torch.equal(back[name], tensor.resolve_conj()), name
    back["whole"].zero_()
    assert torch.equal(back["again"], base)


def test_the_tensors_can_be_read_by_the_library_of_the_format(tmp_path):
    save_tree(tmp_path, "state", {"a": torch.ones(3, dtype=torch.bfloat16), "b": [torch.tensor(2)]})
    found = load_file(tmp_path / "state.safetensors")
    assert {name: each.tolist() for name, each in found.items()} == {"0 a": [1.0, 1.0, 1.0], "1 b.0": 2}


class Shape(torch.Tensor):
    """A tensor of another class, as sharded and quantised ones are."""


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (object(), "object"),
        ({1, 2}, "set"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.ones(2).as_subclass(Shape), "Shape"),
        ({b"key": 1}, "bytes"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_its_place_and_nothing_is_written(tmp_path, value, got):
    with refusal(InputError, what="'a.1'", got=got):
        save_tree(tmp_path, "state", {"a": [0, value]})
    assert list(tmp_path.iterdir()) == []


def test_a_missing_tree_is_named(tmp_path):
    with pytest.raises(ArtefactNotFoundError, match=r"state\.json"):
        load_tree(tmp_path, "state")
    save_tree(tmp_path, "state", {})
    (tmp_path / "state.safetensors").unlink()
    with pytest.raises(ArtefactNotFoundError, match=r"state\.safetensors"):
        load_tree(tmp_path, "state")


def test_two_files_of_different_saves_are_not_taken_for_a_tree(tmp_path):
    (tmp_path / "old").mkdir()
    save_tree(tmp_path, "state", {"a": torch.zeros(2)})
    save_tree(tmp_path / "old", "state", {"a": torch.ones(2)})
    (tmp_path / "old" / "state.safetensors").replace(tmp_path / "state.safetensors")
    with refusal(ArtefactCorruptError, what="state.safetensors", expected="state.json"):
        load_tree(tmp_path, "state")


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "other"}'])
def test_a_file_that_is_no_tree_is_named(tmp_path, text):
    save_tree(tmp_path, "state", {})
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(ArtefactCorruptError, match=r"state\.json"):
        load_tree(tmp_path, "state")


@pytest.mark.parametrize("node", [{"tensor": "9 none"}, {"what": 1}, {"dict": [], "tuple": []}, {"float": "zz"}])
def test_a_tree_with_a_part_nobody_writes_is_named(tmp_path, node):
    save_tree(tmp_path, "state", {})
    about = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps(about | {"tree": node}))
    with pytest.raises(ArtefactCorruptError, match=r"state\.json"):
        load_tree(tmp_path, "state")


def test_cut_tensors_are_named(tmp_path):
    save_tree(tmp_path, "state", {"a": torch.zeros(100)})
    path = tmp_path / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ArtefactCorruptError, match=r"state\.safetensors"):
        load_tree(tmp_path, "state")
