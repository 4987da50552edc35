"""Files as Windows leaves them: byte order marks and UTF-16 change nothing, in any format."""

from __future__ import annotations

import codecs
import os
from pathlib import Path

import pytest
from format_sessions import SESSIONS
from session_bytes import ingest

from composer_replication.ingestion import registry
from composer_replication.ingestion import source_files as json_text
from composer_replication.ingestion.formats import openai_messages
from composer_replication.ingestion.source_files import IngestReport, SourceFile, read_records

TEXT_SESSIONS = {name: session for name, session in SESSIONS.items() if name != "inspect_eval"}
ENCODINGS = {
    "UTF-8 with a mark": lambda text: codecs.BOM_UTF8 + text.encode(),
    "UTF-16 little end first": lambda text: codecs.BOM_UTF16_LE + text.encode("utf-16-le"),
    "UTF-16 big end first": lambda text: codecs.BOM_UTF16_BE + text.encode("utf-16-be"),
    "UTF-16 with Windows line ends": lambda text: text.replace("\n", "\r\n").encode("utf-16"),
}


@pytest.mark.parametrize("session", TEXT_SESSIONS.values(), ids=TEXT_SESSIONS)
@pytest.mark.parametrize("encoded", ENCODINGS.values(), ids=ENCODINGS)
def test_every_format_is_known_and_read_in_every_encoding(tmp_path, session, encoded):
    plain, _ = ingest(session.module, tmp_path, session.file(), session.name)
    again, report = ingest(session.module, tmp_path, encoded(session.file().decode()), session.name)
    assert again == plain
    assert not report.skipped
    assert registry.detect(tmp_path / session.name) is session.module


@pytest.mark.parametrize("encoded", ENCODINGS.values(), ids=ENCODINGS)
def test_lines_keep_their_numbers(tmp_path, encoded):
    path = tmp_path / "f.jsonl"
    path.write_bytes(encoded('{"a": "é \U0001f600 \u2028"}\n\nbroken\n{"b": 2}\n{"c": '))
    report = IngestReport()
    found = list(read_records(SourceFile(path, "f.jsonl"), report))
    assert found == [(1, {"a": "é \U0001f600 \u2028"}), (4, {"b": 2})]
    assert [(skip.reason, skip.line) for skip in report.skips] == [("invalid JSON", 3), ("truncated last line", 5)]


def test_files_joined_with_their_marks_lose_no_line(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\xef\xbb\xbf{"b": 2}\n')
    report = IngestReport()
    assert list(read_records(SourceFile(path, "f.jsonl"), report)) == [(1, {"a": 1}), (2, {"b": 2})]
    assert not report.skipped


@pytest.mark.parametrize("mark", [codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE])
def test_two_broken_bytes_at_the_start_are_no_utf16(tmp_path, mark):
    path = tmp_path / "f.jsonl"
    path.write_bytes(mark + b'{"a": 1}\n{"b": 2}\n')
    report = IngestReport()
    assert list(read_records(SourceFile(path, "f.jsonl"), report)) == [(2, {"b": 2})]
    assert [(skip.reason, skip.line) for skip in report.skips] == [("invalid UTF-8", 1)]


def test_a_head_of_utf16_may_end_inside_a_character():
    text = codecs.BOM_UTF16_LE + '{"role": "user", "content": "q"}\n'.encode("utf-16-le")
    for end in range(len(text)):
        json_text.as_utf8(text[:end])
        openai_messages.sniff(text[:end], Path("x.jsonl"))


def test_a_file_name_that_is_no_text_can_be_written(tmp_path):
    session = SESSIONS["openai_lines"]
    path = tmp_path / os.fsdecode(b"caf\xe9.jsonl")
    path.write_bytes(session.file())
    [conversation] = session.module.read(SourceFile(path, path.name), IngestReport())
    assert conversation.id == "caf?"
    assert conversation.turns[0].provenance.file == "caf?.jsonl"
