"""Encode a vector as bytes that a reader can verify: one safetensors file of fp32, bf16, int8 or int4.

A header is never trusted. Its length is constant, and the reader knows the expected number of elements and `about`, so
it builds the expected header and compares it byte by byte. A malicious sender therefore cannot control allocations or
parsing. Integers share a scale per block of 128 numbers, and `ErrorFeedback` adds rounding errors to the next payload.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from composer_replication.canonical_json import decode_object, encode
from composer_replication.errors import ComposerError, InputError, NonFiniteError, ShapeError, explain

__all__ = [
    "BLOCK_ELEMENTS",
    "ErrorFeedback",
    "PayloadError",
    "PayloadKind",
    "decode_vector",
    "encode_vector",
    "payload_bytes",
]


PayloadKind = Literal["fp32", "bf16", "int8", "int4"]
KINDS: tuple[PayloadKind, ...] = get_args(PayloadKind)
Reason = Literal["too_large", "truncated", "not_a_payload", "header", "elements", "about", "checksum", "not_finite"]
BLOCK_ELEMENTS = 128
"""How many numbers share a scale. Vectors are cut into shards at multiples of this."""
HEADER_BYTES = 2048
FORMAT = "composer-diloco-vector-1"
_LENGTH_BYTES = 8


class PayloadError(ComposerError, ValueError):
    """Raised for bytes that are not the expected payload; `reason` is a one-word explanation."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


@dataclass(frozen=True)
class _PayloadPart:
    """The name, type and length of one tensor in a payload."""

    name: str
    code: str  # the name of the dtype in safetensors
    dtype: torch.dtype
    count: int

    @property
    def num_bytes(self) -> int:
        return self.count * self.dtype.itemsize


