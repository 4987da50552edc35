"""Read and write tensors as safetensors files, and trees of tensors and plain values.

A tree is saved atomically as two files, safetensors and JSON. Lists, and leaves that JSON represents exactly (None,
booleans, text, finite floats, 64-bit integers), are stored as they are. Everything else is an object with a single key
that names its kind:

    {"dict": [[key, value], ...]}  in order; keys are leaves or tuples of leaves, so 1 and "1" are distinct
    {"tuple": [...]}
    {"tensor": name}               the name of the tensor in the safetensors file
    {"float": 16 hex digits}       NaN and infinities, bit for bit
    {"int": decimal text}          integers beyond 64 bits
    {"text": UTF-8 bytes in hex}   text with lone surrogates, which JSON cannot represent
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from composer_replication.atomic import commit_together, staged
from composer_replication.canonical_json import decode_object, encode
from composer_replication.errors import ArtefactCorruptError, ArtefactNotFoundError, InputError, explain

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
# The size of the largest item, complex128, in bytes. The data after the header starts at a multiple of this size.
_LARGEST_ITEM = 16
# The number of bytes to hash and write at a time.
_CHUNK = 1 << 26


def write_tensors(file: BinaryIO, tensors: dict[str, Tensor]) -> str:
    """Write a safetensors file and return the SHA-256 of its data, which is also stored in its metadata.

    Tensors whose dtype the format does not support are written as bytes; `_raw_dtypes` returns their dtypes.
    """
    # Widest items first, as in the safetensors library, so that every tensor starts at a multiple of its item size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    # The digest is known only after the data is written, so write the header twice, with the same length.
    placeholder = "0" * 64
    file.write(_header(ordered, placeholder))
    digest = hashlib.sha256()
    for tensor in ordered.values():
        data = _bytes_of(tensor)
        for start in range(0, len(data), _CHUNK):
            file.write(data[start : start + _CHUNK])
            digest.update(data[start : start + _CHUNK])
    file.seek(0)
    file.write(_header(ordered, digest.hexdigest()))
    file.seek(0, 2)
    return digest.hexdigest()


def _raw_dtypes(tensors: dict[str, Tensor]) -> dict[str, list[object]]:
    """Return the dtype and shape of each tensor that is written as bytes."""
    return {
        name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in tensors.items()
        if tensor.dtype not in _DTYPE_NAMES
    }


def read_tensors(path: Path, *, device: str = "cpu", fix: str = "") -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file. Raises ArtefactCorruptError if it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt", device=device) as file:
            # Clone the tensors: views of the memory-mapped file would change with the file and keep it open.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except SafetensorError as error:
        raise ArtefactCorruptError(
            explain(str(path), got=str(error), expected="a safetensors file", fix=fix)
        ) from error


def _header(tensors: dict[str, Tensor], data_sha256: str) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "data_sha256": data_sha256}}
    start = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        dtype_name = _DTYPE_NAMES.get(tensor.dtype)
        shape = list(tensor.shape) if dtype_name else [size]
        entries[name] = {"dtype": dtype_name or "U8", "shape": shape, "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _LARGEST_ITEM)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor) -> memoryview:
    # A conjugate or negative view is only a flag on other bytes, so resolve it first.
    plain = tensor.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    array: Any = plain.view(torch.uint8).numpy()
    return memoryview(array).cast("B") if plain.numel() else memoryview(b"")


_SCHEMA = "composer_replication.tree"
_VERSION = 1


def save_tree(folder: Path, name: str, tree: Any) -> None:
    """Write a tree of dicts, lists, tuples, None, bool, int, float, str and tensors.

    The files are `<name>.safetensors` and `<name>.json`. Values are stored bit for bit, but not devices, nor whether
    two entries share a tensor. A value of another type raises InputError with its path in the tree.
    """
    folder = Path(folder)
    encoder = _TreeEncoder(f"tree {name!r}")
    structure = encoder.encode(tree)
    # Both files appear together or not at all, and the JSON file contains the digest of the tensors.
    with staged(folder / f"{name}.safetensors") as tensor_stage, staged(folder / f"{name}.json") as json_stage:
        digest = write_tensors(tensor_stage.file, encoder.tensors)
        about = {
            "schema": _SCHEMA,
            "version": _VERSION,
            "data_sha256": digest,
            "raw": _raw_dtypes(encoder.tensors),
            "tree": structure,
        }
        json_stage.file.write(encode(about, where=str(folder / f"{name}.json")) + b"\n")
        commit_together(tensor_stage, json_stage)


def load_tree(folder: Path, name: str, *, device: str = "cpu") -> Any:
    """Return the tree that `save_tree` wrote, with its tensors on `device`."""
    path = Path(folder) / f"{name}.json"
    try:
        about: dict[str, Any] = decode_object(path.read_bytes())
    except FileNotFoundError as error:
        raise ArtefactNotFoundError(explain(f"tree {name!r}", got="a missing file", expected=str(path))) from error
    except ValueError as error:
        raise ArtefactCorruptError(
            explain(str(path), got=str(error), expected="a file written by save_tree")
        ) from error
    if (about.get("schema"), about.get("version")) != (_SCHEMA, _VERSION):
        got = f"schema {about.get('schema')} version {about.get('version')}"
        raise ArtefactCorruptError(explain(str(path), got=got, expected=f"{_SCHEMA} version {_VERSION}"))
    tensor_path = path.with_name(f"{name}.safetensors")
    if not tensor_path.is_file():
        raise ArtefactNotFoundError(explain(f"tree {name!r}", got="a missing file", expected=str(tensor_path)))
    tensors, metadata = read_tensors(tensor_path, device=device)
    if metadata.get("data_sha256") != about["data_sha256"]:
        got = f"data with digest {metadata.get('data_sha256')}"
        raise ArtefactCorruptError(explain(str(tensor_path), got=got, expected=f"the file that belongs to {path.name}"))
    # `_raw_dtypes` has the tensors that were written as bytes.
    for tensor_name, (dtype, shape) in about["raw"].items():
        tensors[tensor_name] = tensors[tensor_name].view(getattr(torch, dtype)).reshape(shape)
    return _TreeDecoder(str(path), tensors).decode(about["tree"])


_PLAIN_TENSORS = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
_KEYS = (str, int, float, type(None))  # bool is an int


class _TreeEncoder:
    """Turns a tree into JSON, and collects its tensors."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.tensors: dict[str, Tensor] = {}

    def encode(self, value: Any, path: str = "") -> object:
        if isinstance(value, Tensor):
            return {"tensor": self._add(value, path)}
        if isinstance(value, dict):
            items = cast("dict[Any, Any]", value).items()
            return {
                "dict": [[self._key(key, path), self.encode(child, _child_path(path, key))] for key, child in items]
            }
        if isinstance(value, list | tuple):
            nodes = [self.encode(item, _child_path(path, index)) for index, item in enumerate(cast("list[Any]", value))]
            return {"tuple": nodes} if isinstance(value, tuple) else nodes
        if isinstance(value, _KEYS):
            return _leaf(value)
        raise self._refuse(path, type(value).__name__, "None, bool, int, float, str, dict, list, tuple or tensor")

    def _key(self, key: Any, path: str) -> object:
        if isinstance(key, tuple):
            return {"tuple": [self._key(part, path) for part in cast("tuple[Any, ...]", key)]}
        if isinstance(key, _KEYS):
            return _leaf(key)
        raise self._refuse(
            path, f"a key of type {type(key).__name__}", "keys that are text, numbers, None or tuples of these"
        )

    def _add(self, tensor: Tensor, path: str) -> str:
        if type(tensor) not in _PLAIN_TENSORS:
            fix = "Gather a sharded tensor first (full_tensor(), or a full state dict)."
            raise self._refuse(path, f"a tensor of class {type(tensor).__name__}", "a plain tensor", fix)
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "on the meta device" if tensor.is_meta else f"with layout {tensor.layout} and dtype {tensor.dtype}"
            raise self._refuse(path, f"a tensor {kind}", "a dense tensor with values")
        # The number makes names unique, the path makes them readable.
        name = f"{len(self.tensors)} {path}"
        self.tensors[name.encode("utf-8", "replace").decode()] = tensor.detach()
        return next(reversed(self.tensors))

    def _refuse(self, path: str, got: str, expected: str, fix: str = "") -> InputError:
        return InputError(explain(f"{self._where}, at {path or 'the root'!r}", got=got, expected=expected, fix=fix))


