"""Bytes that somebody else wrote: each kind of malice is refused by a word, before anything is allocated for it.

Whoever can write to the bucket can also write a valid payload of wrong numbers; membership is what keeps strangers out.
These are the bytes that must not crash a reader, fill its memory, run, or be taken for another vector.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import resource
import struct
import zipfile

import pytest
import torch
from safetensors.torch import save

from composer_replication.diloco.payload import HEADER_BYTES, PayloadError, decode_vector, encode_vector, payload_bytes

ELEMENTS = 300
ABOUT = {"generation": "0", "step": "3", "rank": "1"}
VECTOR = torch.linspace(-1, 1, ELEMENTS)
GOOD = {kind: encode_vector(VECTOR, kind=kind, about=ABOUT) for kind in ("fp32", "bf16", "int8", "int4")}


class Runs:
    """What unpickling it would do."""

    def __reduce__(self):
        return (pytest.fail, ("a payload was unpickled",))


def header(data: bytes) -> dict:
    return json.loads(data[8:HEADER_BYTES])


def rewritten(change, *, kind="fp32", body=None) -> bytes:
    """A good payload with another header, of the same length and with a checksum that fits."""
    described = header(GOOD[kind])
    body = GOOD[kind][HEADER_BYTES:] if body is None else body
    described["__metadata__"]["sha256"] = hashlib.sha256(body).hexdigest()
    text = change(described) or json.dumps(described, separators=(",", ":"), sort_keys=True)
    text = text.encode() if isinstance(text, str) else text
    return GOOD[kind][:8] + text[: HEADER_BYTES - 8].ljust(HEADER_BYTES - 8) + body


def with_tensor(**changes):
    return lambda described: described["values"].update(changes)


def with_metadata(**changes):
    return lambda described: described["__metadata__"].update(changes)


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("values", bytes(1 << 20))
    return buffer.getvalue()


def numbers(*, kind: str, at: int, value: bytes) -> bytes:
    body = bytearray(GOOD[kind][HEADER_BYTES:])
    body[at : at + len(value)] = value
    return rewritten(lambda described: None, kind=kind, body=bytes(body))


def flipped(at: int) -> bytes:
    data = bytearray(GOOD["fp32"])
    data[at] ^= 1
    return bytes(data)


NAN, INFINITY = struct.pack("<f", float("nan")), struct.pack("<f", float("inf"))
NESTED = '{"__metadata__":' + "[" * 2000
TWICE = '{"__metadata__":{"format":"composer-diloco-vector-1","format":"composer-diloco-vector-1"},"values":{}}'

MALICE = {
    "nothing": (b"", "truncated"),
    "fewer bytes than a header": (GOOD["fp32"][:100], "truncated"),
    "half of the numbers": (GOOD["fp32"][:-600], "truncated"),
    "one byte too few": (GOOD["int4"][:-1], "truncated"),
    "bytes behind the end": (GOOD["fp32"] + b"\0" * 64, "too_large"),
    "more than the reader takes": (GOOD["fp32"] * 50, "too_large"),
    "a header's length of 2**63": (struct.pack("<Q", 2**63) + GOOD["fp32"][8:], "header"),
    "a header's length of 0": (struct.pack("<Q", 0) + GOOD["fp32"][8:], "header"),
    "a shape of 2**60": (rewritten(with_tensor(shape=[2**60])), "header"),
    "a negative shape": (rewritten(with_tensor(shape=[-ELEMENTS])), "header"),
    "two dimensions": (rewritten(with_tensor(shape=[ELEMENTS // 2, 2])), "header"),
    "offsets behind the end": (rewritten(with_tensor(data_offsets=[0, 2**40])), "header"),
    "offsets before the start": (rewritten(with_tensor(data_offsets=[-8, ELEMENTS * 4 - 8])), "header"),
    "offsets that overlap": (rewritten(with_tensor(data_offsets=[0, ELEMENTS]), kind="int8"), "header"),
    "another type": (rewritten(with_tensor(dtype="F64")), "header"),
    "a type nobody knows": (rewritten(with_tensor(dtype="F99")), "header"),
    "a tensor more": (rewritten(lambda described: described.update(more=described["values"])), "header"),
    "no tensor": (rewritten(lambda described: described.pop("values") and None), "header"),
    "another kind": (rewritten(with_metadata(kind="bf16")), "header"),
    "a kind nobody knows": (rewritten(with_metadata(kind="fp8")), "header"),
    "another length stated": (rewritten(with_metadata(elements="301")), "elements"),
    "a length of 2**62 stated": (rewritten(with_metadata(elements=str(2**62))), "elements"),
    "a version of the future": (rewritten(with_metadata(format="composer-diloco-vector-2")), "not_a_payload"),
    "one key twice": (rewritten(lambda described: TWICE), "elements"),
    "JSON two thousand deep": (rewritten(lambda described: NESTED), "not_a_payload"),
    "a list for a header": (rewritten(lambda described: "[]"), "not_a_payload"),
    "a header that is no UTF-8": (rewritten(lambda described: b'{"\xff\xfe":1}'), "not_a_payload"),
    "metadata that is no table": (rewritten(lambda described: described.update(__metadata__=7)), "not_a_payload"),
    "another step": (rewritten(with_metadata(**{"about.step": "2"})), "about"),
    "another rank": (rewritten(with_metadata(**{"about.rank": "0"})), "about"),
    "something more about it": (rewritten(with_metadata(**{"about.extra": "x"})), "about"),
    "a flipped bit in the numbers": (flipped(HEADER_BYTES + 77), "checksum"),
    "a flipped bit in the last byte": (flipped(-1), "checksum"),
    "a flipped bit in the padding": (flipped(HEADER_BYTES - 1), "not_a_payload"),
    "NaN": (numbers(kind="fp32", at=40, value=NAN), "not_finite"),
    "infinity": (numbers(kind="fp32", at=40, value=INFINITY), "not_finite"),
    "NaN in bf16": (numbers(kind="bf16", at=40, value=b"\xc0\x7f"), "not_finite"),
    "a scale of NaN": (numbers(kind="int8", at=0, value=NAN), "not_finite"),
    "a scale that overflows": (numbers(kind="int4", at=0, value=struct.pack("<f", 3e38)), "not_finite"),
    "a pickle": (pickle.dumps(Runs()), "truncated"),
    "a long pickle": (pickle.dumps([Runs(), bytes(4000)]), "not_a_payload"),
    "torch.save": (saved({"values": VECTOR}), "not_a_payload"),
    "a zip": (zipped(), "truncated"),
    "safetensors of another program": (save({"values": VECTOR}), "truncated"),
    "a large safetensors of another program": (save({"values": torch.zeros(5000)}), "not_a_payload"),
}


@pytest.mark.parametrize("name", sorted(MALICE))
def test_malice_is_refused_by_its_name(name):
    data, reason = MALICE[name]
    with pytest.raises(PayloadError) as caught:
        decode_vector(data, elements=ELEMENTS, about=ABOUT, most_bytes=40_000)
    assert caught.value.reason == reason
    assert len(str(caught.value)) < 400


def test_every_byte_of_a_payload_counts():
    for kind, good in GOOD.items():
        for at in range(0, len(good), 37):
            data = bytearray(good)
            data[at] ^= 0x10
            with pytest.raises(PayloadError):
                decode_vector(bytes(data), elements=ELEMENTS, about=ABOUT)
        assert len(good) == payload_bytes(ELEMENTS, kind)


def test_a_lying_header_allocates_nothing():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for data, _ in MALICE.values():
        with pytest.raises(PayloadError):
            decode_vector(data, elements=ELEMENTS, about=ABOUT)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8_000  # KiB


def test_a_payload_for_another_reader_is_refused():
    for elements, about, reason in (
        (ELEMENTS + 1, ABOUT, "elements"),
        (ELEMENTS, {}, "about"),
        (ELEMENTS, ABOUT | {"step": "4"}, "about"),
    ):
        with pytest.raises(PayloadError) as caught:
            decode_vector(GOOD["int8"], elements=elements, about=about)
        assert caught.value.reason == reason
