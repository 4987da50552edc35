"""A checkpoint is complete when its manifest is there and every file is as it says; else it is passed over, by name."""

from __future__ import annotations

import shutil

import pytest
from checkpoint_folders import ABOUT, NEEDED, checkpoint, names

from composer_replication.errors import ArtefactCorruptError, ArtefactNotFoundError
from composer_replication.trainer.checkpoints import check_manifest, newest_complete
from composer_replication.trainer.checkpoints.manifest import clear_path, delete_old_checkpoints, delete_replaced
from refusals import refusal


def test_a_manifest_lists_every_file_with_its_size_and_keeps_what_it_is_told(tmp_path):
    folder = checkpoint(tmp_path, 3)
    (folder / ".a.json.1.abcd.tmp").write_text("left by a crash")
    fields = check_manifest(folder)
    assert fields["step"] == 3
    assert fields["about"] == ABOUT
    sizes = {name: each["num_bytes"] for name, each in fields["files"].items()}
    assert sizes == {name: len(f"{name} of 3") for name in NEEDED} | {"a.json": 11, "adapter/b.safetensors": 64}


def flip(path):
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "error", "facts"),
    [
        (lambda folder: (folder / "a.json").unlink(), ArtefactNotFoundError, {"expected": "a.json"}),
        (lambda folder: flip(folder / "adapter" / "b.safetensors"), ArtefactCorruptError, {"what": "b.safetensors"}),
        (
            lambda folder: (folder / "a.json").write_text("{}"),
            ArtefactCorruptError,
            {"what": "a.json", "got": "2 bytes", "expected": "12 bytes"},
        ),
        (lambda folder: (folder / "manifest.json").unlink(), ArtefactNotFoundError, {"expected": "manifest.json"}),
        (lambda folder: (folder / "manifest.json").write_text("{"), ArtefactCorruptError, {"what": "manifest.json"}),
        (lambda folder: (folder / "manifest.json").write_text("{}"), ArtefactCorruptError, {"got": "schema None"}),
        (lambda folder: (folder / "optimizer.pt").write_bytes(b"x"), ArtefactCorruptError, {"got": "optimizer.pt"}),
    ],
)
def test_the_first_file_that_is_not_as_it_was_is_named_and_the_checkpoint_passed_over(
    tmp_path, caplog, damage, error, facts
):
    earlier, folder = checkpoint(tmp_path, 9), checkpoint(tmp_path, 10)
    damage(folder)
    with refusal(error, **facts):
        check_manifest(folder)
    assert newest_complete(tmp_path) == earlier
    [warning] = caplog.records
    assert "checkpoint-10" in warning.getMessage()


def test_the_newest_is_the_one_of_most_steps(tmp_path, caplog):
    for step in (9, 100, 20):
        checkpoint(tmp_path, step)
    for name in ("checkpoint-best", "checkpoint-0300", "checkpoint-٣٠٠"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-200").write_text("a file")
    assert newest_complete(tmp_path).name == "checkpoint-100"
    assert caplog.text == ""


def test_no_checkpoint_and_no_folder_are_none(tmp_path):
    assert newest_complete(tmp_path) is None
    assert newest_complete(tmp_path / "nothing") is None


def test_rotation_counts_complete_checkpoints_and_keeps_the_newest_of_them(tmp_path):
    for step in (2, 4, 6):
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 3, complete=False)
    checkpoint(tmp_path, 8, complete=False)
    delete_old_checkpoints(tmp_path, 1)
    assert names(tmp_path) == ["checkpoint-6", "checkpoint-8"]


def test_rotation_keeps_what_it_is_told_to(tmp_path):
    for step in (2, 4, 6):
        checkpoint(tmp_path, step)
    delete_old_checkpoints(tmp_path, 2, keep=[tmp_path / "checkpoint-2"])
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-6"]


@pytest.mark.parametrize("limit", [None, 0, 5])
def test_rotation_without_need_deletes_nothing(tmp_path, limit):
    for step in (2, 4):
        checkpoint(tmp_path, step)
    delete_old_checkpoints(tmp_path, limit)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4"]


def test_a_complete_checkpoint_in_the_way_is_set_aside_and_still_found(tmp_path):
    folder = checkpoint(tmp_path, 4)
    clear_path(folder)
    assert not folder.exists()
    assert newest_complete(tmp_path).name == "checkpoint-4.replaced"
    clear_path(checkpoint(tmp_path, 4, complete=False))
    assert names(tmp_path) == ["checkpoint-4.replaced"]
    checkpoint(tmp_path, 4)
    assert newest_complete(tmp_path) == folder


def test_deleting_takes_the_manifest_first(tmp_path, monkeypatch):
    checkpoint(tmp_path, 2), checkpoint(tmp_path, 4)
    monkeypatch.setattr(shutil, "rmtree", lambda *_args, **_options: None)  # killed right there
    delete_old_checkpoints(tmp_path, 1)
    assert names(tmp_path / "checkpoint-2") == sorted(["a.json", "adapter", *NEEDED])
    assert newest_complete(tmp_path).name == "checkpoint-4"


def linked(tmp_path, step):
    """A run's folder in which the checkpoint of a step is a link to one that somebody keeps elsewhere."""
    kept = checkpoint(tmp_path / "kept", step)
    (tmp_path / "run").mkdir()
    link = tmp_path / "run" / f"checkpoint-{step}"
    link.symlink_to(kept)
    return kept, link


@pytest.mark.parametrize("step", [1, 9])
def test_rotation_neither_counts_nor_touches_a_link(tmp_path, step):
    kept, link = linked(tmp_path, step)
    for own in (2, 4):
        checkpoint(tmp_path / "run", own)
    delete_old_checkpoints(tmp_path / "run", 1)
    assert names(tmp_path / "run") == sorted([link.name, "checkpoint-4"])
    check_manifest(kept)
    check_manifest(link)


def test_a_link_to_something_half_written_stays_too(tmp_path):
    kept, link = linked(tmp_path, 1)
    (kept / "manifest.json").unlink()
    checkpoint(tmp_path / "run", 4)
    delete_old_checkpoints(tmp_path / "run", 1)
    assert link.is_symlink()
    assert (kept / "model.safetensors").exists()


def test_a_link_in_the_place_of_a_new_checkpoint_gives_way_and_what_it_points_to_stays(tmp_path):
    kept, link = linked(tmp_path, 4)
    clear_path(link)
    assert newest_complete(tmp_path / "run").name == "checkpoint-4.replaced"
    checkpoint(tmp_path / "run", 4)
    delete_replaced(link)
    assert names(tmp_path / "run") == ["checkpoint-4"]
    check_manifest(kept)


def test_a_link_to_nothing_gives_way(tmp_path):
    for name in ("checkpoint-4", "checkpoint-4.replaced"):
        (tmp_path / name).symlink_to(tmp_path / "nothing")
    clear_path(tmp_path / "checkpoint-4")
    delete_replaced(tmp_path / "checkpoint-4")
    assert names(tmp_path) == []
