"""Documents cut off anywhere: what stands before the cut comes back, never more than was there and nothing half."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from session_bytes import jsonl

from composer_replication.ingestion.json_documents import _salvage_document, head_values, read_lines_or_document
from composer_replication.ingestion.source_files import IngestReport, SourceFile

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab"\\{}[],:é\n'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab",', max_size=2), inner, max_size=3),
    max_leaves=10,
)


@given(st.lists(VALUES, max_size=4), st.floats(0, 1), st.sampled_from([None, 1]))
def test_a_cut_document_gives_its_whole_messages_in_order(messages, share, indent):
    data = json.dumps({"id": 1, "messages": messages}, indent=indent, ensure_ascii=False).encode()
    kept = (_salvage_document(data[: int(share * len(data))], depth=2) or {}).get("messages", [])
    assert kept == messages[: len(kept)]
    whole = (_salvage_document(data, depth=2) or {}).get("messages")
    assert whole == messages


@given(VALUES, st.floats(0, 1))
def test_a_head_cut_anywhere_never_raises(value, share):
    data = json.dumps(value).encode()
    head_values(data[: int(share * len(data))])


@given(st.binary(max_size=64))
def test_any_bytes_are_survived(data):
    head_values(data)
    _salvage_document(data)


def test_a_string_may_hold_every_sign_of_the_syntax():
    assert _salvage_document(b'{"a": "}],{\\"", "b": [1, 2, "x') == {"a": '}],{"', "b": [1, 2]}
    assert _salvage_document(b'[{"a": 1}, {"b": 2, "c"', depth=1) == [{"a": 1}]
    assert _salvage_document(b'{"a": 1, "b": 2]') == {"a": 1}


def test_head_values_are_the_lines_or_the_document():
    assert head_values(jsonl({"a": 1}, {"b": 2})[:-3]) == [{"a": 1}]
    assert head_values(b'{\n "a": 1,\n "b": [1,\n 2') == [{"a": 1, "b": [1]}]
    assert head_values(b"") == []


@pytest.mark.parametrize(
    ("data", "values", "skipped"),
    [
        (b'{"a": 1}\n{"b": 2}\n', [(1, {"a": 1}), (2, {"b": 2})], {}),
        (b'\n{"a": 1}\n', [(2, {"a": 1})], {}),
        (b'{\n"a": 1}\n', [(0, {"a": 1})], {}),
        (b'{"a": \n{"b": 2}\n', [(2, {"b": 2})], {"invalid JSON": 1}),
        (b'{\n"a": 1,\n"b": ', [(0, {"a": 1})], {"invalid JSON document": 1}),
        (b" \n", [], {"empty file": 1}),
    ],
)
def test_lines_and_documents_are_told_apart(tmp_path, data, values, skipped):
    path = tmp_path / "file.json"
    path.write_bytes(data)
    report = IngestReport()
    assert list(read_lines_or_document(SourceFile(path, "file.json"), report)) == values
    assert dict(report.skipped) == skipped


def test_a_file_that_is_not_there_is_counted(tmp_path):
    report = IngestReport()
    assert list(read_lines_or_document(SourceFile(tmp_path / "none.json", "none.json"), report)) == []
    assert dict(report.skipped) == {"unreadable file: No such file or directory": 1}
