"""Hold a workspace's files in memory, and word what a harness says when a call fails.

A path is a key of a table and never reaches a disk, so no path can leave the root.
"""

from __future__ import annotations

import difflib
import fnmatch
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

ROOT = "/workspace"
# Limits of a usual file system (255 bytes per part of a path), and of what one episode may fill with files.
MAX_PATH, MAX_PART, MAX_PARTS = 1000, 255, 20
MAX_FILE, MAX_TOTAL, MAX_FILES = 256 * 1024, 1024 * 1024, 200
MAX_PATTERN, MAX_ALTERNATIVES = 300, 32
Refusal = Literal["null", "too long", "not a folder", "no space"]


def below_root(path: str) -> str | None:
    """Return the path below the root: "" for the root itself, None for a path outside it."""
    # "~" is a home folder for a shell. The length check keeps normpath from working on huge texts.
    if path.startswith("~") or len(path) > MAX_PATH * 4:
        return None
    full = posixpath.normpath(posixpath.join(ROOT, path))
    # POSIX keeps exactly two leading slashes apart ("//workspace"), and so does normpath.
    full = "/" + full.lstrip("/")
    if full == ROOT:
        return ""
    return full.removeprefix(ROOT + "/") if full.startswith(ROOT + "/") else None


def absolute(name: str) -> str:
    return f"{ROOT}/{name}" if name else ROOT


class Files:
    """The texts of files by path below the root. A folder exists if a file is in it."""

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
        """Return why a file system would refuse to write this file, or None if it would not."""
        parts = name.split("/")
        if "\0" in name:
            return "null"
        if len(name) > MAX_PATH or len(parts) > MAX_PARTS or any(len(part.encode()) > MAX_PART for part in parts):
            return "too long"
        if any("/".join(parts[:count]) in self._texts for count in range(1, len(parts))):
            return "not a folder"
        # The file's old text does not count: it is replaced.
        rest = sum(len(file_text) for path, file_text in self._texts.items() if path != name)
        too_many = name not in self._texts and len(self._texts) >= MAX_FILES
        return "no space" if len(text) > MAX_FILE or rest + len(text) > MAX_TOTAL or too_many else None

    def is_folder(self, name: str) -> bool:
        return name == "" or any(path.startswith(f"{name}/") for path in self._texts)

    def below(self, folder: str) -> list[str]:
        """Return the paths of all files below a folder, sorted."""
        return sorted(path for path in self._texts if not folder or path.startswith(f"{folder}/"))

    def entries(self, folder: str) -> list[str]:
        """Return the names directly in a folder, folders with a slash, sorted."""
        start = len(folder) + 1 if folder else 0
        parts = [path[start:].partition("/") for path in self.below(folder)]
        return sorted({name + slash for name, slash, _ in parts})

    def matching(self, folder: str, pattern: str) -> list[str] | None:
        """Return the files below a folder whose relative path matches a glob; None for a pattern too large."""
        pattern = pattern.removeprefix(absolute(folder) + "/").removeprefix("./")
        alternatives = _expand_braces(pattern) if len(pattern) <= MAX_PATTERN else None
        if alternatives is None:
            return None
        start = len(folder) + 1 if folder else 0
        parts = [alternative.split("/") for alternative in alternatives]
        return [
            path
            for path in self.below(folder)
            if any(_fits(path[start:].split("/"), alternative) for alternative in parts)
        ]

    def similar(self, name: str) -> str | None:
        """Return the file that was probably meant: same path but for case, same name elsewhere, or a similar path."""
        names, last = sorted(self._texts), posixpath.basename(name).lower()
        same = [path for path in names if last and posixpath.basename(path).lower() == last]
        # Only the end of the path: difflib takes quadratic time, and the path comes from a model.
        close = difflib.get_close_matches(name[-200:], names, n=1, cutoff=0.8)
        return next(iter([*(path for path in same if path.lower() == name.lower()), *same, *close]), None)

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
    """Return the patterns that a pattern with braces means, or None if they are more than `MAX_ALTERNATIVES`."""
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


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether the parts of a path match those of a pattern, in which `**` is any number of parts."""
    # How many parts of the path the pattern may have consumed so far; a set, so that no pattern backtracks.
    reached = {0}
    for pattern_part in pattern:
        if pattern_part == "**":
            reached = set(range(min(reached), len(parts) + 1)) if reached else reached
        else:
            reached = {at + 1 for at in reached if at < len(parts) and fnmatch.fnmatchcase(parts[at], pattern_part)}
    return len(parts) in reached


# What harnesses say when a call fails, word for word, with the failure's kind in sites/rule.py. The texts are data:
# error rules recognize them, and the embedded student was trained on them.

MAX_TEXT, MAX_PATH_LENGTH = 30_000, 300
EMPTY = "<system-reminder>Warning: the file exists but the contents are empty.</system-reminder>"
SHORTER = (
    "<system-reminder>Warning: the file exists but is shorter than the provided offset ({offset}). "
    "The file has {lines} lines.</system-reminder>"
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a call. `kind` is the failure's kind in sites/rule.py; None if it is not the model's."""

    text: str
    failed: bool = False
    kind: str | None = None


