"""Old checkpoints make room for new ones, and the newest complete one never before there is a newer one."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from composer_replication.errors import RunError
from composer_replication.trainer.checkpoints.manifest import MANIFEST, check_manifest, checkpoints_in


def make_room(folder: Path) -> None:
    """Take what stands where a checkpoint will be written out of the way.

    A half-written one is deleted. A complete one is set aside, under a name that resume still finds, until
    `drop_replaced` is told that its successor is complete.
    """
    if (folder / MANIFEST).exists():
        drop_replaced(folder)
        folder.rename(_aside(folder))
    elif folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def drop_replaced(folder: Path) -> None:
    """Delete the checkpoint that was set aside for `folder`, if there is one."""
    if _aside(folder).exists() or _aside(folder).is_symlink():
        delete_checkpoint(_aside(folder))


def delete_checkpoint(folder: Path) -> None:
    """Delete it so that at no moment it looks complete and is not: the manifest goes first.

    Of a link only the link goes: what it points to was put there by someone else, for another use.
    """
    if folder.is_symlink():
        folder.unlink()
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def rotate(output_dir: Path, limit: int | None, *, keep: Iterable[Path] = ()) -> None:
    """Delete the oldest complete checkpoints beyond `limit`, and half-written ones older than the newest complete.

    A link is neither counted nor touched: somebody made it to keep what it points to.
    """
    if limit is None or limit <= 0:
        return
    found = [folder for _, folder in sorted(checkpoints_in(output_dir)) if not folder.is_symlink()]
    complete = [folder for folder in found if _looks_complete(folder)]
    if not complete:
        return
    protected = {each.resolve() for each in (complete[-1], *keep)} & {each.resolve() for each in complete}
    spare = len(complete) - max(limit, len(protected))
    surplus = [each for each in complete if each.resolve() not in protected][: max(spare, 0)]
    half_written = [each for each in found[: found.index(complete[-1])] if each not in complete]
    for folder in (*half_written, *surplus):
        delete_checkpoint(folder)


def _looks_complete(folder: Path) -> bool:
    try:
        check_manifest(folder, hashes=False)  # hashing every kept checkpoint at every save would cost more than saving
    except RunError:
        return False
    return True


def _aside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.replaced")
