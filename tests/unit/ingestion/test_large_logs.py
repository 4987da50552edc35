"""Logs that are too large: what is left out is counted and named, and memory stays flat."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile

import pytest
from run_pieces import ingested, write_session

import composer_replication
from composer_replication.ingestion import json_documents, source_files
from composer_replication.ingestion import source_files as json_text
from composer_replication.ingestion.registry import _read_file
from composer_replication.ingestion.source_files import IngestReport, SourceFile, read_records

MB = 10**6
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
USER = '{"role": "user", "content": "%s"}'
CODE = """
import json, re, sys
from pathlib import Path
from composer_replication.ingestion.source_files import IngestReport, SourceFile
from composer_replication.ingestion.registry import _read_file
report = IngestReport()
path = Path(sys.argv[1])
conversations = list(_read_file(SourceFile(path, path.name), report))
peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
print(json.dumps([len(conversations), dict(report.skipped), peak / 1000]))
"""


def read_in_process(path):
    """How many conversations a file holds, what was skipped, and the peak memory of the process in MB."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{composer_replication.__path__[0]}/.."}
    done = subprocess.run([sys.executable, "-c", CODE, str(path)], env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.fixture
def session(tmp_path):
    return write_session(tmp_path / "logs", "11111111-aaaa")


def write_hole(file, size):
    """NUL characters that take no room on the disk."""
    file.seek(file.tell() + size)


@on_linux
@pytest.mark.parametrize("end", [b'"}\n', b'"}'], ids=["with a line end", "without one"])
def test_a_line_of_200_mb_is_not_held_in_memory(session, end):
    with session.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(b'{"type":"user","content":"')
        write_hole(file, 200 * MB)
        file.write(end)
    num_conversations, skipped, peak = read_in_process(session)
    assert (num_conversations, skipped) == (1, {"line too long": 1})
    assert peak < 300


@on_linux
def test_a_line_that_is_not_too_long_may_hold_too_many_values(session):
    with session.open("ab") as file:
        file.write(b'{"type":"user","content":[' + b"[]," * (20 * MB // 3) + b"[]]}\n")
    num_conversations, skipped, peak = read_in_process(session)
    assert (num_conversations, skipped) == (1, {"line too long": 1})
    assert peak < 300


@on_linux
@pytest.mark.parametrize("name", ["chat.json", "chat.jsonl"])
def test_a_document_of_200_mb_is_named_and_not_read(tmp_path, name):
    path = tmp_path / name
    with path.open("wb") as file:
        file.write(b'{\n"messages": [\n' + (USER % "hello").encode() + b',\n{"role": "assistant",\n"content": "')
        write_hole(file, 200 * MB)
        file.write(b'"}\n]\n}\n')
    num_conversations, skipped, peak = read_in_process(path)
    assert (num_conversations, skipped) == (0, {"document too large": 1})
    assert peak < 300


def test_lines_beyond_what_is_read_of_one_file_are_counted(session, monkeypatch):
    lines = session.read_bytes().splitlines(keepends=True)
    monkeypatch.setattr(source_files, "MAX_FILE_WEIGHT", sum(map(source_files._memory_weight, lines[:-2])))
    report = IngestReport()
    records = list(read_records(SourceFile(session, session.name), report))
    assert [number for number, _ in records] == list(range(1, len(lines) - 1))
    assert report.skipped == {"line beyond what is read of one file": 2}
    assert [skip.line for skip in report.skips] == [len(lines) - 1, len(lines)]


def test_the_summary_of_an_ingest_counts_them(session, tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "MAX_LINE_BYTES", 10_000)
    with session.open("ab") as file:
        file.write(b'"' + b"x" * 20_000 + b'"\n')
    _, summary = ingested(tmp_path / "run", tmp_path / "logs")
    assert [(left.reason, left.number) for left in summary.skipped] == [("line too long", 1)]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_long_lines_are_cut_in_every_encoding(tmp_path, encoding):
    text = "short é\n" + "long 漢" * 500 + "\n\nshort\n" + "x" * 3000
    path = tmp_path / "log.jsonl"
    path.write_bytes(text.encode(encoding))
    with path.open("rb") as file:
        lines = list(json_text.read_utf8_lines(file, 100))
    assert [len(line) <= 100 for line in lines] == [True, False, True, True, False]
    assert [lines[0], lines[2], lines[3]] == ["short é\n".encode(), b"\n", b"short\n"]
    assert max(map(len, lines)) <= 4 * 101


def test_a_large_file_of_lines_with_a_damaged_first_one_is_still_read_as_lines(tmp_path, monkeypatch):
    path = tmp_path / "chat.jsonl"
    talk = '{"messages": [' + USER % "hello" + ', {"role": "assistant", "content": "hi"}]}\n'
    path.write_text("[damaged\n" + talk * 50)
    for module in (source_files, json_documents):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 1000)
    report = IngestReport()
    values = list(json_documents.read_lines_or_document(SourceFile(path, path.name), report))
    assert len(values) == 50
    assert report.skipped == {"invalid JSON": 1}


def test_a_zipped_sample_with_too_many_values_is_named(tmp_path):
    path = tmp_path / "log.eval"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("samples/1_epoch_1.json", b'{"messages": [' + b"[]," * (10 * MB) + b"[]]}")
        archive.writestr("samples/2_epoch_1.json", '{"messages": [' + USER % "hello" + "]}")
    report = IngestReport()
    assert len(list(_read_file(SourceFile(path, path.name), report))) == 1
    assert report.skipped == {"zip member too large": 1}
