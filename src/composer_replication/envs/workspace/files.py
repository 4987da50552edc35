"""Hold the files of a workspace in memory.

Paths are the keys of a dictionary and are never used on a disk, so no path can escape the root.
"""

from __future__ import annotations

import difflib
import fnmatch
import posixpath
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

ROOT = "/workspace"
# Limits of common file systems (255 bytes per part of a path), and of the memory that one episode may use.
MAX_PATH, MAX_PART, MAX_PARTS = 1000, 255, 20
MAX_FILE, MAX_TOTAL, MAX_FILES = 256 * 1024, 1024 * 1024, 200
MAX_PATTERN, MAX_ALTERNATIVES = 300, 32
Refusal = Literal["null", "too long", "not a folder", "no space"]


def below_root(path: str) -> str | None:
    """Return the path relative to the root: an empty string for the root itself, None for a path outside it."""
    # A shell expands "~" to the home folder. The length check keeps normpath from working on huge texts.
    if path.startswith("~") or len(path) > MAX_PATH * 4:
        return None
    full = posixpath.normpath(posixpath.join(ROOT, path))
    # Exactly two leading slashes have a meaning of their own in POSIX, so normpath keeps them ("//workspace").
    full = "/" + full.lstrip("/")
    if full == ROOT:
        return ""
    return full.removeprefix(ROOT + "/") if full.startswith(ROOT + "/") else None


def absolute(name: str) -> str:
    """Return the absolute form of a path below the root."""
    return f"{ROOT}/{name}" if name else ROOT


class Files:
    """The texts of the files, by path below the root. A folder exists if it contains a file."""

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

    def write_refusal(self, name: str, text: str) -> Refusal | None:
        """Return the reason why a file system would refuse to write this file, or None if it would not."""
        parts = name.split("/")
        if "\0" in name:
            return "null"
        if len(name) > MAX_PATH or len(parts) > MAX_PARTS or any(len(part.encode()) > MAX_PART for part in parts):
            return "too long"
        if any("/".join(parts[:count]) in self._texts for count in range(1, len(parts))):
            return "not a folder"
        # The old text of the file does not count, because it is replaced.
        others_size = sum(len(file_text) for path, file_text in self._texts.items() if path != name)
        too_many = name not in self._texts and len(self._texts) >= MAX_FILES
        return "no space" if len(text) > MAX_FILE or others_size + len(text) > MAX_TOTAL or too_many else None

    def is_folder(self, name: str) -> bool:
        return name == "" or any(path.startswith(f"{name}/") for path in self._texts)

    def below(self, folder: str) -> list[str]:
        """Return the paths of all files below a folder, sorted."""
        return sorted(path for path in self._texts if not folder or path.startswith(f"{folder}/"))

    def entries(self, folder: str) -> list[str]:
        """Return the sorted names of the files and folders directly in a folder. Folder names end with a slash."""
        start = len(folder) + 1 if folder else 0
        parts = [path[start:].partition("/") for path in self.below(folder)]
        return sorted({name + slash for name, slash, _ in parts})

    def matching(self, folder: str, pattern: str) -> list[str] | None:
        """Return the files below a folder whose relative path matches a glob, or None if the pattern is too large."""
        pattern = pattern.removeprefix(absolute(folder) + "/").removeprefix("./")
        alternatives = _expand_braces(pattern) if len(pattern) <= MAX_PATTERN else None
        if alternatives is None:
            return None
        start = len(folder) + 1 if folder else 0
        parts = [alternative.split("/") for alternative in alternatives]
        return [
            path
            for path in self.below(folder)
            if any(_matches(path[start:].split("/"), alternative) for alternative in parts)
        ]

    def similar(self, name: str) -> str | None:
        """Return the path of the file that was probably meant, or None.

        A path that differs only in case is preferred, then a file with the same name, then a similar path.
        """
        names, last = sorted(self._texts), posixpath.basename(name).lower()
        same_name = [path for path in names if last and posixpath.basename(path).lower() == last]
        # Only the end of the path, because difflib takes quadratic time and the path comes from a model.
        close = difflib.get_close_matches(name[-200:], names, n=1, cutoff=0.8)
        return next(iter([*(path for path in same_name if path.lower() == name.lower()), *same_name, *close]), None)

    def format_code(self) -> list[str]:
        """Strip trailing whitespace in Python files, end each with one newline, and return the paths that changed."""
        changed: list[str] = []
        for name in self.below(""):
            text = self._texts[name]
            tidy = "".join(f"{line.rstrip()}\n" for line in text.rstrip().split("\n")) if text.strip() else ""
            if name.endswith(".py") and tidy != text:
                self._texts[name] = tidy
                changed.append(name)
        return changed


def _expand_braces(pattern: str) -> list[str] | None:
    """Return the patterns that a pattern with braces expands to, or None if there are more than `MAX_ALTERNATIVES`."""
    waiting, finished = [pattern], list[str]()
    while waiting:
        alternative = waiting.pop(0)
        # Innermost braces first: "*.{py,md}" -> "py,md"
        match = re.search(r"\{([^{}]*)\}", alternative)
        if match is None:
            finished.append(alternative)
        else:
            waiting += [
                alternative[: match.start()] + choice + alternative[match.end() :] for choice in match[1].split(",")
            ]
        if len(waiting) + len(finished) > MAX_ALTERNATIVES:
            return None
    return finished


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether the parts of a path match those of a pattern, in which `**` matches any number of parts."""
    # The numbers of path parts that the pattern may have consumed so far. A set makes backtracking unnecessary.
    reached = {0}
    for pattern_part in pattern:
        if pattern_part == "**":
            reached = set(range(min(reached), len(parts) + 1)) if reached else reached
        else:
            reached = {at + 1 for at in reached if at < len(parts) and fnmatch.fnmatchcase(parts[at], pattern_part)}
    return len(parts) in reached
