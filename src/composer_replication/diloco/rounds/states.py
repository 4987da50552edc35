"""Publish the global state of a run, and load it into replicas that have fallen behind.

A published state is its structure as JSON, and its tensors in chunks of safetensors. Loading it cannot run code: the
structure consists of dicts, lists, plain values and references to tensors, and each chunk is compared with its checksum
before it is parsed. The record of a state is not trusted either: its fields have bounds, and a state counts as
unreadable unless its chunks contain every element of every tensor exactly once.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from composer_replication.diloco.rounds.patience import PatientStore, RoundTimeout, StateUnreadable
from composer_replication.diloco.rounds.reading import (
    READS,
    published_states,
    read_commit,
    read_departures,
    read_record,
    step_of,
)
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
    parse_state,
    unpack_fields,
)
from composer_replication.diloco.rounds.settings import RoundSettings, RunPosition
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
_MAX_SLOTS = 100  # for the record that names the first state; a slot is used when all earlier ones are damaged

StateFns = MutableMapping[str, tuple[Callable[[Any], None], Callable[[], Any]]]


@dataclass
class GlobalState:
    """The state that all replicas share: the values that the registered state functions return and load."""

    layout: Layout
    settings: RoundSettings
    functions: StateFns
    _readable: set[str] = field(default_factory=set)

    def saved(self) -> _FlatState:
        """Return the current values of the registered state functions, split into structure and tensors."""
        return _flatten({key: value() for key, (_, value) in sorted(self.functions.items())})

    def begin(self, store: PatientStore, position: RunPosition) -> tuple[RunPosition, bool]:
        """Return the position at which a replica joins the run, and whether its weights were replaced.

        The weights are replaced by the newest published state. If only the first state of the run exists, they are
        replaced by that one, which comes from rank 0, or from another replica if rank 0 does not join in time.
        """
        # `newest` never loads a state of step 0: the record "genesis" names the first state of a run.
        newest = self.newest(store, replace(position, step=0), margin=0)
        if newest is not None:
            return newest, True
        mine = _describe_state(self.saved(), name=_state_name(position, 0), step=0)
        first = self._agree_on_first_state(store, position, mine)
        if first.digest == mine.digest:
            return replace(position, base=first.digest), False
        if self._load(store, first):
            return replace(position, base=first.digest), True
        return self.wait_for_newer(store, position), True

    def wait_for_newer(self, store: PatientStore, position: RunPosition) -> RunPosition:
        """Request a state, and load the first one published that is newer than this replica's own.

        Raises StateUnreadable when the time is up, or when all replicas that could publish a state have finished. If
        the number of commits of the run is unknown, replicas that have finished get a grace period in which to return.
        """
        began = time.monotonic()
        alone_since: float | None = None
        while True:
            # Checked before looking for a state, because a replica publishes its last state before its goodbye.
            is_alone, now = self._is_alone(store, position), time.monotonic()
            alone_since = (now if alone_since is None else alone_since) if is_alone else None
            grace_is_over = alone_since is not None and now - alone_since >= self.settings.return_grace_s(
                position.commits
            )
            is_over = not self.functions or grace_is_over or now - began >= self.settings.timeout_s
            if (newer := self.newest(store, position, margin=0)) is not None:
                break
            if is_over:
                what = f"round {position.step} of generation {self.layout.generation} at {store.uri}"
                got = "no newer state to load, and a round whose mean was deleted"
                expected = "a newer state, or an unfinished replica that could publish it"
                another = f"begin again with generation={self.layout.generation + 1}"
                fix = f"Use the model of a replica that has finished, or {another}."
                raise StateUnreadable(explain(what, got=got, expected=expected, fix=fix))
            store.put(self.layout.key("wanted", f"{position.rank:05d}"), b"")
            time.sleep(self.settings.poll_s)
        return newer

    def _is_alone(self, store: PatientStore, position: RunPosition) -> bool:
        """Return whether every other replica that has ever joined has finished with at least the number of commits
        that this replica needs.
        """
        other_ranks = _joined_ranks(store, self.layout) - {position.rank}
        return other_ranks <= read_departures(store, self.layout).finished_for(position.commits)

    def newest(self, store: PatientStore, position: RunPosition, *, margin: int) -> RunPosition | None:
        """Load the newest readable state that is more than `margin` steps ahead of this replica, and return the new
        position; return None if there is no such state.
        """
        for name in published_states(store, self.layout):
            if step_of(name) <= position.step + margin:
                return None
            state = read_state(store, self.layout, name)
            if state is not None and self._load(store, state):
                return self._position_after_load(store, position, state)
        return None

    def _position_after_load(self, store: PatientStore, position: RunPosition, state: _PublishedState) -> RunPosition:
        """Return the position of this replica after it has loaded a state."""
        # The next round waits for the members of the last commit before the state.
        last = read_commit(store, self.layout, state.step - 1)
        first_trial = position.first_trial if state.step == position.step else 0
        loaded = replace(position, step=state.step, base=state.base, last=last[1] if last else None)
        return replace(loaded, first_trial=first_trial)

    def weights_digest(self, position: RunPosition) -> str:
        """Return a digest of every bit of this replica's weights."""
        return _describe_state(
            self.saved(), name=_state_name(position, position.step), step=position.step
        ).tensor_digest

    def load_matching(self, store: PatientStore, position: RunPosition, weights_digest: str) -> RunPosition | None:
        """Load the published state of this step whose tensors have this digest; return None if there is no such
        state.
        """
        for name in published_states(store, self.layout):
            if step_of(name) == position.step:
                state = read_state(store, self.layout, name)
                if state is not None and state.tensor_digest == weights_digest and self._load(store, state):
                    return self._position_after_load(store, position, state)
        return None

    def publish(self, store: PatientStore, position: RunPosition) -> None:
        """Publish the state of the current step, unless this state or a later one has already been published."""
        if self.newest_step(store) >= position.step:
            return
        flat = self.saved()
        state = _describe_state(flat, name=_state_name(position, position.step), step=position.step)
        _publish_state(store, self.layout, flat, replace(state, base=position.base))

    def is_due(self, store: PatientStore, position: RunPosition, every: int) -> bool:
        """Return whether to publish a state. One is due after `every` steps, or earlier if a replica has requested
        one.
        """
        steps_since = position.step - max(0, self.newest_step(store))
        # Requests are deleted as soon as they are read, so that each leads to a single state.
        request_keys = store.keys(self.layout.key("wanted")) if 0 < steps_since < every else []
        store.delete(request_keys)
        return steps_since >= every or bool(request_keys)

    def readable_names(self, store: PatientStore) -> list[str]:
        """Return the names of the states whose records can be read, newest first.

        A name alone is not trusted, so the record is read: otherwise, an unrelated object whose name contains a later
        step would keep newer states from being published.
        """
        names = published_states(store, self.layout)
        self._readable &= set(names)
        self._readable |= {
            name for name in names if name not in self._readable and read_state(store, self.layout, name)
        }
        return [name for name in names if name in self._readable]

    def newest_step(self, store: PatientStore) -> int:
        """Return the step of the newest state whose record can be read; -1 if there is none."""
        names = self.readable_names(store)
        return step_of(names[0]) if names else -1

    def _agree_on_first_state(
        self, store: PatientStore, position: RunPosition, mine: _PublishedState
    ) -> _PublishedState:
        """Return the first state of the run. If no replica has named one in time, this replica publishes and names
        its own.
        """
        now = time.monotonic()
        until, rank_0_until = now + self.settings.timeout_s, now + (self.settings.first_grace_s if position.rank else 0)
        while True:
            first, slot = self._read_genesis(store)
            if first is not None:
                return first
            if time.monotonic() >= until:
                raise RoundTimeout(
                    f"{store.uri}: nobody published a first state of generation {self.layout.generation}"
                )
            if time.monotonic() >= rank_0_until:
                chosen = self._readable_first_state(store)
                if chosen is None:
                    _publish_state(store, self.layout, self.saved(), mine)
                key = self.layout.genesis(slot)
                store.create_verified(key, pack("genesis", self.layout.address(key), {"name": chosen or mine.name}))
                # If the record cannot be read back, the next iteration uses the next slot.
                if self._read_genesis(store)[0] is not None:
                    continue
            time.sleep(self.settings.poll_s)

    def _readable_first_state(self, store: PatientStore) -> str | None:
        """Return the name of a readable published state of step 0, or None. It is used if only the record that names
        the first state is damaged.
        """
        return next((name for name in sorted(self.readable_names(store)) if step_of(name) == 0), None)

    def _read_genesis(self, store: PatientStore) -> tuple[_PublishedState | None, int]:
        """Return the first state of the run (or None), and a slot number: that of the record that names this state,
        or that in which the record should be written.
        """
        for slot in range(_MAX_SLOTS):
            key = self.layout.genesis(slot)
            name = self._read_genesis_name(store, key)
            first = None if name is None else read_state(store, self.layout, name)
            if first is not None or store.size(key) is None:
                return first, slot
        return None, _MAX_SLOTS

    def _read_genesis_name(self, store: PatientStore, key: str) -> str | None:
        def unpack_name(at: str, data: bytes) -> str:
            content = unpack_fields("genesis", at, data, "name")
            with as_record_error("genesis"):
                if parse_state(stated := checked_text(content["name"])) is None:
                    raise ValueError(f"{stated[:40]!r}, which is not the name of a state")
                return stated

        return read_record(store, self.layout, key, unpack_name)

    def _load(self, store: PatientStore, state: _PublishedState) -> bool:
        """Load a state into the registered functions. Returns False, and loads nothing, if it cannot be read."""
        content = _fetch_state(store, self.layout, state, self.saved().outline())
        if content is None:
            return False
        for key, (load_fn, _) in self.functions.items():
            load_fn(content[key])
        return True


