"""Write and read published states: the structure as JSON, and the tensors in chunks of safetensors.

Loading a state cannot run code: the structure consists of dicts, lists, plain values and references to tensors, and
each chunk is compared with its checksum before it is parsed. The record of a state is not trusted either: its fields
have bounds, and a state counts as unreadable unless its chunks contain every element of every tensor exactly once.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from composer_replication.diloco.rounds.patience import PatientStore
from composer_replication.diloco.rounds.reading import READS, read_record, step_of
from composer_replication.diloco.rounds.records import (
    Layout,
    RecordError,
    as_record_error,
    checked_int,
    checked_list,
    checked_sha256,
    checked_text,
    digest,
    pack,
    unpack_fields,
)
from composer_replication.diloco.store import MissingObject, ObjectTooLarge
from composer_replication.errors import InputError, ShapeError, explain

CHUNK_BYTES = 16 * 2**20
_HEADER_BYTES = 2**20  # more than safetensors needs for the names in a chunk
_MAX_PIECES = 8192  # pieces of tensors in a chunk, so that their names fit into its header
_MAX_BYTES = 2**50
# "3.1048576": tensor 3, from element 1,048,576 on; not "3"
_PIECE = re.compile(r"(\d{1,9})\.(\d{1,15})")
_MAX_GROWTH = 8  # how many times larger than mine a state may be: optimizers add a few numbers per parameter
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)}
_DTYPES |= {str(dtype): dtype for dtype in (torch.int32, torch.uint8, torch.int8, torch.bool)}
_IN_FILES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_IN_FILES |= {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "I8": torch.int8, "BOOL": torch.bool}


@dataclass(frozen=True)
class PublishedState:
    """The record of a published state; `name` is its key below `states`."""

    name: str
    step: int
    base: str
    structure: Any
    spec: list[list[Any]]
    chunks: list[list[Any]]  # bytes, sha256

    @property
    def tensor_digest(self) -> str:
        """A digest that two states share exactly if all bits of their tensors are equal."""
        return digest([self.spec, [sha256 for _, sha256 in self.chunks]])

    @property
    def digest(self) -> str:
        """A digest of the structure and the tensors."""
        return digest([self.structure, self.spec, [sha256 for _, sha256 in self.chunks]])


def describe(flat: Flat, *, name: str, step: int, base: str = "") -> PublishedState:
    """Return the record of a state. Nothing is written."""
    sums = [[len(chunk), hashlib.sha256(chunk).hexdigest()] for chunk in _chunks(flat)]
    return PublishedState(name, step, base, flat.structure, flat.outline().spec, sums)


def publish(store: PatientStore, layout: Layout, flat: Flat, state: PublishedState) -> None:
    """Write the chunks of a state and then its record, so that a state is either complete or not visible.

    Everything is read back, because the first state of a run and the last one cannot be published again later.
    """
    for index, chunk in enumerate(_chunks(flat)):
        store.put_verified(_chunk_key(layout, state.name, index), chunk)
    key = layout.key("states", state.name)
    store.put_verified(key, pack("state", layout.address(key), _content(state)))


def read_state(store: PatientStore, layout: Layout, name: str) -> PublishedState | None:
    """Return the record of a state; None if it cannot be read."""

    def unpack_state(at: str, data: bytes) -> PublishedState:
        content = unpack_fields("state", at, data, "step", "base", "structure", "spec", "chunks")
        with as_record_error("state"):
            if content["step"] != step_of(name):
                raise ValueError(f"step {str(content['step'])[:40]} in the record of {name}")
            sizes = [_bytes_of(spec) for spec in checked_list(content["spec"], MAX_TENSORS)]
            checked_text(content["base"])
            _check_chunks(content["chunks"], sizes)
            tensor_numbers = sorted(_tensors_in(content["structure"]))
            if tensor_numbers != list(range(len(sizes))):
                raise ValueError("the structure does not hold each tensor exactly once")
            return PublishedState(name, **content)

    return read_record(store, layout, layout.key("states", name), unpack_state)


def fetch(store: PatientStore, layout: Layout, state: PublishedState, mine: _Outline) -> Any | None:
    """Return the content of a published state, or None if a chunk cannot be read. Raises ShapeError if it belongs to
    another model."""
    _refuse_another_model(state, mine)
    filling = _Filling([torch.empty(shape, dtype=_DTYPES[dtype]) for shape, dtype in state.spec])
    try:
        for index, (size, sha256) in enumerate(state.chunks):
            data = _read_chunk(store, _chunk_key(layout, state.name, index), size, sha256)
            if data is None:
                return None
            filling.add(data)
        return _unflatten(state.structure, filling.full_tensors())
    except RecordError:
        store.traffic.add(refused=1)
        return None


class _Filling:
    """Fills tensors piece by piece, in order, from the first element of the first tensor to the last of the last."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        # The tensor and element where the next piece begins.
        self._number = self._start = 0
        self._skip_full()

    def add(self, chunk: bytes) -> None:
        """Copy the pieces of the next chunk. Raises RecordError if a piece is missing or out of order."""
        pieces = _pieces(chunk)
        named_matches = [(match, name) for name in pieces if (match := _PIECE.fullmatch(name))]
        if len(named_matches) != len(pieces):
            raise RecordError("a chunk of a state has invalid piece names")
        for number, start, name in sorted((int(match[1]), int(match[2]), name) for match, name in named_matches):
            self._fill(number, start, pieces[name])

    def full_tensors(self) -> list[Tensor]:
        """Return the tensors. Raises RecordError if elements are missing."""
        if self._number < len(self._tensors):
            raise RecordError("the chunks of a state are incomplete")
        return self._tensors

    def _fill(self, number: int, start: int, piece: Tensor) -> None:
        if (number, start) != (self._number, self._start) or number >= len(self._tensors):
            raise RecordError(f"the piece of tensor {number} from {start} on is out of order")
        flat, end = self._tensors[number].view(-1), start + piece.numel()
        if piece.dtype != flat.dtype or end > flat.numel():
            raise RecordError(f"a piece of tensor {number} does not fit into it")
        flat[start:end].copy_(piece)
        self._start = end
        self._skip_full()

    def _skip_full(self) -> None:
        """Move on to the next tensor that is not full yet."""
        while self._number < len(self._tensors) and self._start == self._tensors[self._number].numel():
            self._number, self._start = self._number + 1, 0


