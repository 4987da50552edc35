"""Whatever Python or JavaScript writes as JSON is read, can be written again, and is changed only where it must be."""

from __future__ import annotations

import json
import math

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.ingestion import source_files as json_text

ANY_TEXT = st.text(st.characters(categories=["L", "N", "P", "S", "Z", "Cs", "Cc"]), max_size=6)
ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | ANY_TEXT
    | st.sampled_from(["NaN", "\\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=8,
)


def is_strict(data):
    try:
        orjson.loads(data)
    except orjson.JSONDecodeError:
        return False
    return True


@given(ANY_JSON)
def test_every_value_python_writes_is_read_and_can_be_written(value):
    data = json.dumps(value).encode()
    read = json_text.parse_repaired(data)
    orjson.dumps(read)
    if is_strict(data):
        assert json_text.repair_json(data) == data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (rb'{"a": NaN, "b": -Infinity, "c": Infinity, "d": "NaN"}', {"a": None, "b": None, "c": None, "d": "NaN"}),
        (rb'"\ud83d\ude00 \ud83d \ude00 \ud83d\ud83d\ude00"', "\U0001f600 \ufffd \ufffd \ufffd\U0001f600"),
        (rb'"\\ud83d \\\ud83d \"\uDC00\""', '\\ud83d \\\ufffd "\ufffd"'),
        (b"[1e999, -1e999, 1e-999, 12345678901234567890123]", [None, None, 0.0, 1.2345678901234568e22]),
        (b'\xef\xbb\xbf{"a": 1}', {"a": 1}),
    ],
)
def test_only_what_json_cannot_hold_is_changed(text, value):
    assert json_text.parse_repaired(text) == value


@pytest.mark.parametrize("text", [b"", b"{", b'"\xff"', b"[1-2]", b"[NaNa]", b'{"a": "\\ud8"}', b"nan", b"+Infinity"])
def test_damage_stays_damage(text):
    with pytest.raises(ValueError, match=r"."):
        json_text.parse_repaired(text)


def test_no_infinity_comes_from_digits():
    assert json_text.parse_repaired(b"9" * 400) is None
    assert math.isfinite(json_text.parse_repaired(b"9" * 300))