def _joined_ranks(store: PatientStore, layout: Layout) -> set[int]:
    """Return the ranks that any process has claimed."""
    prefix = layout.key("claims")
    names = {key.removeprefix(f"{prefix}/").partition("/")[0] for key in store.keys(prefix)}
    return {int(name) for name in names if name.isdigit()}


def _state_name(position: RunPosition, step: int) -> str:
    return f"{step:08d}.{position.rank:05d}.{position.claim}"


# A published state: its record and its chunks.


@dataclass(frozen=True)
class _PublishedState:
    """The record of a published state; `name` is its key below `states`."""

    name: str
    step: int
    base: str
    structure: Any
    spec: list[list[Any]]
    chunks: list[list[Any]]  # bytes, sha256

    @property
    def tensor_digest(self) -> str:
        """A digest of the tensors. Two states have the same digest exactly if all bits of their tensors are equal."""
        return digest([self.spec, [sha256 for _, sha256 in self.chunks]])

    @property
    def digest(self) -> str:
        """A digest of the structure and the tensors of the state."""
        return digest([self.structure, self.spec, [sha256 for _, sha256 in self.chunks]])


def _describe_state(flat: _FlatState, *, name: str, step: int, base: str = "") -> _PublishedState:
    """Return the record that describes a state, without writing anything."""
    sums = [[len(chunk), hashlib.sha256(chunk).hexdigest()] for chunk in _chunks(flat)]
    return _PublishedState(name, step, base, flat.structure, flat.outline().spec, sums)