def _pieces(chunk: bytes) -> dict[str, Tensor]:
    """Return the tensors of a chunk, by name.

    A malicious header may have types that torch does not know, or dimensions that it cannot represent. So the entries
    are checked before tensors are made of them.
    """
    import safetensors

    try:
        parsed = safetensors.deserialize(chunk)
    except safetensors.SafetensorError as error:
        raise RecordError("a chunk of a state is not a safetensors file") from error
    for name, piece in parsed:
        if piece["dtype"] not in _IN_FILES or len(piece["shape"]) != 1 or not piece["data"]:
            raise RecordError(f"piece {name[:40]!r} of a state is not a vector of a known type")
    return {name: torch.frombuffer(piece["data"], dtype=_IN_FILES[piece["dtype"]]) for name, piece in parsed}


def _refuse_another_model(state: PublishedState, mine: _Outline) -> None:
    sizes = [torch.Size(shape).numel() * _DTYPES[dtype].itemsize for shape, dtype in state.spec if dtype in _DTYPES]
    fits = len(sizes) == len(state.spec) and sum(sizes) <= _MAX_GROWTH * mine.num_bytes + _HEADER_BYTES
    if not fits or not _has_tensors_of(state.structure, state.spec, mine.structure, mine.spec):
        what = f"published state of step {state.step}"
        fix = "Use the same model and fragments at all replicas, and another generation for another model."
        raise ShapeError(explain(what, got="other tensors", expected="those of this replica", fix=fix))


def _has_tensors_of(theirs: Any, their_spec: list[list[Any]], mine: Any, my_spec: list[list[Any]]) -> bool:
    """Return whether the state has all tensors of mine, with equal shapes and types. It may have more, because
    optimizers create some in their first step."""
    if "tensor" in mine:
        return "tensor" in theirs and their_spec[theirs["tensor"]] == my_spec[mine["tensor"]]
    if "dict" in mine:
        inner = dict(theirs.get("dict", []))
        return all(
            key in inner and _has_tensors_of(inner[key], their_spec, value, my_spec) for key, value in mine["dict"]
        )
    return True


