"""Journals: whole checksummed lines, of which a crash may tear the last."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from composer_replication.errors import ArtefactCorruptError, ArtefactNotFoundError, InputError, RunError
from composer_replication.runs import RunDir, TornLine
from refusals import refusal

ROWS: list[dict[str, object]] = [{"step": 1, "loss": 2.5}, {"step": 2, "loss": None, "note": "ü"}, {"step": 3}]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


def append(run: RunDir, *rows: dict[str, object]) -> bytes:
    with run.append_jsonl("metrics") as journal:
        for row in rows:
            journal.append(row)
    return run.path("metrics").read_bytes()


def test_rows_come_back_in_order_over_several_openings(run: RunDir) -> None:
    append(run, *ROWS[:2])
    append(run, ROWS[2])
    contents = run.read_journal("metrics")
    assert contents.rows == ROWS
    assert contents.torn is None


def test_a_line_is_plain_json_that_begins_with_the_checksum_of_the_rest(run: RunDir) -> None:
    line = append(run, {"step": 1, "loss": 2.5})
    checksum = format(zlib.crc32(b'{"loss":2.5,"step":1}'), "08x")
    assert line == f'{{"crc32":"{checksum}","loss":2.5,"step":1}}\n'.encode()
    assert json.loads(line) == {"crc32": checksum, "step": 1, "loss": 2.5}


def test_every_torn_last_line_is_tolerated_reported_and_cut_before_the_next_row(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    whole, path = append(run, *ROWS), run.path("metrics")
    start = whole.rindex(b"\n", 0, -1) + 1
    for end in range(start + 1, len(whole)):
        path.write_bytes(whole[:end])
        contents = run.read_journal("metrics")
        assert contents.rows == ROWS[:2]
        assert contents.torn == TornLine(number=3, num_bytes=end - start)
        with caplog.at_level(logging.WARNING):
            assert append(run, ROWS[2]) == whole
        [record] = caplog.records
        assert re.search(
            rf"\b{end - start} bytes\b.*metrics\.jsonl|metrics\.jsonl\b.*\b{end - start} bytes\b", record.message
        )
        caplog.clear()


def test_a_torn_only_line_is_cut_wherever_it_was_torn(run: RunDir) -> None:
    whole, path = append(run, ROWS[0]), run.path("metrics")
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        assert append(run, ROWS[0]) == whole


@pytest.mark.parametrize(
    "text",
    [
        b"a thesis without a line end",
        b"\n",
        b'{"crc32":"\n{"crc',
        b'{"crc32":"0123456789","loss":1}',
        b'{"step":1}\n{"step":2',
        b'{"crc32":"00000000","step":1}\n{"step":2',
        b"a thesis\nwith line ends\n",
    ],
)
def test_a_file_that_is_no_journal_is_refused_and_left_as_it_is(run: RunDir, text: bytes) -> None:
    run.path("metrics").write_bytes(text)
    with refusal(RunError, what="metrics.jsonl", expected="crc32"):
        append(run, ROWS[0])
    assert run.path("metrics").read_bytes() == text


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="this platform cannot refuse links on opening")
@pytest.mark.parametrize("text", [b"a thesis without a line end", None])
def test_a_link_is_not_followed_and_what_it_points_at_is_untouched(
    run: RunDir, tmp_path: Path, text: bytes | None
) -> None:
    target = tmp_path / "thesis.tex"
    if text is not None:
        target.write_bytes(text)
    run.path("metrics").symlink_to(target)
    with refusal(RunError, what="metrics.jsonl", got="link"):
        run.append_jsonl("metrics")
    assert (target.read_bytes() if target.exists() else None) == text


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this platform has no pipes in the file system")
def test_a_pipe_is_no_journal_and_no_descriptor_stays_open(run: RunDir) -> None:
    os.mkfifo(run.path("metrics"))
    before = os.dup(0)
    os.close(before)
    with refusal(RunError, what="metrics.jsonl", expected="crc32"):
        run.append_jsonl("metrics")
    after = os.dup(0)
    os.close(after)
    assert after == before


def test_every_edited_byte_is_an_error_with_its_line(run: RunDir) -> None:
    whole, path = append(run, *ROWS), run.path("metrics")
    for place in range(len(whole) - 1):  # without its newline the last line is torn, which is no error
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with refusal(ArtefactCorruptError, what="metrics.jsonl") as caught:
            run.read_journal("metrics")
        assert re.search(rf"\bline {whole[:place].count(10) + 1}\b", caught.value.what)


def test_a_torn_line_with_another_behind_it_is_an_error(run: RunDir) -> None:
    whole = append(run, *ROWS)
    run.path("metrics").write_bytes(whole[:10] + b"\n" + whole)
    with pytest.raises(ArtefactCorruptError, match="line 1"):
        run.read_journal("metrics")


def test_an_empty_journal_has_no_rows(run: RunDir) -> None:
    assert append(run) == b""
    assert run.read_journal("metrics").rows == []


def test_a_journal_that_was_never_written_names_its_command(run: RunDir) -> None:
    with pytest.raises(ArtefactNotFoundError, match="`crf train`"):
        run.read_journal("metrics")


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({}, {"got": "[]", "expected": "key"}),
        ({"crc32": 1}, {"got": "['crc32']", "expected": "'crc32'"}),
        ({"loss": float("inf")}, {"what": "'loss'", "got": "inf"}),
    ],
)
def test_a_row_that_cannot_be_a_line_is_refused_and_nothing_is_written(
    run: RunDir, row: dict[str, object], parts: dict[str, str]
) -> None:
    whole = append(run, *ROWS)
    with refusal(InputError, **parts):
        append(run, row)
    assert run.path("metrics").read_bytes() == whole


def test_a_line_for_which_the_disk_has_no_room_is_taken_back(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, write = append(run, *ROWS), os.write

    def write_half(descriptor: int, data: bytes) -> int:
        return write(descriptor, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", write_half)
    with refusal(RunError, what="metrics.jsonl", got=" bytes", expected=" bytes") as caught:
        append(run, {"step": 4})
    written, length = (int(number) for number in re.findall(r"\d+", f"{caught.value.got} {caught.value.expected}"))
    assert written == length // 2
    assert run.path("metrics").read_bytes() == whole


def test_each_row_is_one_write_and_is_there_before_the_journal_is_closed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    write = os.write

    def record(descriptor: int, data: bytes) -> int:
        sizes.append(len(data))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", record)
    with run.append_jsonl("metrics") as journal:
        journal.append({"step": 1})
        assert run.read_journal("metrics").rows == [{"step": 1}]
    assert sizes == [run.path("metrics").stat().st_size]


APPEND = """
import sys
from composer_replication.runs import RunDir

root, writer = sys.argv[1:]
with RunDir.open(root).append_jsonl("metrics") as journal:
    for step in range(200):
        journal.append({"writer": int(writer), "step": step, "pad": "x" * (step * 7 % 500)})
"""


def test_rows_of_concurrent_writers_are_all_there_and_in_each_writers_order(run: RunDir) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", APPEND, str(run.root)]
    writers = [subprocess.Popen([*command, str(writer)], env=environment) for writer in range(3)]
    assert [each.wait() for each in writers] == [0, 0, 0]
    rows = run.read_journal("metrics").rows
    for writer in range(3):
        assert [row["step"] for row in rows if row["writer"] == writer] == list(range(200))
    assert len(rows) == 600
