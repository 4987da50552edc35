"""A safetensors file written tensor by tensor: a state that fills the memory is not copied once more to be saved."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from composer_replication.errors import ArtefactCorruptError, explain

_NAMES = {
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
_LARGEST_ITEM = 16  # complex128; what follows the header starts at a multiple of it
_CHUNK = 1 << 26  # bytes that are hashed and written at once


def write_tensors(file: BinaryIO, tensors: dict[str, Tensor]) -> str:
    """Write a safetensors file and return the SHA-256 of its data, which its metadata holds as well.

    A dtype the format does not know is written as bytes; `raw_dtypes` says which.
    """
    # Wide items first, as the library does: every tensor then begins at a multiple of its item size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
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


def raw_dtypes(tensors: dict[str, Tensor]) -> dict[str, list[object]]:
    """Dtype and shape of the tensors that are written as bytes."""
    return {
        name: [str(each.dtype).removeprefix("torch."), list(each.shape)]
        for name, each in tensors.items()
        if each.dtype not in _NAMES
    }


def read_tensors(path: Path, raw: dict[str, list[object]], *, data_sha256: str, device: str) -> dict[str, Tensor]:
    """What `write_tensors` wrote; raises when the file is not the one whose data had this digest."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt", device=device) as file:
            found = (file.metadata() or {}).get("data_sha256")
            if found != data_sha256:
                expected = f"the file that belongs to {path.with_suffix('.json').name}"
                raise ArtefactCorruptError(explain(str(path), got=f"data of digest {found}", expected=expected))
            # Cloned: a tensor that is a view of the mapped file would change with it, or keep it open.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ArtefactCorruptError(explain(str(path), got=str(error), expected="a safetensors file")) from error
    for name, (dtype, shape) in raw.items():
        tensors[name] = tensors[name].view(getattr(torch, str(dtype))).reshape(shape)  # pyright: ignore
    return tensors


def _header(tensors: dict[str, Tensor], data_sha256: str) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "data_sha256": data_sha256}}
    start = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        known = _NAMES.get(tensor.dtype)
        shape = list(tensor.shape) if known else [size]
        entries[name] = {"dtype": known or "U8", "shape": shape, "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _LARGEST_ITEM)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor) -> memoryview:
    plain = tensor.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    array: Any = plain.view(torch.uint8).numpy()
    return memoryview(array).cast("B") if plain.numel() else memoryview(b"")
