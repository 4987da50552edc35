"""The best checkpoint, kept whatever the rotation of the others does.

Its files are hard links (copies where there are none) in a folder of their own, `best-<step>`, which is complete before
it has that name. `best` is a symbolic link to it that is exchanged in one rename, and `best.json` says how good it is.
An earlier best is removed last, so there is a whole one at every moment.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from composer_replication.atomic import atomic_write_json
from composer_replication.errors import ArtefactNotFoundError, explain

LINK, RECORD = "best", "best.json"
_FOLDER = re.compile(r"best-\d+")
# What file systems without links answer.
_CANNOT_LINK = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EMLINK, errno.EXDEV}


@dataclass(frozen=True, kw_only=True)
class Best:
    """Which checkpoint is best so far, by which metric, and where it is kept."""

    step: int
    metric: str
    value: float
    higher_is_better: bool

    @property
    def folder(self) -> str:
        return f"best-{self.step}"

    def is_beaten_by(self, metric: str, value: float) -> bool:
        """By a better value of the same metric; a value of another metric cannot be compared, and does not count."""
        if metric != self.metric:
            return False
        return value > self.value if self.higher_is_better else value < self.value


def keep_best(output: Path, best: Best) -> None:
    """Keep the checkpoint of that step in the folder as the best one, and let an earlier best go."""
    checkpoint = output / f"checkpoint-{best.step}"
    if not checkpoint.is_dir():
        raise ArtefactNotFoundError(
            explain("checkpoint to keep", got=f"no {checkpoint}", expected="the folder that was just saved")
        )
    _copy_folder(checkpoint, output / best.folder)
    _point(output, best.folder)
    atomic_write_json(output / RECORD, asdict(best))
    for folder in output.iterdir():
        if _FOLDER.fullmatch(folder.name) and folder.name != best.folder:
            shutil.rmtree(folder)


def read_best(output: Path) -> Best | None:
    """What an earlier part of this run kept; None where there is nothing whole."""
    try:
        record: dict[str, Any] = json.loads((output / RECORD).read_bytes())
        best = Best(**record)
    except (OSError, ValueError, TypeError):  # no record, or not one of ours: as good as none
        return None
    return best if (output / best.folder).is_dir() else None


def _copy_folder(source: Path, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        shutil.copytree(source, temporary, copy_function=_link_or_copy)
        if target.exists():  # the same step again, after a resume
            shutil.rmtree(target)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        shutil.copy2(source, target)


def _point(output: Path, folder: str) -> None:
    """Exchange the link in one rename; where there are no links, best.json alone says which folder it is."""
    temporary = output / f".{LINK}.{secrets.token_hex(4)}.tmp"
    try:
        temporary.symlink_to(folder, target_is_directory=True)
        temporary.replace(output / LINK)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
