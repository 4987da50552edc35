"""What each tool does. Names and arguments are Claude Code's where it has the tool; so are the answers."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from typing import Any

from composer_replication.envs.workspace import words
from composer_replication.envs.workspace.files import MAX_FILE, Files, absolute, below_root
from composer_replication.envs.workspace.regex.program import PatternError
from composer_replication.envs.workspace.regex.search import BudgetError, Regex
from composer_replication.envs.workspace.sandbox import TestRunner
from composer_replication.envs.workspace.words import Outcome

MAX_LINES, MAX_LINE = 2000, 2000
MAX_CHARACTERS = 100_000
"""What one Read may show: 25,000 tokens of four characters."""
MAX_HITS, MAX_HIT = 100, 500
TRUNCATED = "(Results are truncated. Consider using a more specific path or pattern.)"


class Toolbox:
    """The tools over one set of files; remembers what was read, as harnesses do."""

    def __init__(self, files: Files, runner: Callable[[], TestRunner]) -> None:
        self.files, self._runner = files, runner
        self._read: dict[str, str] = {}
        self._does: dict[str, Callable[..., Outcome]] = {
            "LS": self.list_folder,
            "Glob": self.find_files,
            "Grep": self.find_lines,
            "Read": self.read,
            "Edit": self.edit,
            "Write": self.write,
            "RunTests": self.run_tests,
        }

    def use(self, name: str, given: Mapping[str, Any]) -> Outcome:
        """A tool by its name, with arguments that fit its schema."""
        return self._does[name](**given)

    def list_folder(self, path: str) -> Outcome:
        name = below_root(path)
        if name is None or not self.files.is_folder(name):
            return words.folder_not_found(path)
        entries = [f"  - {entry}" for entry in self.files.entries(name)]
        return _hits([f"- {absolute(name)}/", *entries], "")

    def find_files(self, pattern: str, path: str = "") -> Outcome:
        name = below_root(path)
        if name is None or not self.files.is_folder(name):
            return words.folder_not_found(path)
        hits = self.files.matching(name, pattern)
        if hits is None:
            return words.invalid_glob(pattern)
        return _hits([absolute(hit) for hit in hits], "No files found")

    def find_lines(self, pattern: str, path: str = "") -> Outcome:
        name = below_root(path)
        if name is None or not (name in self.files or self.files.is_folder(name)):
            return words.path_not_found(path)
        try:
            expression = Regex(pattern)
            hits = [
                f"{absolute(file_name)}:{number}:{line[:MAX_HIT]}"
                for file_name in ([name] if name in self.files else self.files.below(name))
                for number, line in enumerate(self.files[file_name].split("\n"), 1)
                if line and expression.matches(line)
            ]
        except PatternError as error:
            return words.invalid_regex(str(error))
        except BudgetError:
            return words.search_timed_out()
        return _hits(hits, "No matches found")

    def read(self, file_path: str, offset: float = 1, limit: float = MAX_LINES) -> Outcome:
        name = self._file(file_path)
        if isinstance(name, Outcome):
            return name
        text = self.files[name]
        self._read[name] = text
        if not text:
            return Outcome(text=words.EMPTY)
        lines = text.split("\n")
        start = max(int(offset), 1) - 1
        if start >= len(lines):
            return Outcome(text=words.SHORTER.format(offset=_number(offset), lines=len(lines)))
        stop = start + max(int(min(limit, MAX_LINES)), 1)
        numbered_text = "\n".join(f"{at:>6}→{line[:MAX_LINE]}" for at, line in enumerate(lines[start:stop], start + 1))
        return (
            Outcome(text=numbered_text)
            if len(numbered_text) <= MAX_CHARACTERS
            else words.too_large(len(numbered_text) // 4)
        )

    def edit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> Outcome:
        if old_string == new_string:
            return words.edit_noop()
        name = self._file(file_path)
        if isinstance(name, Outcome):
            is_new = not old_string and name.kind == "file_not_found"
            return self.write(file_path, new_string) if is_new else name
        text = self.files[name]
        if not old_string and text.strip():
            return words.exists_already()
        if name not in self._read:
            return words.edit_not_read()
        if self._read[name] != text:
            return words.edit_stale()
        count = text.count(old_string) if old_string else 1
        if count == 0:
            return words.edit_no_match(old_string)
        if count > 1 and not replace_all:
            return words.edit_ambiguous(count, old_string)
        if old_string and len(text) + count * (len(new_string) - len(old_string)) > MAX_FILE:
            return words.cannot_write("no space", absolute(name))  # before a text of that size is in memory
        return self._put(name, text.replace(old_string, new_string) if old_string else new_string)

    def write(self, file_path: str, content: str) -> Outcome:
        name = below_root(file_path)
        if name is None:
            return words.outside(file_path)
        if self.files.is_folder(name):
            return words.is_directory("open", file_path)
        if name in self.files:
            if name not in self._read:
                return words.edit_not_read()
            if self._read[name] != self.files[name]:
                return words.edit_stale()
        return self._put(name, content)

    def run_tests(self) -> Outcome:
        """Formats what is not formatted, as many a project's test command does, and runs every test."""
        formatted = self.files.format_code()
        paths = [path for path in self.files.below("tests") if posixpath.basename(path).startswith("test_")]
        report = self._runner().run_tests(self.files.texts, [path for path in paths if path.endswith(".py")])
        text = "\n".join([*(f"reformatted {path}" for path in formatted), report.text])
        return Outcome(text=text) if report.ended else words.thrown(None, text)

    def _file(self, path: str) -> str | Outcome:
        """The file's name below the root, or what a harness says where there is no such file."""
        name = below_root(path)
        if name is not None and name in self.files:
            return name
        if name is not None and self.files.is_folder(name):
            return words.is_directory("read")
        similar = self.files.similar(path if name is None else name)
        return words.file_not_found(absolute(similar) if similar else None)

    def _put(self, name: str, text: str) -> Outcome:
        is_new = name not in self.files
        refusal = self.files.refuses(name, text)
        if refusal is not None:
            return words.cannot_write(refusal, absolute(name))
        self.files.write(name, text)
        self._read[name] = text
        path = absolute(name)
        message = (
            f"File created successfully at: {path}" if is_new else f"The file {path} has been updated successfully."
        )
        return Outcome(text=message)


def _hits(lines: list[str], none: str) -> Outcome:
    return Outcome(text="\n".join(lines[:MAX_HITS] + [TRUNCATED] * (len(lines) > MAX_HITS)) or none)


def _number(value: float) -> str:
    """A line number as it was given; huge ones by their size."""
    return str(value) if abs(value) < 1e15 else f"{float(min(value, 1e300)):.3g}"
