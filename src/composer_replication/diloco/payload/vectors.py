"""A vector to bytes and back. What comes out is fp32 and finite, or a PayloadError."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from composer_replication.canonical_json import decode_object
from composer_replication.diloco.payload.formats import (
    FORMAT,
    HEADER_BYTES,
    KINDS,
    PayloadError,
    PayloadKind,
    Reason,
    header_of,
    parts_of,
    payload_bytes,
)
from composer_replication.diloco.payload.rounding import (
    LARGEST_INT4,
    LARGEST_INT8,
    from_blocks,
    pack_int4,
    to_blocks,
    unpack_int4,
)
from composer_replication.errors import NonFiniteError, ShapeError, explain

_SHOWN = 60


def encode_vector(vector: Tensor, *, kind: PayloadKind, about: Mapping[str, str]) -> bytes:
    """A 1-D fp32 vector as the bytes of one safetensors file; `about` says what it is, and its reader asks for it."""
    checked = _checked(vector)
    data = [_bytes_of(tensor) for tensor in _tensors_of(checked, kind)]
    checksum = hashlib.sha256()
    for piece in data:
        checksum.update(piece)
    return b"".join([header_of(kind, checked.numel(), about, checksum.hexdigest()), *data])


def decode_vector(data: bytes, *, elements: int, about: Mapping[str, str], most_bytes: int | None = None) -> Tensor:
    """The vector that `encode_vector` wrote, in fp32; PayloadError on anything that differs from what is expected."""
    if most_bytes is not None and len(data) > most_bytes:
        raise _refused("too_large", got=f"{len(data):,} bytes", expected=f"at most {most_bytes:,}")
    kinds: list[PayloadKind] = [kind for kind in KINDS if payload_bytes(elements, kind) == len(data)]
    checksum = hashlib.sha256(memoryview(data)[HEADER_BYTES:]).hexdigest() if kinds else ""
    for kind in kinds:
        if data.startswith(header_of(kind, elements, about, checksum)):
            return _finite(_read(data, kind, elements))
    raise _why_refused(data, elements, about)


def rounded(vector: Tensor, kind: PayloadKind) -> Tensor:
    """What a reader of such a payload will see."""
    return _vector_of(_tensors_of(_checked(vector), kind), kind, vector.numel())


def _checked(vector: Tensor) -> Tensor:
    if vector.dim() != 1 or vector.dtype != torch.float32:
        got = f"{vector.dtype} of shape {tuple(vector.shape)}"
        raise ShapeError(explain("vector of a payload", got=got, expected="one dimension of torch.float32"))
    if not _is_finite(vector):
        raise NonFiniteError(explain("vector of a payload", got="NaN or infinity", expected="finite numbers"))
    return vector.detach().cpu().contiguous()


def _tensors_of(vector: Tensor, kind: PayloadKind) -> tuple[Tensor, ...]:
    """In the order of `parts_of`."""
    if kind == "fp32":
        return (vector,)
    if kind == "bf16":  # the largest magnitudes would round to infinity
        largest = torch.finfo(torch.bfloat16).max
        return (vector.clamp(-largest, largest).to(torch.bfloat16),)
    scales, integers = to_blocks(vector, LARGEST_INT8 if kind == "int8" else LARGEST_INT4)
    return (scales, integers if kind == "int8" else pack_int4(integers))


def _vector_of(tensors: tuple[Tensor, ...], kind: PayloadKind, elements: int) -> Tensor:
    if kind in ("fp32", "bf16"):
        return tensors[0].to(torch.float32)
    scales, values = tensors
    return from_blocks(scales, values if kind == "int8" else unpack_int4(values, elements))


def _read(data: bytes, kind: PayloadKind, elements: int) -> Tensor:
    tensors: list[Tensor] = []
    start = HEADER_BYTES
    for part in parts_of(kind, elements):
        piece = bytearray(memoryview(data)[start : start + part.num_bytes])
        start += part.num_bytes
        tensors.append(torch.frombuffer(piece, dtype=part.dtype) if piece else torch.empty(0, dtype=part.dtype))
    return _vector_of(tuple(tensors), kind, elements)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).numpy().data


def _is_finite(vector: Tensor) -> bool:
    """Without a mask as long as the vector: NaN goes through a minimum and a maximum."""
    return not vector.numel() or all(bool(torch.isfinite(edge)) for edge in torch.aminmax(vector))


def _finite(vector: Tensor) -> Tensor:
    if not _is_finite(vector):
        raise _refused("not_finite", got="NaN or infinity", expected="finite numbers")
    return vector


def _why_refused(data: bytes, elements: int, about: Mapping[str, str]) -> PayloadError:
    """The first thing that differs. The header is read for these words alone, and it has HEADER_BYTES at most."""
    try:
        header = decode_object(data[8:HEADER_BYTES])
    except ValueError:
        short = len(data) < HEADER_BYTES
        return _refused("truncated" if short else "not_a_payload", got=f"{len(data):,} bytes", expected=FORMAT)
    metadata = header.get("__metadata__")
    stated: dict[str, object] = metadata if isinstance(metadata, dict) else {}
    if stated.get("format") != FORMAT:
        return _refused("not_a_payload", got=repr(stated.get("format"))[:_SHOWN], expected=FORMAT)
    if stated.get("elements") != str(elements):
        return _refused("elements", got=repr(stated.get("elements"))[:_SHOWN], expected=f"{elements}")
    expected = {f"about.{key}": value for key, value in about.items()}
    got = {key: value for key, value in stated.items() if key.startswith("about.")}
    if got != expected:
        key = min(key for key in got.keys() | expected.keys() if got.get(key) != expected.get(key))
        return _refused("about", got=f"{key[:_SHOWN]} {got.get(key)!r}"[: 2 * _SHOWN], expected=repr(expected.get(key)))
    return _why_bytes_are_refused(data, elements, about, stated)


def _why_bytes_are_refused(
    data: bytes, elements: int, about: Mapping[str, str], stated: Mapping[str, object]
) -> PayloadError:
    kind, checksum = stated.get("kind"), stated.get("sha256")
    if kind not in KINDS or not isinstance(checksum, str) or len(checksum) != hashlib.sha256().digest_size * 2:
        return _refused("header", got=repr(kind)[:_SHOWN], expected=f"one of {', '.join(KINDS)}, and a sha256")
    if not data.startswith(header_of(kind, elements, about, checksum)):
        return _refused("header", got="other types, shapes or offsets", expected=f"those of {kind}")
    size = payload_bytes(elements, kind)
    if len(data) != size:
        reason: Reason = "truncated" if len(data) < size else "too_large"
        return _refused(reason, got=f"{len(data):,} bytes", expected=f"{size:,}")
    return _refused("checksum", got="bytes of another checksum", expected=checksum)


def _refused(reason: Reason, *, got: str, expected: str) -> PayloadError:
    return PayloadError(reason, explain(f"payload refused ({reason})", got=got, expected=expected))
