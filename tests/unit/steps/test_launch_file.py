"""The file of a launch: its owner's alone, whole at every moment, and of one bucket."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from paid_service import launch_file

from composer_replication.cli.replicas.launch_status import make_executor
from composer_replication.cli.replicas.launches import (
    LaunchFile,
    _launch_folder,
    canonical_bucket,
    find_launch_file,
    launch_path,
    local_launch_numbers,
)
from composer_replication.diloco.serverless.executor import ReplicaHandle
from composer_replication.errors import ArtefactNotFoundError, InputError, RunError
from refusals import refusal


def test_only_its_owner_reads_and_writes_it(tmp_path):
    before = os.umask(0)
    try:
        file = launch_file(tmp_path / "state")
        file.begin(0, 0)
    finally:
        os.umask(before)
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert file.path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_one_that_others_may_write_is_refused(tmp_path, mode):
    file = launch_file(tmp_path)
    file.path.chmod(mode)
    with refusal(InputError, what=str(file.path), fix="`chmod 600`"):
        file.read()


def test_one_of_another_user_is_refused(tmp_path, monkeypatch):
    file = launch_file(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: file.path.stat().st_uid + 1)
    with refusal(InputError, what=str(file.path), got=str(file.path.stat().st_uid), fix="`chmod 600`"):
        file.read()


@pytest.mark.parametrize(
    ("content", "got"),
    [
        ("", "line 1 column 1"),
        ("[]", "list"),
        ('{"format": 2}', "format 2"),
        ('{"format": 1, "launch": {}, "starts": [], "cancelled": null}', "Launch"),
    ],
)
def test_what_is_no_launch_is_refused_by_name(tmp_path, content, got):
    file = launch_file(tmp_path)
    file.path.write_text(content)
    with refusal(RunError, what=str(file.path), got=got, expected="launch"):
        file.read()
    with refusal(ArtefactNotFoundError, what=str(tmp_path / "nothing"), expected="launch"):
        LaunchFile(tmp_path / "nothing").read()


def test_a_file_names_an_executor_that_there_is_and_no_place_for_tokens(tmp_path):
    file = launch_file(tmp_path)
    content = json.loads(file.path.read_text())
    content["launch"]["executor"] = "os.system"
    file.path.write_text(json.dumps(content))
    with refusal(RunError, what=str(file.path), got="executor 'os.system'"):
        file.read()
    for option in ("endpoint", "token"):
        with refusal(InputError, what=f"option {option}", expected=f"HF_{option.upper()}") as caught:
            make_executor("hf_jobs", {option: "https://evil.example"})
        assert "evil" not in str(caught.value)


def test_notes_of_many_at_once_are_all_kept(tmp_path):
    file = launch_file(tmp_path, replicas=8)

    def begin(rank: int) -> None:
        LaunchFile(file.path).begin(rank, 0)
        LaunchFile(file.path).note(ReplicaHandle(rank, "paid", {"job": str(rank), "attempt": 0}))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(begin, range(8)))
    latest_starts = file.read().latest_starts
    assert [*latest_starts] == list(range(8))
    assert [each.handle and each.handle.metadata["job"] for each in latest_starts.values()] == [
        str(each) for each in range(8)
    ]


def test_a_bucket_has_one_name_however_it_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        canonical_bucket("a b")
        == canonical_bucket(str(tmp_path / "a b"))
        == canonical_bucket((tmp_path / "a b").as_uri())
    )
    assert canonical_bucket("s3://bucket/first/") == canonical_bucket("s3://bucket/first") == "s3://bucket/first"
    assert canonical_bucket("s3://bucket/first") != canonical_bucket("gs://bucket/first")


def test_files_are_below_the_user_s_state_folder_a_folder_a_bucket(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert _launch_folder("s3://bucket/first").parent == tmp_path / "composer-replication" / "launches"
    assert _launch_folder("s3://bucket/first") != _launch_folder("s3://bucket-first")
    monkeypatch.setenv("XDG_STATE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert _launch_folder("s3://b").is_relative_to(tmp_path / "home" / ".local" / "state")


def test_the_last_launch_of_this_machine_is_meant_or_the_one_that_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    place = canonical_bucket("s3://b/x")
    assert find_launch_file("s3://b/x", None, None) is None
    for number in (0, 3):
        path = launch_path(place, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (launch_path(place, 0).parent / "notes.json").touch()
    assert local_launch_numbers(place) == [0, 3]
    assert find_launch_file("s3://b/x/", None, None) == LaunchFile(launch_path(place, 3))
    assert find_launch_file("s3://b/x", 0, None) == LaunchFile(launch_path(place, 0))
    assert find_launch_file("s3://b/x", 1, None) is None
    given = launch_file(tmp_path / "elsewhere")
    with refusal(InputError, what=str(given.path), got="elsewhere/bucket", expected="s3://b/x"):
        find_launch_file("s3://b/x", None, given.path)
    with refusal(InputError, what=str(given.path), got="launch 0", expected="launch 4"):
        find_launch_file(str(tmp_path / "elsewhere" / "bucket"), 4, given.path)
    assert find_launch_file(str(Path(tmp_path / "elsewhere" / "bucket")), None, given.path) == given
