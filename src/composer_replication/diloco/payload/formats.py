"""What each kind of payload holds: its tensors, its size, and the one header that its reader accepts.

A header is not believed. Whoever reads knows how many elements and what `about` to expect, so the header is built anew
and compared byte by byte; its length is a constant. So nothing is allocated, parsed or skipped on a sender's word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from composer_replication.canonical_json import encode
from composer_replication.errors import ComposerError, InputError, explain

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
class Part:
    """A tensor of a payload."""

    name: str
    code: str  # safetensors' name of the type
    dtype: torch.dtype
    count: int

    @property
    def num_bytes(self) -> int:
        return self.count * self.dtype.itemsize


def parts_of(kind: PayloadKind, elements: int) -> tuple[Part, ...]:
    """The tensors of a payload, in the order of their bytes; scales first, which keeps them aligned."""
    if kind == "fp32":
        return (Part("values", "F32", torch.float32, elements),)
    if kind == "bf16":
        return (Part("values", "BF16", torch.bfloat16, elements),)
    scales = Part("scales", "F32", torch.float32, -(-elements // BLOCK_ELEMENTS))
    if kind == "int8":
        return (scales, Part("values", "I8", torch.int8, elements))
    if kind == "int4":  # two to a byte, the first in the low half
        return (scales, Part("values", "U8", torch.uint8, -(-elements // 2)))
    raise InputError(explain("kind of a payload", got=repr(kind), expected=f"one of {', '.join(KINDS)}"))


def payload_bytes(elements: int, kind: PayloadKind) -> int:
    """The exact size of such a payload: of a given kind and length there is no other."""
    return HEADER_BYTES + sum(part.num_bytes for part in parts_of(kind, elements))


def header_of(kind: PayloadKind, elements: int, about: Mapping[str, str], checksum: str) -> bytes:
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
