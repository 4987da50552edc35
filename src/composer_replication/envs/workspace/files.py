"""The files of a workspace, in memory: a path is a name in a table, so no path can leave the root."""

from __future__ import annotations

import difflib
import posixpath
from collections.abc import Mapping
from types import MappingProxyType

ROOT = "/workspace"


def below_root(path: str) -> str | None:
    """The path below the root, "" for the root itself, None for one that lies elsewhere."""
    full = posixpath.normpath(posixpath.join(ROOT, path)) if not path.startswith("~") else path
    if full == ROOT:
        return ""
    return full.removeprefix(ROOT + "/") if full.startswith(ROOT + "/") else None


def absolute(name: str) -> str:
    return f"{ROOT}/{name}" if name else ROOT


class Files:
    """Texts by path below the root; folders are what paths have before their last part."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = dict(texts)

    @property
    def texts(self) -> Mapping[str, str]:
        return MappingProxyType(self._texts)

    def __contains__(self, name: object) -> bool:
        return name in self._texts

    def __getitem__(self, name: str) -> str:
        return self._texts[name]

    def write(self, name: str, text: str) -> None:
        self._texts[name] = text

    def is_folder(self, name: str) -> bool:
        return name == "" or any(each.startswith(f"{name}/") for each in self._texts)

    def below(self, folder: str) -> list[str]:
        """Every file below a folder, sorted."""
        return sorted(each for each in self._texts if not folder or each.startswith(f"{folder}/"))

    def entries(self, folder: str) -> list[str]:
        """Names directly in a folder, folders with a slash."""
        start = len(folder) + 1 if folder else 0
        parts = [each[start:].partition("/") for each in self.below(folder)]
        return sorted({name + slash for name, slash, _ in parts})

    def similar(self, name: str) -> str | None:
        """A file that may have been meant: the same name elsewhere, or a name much like it."""
        last = posixpath.basename(name)
        same = [each for each in sorted(self._texts) if posixpath.basename(each) == last]
        if same:
            return same[0]
        close = difflib.get_close_matches(name[:200], sorted(self._texts), n=1, cutoff=0.8)
        return close[0] if close else None
