"""The files of a workspace, in memory: a path is a name in a table, so no path can leave the root."""

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


# What real harnesses say when a call fails, and the kind of each failure in sites/rule.py.

MAX_TEXT, MAX_PATH_LENGTH = 30_000, 300
EMPTY = "<system-reminder>Warning: the file exists but the contents are empty.</system-reminder>"
SHORTER = (
    "<system-reminder>Warning: the file exists but is shorter than the provided offset ({offset}). "
    "The file has {lines} lines.</system-reminder>"
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came back. `kind` is the failure's name in the taxonomy, where the failure is the model's doing."""

    text: str
    failed: bool = False
    kind: str | None = None


def thrown(kind: str | None, text: str) -> Outcome:
    """What the tool or the system under it said; the harness passes it on."""
    return Outcome(text=text[:MAX_TEXT], failed=True, kind=kind)


def refused(kind: str, text: str) -> Outcome:
    """What the harness itself says before it runs a call: in tags, as the model sees it and as logs have it."""
    return Outcome(text=f"<tool_use_error>{text[:MAX_TEXT]}</tool_use_error>", failed=True, kind=kind)


def unknown_tool(name: str) -> Outcome:
    return refused("tool_not_found", f"Error: No such tool available: {name}")


def invalid_arguments(tool: str, issues: list[str]) -> Outcome:
    noun = "issue" if len(issues) == 1 else "issues"
    return refused(
        "input_validation", "\n".join([f"InputValidationError: {tool} failed due to the following {noun}:", *issues])
    )


def not_an_object(tool: str) -> Outcome:
    return refused(
        "input_validation", f"InputValidationError: {tool} failed to parse: the arguments are not valid JSON"
    )


def file_not_found(suggestion: str | None) -> Outcome:
    text = "File does not exist." + (f" Did you mean {suggestion}?" if suggestion else "")
    return refused("file_not_found", text)


def folder_not_found(path: str) -> Outcome:
    return refused("file_not_found", f"Directory does not exist: {path[:MAX_PATH_LENGTH]}")


def path_not_found(path: str) -> Outcome:
    return refused("file_not_found", f"Path does not exist: {path[:MAX_PATH_LENGTH]}")


def is_directory(doing: str, path: str = "") -> Outcome:
    return refused(
        "is_directory", f"EISDIR: illegal operation on a directory, {doing}" + (f" '{path}'" if path else "")
    )


def too_large(tokens: int) -> Outcome:
    return thrown(
        "output_too_large",
        f"File content ({tokens} tokens) exceeds maximum allowed tokens (25000). Please use offset and limit "
        "parameters to read specific portions of the file, or use the GrepTool to search for specific content.",
    )


def outside(path: str) -> Outcome:
    return thrown(
        None, f"Claude requested permissions to write to {path[:MAX_PATH_LENGTH]}, but you haven't granted it yet."
    )


def invalid_glob(pattern: str) -> Outcome:
    return refused("input_validation", f"Invalid glob pattern: {pattern[:200]}")


def invalid_regex(reason: str) -> Outcome:
    return refused("input_validation", reason)


def search_timed_out() -> Outcome:
    return thrown(
        None,
        "Ripgrep search timed out after 20 seconds. The search may have matched files but did not complete in time. "
        "Try searching a more specific path or pattern.",
    )


def cannot_write(refusal: Refusal, path: str) -> Outcome:
    """What the operating system says, through the harness."""
    if refusal == "null":
        shown_path = path.replace("\0", "\\x00")
        return thrown(
            "input_validation",
            f"The argument 'path' must be a string, Uint8Array, or URL without null bytes. Received '{shown_path}'",
        )
    messages = {
        "too long": "ENAMETOOLONG: name too long, open",
        "not a folder": "ENOTDIR: not a directory, open",
        "no space": "ENOSPC: no space left on device, write",
    }
    return thrown(None, f"{messages[refusal]} '{path}'")


def edit_noop() -> Outcome:
    return refused("edit_noop", "No changes to make: old_string and new_string are exactly the same.")


def edit_not_read() -> Outcome:
    return refused("edit_not_read", "File has not been read yet. Read it first before writing to it.")


def edit_stale() -> Outcome:
    return refused(
        "edit_stale",
        "File has been modified since read, either by the user or by a linter. "
        "Read it again before attempting to write it.",
    )


def edit_no_match(old: str) -> Outcome:
    return refused("edit_no_match", f"String to replace not found in file.\nString: {old}")


def edit_ambiguous(count: int, old: str) -> Outcome:
    return refused(
        "edit_ambiguous",
        f"Found {count} matches of the string to replace, but replace_all is false. To replace all occurrences, set "
        "replace_all to true. To replace only one occurrence, please provide more context to uniquely identify the "
        f"instance.\nString: {old}",
    )


def exists_already() -> Outcome:
    return refused("input_validation", "Cannot create new file - file already exists.")
