"""Paths in one spelling: against the folder the session works in, by the text alone, case kept."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Any

from composer_replication.actions.tools import channel_of, word_set

_DRIVE = re.compile(r"[A-Za-z]:[\\/]")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# These say file or folder in any tool; the others also name routes, keys or branches, and mean a file in a file tool.
_SURE_NAMES = word_set(
    "file_path filepath filePath file_paths filePaths notebook_path absolute_path absolutePath dir_path dirPath"
    " directory_path target_file targetFile relative_workspace_path target_directory workdir cwd working_directory"
    " working_dir workingDirectory"
)
_FILE_TOOL_NAMES = word_set(
    "path paths file files filename file_name directory dir folder source destination src dst old_path new_path"
)
_DESCRIBED = re.compile(r"\b(?:file|files|directory|directories|folder)\b", re.IGNORECASE)
_FORMATS = ("path", "file-path", "directory-path")


def normal_path(path: str, base: str | None) -> str:
    """One spelling of a path: no `.`, `//` or final `/`, `..` taken back; absolute where `base` is.

    `a/../b` is `b` by the text; where `a` is a link this may be another file, as for everyone who reads the text.
    """
    if not path or _SCHEME.match(path):
        return path
    if _DRIVE.match(path) or (base is not None and _DRIVE.match(base)):
        return _windows_path(path, base)
    if path.startswith("~"):
        return posixpath.normpath(path)  # whose home it is, the session does not say
    joined = path if base is None or path.startswith("/") else f"{base}/{path}"
    return _collapsed(joined)


def is_path_parameter(tool: str, name: str, described: Mapping[str, Any]) -> bool:
    """Whether a parameter holds a path (or paths): by its name, its tool, or what the schema says of it."""
    if name in _SURE_NAMES or described.get("format") in _FORMATS:
        return True
    if name not in _FILE_TOOL_NAMES:
        return False
    if channel_of(tool) == "other":
        text = described.get("description")
        return isinstance(text, str) and _DESCRIBED.search(text) is not None
    return True


def _windows_path(path: str, base: str | None) -> str:
    slashed_path = path.replace("\\", "/")
    is_absolute = _DRIVE.match(path) is not None or slashed_path.startswith("/")
    joined = slashed_path if is_absolute or base is None else f"{base}/{slashed_path}".replace("\\", "/")
    return _collapsed(joined[:1].upper() + joined[1:] if joined[1:2] == ":" else joined)


def _collapsed(path: str) -> str:
    plain = posixpath.normpath(path)
    return plain[1:] if plain.startswith("//") else plain  # POSIX lets two slashes mean something; no one uses it
