"""What each tool does, and its schema. Names and arguments are Claude Code's where it has the tool."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any

from composer_replication.envs.workspace import words
from composer_replication.envs.workspace.files import Files, absolute, below_root
from composer_replication.envs.workspace.sandbox import TestRunner
from composer_replication.envs.workspace.words import Outcome

MAX_LINES, MAX_LINE, MAX_ENTRIES = 2000, 2000, 100


def _tool(name: str, about: str, required: str, **properties: tuple[str, str]) -> dict[str, Any]:
    schema = {key: {"type": kind, "description": text} for key, (kind, text) in properties.items()}
    parameters = {
        "type": "object",
        "properties": schema,
        "required": required.split(),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


_PATH = ("string", "The absolute path")
TOOLS: tuple[dict[str, Any], ...] = (
    _tool("LS", "Lists a folder.", "path", path=_PATH),
    _tool("Glob", "Finds files by pattern.", "pattern", pattern=("string", "A glob pattern"), path=_PATH),
    _tool("Grep", "Finds lines by regular expression.", "pattern", pattern=("string", "The expression"), path=_PATH),
    _tool(
        "Read",
        "Reads a file, with line numbers.",
        "file_path",
        file_path=_PATH,
        offset=("number", "The line to start at"),
        limit=("number", "How many lines"),
    ),
    _tool(
        "Edit",
        "Replaces an exact string in a file that was read.",
        "file_path old_string new_string",
        file_path=_PATH,
        old_string=("string", "The text to replace"),
        new_string=("string", "What to put there"),
        replace_all=("boolean", "Replace every occurrence"),
    ),
    _tool("Write", "Writes a file.", "file_path content", file_path=_PATH, content=("string", "The whole text")),
    _tool("RunTests", "Runs the tests.", ""),
    _tool("Finish", "Says that the work is done.", ""),
)


class Toolbox:
    """The tools over one set of files; remembers what was read, as harnesses do."""

    def __init__(self, files: Files, runner: Callable[[], TestRunner]) -> None:
        self.files, self._runner = files, runner
        self._read: dict[str, str] = {}

    def use(self, name: str, given: Mapping[str, Any]) -> Outcome:
        does = {"LS": self._ls, "Glob": self._glob, "Grep": self._grep, "Read": self._read_file, "Edit": self._edit}
        does |= {"Write": self._write, "RunTests": self._runtests}
        return does[name](**given)

    def _ls(self, path: str) -> Outcome:
        name = below_root(path)
        if name is None or not self.files.is_folder(name):
            return words.folder_not_found(path)
        return Outcome(text="\n".join([f"- {absolute(name)}/", *(f"  - {each}" for each in self.files.entries(name))]))

    def _glob(self, pattern: str, path: str = "") -> Outcome:
        name = below_root(path)
        if name is None or not self.files.is_folder(name):
            return words.folder_not_found(path)
        pattern = pattern.removeprefix(absolute(name) + "/").replace("**/", "*")
        start = len(name) + 1 if name else 0
        hits = [absolute(each) for each in self.files.below(name) if fnmatch.fnmatchcase(each[start:], pattern)]
        return Outcome(text="\n".join(hits[:MAX_ENTRIES]) or "No files found")

    def _grep(self, pattern: str, path: str = "") -> Outcome:
        name = below_root(path)
        if name is None or not (name in self.files or self.files.is_folder(name)):
            return words.path_not_found(path)
        try:
            expression = re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            return words.failure("input_validation", f"regex parse error: {error}")
        names = [name] if name in self.files else self.files.below(name)
        hits = [
            f"{absolute(each)}:{number}:{line[:MAX_LINE]}"
            for each in names
            for number, line in enumerate(self.files[each].split("\n"), 1)
            if expression.search(line)
        ]
        return Outcome(text="\n".join(hits[:MAX_ENTRIES]) or "No matches found")

    def _read_text(self, file_path: str) -> tuple[str, Outcome | None]:
        name = below_root(file_path)
        if name is not None and name in self.files:
            return name, None
        if name is not None and self.files.is_folder(name):
            return "", words.is_directory()
        similar = self.files.similar(name) if name else None
        return "", words.file_not_found(absolute(similar) if similar else None)

    def _read_file(self, file_path: str, offset: float = 1, limit: float = MAX_LINES) -> Outcome:
        name, failed = self._read_text(file_path)
        if failed:
            return failed
        self._read[name] = self.files[name]
        lines = self.files[name].split("\n")
        start = max(int(offset), 1) - 1
        shown = lines[start : start + int(min(limit, MAX_LINES))]
        return Outcome(text="\n".join(f"{start + at:>6}→{line[:MAX_LINE]}" for at, line in enumerate(shown, 1)))

    def _edit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> Outcome:
        if old_string == new_string:
            return words.edit_noop()
        name, failed = self._read_text(file_path)
        if failed:
            return failed
        if not old_string:
            return words.exists_already()
        if name not in self._read:
            return words.edit_not_read()
        text = self.files[name]
        if self._read[name] != text:
            return words.edit_stale()
        count = text.count(old_string)
        if count == 0:
            return words.edit_no_match(old_string)
        if count > 1 and not replace_all:
            return words.edit_ambiguous(count, old_string)
        self._put(name, text.replace(old_string, new_string))
        return Outcome(text=f"The file {absolute(name)} has been updated successfully.")

    def _write(self, file_path: str, content: str) -> Outcome:
        name = below_root(file_path)
        if name is None:
            return words.outside(file_path)
        if self.files.is_folder(name):
            return words.is_directory()
        if name in self.files and name not in self._read:
            return words.edit_not_read()
        is_new = name not in self.files
        self._put(name, content)
        path = absolute(name)
        return Outcome(
            text=f"File created successfully at: {path}"
            if is_new
            else f"The file {path} has been updated successfully."
        )

    def _put(self, name: str, text: str) -> None:
        self.files.write(name, text)
        self._read[name] = text

    def _runtests(self) -> Outcome:
        paths = [each for each in self.files.below("tests") if each.endswith(".py")]
        return Outcome(text=self._runner().run_tests(self.files.texts, paths).text)