class _TreeDecoder:
    """Turns JSON written by `_TreeEncoder` back into the tree."""

    def __init__(self, where: str, tensors: dict[str, Tensor]) -> None:
        self._where = where
        self._tensors = tensors

    def decode(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.decode(child) for child in cast("list[Any]", node)]
        if not isinstance(node, dict):
            return node
        try:
            # An object with no key raises ValueError here.
            (kind, content), *more = cast("dict[str, Any]", node).items()
            if not more:
                return self._tagged(kind, content)
        except (ValueError, TypeError, KeyError, struct.error) as error:
            got = f"{node!r:.80} ({error!r})"
            raise ArtefactCorruptError(
                explain(self._where, got=got, expected="a value written by save_tree")
            ) from error
        raise ArtefactCorruptError(explain(self._where, got=f"{node!r:.80}", expected="an object with a single kind"))

    def _tagged(self, kind: str, content: Any) -> Any:
        if kind == "dict":
            return {self.decode(key): self.decode(value) for key, value in content}
        if kind == "tuple":
            return tuple(self.decode(child) for child in content)
        if kind == "tensor":
            return self._tensors[content]
        if kind == "float":
            return struct.unpack(">d", bytes.fromhex(content))[0]
        if kind == "int":
            return int(content)
        if kind == "text":
            return bytes.fromhex(content).decode("utf-8", "surrogatepass")
        raise KeyError(kind)


def _leaf(value: Any) -> object:
    # Checked before int, since a bool is an int.
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**63 else {"int": str(int(value))}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return {"text": value.encode("utf-8", "surrogatepass").hex()}
    return str(value)


def _child_path(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