def _publish_state(store: PatientStore, layout: Layout, flat: _FlatState, state: _PublishedState) -> None:
    """Write the chunks of a state and then its record, so that a state becomes visible only when it is complete.

    Everything is read back, because neither the first state of a run nor the last one can be published again later.
    """
    for index, chunk in enumerate(_chunks(flat)):
        store.put_verified(_chunk_key(layout, state.name, index), chunk)
    key = layout.key("states", state.name)
    store.put_verified(key, pack("state", layout.address(key), _record_fields(state)))


def read_state(store: PatientStore, layout: Layout, name: str) -> _PublishedState | None:
    """Return the record of a published state, or None if it cannot be read."""

    def unpack_state(at: str, data: bytes) -> _PublishedState:
        content = unpack_fields("state", at, data, "step", "base", "structure", "spec", "chunks")
        with as_record_error("state"):
            if content["step"] != step_of(name):
                raise ValueError(f"step {str(content['step'])[:40]} in the record of {name}")
            sizes = [_tensor_bytes(spec) for spec in checked_list(content["spec"], MAX_TENSORS)]
            checked_text(content["base"])
            _check_chunks(content["chunks"], sizes)
            tensor_numbers = sorted(_tensors_in(content["structure"]))
            if tensor_numbers != list(range(len(sizes))):
                raise ValueError("the structure does not hold each tensor exactly once")
            return _PublishedState(name, **content)

    return read_record(store, layout, layout.key("states", name), unpack_state)


