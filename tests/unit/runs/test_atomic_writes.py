"""Atomic writes: the old file or the new one, and nothing else in the folder."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from composer_replication.atomic import atomic_create_json, atomic_write_bytes, atomic_write_json, atomic_write_text
from composer_replication.errors import InputError


def test_a_new_file_holds_the_bytes_and_stands_alone(tmp_path: Path) -> None:
    atomic_write_bytes(tmp_path / "a.bin", b"\x00\r\n\xff")
    assert (tmp_path / "a.bin").read_bytes() == b"\x00\r\n\xff"
    assert list(tmp_path.iterdir()) == [tmp_path / "a.bin"]


def test_a_shorter_text_leaves_nothing_of_the_longer_one_before(tmp_path: Path) -> None:
    atomic_write_text(tmp_path / "a.txt", "a long text\n")
    atomic_write_text(tmp_path / "a.txt", "ü\r\n")
    assert (tmp_path / "a.txt").read_bytes() == "ü\r\n".encode()


def test_json_is_indented_keeps_the_order_of_keys_and_ends_with_a_newline(tmp_path: Path) -> None:
    atomic_write_json(tmp_path / "a.json", {"b": [1], "a": 0.5})
    assert (tmp_path / "a.json").read_text() == '{\n  "b": [\n    1\n  ],\n  "a": 0.5\n}\n'


def test_json_with_a_nan_is_refused_and_leaves_the_old_file(tmp_path: Path) -> None:
    atomic_write_json(tmp_path / "a.json", {"loss": 1.0})
    with pytest.raises(InputError, match="'loss'"):
        atomic_write_json(tmp_path / "a.json", {"loss": float("nan")})
    assert (tmp_path / "a.json").read_text() == '{\n  "loss": 1.0\n}\n'


@pytest.mark.parametrize("broken", ["replace", "fsync"])
def test_a_write_that_fails_leaves_the_old_file_and_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk on fire")

    atomic_write_bytes(tmp_path / "a", b"old")
    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(OSError, match="disk on fire"):
        atomic_write_bytes(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_the_bytes_are_on_the_disk_before_the_rename_and_the_rename_is_synced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor: int) -> None:
        events.append("sync folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync file")
        fsync(descriptor)

    def record_replace(source: Path, target: Path) -> None:
        assert source.read_bytes() == b"new"
        events.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    atomic_write_bytes(tmp_path / "a", b"new")
    assert events == ["sync file", "rename", "sync folder"]


def test_the_new_file_gets_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        atomic_write_bytes(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_a_link_is_replaced_and_what_it_pointed_at_is_untouched(tmp_path: Path) -> None:
    (tmp_path / "original").write_bytes(b"original")
    (tmp_path / "link").symlink_to(tmp_path / "original")
    atomic_write_bytes(tmp_path / "link", b"new")
    assert (tmp_path / "original").read_bytes() == b"original"
    assert not (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_is_created_once_and_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not has_links:
        monkeypatch.setattr(os, "link", fail)
    atomic_create_json(tmp_path / "a.json", {"a": 1})
    with pytest.raises(FileExistsError):
        atomic_create_json(tmp_path / "a.json", {"a": 2})
    assert (tmp_path / "a.json").read_text() == '{\n  "a": 1\n}\n'
    assert list(tmp_path.iterdir()) == [tmp_path / "a.json"]


def test_a_creation_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(PermissionError):
        atomic_create_json(tmp_path / "a.json", {"a": 1})
    assert list(tmp_path.iterdir()) == []
