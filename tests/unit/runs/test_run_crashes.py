"""Crashes and races: a reader gets one writer's whole artefact, or an error."""

from __future__ import annotations

import multiprocessing
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from composer_replication.errors import ArtefactCorruptError
from composer_replication.runs import RunDir
from refusals import refusal

OLD: list[dict[str, object]] = [{"id": "old"}]
NEW: list[dict[str, object]] = [{"id": "new"}]  # as many bytes as OLD: only the checksum tells them apart


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


def write(run: RunDir, rows: list[dict[str, object]]) -> None:
    run.write_jsonl("pairs", rows, schema="pair", version=1)


def read(run: RunDir) -> list[dict[str, object]]:
    return list(run.read_jsonl("pairs", schema="pair"))


def run_script(script: str, *arguments: str) -> int:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run([sys.executable, "-c", script, *arguments], env=environment, check=False).returncode


def fail_at_rename(monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    replace, calls = os.replace, iter(range(1, 100))

    def fail_once(source: Path, target: Path) -> None:
        if next(calls) == which:
            raise OSError("power cut")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_once)


def test_a_failure_before_both_renames_keeps_the_old_artefact(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run, OLD)
    fail_at_rename(monkeypatch, 1)
    with pytest.raises(OSError, match="power cut"):
        write(run, NEW)
    assert read(run) == OLD


def test_a_failure_between_the_two_renames_is_found_on_reading(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run, OLD)
    fail_at_rename(monkeypatch, 2)
    with pytest.raises(OSError, match="power cut"):
        write(run, NEW)
    with refusal(ArtefactCorruptError, what="pairs.jsonl", got="sha256", fix="`crf pairs`"):
        read(run)
    write(run, NEW)
    assert read(run) == NEW


def test_a_failure_between_the_renames_of_a_first_write_is_found_too(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at_rename(monkeypatch, 2)
    with pytest.raises(OSError, match="power cut"):
        write(run, NEW)
    with refusal(ArtefactCorruptError, what="pairs.jsonl", expected="pairs.meta.json"):
        read(run)


def test_a_folder_that_cannot_be_synced_leaves_the_new_artefact_whole(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, failures = os.fsync, iter([True])

    def fail_once_for_a_folder(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) and next(failures, False):
            raise OSError("folder on fire")
        fsync(descriptor)

    write(run, OLD)
    monkeypatch.setattr(os, "fsync", fail_once_for_a_folder)
    with pytest.raises(OSError, match="folder on fire"):
        write(run, NEW)
    assert read(run) == NEW
    assert sorted(each.name for each in run.root.iterdir()) == ["pairs.jsonl", "pairs.meta.json", "run.json"]


def test_a_file_that_cannot_be_synced_keeps_the_old_artefact(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError("disk on fire")

    write(run, OLD)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk on fire"):
        write(run, NEW)
    assert read(run) == OLD


CRASH = """
import itertools, os, sys
from composer_replication.runs import RunDir

place, root = sys.argv[1:]
run = RunDir.open(root)
replace, calls = os.replace, itertools.count(1)

def rows():
    yield {"id": "new"}
    if place == "in the rows":
        os._exit(9)

def replace_or_die(source, target):
    if place == "at rename " + str(next(calls)):
        os._exit(9)
    replace(source, target)

os.replace = replace_or_die
run.write_jsonl("pairs", rows(), schema="pair", version=1)
"""


@pytest.mark.parametrize("place", ["in the rows", "at rename 1", "at rename 2"])
def test_a_process_that_dies_while_writing_leaves_the_old_artefact_or_an_error(run: RunDir, place: str) -> None:
    write(run, OLD)
    assert run_script(CRASH, place, str(run.root)) == 9
    if place == "at rename 2":
        with pytest.raises(ArtefactCorruptError):
            read(run)
    else:
        assert read(run) == OLD
    write(run, NEW)
    assert read(run) == NEW


def test_a_reader_that_has_begun_finishes_with_the_artefact_it_began_with(run: RunDir) -> None:
    rows: list[dict[str, object]] = [{"id": str(number)} for number in range(50_000)]
    write(run, rows)
    reader = run.read_jsonl("pairs", schema="pair")
    first = next(reader)
    write(run, NEW)
    assert [first, *reader] == rows
    assert read(run) == NEW


def test_of_concurrent_writers_one_wins_whole_and_every_reader_sees_a_whole_artefact(run: RunDir) -> None:
    num_tasks, num_rows = 60, 300
    write(run, [{"writer": -1, "row": row} for row in range(num_rows)])
    seen: set[object] = set()
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        writes = [
            pool.apply_async(
                run.write_jsonl,
                ("pairs", [{"writer": task, "row": row} for row in range(num_rows + task)]),
                {"schema": "pair", "version": 1},
            )
            for task in range(num_tasks)
        ]
        while not all(each.ready() for each in writes):
            rows = read(run)
            seen.add(rows[0]["writer"])
            assert {row["writer"] for row in rows} == {rows[0]["writer"]}
        metas = [each.get() for each in writes]
    last = read(run)
    assert run.meta("pairs") in metas
    assert last == [{"writer": last[0]["writer"], "row": row} for row in range(len(last))]
    assert sorted(each.name for each in run.root.iterdir()) == ["pairs.jsonl", "pairs.meta.json", "run.json"]
    assert len(seen) > 1, "the reader never ran beside a writer, so this showed nothing"