def _chunks(flat: Flat) -> Iterator[bytes]:
    """Yield safetensors files with up to CHUNK_BYTES of data. Each piece is named by its tensor and first element."""
    import safetensors.torch

    pieces: dict[str, Tensor] = {}
    size = 0
    # Large tensors are cut and small ones share a chunk, which bounds both memory and the number of requests.
    for number, tensor in enumerate(flat.tensors):
        whole = tensor.cpu().contiguous().view(-1)
        for start in range(0, whole.numel(), most := max(1, CHUNK_BYTES // tensor.element_size())):
            piece = whole[start : start + most]
            if size and (size + piece.numel() * piece.element_size() > CHUNK_BYTES or len(pieces) >= _MAX_PIECES):
                yield safetensors.torch.save(pieces)
                pieces, size = {}, 0
            # A copy, because safetensors refuses tensors that share memory.
            pieces[f"{number}.{start}"] = piece.clone()
            size += piece.numel() * piece.element_size()
    if pieces:
        yield safetensors.torch.save(pieces)


def _bytes_of(spec: Any) -> int:
    shape, dtype = checked_list(spec, 2)
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"unknown dtype {str(dtype)[:40]!r}")
    sizes = [checked_int(size, below=_MAX_BYTES) for size in checked_list(shape, MAX_DEPTH)]
    # A 0 must not hide the other dimensions, because torch multiplies those to compute strides.
    checked_int(math.prod(max(1, size) for size in sizes), below=_MAX_BYTES)
    return checked_int(math.prod(sizes) * _DTYPES[dtype].itemsize, below=_MAX_BYTES)


def _check_chunks(chunks: Any, sizes: Sequence[int]) -> None:
    """Raise ValueError for a chunk of an invalid size, or if there are more chunks than the tensors need."""
    # Every chunk has at least one piece, and only tensors larger than a chunk are cut.
    most = sum(-(-size // CHUNK_BYTES) for size in sizes)
    for size, sha256 in (checked_list(chunk, 2) for chunk in checked_list(chunks, most)):
        if not checked_int(size, below=CHUNK_BYTES + _HEADER_BYTES):
            raise ValueError("an empty chunk")
        checked_sha256(sha256)


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


# A state in memory, split into a structure of dicts, lists and plain values, and the tensors.

MAX_TENSORS, MAX_DEPTH = 10**7, 64
_PLAIN = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class Flat:
    """A state, split into its structure and its tensors."""

    structure: Any
    tensors: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def outline(self) -> _Outline:
        """Return the outline of the state."""
        spec = [[list(tensor.shape), str(tensor.dtype)] for tensor in self.tensors]
        return _Outline(self.structure, spec, self.num_bytes)


@dataclass(frozen=True)
class _Outline:
    """The structure of a state, and the shapes and types of its tensors."""

    structure: Any
    spec: list[list[Any]]
    num_bytes: int


def flatten(state: Any) -> Flat:
    """Split a state into its structure and its tensors. Raises InputError for an object that is neither."""
    tensors: list[Tensor] = []
    return Flat(_structure(state, tensors), tuple(tensors))


def _unflatten(structure: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the state with this structure and these tensors; the inverse of `flatten`."""
    (tag, content), *rest = structure.items()
    if rest:
        raise RecordError(f"a structure with several tags: {sorted(structure)}")
    if tag == "tensor":
        return tensors[content]
    if tag == "dict":
        return {key: _unflatten(value, tensors) for key, value in content}
    if tag == "list":
        return [_unflatten(value, tensors) for value in content]
    if tag == "tuple":
        return tuple(_unflatten(value, tensors) for value in content)
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


def _tensors_in(structure: Any, depth: int = MAX_DEPTH) -> Iterator[int]:
    """Yield the tensor numbers in a structure. Raises ValueError for anything that `flatten` does not write."""
    if not depth or not isinstance(structure, dict) or len(structure) != 1:
        raise ValueError(f"invalid or too deeply nested structure: {str(structure)[:40]!r}")
    ((tag, content),) = structure.items()
    if tag == "tensor":
        yield checked_int(content, below=MAX_TENSORS)
    elif tag == "dict":
        for key, inner in (checked_list(pair, 2) for pair in checked_list(content, MAX_TENSORS)):
            _key(key)
            yield from _tensors_in(inner, depth - 1)
    elif tag in ("list", "tuple"):
        for inner in checked_list(content, MAX_TENSORS):
            yield from _tensors_in(inner, depth - 1)
    elif tag != "value" or not isinstance(content, _PLAIN):
        raise ValueError(f"unknown tag in a structure: {str(tag)[:40]!r}")