def tool_error(kind: str | None, text: str) -> Outcome:
    """Return an error that the tool or the operating system raised and the harness passes on."""
    return Outcome(text=text[:MAX_TEXT], failed=True, kind=kind)


def harness_error(kind: str, text: str) -> Outcome:
    """Return an error of the harness itself, which did not run the call: in tags, as in real logs."""
    return Outcome(text=f"<tool_use_error>{text[:MAX_TEXT]}</tool_use_error>", failed=True, kind=kind)


def unknown_tool(name: str) -> Outcome:
    return harness_error("tool_not_found", f"Error: No such tool available: {name}")


def invalid_arguments(tool: str, issues: list[str]) -> Outcome:
    noun = "issue" if len(issues) == 1 else "issues"
    return harness_error(
        "input_validation", "\n".join([f"InputValidationError: {tool} failed due to the following {noun}:", *issues])
    )


def not_an_object(tool: str) -> Outcome:
    return harness_error(
        "input_validation", f"InputValidationError: {tool} failed to parse: the arguments are not valid JSON"
    )


def file_not_found(suggestion: str | None) -> Outcome:
    text = "File does not exist." + (f" Did you mean {suggestion}?" if suggestion else "")
    return harness_error("file_not_found", text)


def folder_not_found(path: str) -> Outcome:
    return harness_error("file_not_found", f"Directory does not exist: {path[:MAX_PATH_LENGTH]}")


def path_not_found(path: str) -> Outcome:
    return harness_error("file_not_found", f"Path does not exist: {path[:MAX_PATH_LENGTH]}")


def is_directory(operation: str, path: str = "") -> Outcome:
    return harness_error(
        "is_directory", f"EISDIR: illegal operation on a directory, {operation}" + (f" '{path}'" if path else "")
    )


def too_large(tokens: int) -> Outcome:
    return tool_error(
        "output_too_large",
        f"File content ({tokens} tokens) exceeds maximum allowed tokens (25000). Please use offset and limit "
        "parameters to read specific portions of the file, or use the GrepTool to search for specific content.",
    )


def outside_root(path: str) -> Outcome:
    return tool_error(
        None, f"Claude requested permissions to write to {path[:MAX_PATH_LENGTH]}, but you haven't granted it yet."
    )


def invalid_glob(pattern: str) -> Outcome:
    return harness_error("input_validation", f"Invalid glob pattern: {pattern[:200]}")


def invalid_regex(reason: str) -> Outcome:
    return harness_error("input_validation", reason)


def search_timed_out() -> Outcome:
    return tool_error(
        None,
        "Ripgrep search timed out after 20 seconds. The search may have matched files but did not complete in time. "
        "Try searching a more specific path or pattern.",
    )


def cannot_write(refusal: Refusal, path: str) -> Outcome:
    """Return the operating system's error for a file that cannot be written."""
    if refusal == "null":
        shown_path = path.replace("\0", "\\x00")
        return tool_error(
            "input_validation",
            f"The argument 'path' must be a string, Uint8Array, or URL without null bytes. Received '{shown_path}'",
        )
    messages = {
        "too long": "ENAMETOOLONG: name too long, open",
        "not a folder": "ENOTDIR: not a directory, open",
        "no space": "ENOSPC: no space left on device, write",
    }
    return tool_error(None, f"{messages[refusal]} '{path}'")


def edit_noop() -> Outcome:
    return harness_error("edit_noop", "No changes to make: old_string and new_string are exactly the same.")


def edit_not_read() -> Outcome:
    return harness_error("edit_not_read", "File has not been read yet. Read it first before writing to it.")


def edit_stale() -> Outcome:
    return harness_error(
        "edit_stale",
        "File has been modified since read, either by the user or by a linter. "
        "Read it again before attempting to write it.",
    )


def edit_no_match(old: str) -> Outcome:
    return harness_error("edit_no_match", f"String to replace not found in file.\nString: {old}")


def edit_ambiguous(count: int, old: str) -> Outcome:
    return harness_error(
        "edit_ambiguous",
        f"Found {count} matches of the string to replace, but replace_all is false. To replace all occurrences, set "
        "replace_all to true. To replace only one occurrence, please provide more context to uniquely identify the "
        f"instance.\nString: {old}",
    )


def exists_already() -> Outcome:
    return harness_error("input_validation", "Cannot create new file - file already exists.")