def _fetch_state(store: PatientStore, layout: Layout, state: _PublishedState, mine: _Outline) -> Any | None:
    """Return the content of a published state, or None if a chunk cannot be read. Raises ShapeError if the state
    belongs to a different model.
    """
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
    """Fills a list of tensors from consecutive pieces, beginning with the first element of the first tensor."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        # The tensor and element where the next piece begins.
        self._number = self._start = 0
        self._skip_full()

    def add(self, chunk: bytes) -> None:
        """Copy the pieces of the next chunk into the tensors. Raises RecordError if a piece is missing or out of
        order.
        """
        pieces = _parse_chunk(chunk)
        named_matches = [(match, name) for name in pieces if (match := _PIECE.fullmatch(name))]
        if len(named_matches) != len(pieces):
            raise RecordError("a chunk of a state has invalid piece names")
        for number, start, name in sorted((int(match[1]), int(match[2]), name) for match, name in named_matches):
            self._fill(number, start, pieces[name])

    def full_tensors(self) -> list[Tensor]:
        """Return the filled tensors. Raises RecordError if any elements are missing."""
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
        """Advance to the next tensor that is not yet full."""
        while self._number < len(self._tensors) and self._start == self._tensors[self._number].numel():
            self._number, self._start = self._number + 1, 0


def _parse_chunk(chunk: bytes) -> dict[str, Tensor]:
    """Return the tensors of a chunk by name.

    A malicious header may contain types that torch does not know, or dimensions that it cannot represent, so the
    entries are checked before tensors are created from them.
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


def _refuse_another_model(state: _PublishedState, mine: _Outline) -> None:
    sizes = [torch.Size(shape).numel() * _DTYPES[dtype].itemsize for shape, dtype in state.spec if dtype in _DTYPES]
    fits = len(sizes) == len(state.spec) and sum(sizes) <= _MAX_GROWTH * mine.num_bytes + _HEADER_BYTES
    if not fits or not _has_tensors_of(state.structure, state.spec, mine.structure, mine.spec):
        what = f"published state of step {state.step}"
        fix = "Use the same model and fragments at all replicas, and another generation for another model."
        raise ShapeError(explain(what, got="other tensors", expected="the tensors of this replica", fix=fix))


def _has_tensors_of(theirs: Any, their_spec: list[list[Any]], mine: Any, my_spec: list[list[Any]]) -> bool:
    """Return whether a state contains all tensors of this replica's state, with equal shapes and types. It may
    contain more, because some optimizers create tensors in their first step.
    """
    if "tensor" in mine:
        return "tensor" in theirs and their_spec[theirs["tensor"]] == my_spec[mine["tensor"]]
    if "dict" in mine:
        inner = dict(theirs.get("dict", []))
        return all(
            key in inner and _has_tensors_of(inner[key], their_spec, value, my_spec) for key, value in mine["dict"]
        )
    return True


