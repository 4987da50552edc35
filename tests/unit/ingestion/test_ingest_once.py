"""Ingest does things once: a line of a log is parsed once, a row is written as text once, and no row is parsed back.

Counted in the parser and the writer themselves. What tells formats apart looks at the head of a file before it is read;
only that part of a file is looked at again.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import orjson
import pytest
from run_pieces import bytes_of, ingested, stored, write_chat, write_session, write_subagent

import composer_replication
from composer_replication.cli.forget import forget
from composer_replication.ingestion.scrubbing import _code_files

HEAD_LINES = 16
PACKAGE = Path(composer_replication.__file__).parent


@pytest.fixture
def logs(tmp_path):
    folder = tmp_path / "logs"
    for number in range(3):
        write_session(folder, f"session-{number}", command=f"echo {number}")
    write_subagent(folder, "parent")
    return folder


@pytest.fixture
def counts(monkeypatch):
    """Rows that were encoded and decoded, and every text that was parsed."""
    found: Counter = Counter()

    def loads(text, real=orjson.loads):
        value = real(text)
        if isinstance(value, dict):
            found["rows decoded"] += "turns" in value
            found[bytes(text).strip() if isinstance(text, bytes) else text.encode()] += 1
        return value

    def dumps(value, *rest, real=orjson.dumps, **options):
        found["rows encoded"] += isinstance(value, dict) and "turns" in value
        return real(value, *rest, **options)

    monkeypatch.setattr(orjson, "loads", loads)
    monkeypatch.setattr(orjson, "dumps", dumps)
    return found


def rows_of(counts):
    return counts["rows encoded"], counts["rows decoded"]


def test_a_row_is_encoded_once_and_not_decoded(tmp_path, logs, counts):
    run, _ = ingested(tmp_path / "run", logs)
    assert rows_of(counts) == (5, 0)
    assert len(stored(run)) == 5


def test_a_row_that_is_taken_over_is_decoded_once_and_not_encoded(tmp_path, logs, counts):
    run, _ = ingested(tmp_path / "run", logs)
    before = bytes_of(run)
    counts.clear()
    ingested(tmp_path / "run", logs)
    assert rows_of(counts) == (0, 5)
    assert bytes_of(run) == before


def test_one_changed_file_costs_its_family(tmp_path, logs, counts):
    ingested(tmp_path / "run", logs)
    with (logs / "session-1.jsonl").open("ab") as file:
        file.write(b"\n")
    counts.clear()
    _, summary = ingested(tmp_path / "run", logs)
    assert rows_of(counts) == (1, 4)
    assert (summary.num_read, summary.num_reused) == (1, 4)
    lines = (logs / "session-0.jsonl").read_bytes().splitlines()
    assert not any(counts[line] for line in lines)


@pytest.mark.parametrize("name", ["session-0.jsonl", "chats.jsonl"])
def test_every_line_of_a_log_is_parsed_once(tmp_path, logs, counts, name):
    chats = [{"messages": [{"role": "user", "content": f"question {n}"}]} for n in range(40)]
    (logs / "chats.jsonl").write_text("".join(json.dumps(each) + "\n" for each in chats))
    ingested(tmp_path / "run", logs)
    lines = [line.strip() for line in (logs / name).read_bytes().splitlines()]
    assert {counts[line] for line in lines[HEAD_LINES:] or lines} == {1}


def test_a_document_on_one_line_is_parsed_once(tmp_path, counts):
    path = write_chat(tmp_path / "logs" / "chat.json", said="x" * 100_000)  # longer than the head
    ingested(tmp_path / "run", tmp_path / "logs")
    assert counts[path.read_bytes().strip()] == 1


def test_copies_are_not_read_again_while_nothing_changes(tmp_path, logs, counts):
    (logs / "z").mkdir()
    shutil.copy2(logs / "session-0.jsonl", logs / "z" / "session-0.jsonl")
    run, first = ingested(tmp_path / "run", logs)
    before = bytes_of(run)
    _, second = ingested(tmp_path / "run", logs)
    assert (first.num_read, second.num_read, second.num_reused) == (6, 0, 6)
    assert bytes_of(run) == before
    assert second.skipped == first.skipped


def test_a_copy_is_looked_at_when_what_it_is_a_copy_of_goes(tmp_path, logs):
    (logs / "z").mkdir()
    shutil.copy2(logs / "session-0.jsonl", logs / "z" / "session-0.jsonl")
    run, _ = ingested(tmp_path / "run", logs)
    ingested(tmp_path / "run", logs)
    ingested(tmp_path / "run", logs, exclude=["session-0.jsonl"])
    assert "session-0" not in stored(run)
    ingested(tmp_path / "run", logs / "z")
    assert "session-0" in stored(run)


def test_nothing_forgotten_is_kept_to_be_taken_over(tmp_path, logs):
    """The rows of the last ingest are all there is to take over, so what they lose nothing brings back."""
    write_session(logs, "secret-session", said="the unspeakable")
    run, _ = ingested(tmp_path / "run", logs)
    forget(run, ["secret-session"])
    for options in ({}, {"reread": True}):
        for path in (path for path in run.root.rglob("*") if path.is_file()):
            assert b"unspeakable" not in path.read_bytes(), path
        ingested(tmp_path / "run", logs, **options)
    assert "secret-session" not in stored(run)


def test_rows_are_made_anew_when_any_code_changes_that_reads_or_scrubs():
    """What is loaded to read a family is in the fingerprint of its rows, but for what has no say in what they hold."""
    program = (
        "import sys\nfrom composer_replication.ingestion import registry\n"
        "from composer_replication.ingestion import read_sessions\n"
        "list(map(registry._format_module, registry.FORMATS))\n"
        "print(*(module.__file__ for name, module in sys.modules.items() if name.startswith('composer_replication')))\n"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    names = {Path(file).relative_to(PACKAGE).as_posix() for file in loaded}
    hashed = {file.relative_to(PACKAGE).as_posix() for file in _code_files()}
    no_say = {"__init__.py", "atomic.py", "errors.py", "optional.py", "version.py"}
    assert {name for name in names - hashed - no_say if not name.startswith("runs/")} == set()
    assert {"runs/files.py", "messages.py", "privacy/scrubber.py", "ingestion/formats/codex.py"} <= hashed
