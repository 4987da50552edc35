"""Canonical JSON: the same value gives the same bytes, and what JSON cannot hold is named."""

from __future__ import annotations

import datetime
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.canonical_json import decode, decode_object, encode, encode_as_written
from composer_replication.errors import InputError
from refusals import refusal

text = st.text(st.characters(exclude_categories=("Cs",)))
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text
)
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=10
)


@given(json_values)
def test_what_is_encoded_decodes_to_an_equal_value_here_and_in_the_standard_library(value: object) -> None:
    data = encode(value, where="here")
    assert decode(data) == value
    assert json.loads(data) == value


@given(st.dictionaries(text, json_values, min_size=2, max_size=5))
def test_as_written_keeps_the_order_of_the_keys_and_refuses_the_same_values(value: dict[str, object]) -> None:
    turned = dict(reversed(value.items()))
    assert list(json.loads(encode_as_written(turned, where="here"))) == list(turned)
    assert decode(encode_as_written(turned, where="here")) == value
    with refusal(InputError, what="'last'", got="nan"):
        encode_as_written({**value, "last": math.nan}, where="here")


@given(st.dictionaries(text, json_values, min_size=2, max_size=5))
def test_the_order_of_the_keys_does_not_change_the_bytes(value: dict[str, object]) -> None:
    assert encode(dict(reversed(value.items())), where="here") == encode(value, where="here")


def test_keys_are_sorted_and_text_is_plain_utf_8() -> None:
    assert encode({"b": 1, "a": "é\n"}, where="here") == '{"a":"é\\n","b":1}'.encode()


def test_the_sign_of_a_negative_zero_is_kept() -> None:
    assert math.copysign(1.0, float(str(decode(encode(-0.0, where="here"))))) == -1.0


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_json_does_not_have_is_refused_with_its_key(number: float) -> None:
    with refusal(InputError, what="pairs line 7", got=str(number)) as caught:
        encode({"ok": None, "a": {"b": [1.0, number]}}, where="pairs line 7")
    assert "'a.b[1]'" in caught.value.what


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (2**64, r"'x'.*\bint\b.* 64-bit"),  # the ends of the reasons are orjson's
        ("\ud800", r"'x'.*\bstr\b.* surrogates"),
        (datetime.date(2024, 1, 1), r"'x'.*\bdate\b"),
        ({1: "one"}, "Dict key must be str"),
        ({"deep": b"bytes"}, r"'x\.deep'.*\bbytes\b"),
    ],
)
def test_what_would_come_back_as_something_else_is_refused(value: object, reason: str) -> None:
    with pytest.raises(InputError, match=f"here.*{reason}"):
        encode({"x": value}, where="here")


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(InputError, match=r"here.*Recursion limit"):  # orjson's words
        encode(loop, where="here")


def test_a_null_beside_finite_numbers_is_no_error() -> None:
    assert encode({"a": None, "b": [1.5, None], "c": "null"}, where="here") == b'{"a":null,"b":[1.5,null],"c":"null"}'


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"[1]", r"\blist\b"),
        (b"null", "NoneType"),
        (b"{", "line 1 column 2"),
        (b'{"a":NaN}', "line 1 column 6"),
    ],
)
def test_what_is_not_a_json_object_is_a_value_error(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decode_object(data)