def _payload_parts(kind: PayloadKind, elements: int) -> tuple[_PayloadPart, ...]:
    """Return the tensors that a payload contains, in storage order. Scales come first, which keeps them aligned."""
    if kind == "fp32":
        return (_PayloadPart("values", "F32", torch.float32, elements),)
    if kind == "bf16":
        return (_PayloadPart("values", "BF16", torch.bfloat16, elements),)
    scales = _PayloadPart("scales", "F32", torch.float32, -(-elements // BLOCK_ELEMENTS))
    if kind == "int8":
        return (scales, _PayloadPart("values", "I8", torch.int8, elements))
    # Two numbers per byte, the first in the low four bits.
    if kind == "int4":
        return (scales, _PayloadPart("values", "U8", torch.uint8, -(-elements // 2)))
    raise InputError(explain("kind of a payload", got=repr(kind), expected=f"one of {', '.join(KINDS)}"))


def payload_bytes(elements: int, kind: PayloadKind) -> int:
    """Return the exact size of a payload in bytes, which depends only on its kind and number of elements."""
    return HEADER_BYTES + sum(part.num_bytes for part in _payload_parts(kind, elements))


def _build_header(kind: PayloadKind, elements: int, about: Mapping[str, str], checksum: str) -> bytes:
    """Return the only valid header of a payload with these properties: a safetensors header with sorted keys, padded
    with spaces.
    """
    stated = {"format": FORMAT, "kind": kind, "elements": str(elements), "sha256": checksum}
    described: dict[str, object] = {"__metadata__": stated | {f"about.{key}": value for key, value in about.items()}}
    start = 0
    for part in _payload_parts(kind, elements):
        end = start + part.num_bytes
        described[part.name] = {"dtype": part.code, "shape": [part.count], "data_offsets": [start, end]}
        start = end
    text = encode(described, where="header of a payload")
    room = HEADER_BYTES - _LENGTH_BYTES
    if len(text) > room:
        expected = f"at most {room:,} bytes of header"
        raise InputError(explain("about of a payload", got=f"{len(text):,} bytes", expected=expected))
    return room.to_bytes(_LENGTH_BYTES, "little") + text.ljust(room)


_SHOWN = 60


def encode_vector(vector: Tensor, *, kind: PayloadKind, about: Mapping[str, str]) -> bytes:
    """Return a 1-D fp32 vector encoded as a safetensors file. Its header contains `about`; readers must pass the
    same mapping to `decode_vector`.
    """
    checked = _checked_vector(vector)
    data = [_as_bytes(tensor) for tensor in _to_tensors(checked, kind)]
    checksum = hashlib.sha256()
    for piece in data:
        checksum.update(piece)
    return b"".join([_build_header(kind, checked.numel(), about, checksum.hexdigest()), *data])


def decode_vector(data: bytes, *, elements: int, about: Mapping[str, str], most_bytes: int | None = None) -> Tensor:
    """Return the fp32 vector encoded in a payload. Raises PayloadError if the bytes were not written by
    `encode_vector` with the same `about` and number of elements.
    """
    if most_bytes is not None and len(data) > most_bytes:
        raise _payload_error("too_large", got=f"{len(data):,} bytes", expected=f"at most {most_bytes:,}")
    # The size rules out most kinds before anything is hashed.
    kinds: list[PayloadKind] = [kind for kind in KINDS if payload_bytes(elements, kind) == len(data)]
    checksum = hashlib.sha256(memoryview(data)[HEADER_BYTES:]).hexdigest() if kinds else ""
    for kind in kinds:
        if data.startswith(_build_header(kind, elements, about, checksum)):
            return _checked_finite(_parse_tensors(data, kind, elements))
    raise _explain_refusal(data, elements, about)


def _rounded(vector: Tensor, kind: PayloadKind) -> Tensor:
    """Return the vector as `decode_vector` would return it after `encode_vector` rounded it to this payload kind."""
    return _to_vector(_to_tensors(_checked_vector(vector), kind), kind, vector.numel())


def _checked_vector(vector: Tensor) -> Tensor:
    if vector.dim() != 1 or vector.dtype != torch.float32:
        got = f"{vector.dtype} of shape {tuple(vector.shape)}"
        raise ShapeError(explain("vector of a payload", got=got, expected="one dimension of torch.float32"))
    if not _is_finite(vector):
        raise NonFiniteError(explain("vector of a payload", got="NaN or infinity", expected="finite numbers"))
    return vector.detach().cpu().contiguous()


def _to_tensors(vector: Tensor, kind: PayloadKind) -> tuple[Tensor, ...]:
    """Return the tensors that encode a vector, in the order of `_payload_parts`."""
    if kind == "fp32":
        return (vector,)
    # Without the clamp, the largest fp32 numbers would round to infinity.
    if kind == "bf16":
        largest = torch.finfo(torch.bfloat16).max
        return (vector.clamp(-largest, largest).to(torch.bfloat16),)
    scales, integers = _quantize(vector, LARGEST_INT8 if kind == "int8" else LARGEST_INT4)
    return (scales, integers if kind == "int8" else _pack_int4(integers))


def _to_vector(tensors: tuple[Tensor, ...], kind: PayloadKind, elements: int) -> Tensor:
    if kind in ("fp32", "bf16"):
        return tensors[0].to(torch.float32)
    scales, values = tensors
    return _dequantize(scales, values if kind == "int8" else _unpack_int4(values, elements))


def _parse_tensors(data: bytes, kind: PayloadKind, elements: int) -> Tensor:
    tensors: list[Tensor] = []
    start = HEADER_BYTES
    for part in _payload_parts(kind, elements):
        piece = bytearray(memoryview(data)[start : start + part.num_bytes])
        start += part.num_bytes
        tensors.append(torch.frombuffer(piece, dtype=part.dtype) if piece else torch.empty(0, dtype=part.dtype))
    return _to_vector(tuple(tensors), kind, elements)


def _as_bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).numpy().data


def _is_finite(vector: Tensor) -> bool:
    """Return whether all elements are finite.

    `torch.aminmax` is used because it propagates NaN and, unlike `isfinite`, does not allocate a mask for the whole
    vector.
    """
    return not vector.numel() or all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(vector))


def _checked_finite(vector: Tensor) -> Tensor:
    if not _is_finite(vector):
        raise _payload_error("not_finite", got="NaN or infinity", expected="finite numbers")
    return vector


def _explain_refusal(data: bytes, elements: int, about: Mapping[str, str]) -> PayloadError:
    """Return an error that names the first difference from the expected payload. This is the only function that
    parses a received header.
    """
    try:
        header = decode_object(data[8:HEADER_BYTES])
    except ValueError:
        short = len(data) < HEADER_BYTES
        return _payload_error("truncated" if short else "not_a_payload", got=f"{len(data):,} bytes", expected=FORMAT)
    metadata = header.get("__metadata__")
    stated: dict[str, object] = metadata if isinstance(metadata, dict) else {}
    if stated.get("format") != FORMAT:
        return _payload_error("not_a_payload", got=repr(stated.get("format"))[:_SHOWN], expected=FORMAT)
    if stated.get("elements") != str(elements):
        return _payload_error("elements", got=repr(stated.get("elements"))[:_SHOWN], expected=f"{elements}")
    expected = {f"about.{key}": value for key, value in about.items()}
    got = {key: value for key, value in stated.items() if key.startswith("about.")}
    if got != expected:
        key = min(key for key in got.keys() | expected.keys() if got.get(key) != expected.get(key))
        return _payload_error(
            "about", got=f"{key[:_SHOWN]} {got.get(key)!r}"[: 2 * _SHOWN], expected=repr(expected.get(key))
        )
    return _explain_refused_bytes(data, elements, about, stated)


def _explain_refused_bytes(
    data: bytes, elements: int, about: Mapping[str, str], stated: Mapping[str, object]
) -> PayloadError:
    kind, checksum = stated.get("kind"), stated.get("sha256")
    if kind not in KINDS or not isinstance(checksum, str) or len(checksum) != hashlib.sha256().digest_size * 2:
        return _payload_error("header", got=repr(kind)[:_SHOWN], expected=f"one of {', '.join(KINDS)}, and a sha256")
    if not data.startswith(_build_header(kind, elements, about, checksum)):
        return _payload_error("header", got="other types, shapes or offsets", expected=f"those of {kind}")
    size = payload_bytes(elements, kind)
    if len(data) != size:
        reason: Reason = "truncated" if len(data) < size else "too_large"
        return _payload_error(reason, got=f"{len(data):,} bytes", expected=f"{size:,}")
    return _payload_error("checksum", got="bytes of another checksum", expected=checksum)


def _payload_error(reason: Reason, *, got: str, expected: str) -> PayloadError:
    return PayloadError(reason, explain(f"payload refused ({reason})", got=got, expected=expected))


# Quantization: blocks of numbers as small integers with a shared scale. The scale is the block's largest magnitude
# divided by the largest integer, and rounded to a 16-bit mantissa. Then integer times scale is exact in fp32, and
# quantizing twice changes nothing, so that a sender knows exactly what its readers will see.

LARGEST_INT8, LARGEST_INT4 = 127, 7
_INT4_ZERO = 8
# Blocks with smaller magnitudes become zero, because their scale would not be a normal number.
_MIN_MAGNITUDE = 1e-30
_DROPPED_MANTISSA_BITS = 8


def _quantize(vector: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Quantize a vector, and return the fp32 scale of each block and the integers as int8."""
    blocks = pad(vector, (0, -vector.numel() % BLOCK_ELEMENTS)).view(-1, BLOCK_ELEMENTS)
    magnitudes = torch.linalg.vector_norm(blocks, ord=torch.inf, dim=1)
    scales = _round_mantissa(magnitudes / largest).masked_fill_(magnitudes < _MIN_MAGNITUDE, 0.0)
    # Dividing by infinity makes the integers of a zero block 0, not NaN.
    divisors = scales.masked_fill(scales == 0, torch.inf)
    integers = torch.round(blocks / divisors.unsqueeze(1)).clamp_(-largest, largest)
    return scales, integers.to(torch.int8).view(-1)[: vector.numel()]


def _dequantize(scales: Tensor, integers: Tensor) -> Tensor:
    """Restore an fp32 vector from its block scales and integers."""
    count = integers.numel()
    values = pad(integers.to(torch.float32), (0, -count % BLOCK_ELEMENTS)).view(-1, BLOCK_ELEMENTS)
    return values.mul_(scales.unsqueeze(1)).view(-1)[:count]


def _pack_int4(integers: Tensor) -> Tensor:
    """Pack pairs of integers from -7 to 7 into bytes, with the first integer of each pair in the low four bits."""
    halves = (pad(integers, (0, integers.numel() % 2)) + _INT4_ZERO).to(torch.uint8).view(-1, 2)
    return halves[:, 0] | (halves[:, 1] << 4)


def _unpack_int4(packed: Tensor, count: int) -> Tensor:
    """Return the integers packed by `_pack_int4`. The value -8 is accepted, although `_pack_int4` never writes it."""
    halves = torch.stack((packed & 0x0F, packed >> 4), dim=1).view(-1)[:count]
    return halves.to(torch.int8) - _INT4_ZERO


def _round_mantissa(positive: Tensor) -> Tensor:
    """Round positive numbers to a 16-bit mantissa."""
    # The bits of positive floats, read as integers, have the same order, so rounding the integer rounds the float.
    bits = positive.view(torch.int32)
    half = 1 << (_DROPPED_MANTISSA_BITS - 1)
    return ((bits + half) >> _DROPPED_MANTISSA_BITS << _DROPPED_MANTISSA_BITS).view(torch.float32)


class ErrorFeedback:
    """Adds the rounding error of one payload to the next, so that errors do not accumulate.

    The stored error is at most about half a quantization step per number. It is kept in memory, so a replica loses it
    when it restarts; these losses do not accumulate. `compress` does not store the error, because the round may be
    aborted; call `keep` once the round is committed.
    """

    def __init__(self) -> None:
        self.residual: Tensor | None = None

    def compress(self, vector: Tensor, kind: PayloadKind) -> tuple[Tensor, Tensor]:
        """Return the vector to send, exactly as `decode_vector` will return it, and the residual to pass to `keep`.

        If the vector is sent in pieces, cut it at multiples of BLOCK_ELEMENTS. Otherwise, the pieces are quantized in
        other blocks than the residual assumes.
        """
        compensated_vector = vector if self.residual is None else vector + self._checked_residual(self.residual, vector)
        sent = _rounded(compensated_vector, kind)
        return sent, compensated_vector - sent

    def keep(self, residual: Tensor) -> None:
        """Store the residual, so that `compress` adds it to the next vector."""
        self.residual = residual

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self.residual is None else {"residual": self.residual.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        residual = state.get("residual")
        self.residual = None if residual is None else residual.detach().to(torch.float32).clone()

    @staticmethod
    def _checked_residual(residual: Tensor, vector: Tensor) -> Tensor:
        if residual.shape != vector.shape:
            fix = "A residual belongs to one fragment of one model: keep an ErrorFeedback for each."
            raise ShapeError(
                explain("residual", got=tuple(residual.shape), expected=f"shape {tuple(vector.shape)}", fix=fix)
            )
        return residual.to(vector.device)
