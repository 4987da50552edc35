"""What each kind of payload holds: its tensors, its size, and the one header that its reader accepts.

A header is not believed. Whoever reads knows how many elements and what `about` to expect, so the header is built anew
and compared byte by byte; its length is a constant. So nothing is allocated, parsed or skipped on a sender's word.
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
from composer_replication.errors import (
    ComposerError,
    InputError,
    NonFiniteError,
    ShapeError,
    explain,
)

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
"""Numbers that share a scale. A vector that is cut into shards is cut at multiples of it."""
HEADER_BYTES = 2048
FORMAT = "composer-diloco-vector-1"
_LENGTH_BYTES = 8


class PayloadError(ComposerError, ValueError):
    """Bytes that are not the payload their reader expects; `reason` is one word for it."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


@dataclass(frozen=True)
class _PayloadPart:
    """A tensor of a payload."""

    name: str
    code: str  # safetensors' name of the type
    dtype: torch.dtype
    count: int

    @property
    def num_bytes(self) -> int:
        return self.count * self.dtype.itemsize


def parts_of(kind: PayloadKind, elements: int) -> tuple[_PayloadPart, ...]:
    """The tensors of a payload, in the order of their bytes; scales first, which keeps them aligned."""
    if kind == "fp32":
        return (_PayloadPart("values", "F32", torch.float32, elements),)
    if kind == "bf16":
        return (_PayloadPart("values", "BF16", torch.bfloat16, elements),)
    scales = _PayloadPart("scales", "F32", torch.float32, -(-elements // BLOCK_ELEMENTS))
    if kind == "int8":
        return (scales, _PayloadPart("values", "I8", torch.int8, elements))
    if kind == "int4":  # two to a byte, the first in the low half
        return (scales, _PayloadPart("values", "U8", torch.uint8, -(-elements // 2)))
    raise InputError(explain("kind of a payload", got=repr(kind), expected=f"one of {', '.join(KINDS)}"))


def payload_bytes(elements: int, kind: PayloadKind) -> int:
    """The exact size of such a payload: of a given kind and length there is no other."""
    return HEADER_BYTES + sum(part.num_bytes for part in parts_of(kind, elements))


def _header_of(kind: PayloadKind, elements: int, about: Mapping[str, str], checksum: str) -> bytes:
    """The only header of such a payload: a safetensors header, keys sorted, filled with spaces."""
    stated = {"format": FORMAT, "kind": kind, "elements": str(elements), "sha256": checksum}
    described: dict[str, object] = {"__metadata__": stated | {f"about.{key}": value for key, value in about.items()}}
    start = 0
    for part in parts_of(kind, elements):
        end = start + part.num_bytes
        described[part.name] = {"dtype": part.code, "shape": [part.count], "data_offsets": [start, end]}
        start = end
    text = encode(described, where="header of a payload")
    room = HEADER_BYTES - _LENGTH_BYTES
    if len(text) > room:
        expected = f"at most {room:,} bytes of header"
        raise InputError(explain("about of a payload", got=f"{len(text):,} bytes", expected=expected))
    return room.to_bytes(_LENGTH_BYTES, "little") + text.ljust(room)


# A vector to bytes and back. What comes out is fp32 and finite, or a PayloadError.

_SHOWN = 60


def encode_vector(vector: Tensor, *, kind: PayloadKind, about: Mapping[str, str]) -> bytes:
    """A 1-D fp32 vector as the bytes of one safetensors file; `about` says what it is, and its reader asks for it."""
    checked = _checked(vector)
    data = [_bytes_of(tensor) for tensor in _tensors_of(checked, kind)]
    checksum = hashlib.sha256()
    for piece in data:
        checksum.update(piece)
    return b"".join([_header_of(kind, checked.numel(), about, checksum.hexdigest()), *data])


def decode_vector(data: bytes, *, elements: int, about: Mapping[str, str], most_bytes: int | None = None) -> Tensor:
    """The vector that `encode_vector` wrote, in fp32; PayloadError on anything that differs from what is expected."""
    if most_bytes is not None and len(data) > most_bytes:
        raise _refused("too_large", got=f"{len(data):,} bytes", expected=f"at most {most_bytes:,}")
    kinds: list[PayloadKind] = [kind for kind in KINDS if payload_bytes(elements, kind) == len(data)]
    checksum = hashlib.sha256(memoryview(data)[HEADER_BYTES:]).hexdigest() if kinds else ""
    for kind in kinds:
        if data.startswith(_header_of(kind, elements, about, checksum)):
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
    scales, integers = _to_blocks(vector, LARGEST_INT8 if kind == "int8" else LARGEST_INT4)
    return (scales, integers if kind == "int8" else _pack_int4(integers))


def _vector_of(tensors: tuple[Tensor, ...], kind: PayloadKind, elements: int) -> Tensor:
    if kind in ("fp32", "bf16"):
        return tensors[0].to(torch.float32)
    scales, values = tensors
    return _from_blocks(scales, values if kind == "int8" else _unpack_int4(values, elements))


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
    if not data.startswith(_header_of(kind, elements, about, checksum)):
        return _refused("header", got="other types, shapes or offsets", expected=f"those of {kind}")
    size = payload_bytes(elements, kind)
    if len(data) != size:
        reason: Reason = "truncated" if len(data) < size else "too_large"
        return _refused(reason, got=f"{len(data):,} bytes", expected=f"{size:,}")
    return _refused("checksum", got="bytes of another checksum", expected=checksum)


def _refused(reason: Reason, *, got: str, expected: str) -> PayloadError:
    return PayloadError(reason, explain(f"payload refused ({reason})", got=got, expected=expected))


# Blocks of numbers as small integers and a scale.
#
# A scale is the block's largest magnitude over the largest integer, kept to 16 bits of mantissa. Then integer times
# scale is exact in fp32, and rounding what was rounded changes nothing: a sender knows to the bit what its readers
# will see.

LARGEST_INT8, LARGEST_INT4 = 127, 7
_INT4_ZERO = 8
# Where the largest magnitude is below it, a scale of 16 bits would not be a normal number: such a block is zero.
_SMALLEST = 1e-30
_DROPPED_BITS = 8


def _to_blocks(vector: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """The scale of each block (fp32) and the integers (int8, one for each element)."""
    blocks = pad(vector, (0, -vector.numel() % BLOCK_ELEMENTS)).view(-1, BLOCK_ELEMENTS)
    magnitudes = torch.linalg.vector_norm(blocks, ord=torch.inf, dim=1)
    scales = _to_16_bits(magnitudes / largest).masked_fill_(magnitudes < _SMALLEST, 0.0)
    divisors = scales.masked_fill(scales == 0, torch.inf)
    integers = torch.round(blocks / divisors.unsqueeze(1)).clamp_(-largest, largest)
    return scales, integers.to(torch.int8).view(-1)[: vector.numel()]


def _from_blocks(scales: Tensor, integers: Tensor) -> Tensor:
    """The vector of scales and integers, in fp32."""
    count = integers.numel()
    values = pad(integers.to(torch.float32), (0, -count % BLOCK_ELEMENTS)).view(-1, BLOCK_ELEMENTS)
    return values.mul_(scales.unsqueeze(1)).view(-1)[:count]


def _pack_int4(integers: Tensor) -> Tensor:
    """Two integers of -7 to 7 in a byte, the first in the low half."""
    halves = (pad(integers, (0, integers.numel() % 2)) + _INT4_ZERO).to(torch.uint8).view(-1, 2)
    return halves[:, 0] | (halves[:, 1] << 4)


def _unpack_int4(packed: Tensor, count: int) -> Tensor:
    """The integers of `pack_int4`; a sender's -8, which it never writes, is read as what it says."""
    halves = torch.stack((packed & 0x0F, packed >> 4), dim=1).view(-1)[:count]
    return halves.to(torch.int8) - _INT4_ZERO


def _to_16_bits(positive: Tensor) -> Tensor:
    bits = positive.view(torch.int32)
    half = 1 << (_DROPPED_BITS - 1)
    return ((bits + half) >> _DROPPED_BITS << _DROPPED_BITS).view(torch.float32)


# Error feedback: what rounding left out of a payload is added to the next one, so that nothing is lost for good.


class ErrorFeedback:
    """The residual of one replica's payloads: about half a step of its block's integers for each number, at most.

    It lives in this process: a replica that is started again has lost it once, and such losses do not add up.
    `compress` changes nothing: a round may be aborted, and then what was sent counts for nothing. `keep` is called when
    the round was committed.
    """

    def __init__(self) -> None:
        self.residual: Tensor | None = None

    def compress(self, vector: Tensor, kind: PayloadKind) -> tuple[Tensor, Tensor]:
        """What to send, exactly as `decode_vector` will give it back, and the residual that is left to `keep`.

        Cut what to send at multiples of BLOCK_ELEMENTS, or the shards' blocks are others than the vector's.
        """
        compensated_vector = vector if self.residual is None else vector + self._fitting(self.residual, vector)
        sent = rounded(compensated_vector, kind)
        return sent, compensated_vector - sent

    def keep(self, residual: Tensor) -> None:
        """Send this with the next vector."""
        self.residual = residual

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self.residual is None else {"residual": self.residual.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        residual = state.get("residual")
        self.residual = None if residual is None else residual.detach().to(torch.float32).clone()

    @staticmethod
    def _fitting(residual: Tensor, vector: Tensor) -> Tensor:
        if residual.shape != vector.shape:
            fix = "A residual belongs to one fragment of one model: keep an ErrorFeedback for each."
            raise ShapeError(
                explain("residual", got=tuple(residual.shape), expected=f"shape {tuple(vector.shape)}", fix=fix)
            )
        return residual.to(vector.device)
