"""Symbolic links below a folder of logs: one that leads out of it may lead to anybody's files."""

from __future__ import annotations

import os
from pathlib import Path

LEADS_OUT = "link that leads out of the folder (--follow-links follows it)"
TO_A_FOLDER = "link to a folder"  # that is read at its own place, or it would lead round in circles


class Links:
    """Which links below a folder are followed: none that leads out of it, unless asked; no folder twice."""

    def __init__(self, root: Path, *, follow: bool) -> None:
        self._root, self._follow = _real(root), follow
        self._entered = [self._root]

    def why_not_read(self, file: Path) -> str:
        """Why a file is not read; empty where it is no link, or one that is followed."""
        if self._follow or not file.is_symlink():
            return ""
        return "" if _real(file).is_relative_to(self._root) else LEADS_OUT

    def why_not_entered(self, folder: Path) -> str:
        """Why a link to a folder is not followed; empty where it is."""
        target = _real(folder)
        if any(target.is_relative_to(each) for each in self._entered) or self._root.is_relative_to(target):
            return TO_A_FOLDER
        if not self._follow:
            return LEADS_OUT
        self._entered.append(target)
        return ""


def _real(path: Path) -> Path:
    """Without links; one that leads round in circles stays as it is."""
    return Path(os.path.realpath(path))
