"""What a user names as an output: a link is written through, a device or a pipe is refused and stays what it is."""

from __future__ import annotations

import os
import stat

import pytest

from composer_replication.atomic import atomic_write_json
from composer_replication.errors import InputError
from composer_replication.pairs.export import export_preferences
from composer_replication.pairs.extract import save_pairs
from refusals import refusal

PAIR = {"state_id": "s", "state_messages": [{"role": "user", "content": "go"}], "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize("write", [save_pairs, export_preferences])
def test_a_pipe_is_refused_and_stays_a_pipe(tmp_path, write):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with refusal(InputError, what=str(pipe), got="pipe"):
        write([PAIR], pipe)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]


@pytest.mark.parametrize("write", [save_pairs, export_preferences])
def test_a_link_stays_a_link_and_its_file_is_written(tmp_path, write):
    behind = tmp_path / "elsewhere" / "pairs.jsonl"
    behind.parent.mkdir()
    behind.write_text("old")
    link = tmp_path / "link.jsonl"
    link.symlink_to(behind)
    write([PAIR], link)
    assert link.is_symlink()
    assert behind.read_text().startswith("{")


def test_a_device_is_refused(tmp_path):
    with refusal(InputError, what="/dev/null", got="device"):
        atomic_write_json("/dev/null", {})


def test_a_folder_is_refused(tmp_path):
    with refusal(InputError, what=str(tmp_path), got="folder"):
        atomic_write_json(tmp_path, {})
