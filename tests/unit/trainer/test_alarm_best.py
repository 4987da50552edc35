"""The best checkpoint: kept whole at every moment, and whatever happens to the one it was made of."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from alarm_checkpoints import best_of, checkpoint, names

from composer_replication.errors import ArtefactNotFoundError
from composer_replication.trainer.watch.collapse_alarm import _keep_best, _read_best


def test_the_best_checkpoint_outlives_the_one_it_was_made_of(tmp_path: Path) -> None:
    checkpoint(tmp_path, 3)
    _keep_best(tmp_path, best_of(3, 0.5))
    (tmp_path / "checkpoint-3" / "inner" / "weights").unlink()
    assert (tmp_path / "best" / "inner" / "weights").read_text() == "weights of 3"
    assert _read_best(tmp_path) == best_of(3, 0.5)
    checkpoint(tmp_path, 8)
    _keep_best(tmp_path, best_of(8, 0.6))
    assert (tmp_path / "best" / "inner" / "weights").read_text() == "weights of 8"
    assert names(tmp_path) == {"checkpoint-3", "checkpoint-8", "best", "best-8", "best.json"}


@pytest.mark.parametrize("dies_in", ["copytree", "best-8", "best", "atomic_write_json", "rmtree"])
def test_whenever_keeping_fails_a_whole_best_is_left(
    dies_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from composer_replication.trainer.watch import collapse_alarm as alarm_best

    checkpoint(tmp_path, 3)
    _keep_best(tmp_path, best_of(3, 0.5))
    checkpoint(tmp_path, 8)

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    replace = Path.replace

    def fail_to_rename(path: Path, target: Path) -> Path:
        return fail() if target.name == dies_in else replace(path, target)

    holder = {"copytree": alarm_best.shutil, "rmtree": alarm_best.shutil, "atomic_write_json": alarm_best}.get(dies_in)
    with monkeypatch.context() as patch:
        if holder is None:
            patch.setattr(Path, "replace", fail_to_rename)
        else:
            patch.setattr(holder, dies_in, fail)
        with pytest.raises(OSError, match="No space left"):
            _keep_best(tmp_path, best_of(8, 0.6))
    kept = _read_best(tmp_path)
    assert kept is not None
    assert (tmp_path / kept.folder / "inner" / "weights").read_text() == f"weights of {kept.step}"
    assert (tmp_path / "best" / "inner" / "weights").read_text() in {"weights of 3", "weights of 8"}
    _keep_best(tmp_path, best_of(8, 0.6))
    assert _read_best(tmp_path) == best_of(8, 0.6)


def test_without_links_the_files_are_copied_and_the_record_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object, **options: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    monkeypatch.setattr(Path, "symlink_to", refused)
    checkpoint(tmp_path, 3)
    _keep_best(tmp_path, best_of(3, 0.5))
    best = _read_best(tmp_path)
    assert best is not None
    assert (tmp_path / best.folder / "inner" / "weights").read_text() == "weights of 3"
    assert "best" not in names(tmp_path)


def test_a_checkpoint_that_is_not_there_cannot_be_kept(tmp_path: Path) -> None:
    with pytest.raises(ArtefactNotFoundError, match="checkpoint-3"):
        _keep_best(tmp_path, best_of(3, 0.5))


@pytest.mark.parametrize("record", ["", "[]", "{}", '{"step": 3, "metric": "m", "value": 1, "higher_is_better": true}'])
def test_a_record_that_cannot_be_read_or_leads_nowhere_is_none(record: str, tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text(record)
    assert _read_best(tmp_path) is None
