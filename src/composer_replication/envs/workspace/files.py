"""The files of a workspace, in memory: a path is a name in a table, so no path can leave the root."""

from __future__ import annotations

import difflib
import fnmatch
import posixpath
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

ROOT = "/workspace"
MAX_PATH, MAX_PART, MAX_PARTS = 1000, 255, 20
MAX_FILE, MAX_TOTAL, MAX_FILES = 256 * 1024, 1024 * 1024, 200
MAX_PATTERN, MAX_ALTERNATIVES = 300, 32

Refusal = Literal["null", "too long", "not a folder", "no space"]


def below_root(path: str) -> str | None:
    """The path below the root, "" for the root itself, None for one that lies elsewhere."""
    if path.startswith("~") or len(path) > MAX_PATH * 4:
        return None
    full = posixpath.normpath(posixpath.join(ROOT, path))
    full = "/" + full.lstrip("/")
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

    def refuses(self, name: str, text: str) -> Refusal | None:
        """Why a disk would not take this file."""
        parts = name.split("/")
        if "\0" in name:
            return "null"
        if len(name) > MAX_PATH or len(parts) > MAX_PARTS or any(len(part.encode()) > MAX_PART for part in parts):
            return "too long"
        if any("/".join(parts[:count]) in self._texts for count in range(1, len(parts))):
            return "not a folder"
        rest = sum(len(other_text) for path, other_text in self._texts.items() if path != name)
        too_many = name not in self._texts and len(self._texts) >= MAX_FILES
        return "no space" if len(text) > MAX_FILE or rest + len(text) > MAX_TOTAL or too_many else None

    def is_folder(self, name: str) -> bool:
        return name == "" or any(path.startswith(f"{name}/") for path in self._texts)

    def below(self, folder: str) -> list[str]:
        """Every file below a folder, sorted."""
        return sorted(path for path in self._texts if not folder or path.startswith(f"{folder}/"))

    def entries(self, folder: str) -> list[str]:
        """Names directly in a folder, folders with a slash."""
        start = len(folder) + 1 if folder else 0
        parts = [path[start:].partition("/") for path in self.below(folder)]
        return sorted({name + slash for name, slash, _ in parts})

    def matching(self, folder: str, pattern: str) -> list[str] | None:
        """Files below a folder whose path in it fits a glob pattern; None for a pattern that is none."""
        pattern = pattern.removeprefix(absolute(folder) + "/").removeprefix("./")
        alternatives = _alternatives(pattern) if len(pattern) <= MAX_PATTERN else None
        if alternatives is None:
            return None
        start = len(folder) + 1 if folder else 0
        parts = [alternative.split("/") for alternative in alternatives]
        return [path for path in self.below(folder) if any(_fits(path[start:].split("/"), one) for one in parts)]

    def similar(self, name: str) -> str | None:
        """A file that may have been meant: its name in other letters or another folder, or a name much like it."""
        names, last = sorted(self._texts), posixpath.basename(name).lower()
        same = [path for path in names if last and posixpath.basename(path).lower() == last]
        close = difflib.get_close_matches(name[-200:], names, n=1, cutoff=0.8)
        return next(iter([*(path for path in same if path.lower() == name.lower()), *same, *close]), None)

    def format_code(self) -> list[str]:
        """Takes spaces off the ends of lines and ends every file of code on one newline; the files it changed."""
        changed: list[str] = []
        for name in self.below(""):
            text = self._texts[name]
            tidy = "".join(f"{line.rstrip()}\n" for line in text.rstrip().split("\n")) if text.strip() else ""
            if name.endswith(".py") and tidy != text:
                self._texts[name] = tidy
                changed.append(name)
        return changed


def _alternatives(pattern: str) -> list[str] | None:
    """`*.{py,md}` is two patterns; None where braces make more than anybody writes."""
    waiting, finished = [pattern], list[str]()
    while waiting:
        alternative = waiting.pop(0)
        match = re.search(r"\{([^{}]*)\}", alternative)
        if match is None:
            finished.append(alternative)
        else:
            waiting += [alternative[: match.start()] + one + alternative[match.end() :] for one in match[1].split(",")]
        if len(waiting) + len(finished) > MAX_ALTERNATIVES:
            return None
    return finished


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the parts of a path fit those of a pattern; `**` is any number of parts."""
    reached = {0}
    for want in pattern:
        if want == "**":
            reached = set(range(min(reached), len(parts) + 1)) if reached else reached
        else:
            reached = {at + 1 for at in reached if at < len(parts) and fnmatch.fnmatchcase(parts[at], want)}
    return len(parts) in reached
