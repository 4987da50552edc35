"""Where the weights of a run are kept in memory, and whose folder is taken for the run's own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from composer_replication.recipes.monarch import tensor_file as shared_weights
from composer_replication.recipes.monarch.tensor_file import remove_shared_memory_note, shared_memory_folder


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(shared_weights, "_MEMORY_FOLDER", tmp_path / "memory")
    return tmp_path / "run"


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_killed_run_finds_its_folder_again(run):
    folder = shared_memory_folder(run)
    assert folder.parent == run.parent / "memory"
    assert mode(folder) == 0o700
    assert mode(run / "shared_memory.json") == 0o600
    assert shared_memory_folder(run) == folder
    remove_shared_memory_note(run)
    assert shared_memory_folder(run) != folder


def test_a_folder_that_others_may_write_or_own_is_not_taken(run, monkeypatch):
    folder = shared_memory_folder(run)
    for opened in (0o777, 0o720, 0o704):
        folder.chmod(opened)
        other = shared_memory_folder(run)
        assert other != folder
        (run / "shared_memory.json").write_text(json.dumps({"folder": str(folder)}))
    folder.chmod(0o700)
    assert shared_memory_folder(run) == folder
    monkeypatch.setattr(shared_weights.os, "getuid", lambda: os.geteuid() + 1)
    assert shared_memory_folder(run) != folder


def test_a_link_to_a_folder_or_no_folder_at_all_is_not_taken(run):
    run.mkdir()
    own, link = run.parent / "own", run.parent / "link"
    own.mkdir(mode=0o700)
    link.symlink_to(own)
    for name in (link, run.parent / "gone"):
        (run / "shared_memory.json").write_text(json.dumps({"folder": str(name)}))
        assert shared_memory_folder(run).parent == run.parent / "memory"


def test_without_a_file_system_in_memory_they_are_beside_the_run(run):
    (run.parent / "memory").rmdir()
    assert shared_memory_folder(run) == run / "weights"
    assert mode(run / "weights") == 0o700
    assert shared_memory_folder(run) == run / "weights"
