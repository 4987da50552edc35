"""A published state: what the registered functions save, as JSON for its structure and safetensors for its tensors.

Nothing that was read can run: the structure holds dicts, lists, plain values and numbers of tensors, and each chunk of
tensors is compared with its checksum before it is parsed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from composer_replication.diloco.rounds.patience import PatientStore
from composer_replication.diloco.rounds.reading import READS, read_record
from composer_replication.diloco.rounds.records import Layout, RecordError, digest, pack, unpack
from composer_replication.diloco.store import MissingObject, ObjectTooLarge
from composer_replication.errors import InputError, ShapeError, explain

CHUNK_BYTES = 16 * 2**20
_HEADER_BYTES = 2**20  # more than safetensors needs for the names in a chunk
_MOST_GROWTH = 8  # a state has at most so many times the bytes of mine: optimizers keep a few numbers per parameter
_DTYPES = {str(each): each for each in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)}
_DTYPES |= {str(each): each for each in (torch.int32, torch.uint8, torch.int8, torch.bool)}


@dataclass(frozen=True)
class Flat:
    """A state as its structure and its tensors."""

    structure: Any
    tensors: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def outline(self) -> Outline:
        spec = [[list(tensor.shape), str(tensor.dtype)] for tensor in self.tensors]
        return Outline(self.structure, spec, self.num_bytes)


@dataclass(frozen=True)
class Outline:
    """A state without its numbers."""

    structure: Any
    spec: list[list[Any]]
    num_bytes: int


@dataclass(frozen=True)
class PublishedState:
    """The record of a state; `name` is where it lies."""

    name: str
    step: int
    base: str
    structure: Any
    spec: list[list[Any]]
    chunks: list[list[Any]]  # bytes, sha256

    @property
    def digest(self) -> str:
        return digest([self.structure, self.spec, [sha256 for _, sha256 in self.chunks]])


def flatten(state: Any) -> Flat:
    tensors: list[Tensor] = []
    return Flat(_structure(state, tensors), tuple(tensors))


def unflatten(structure: Any, tensors: Sequence[Tensor]) -> Any:
    (tag, content), *rest = structure.items()
    if rest:
        raise RecordError(f"a structure with the tags {sorted(structure)}")
    if tag == "tensor":
        return tensors[content]
    if tag == "dict":
        return {key: unflatten(value, tensors) for key, value in content}
    if tag == "list":
        return [unflatten(value, tensors) for value in content]
    if tag == "tuple":
        return tuple(unflatten(value, tensors) for value in content)
    return content


def _structure(value: Any, tensors: list[Tensor]) -> dict[str, Any]:
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {"dict": [[_key(key), _structure(inner, tensors)] for key, inner in items]}
    if isinstance(value, list | tuple):
        tag = "list" if isinstance(value, list) else "tuple"
        return {tag: [_structure(inner, tensors) for inner in cast("Sequence[object]", value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    expected = "tensors, dicts, lists and plain values"
    raise InputError(explain("state of a registered function", got=type(value).__name__, expected=expected))


def _key(key: object) -> int | str:
    if isinstance(key, int | str) and not isinstance(key, bool):
        return key
    raise InputError(explain("key of a state", got=repr(key), expected="text or an integer"))


def describe(flat: Flat, *, name: str, step: int, base: str = "") -> PublishedState:
    """The record of a state, without writing anything."""
    sums = [[len(chunk), hashlib.sha256(chunk).hexdigest()] for chunk in _chunks(flat)]
    return PublishedState(name, step, base, flat.structure, flat.outline().spec, sums)


def publish(store: PatientStore, layout: Layout, flat: Flat, state: PublishedState) -> None:
    """Chunks first and then the record: a state is there as a whole or not at all.

    All of it is read back. What a replica offers can be offered anew when it is damaged; the first state of a run, and
    the last of one that ended, nobody can write again.
    """
    for index, chunk in enumerate(_chunks(flat)):
        store.put_whole(_chunk_key(layout, state.name, index), chunk)
    store.put_whole(layout.key("states", state.name), pack("state", _content(state)))


def read_state(store: PatientStore, layout: Layout, name: str) -> PublishedState | None:
    """The record of a state; None where it cannot be read."""

    def checked(data: bytes) -> PublishedState:
        content = unpack("state", data)
        if set(content) != {"step", "base", "structure", "spec", "chunks"}:
            raise RecordError(f"a state with the fields {sorted(content)}")
        return PublishedState(name, **content)

    return read_record(store, layout.key("states", name), checked)


def fetch(store: PatientStore, layout: Layout, state: PublishedState, mine: Outline) -> Any | None:
    """What was saved; None where a chunk cannot be read. ShapeError where it is the state of another model."""
    import safetensors.torch

    _refuse_another_model(state, mine)
    tensors = [torch.empty(shape, dtype=_DTYPES[dtype]) for shape, dtype in state.spec]
    for index, (size, sha256) in enumerate(state.chunks):
        data = _read_chunk(store, _chunk_key(layout, state.name, index), size, sha256)
        if data is None:
            return None
        for name, piece in safetensors.torch.load(data).items():
            number, _, start = name.partition(".")
            tensors[int(number)].view(-1)[int(start) : int(start) + piece.numel()].copy_(piece)
    return unflatten(state.structure, tensors)


def _refuse_another_model(state: PublishedState, mine: Outline) -> None:
    sizes = [torch.Size(shape).numel() * _DTYPES[dtype].itemsize for shape, dtype in state.spec if dtype in _DTYPES]
    fits = len(sizes) == len(state.spec) and sum(sizes) <= _MOST_GROWTH * mine.num_bytes + _HEADER_BYTES
    if not fits or not _covers(state.structure, state.spec, mine.structure, mine.spec):
        what = f"published state of step {state.step}"
        fix = "All replicas need the same model and fragments; another model needs another generation."
        raise ShapeError(explain(what, got="other tensors", expected="those that I save", fix=fix))


def _covers(theirs: Any, their_spec: list[list[Any]], mine: Any, my_spec: list[list[Any]]) -> bool:
    """Whether each tensor of mine is in the state, with its shape and type. An optimizer may hold more by now."""
    if "tensor" in mine:
        return "tensor" in theirs and their_spec[theirs["tensor"]] == my_spec[mine["tensor"]]
    if "dict" in mine:
        inner = dict(theirs.get("dict", []))
        return all(key in inner and _covers(inner[key], their_spec, value, my_spec) for key, value in mine["dict"])
    return True


def _chunks(flat: Flat) -> Iterator[bytes]:
    """Safetensors files of CHUNK_BYTES at most; a name is the tensor's number and where in it the piece begins."""
    import safetensors.torch

    pieces: dict[str, Tensor] = {}
    size = 0
    for number, tensor in enumerate(flat.tensors):
        whole = tensor.cpu().contiguous().view(-1)
        for start in range(0, whole.numel(), most := max(1, CHUNK_BYTES // tensor.element_size())):
            piece = whole[start : start + most]
            if size and size + piece.numel() * piece.element_size() > CHUNK_BYTES:
                yield safetensors.torch.save(pieces)
                pieces, size = {}, 0
            pieces[f"{number}.{start}"] = piece.clone()
            size += piece.numel() * piece.element_size()
    if pieces:
        yield safetensors.torch.save(pieces)


def _read_chunk(store: PatientStore, key: str, size: int, sha256: str) -> bytes | None:
    for _ in range(READS):
        try:
            data = store.get(key, most_bytes=size)
        except (MissingObject, ObjectTooLarge):
            return None
        if hashlib.sha256(data).hexdigest() == sha256:
            return data
        store.traffic.add(refused=1)
    return None


def _chunk_key(layout: Layout, name: str, index: int) -> str:
    return layout.key("statedata", name, f"{index:05d}")


def _content(state: PublishedState) -> dict[str, Any]:
    fields = {"step": state.step, "base": state.base, "structure": state.structure}
    return {**fields, "spec": state.spec, "chunks": state.chunks}
