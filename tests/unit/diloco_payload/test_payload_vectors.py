"""A vector comes back as it was sent, or as its kind rounds it; and rounding what was rounded changes nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from composer_replication.diloco.payload import (
    BLOCK_ELEMENTS,
    ErrorFeedback,
    decode_vector,
    encode_vector,
    payload_bytes,
)
from composer_replication.errors import InputError, NonFiniteError, ShapeError
from refusals import refusal

ABOUT = {"generation": "0", "step": "3", "shard": "1"}
KINDS = ("fp32", "bf16", "int8", "int4")


def there_and_back(vector, kind):
    data = encode_vector(vector, kind=kind, about=ABOUT)
    assert len(data) == payload_bytes(vector.numel(), kind)
    return decode_vector(data, elements=vector.numel(), about=ABOUT, most_bytes=len(data))


vectors = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=300).map(
    lambda numbers: torch.tensor(numbers, dtype=torch.float32)
)


@given(vectors)
def test_fp32_comes_back_to_the_bit(vector):
    assert torch.equal(there_and_back(vector, "fp32").view(torch.int32), vector.view(torch.int32))


@given(vectors, st.sampled_from(KINDS))
def test_rounding_what_was_rounded_changes_nothing(vector, kind):
    once = there_and_back(vector, kind)
    assert torch.equal(there_and_back(once, kind), once)


@pytest.mark.parametrize(("kind", "largest"), [("int8", 127), ("int4", 7)])
def test_a_number_is_off_by_half_a_step_of_its_block_at_most(kind, largest):
    vector = torch.randn(1000) * torch.logspace(-6, 6, 1000)
    blocks = torch.nn.functional.pad(vector, (0, -1000 % BLOCK_ELEMENTS)).view(-1, BLOCK_ELEMENTS)
    step = (blocks.abs().amax(dim=1, keepdim=True) / largest).expand_as(blocks).reshape(-1)[:1000]
    assert ((there_and_back(vector, kind) - vector).abs() <= 0.5001 * step).all()


def test_bf16_is_torch_s_rounding_and_stays_finite():
    vector = torch.randn(77)
    assert torch.equal(there_and_back(vector, "bf16"), vector.to(torch.bfloat16).float())
    assert there_and_back(torch.tensor([3.4e38]), "bf16").isfinite().all()


@pytest.mark.parametrize(("kind", "bits"), [("fp32", 32), ("bf16", 16), ("int8", 8.25), ("int4", 4.25)])
def test_the_size_of_a_payload(kind, bits):
    elements = 1 << 20
    assert payload_bytes(elements, kind) - 2048 == elements * bits / 8


@pytest.mark.parametrize("kind", KINDS)
def test_any_reader_of_safetensors_reads_it(kind):
    tensors = load(encode_vector(torch.arange(300.0), kind=kind, about=ABOUT))
    assert set(tensors) == ({"values"} if kind in ("fp32", "bf16") else {"values", "scales"})


@pytest.mark.parametrize(("kind", "cut"), [("int8", 128), ("int4", 256)])
def test_shards_cut_at_blocks_are_the_whole(kind, cut):
    vector = torch.randn(1000)
    pieces = torch.cat([there_and_back(piece, kind) for piece in vector.split(cut)])
    assert torch.equal(pieces, there_and_back(vector, kind))


def test_equal_vectors_have_equal_bytes():
    about = dict(reversed(ABOUT.items()))
    vector = torch.randn(10)
    assert encode_vector(vector, kind="int8", about=about) == encode_vector(vector.clone(), kind="int8", about=ABOUT)


def test_what_is_no_vector_is_refused():
    for wrong in (torch.zeros(2, 2), torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.bfloat16)):
        with pytest.raises(ShapeError):
            encode_vector(wrong, kind="fp32", about={})
    for number in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(NonFiniteError):
            encode_vector(torch.tensor([0.0, number]), kind="int8", about={})
    with pytest.raises(InputError, match="'fp64'"):
        encode_vector(torch.zeros(1), kind="fp64", about={})
    with refusal(InputError, what="about", got=" bytes", expected="2,040 bytes"):
        encode_vector(torch.zeros(1), kind="fp32", about={"long": "x" * 3000})


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
def test_error_feedback_loses_nothing_over_many_rounds(kind):
    feedback, total = ErrorFeedback(), torch.zeros(256)
    vector = torch.randn(256) * 1e-3
    vector[0] = 1.0  # beside it the others are below half a step of four bits
    for _ in range(50):
        sent, residual = feedback.compress(vector, kind)
        assert torch.equal(there_and_back(sent, kind), sent)
        feedback.keep(residual)
        total += sent
    assert torch.allclose(total + residual, 50 * vector, atol=1e-4)
    assert (total[1:] / 50 - vector[1:]).abs().max() < 2 * residual.abs().max() / 50 + 1e-5


def test_an_aborted_round_keeps_the_residual_of_the_one_before():
    feedback = ErrorFeedback()
    feedback.keep(feedback.compress(torch.randn(9), "int4")[1])
    kept = feedback.residual.clone()
    feedback.compress(torch.randn(9), "int4")
    assert torch.equal(feedback.residual, kept)
    again = ErrorFeedback()
    again.load_state_dict(feedback.state_dict())
    assert torch.equal(again.residual, kept)
    with pytest.raises(ShapeError, match="residual"):
        feedback.compress(torch.randn(10), "int4")