def _chunks(flat: _FlatState) -> Iterator[bytes]:
    """Yield the tensors of a state as safetensors files with up to CHUNK_BYTES of data each. Each piece is named by
    its tensor and its first element.
    """
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


def _tensor_bytes(spec: Any) -> int:
    shape, dtype = checked_list(spec, 2)
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"unknown dtype {str(dtype)[:40]!r}")
    sizes = [checked_int(size, below=_MAX_BYTES) for size in checked_list(shape, MAX_DEPTH)]
    # A 0 must not hide the other dimensions, because torch multiplies those to compute strides.
    checked_int(math.prod(max(1, size) for size in sizes), below=_MAX_BYTES)
    return checked_int(math.prod(sizes) * _DTYPES[dtype].itemsize, below=_MAX_BYTES)


def _check_chunks(chunks: Any, sizes: Sequence[int]) -> None:
    """Raise ValueError if a chunk has an invalid size, or if there are more chunks than the tensors need."""
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


def _record_fields(state: _PublishedState) -> dict[str, Any]:
    fields = {"step": state.step, "base": state.base, "structure": state.structure}
    return {**fields, "spec": state.spec, "chunks": state.chunks}


# A state in memory, split into a structure of dicts, lists and plain values, and the tensors.

MAX_TENSORS, MAX_DEPTH = 10**7, 64
_PLAIN = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class _FlatState:
    """A state, split into its structure and its tensors."""

    structure: Any
    tensors: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def outline(self) -> _Outline:
        """Return the structure of the state with the shapes and types of its tensors."""
        spec = [[list(tensor.shape), str(tensor.dtype)] for tensor in self.tensors]
        return _Outline(self.structure, spec, self.num_bytes)


@dataclass(frozen=True)
class _Outline:
    """The structure of a state, and the shapes and types of its tensors."""

    structure: Any
    spec: list[list[Any]]
    num_bytes: int


def _flatten(state: Any) -> _FlatState:
    """Split a state into its structure and its tensors. Raises InputError for an object that is neither."""
    tensors: list[Tensor] = []
    return _FlatState(_to_structure(state, tensors), tuple(tensors))


def _unflatten(structure: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the state with this structure and these tensors. This is the inverse of `_flatten`."""
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


def _to_structure(value: Any, tensors: list[Tensor]) -> dict[str, Any]:
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {"dict": [[_checked_dict_key(key), _to_structure(inner, tensors)] for key, inner in items]}
    if isinstance(value, list | tuple):
        tag = "list" if isinstance(value, list) else "tuple"
        return {tag: [_to_structure(inner, tensors) for inner in cast("Sequence[object]", value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    expected = "tensors, dicts, lists and plain values"
    raise InputError(explain("state of a registered function", got=type(value).__name__, expected=expected))


def _checked_dict_key(key: object) -> int | str:
    if isinstance(key, int | str) and not isinstance(key, bool):
        return key
    raise InputError(explain("key of a state", got=repr(key), expected="text or an integer"))


def _tensors_in(structure: Any, depth: int = MAX_DEPTH) -> Iterator[int]:
    """Yield the numbers of the tensors referenced in a structure. Raises ValueError for anything that `_flatten`
    never produces.
    """
    if not depth or not isinstance(structure, dict) or len(structure) != 1:
        raise ValueError(f"invalid or too deeply nested structure: {str(structure)[:40]!r}")
    ((tag, content),) = structure.items()
    if tag == "tensor":
        yield checked_int(content, below=MAX_TENSORS)
    elif tag == "dict":
        for key, inner in (checked_list(pair, 2) for pair in checked_list(content, MAX_TENSORS)):
            _checked_dict_key(key)
            yield from _tensors_in(inner, depth - 1)
    elif tag in ("list", "tuple"):
        for inner in checked_list(content, MAX_TENSORS):
            yield from _tensors_in(inner, depth - 1)
    elif tag != "value" or not isinstance(content, _PLAIN):
        raise ValueError(f"unknown tag in a structure: {str(tag)[:40]!r}")
