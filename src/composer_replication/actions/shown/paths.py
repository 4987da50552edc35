"""Which paths a session has shown to be there or not: by tools that took or refused them, by listings, by searches."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from composer_replication.actions.paths import normal_path
from composer_replication.actions.shell.effects import may_change
from composer_replication.actions.shell.tree import lone_command
from composer_replication.actions.shown.named_paths import MAX_PATH, MAX_TEXT, PATH_WORD, NamedPaths
from composer_replication.actions.shown.views import may_change_anything, without_reminders
from composer_replication.actions.tools import channel_of, command_text, path_argument, plain_name, word_set
from composer_replication.types import ToolCall

if TYPE_CHECKING:
    from composer_replication.actions.shown.folder import ShellFolder

_HOME = re.compile(r"/(?:Users|home)/[^/]+")
_GONE = re.compile(r"'?([^\s:']+)'?: (?:open: |stat: )?No such file or directory|no such file or directory: (\S+)")
_IS_MISSING = re.compile(
    r"\b(?:file|path|directory)\b[^\n]{0,300}(?:does not exist|not found)|no such file or directory(?!, posix_spawn)",
    re.IGNORECASE,
)
_IS_THERE = re.compile(r"exceeds maximum|has not been read|not found in file|matches of the string|modified since")
_FOUND_LINE = re.compile(r"^([^\s:][^:\n]{0,300}\.\w+)(?::\d+.*)?$", re.MULTILINE)
_LISTED_LINE = re.compile(r"^(\.{0,2}/?[^\s:]{1,300})$", re.MULTILINE)
_HIDDEN_NAMES = frozenset({".git", ".github", ".gitignore", ".claude", ".vscode"})
_HIDDEN = re.compile(r"(?:^|/)\.")
_ODD = re.compile(r"[*?$`{\[]")
_FILE_NAME = re.compile(r"\.\w{1,8}$")
_MAX_GLOBS = 50
_MAX_FOUND = 100  # where searches of several agents stop
_LISTERS = word_set("glob find_file")
_SEARCHERS = word_set("grep search_file_content grep_search")
_FOLDER_LISTERS = word_set("ls list list_directory list_dir list_files directory_tree")


class Standing(NamedTuple):
    """Whether a path is there (None: nobody can say), and how that is known."""

    is_there: bool | None
    why: str

    @property
    def is_folder(self) -> bool:
        return self.why == "folder"


class KnownPaths:
    """Grows with the session, and takes its shell along. Paths are absolute where the session's folder is."""

    def __init__(self, cwd: str | None, shell: ShellFolder) -> None:
        self.root = None if cwd is None else normal_path(cwd, None)
        home = _HOME.match(cwd or "")
        self._home = home[0] if home else None
        self.shell = shell
        self.files: set[str] = set()
        self.folders: set[str] = set()
        self.missing: dict[str, str] = {}  # and how that is known
        self.too_large: set[str] = set()  # to be shown at once
        self._listed: dict[str, set[str]] = {}  # folders all of whose names are known
        self._globs: list[tuple[str, re.Pattern[str], frozenset[str]]] = []
        self._said = NamedPaths(self.root)
        self._missing_by_name: dict[str, list[str]] = {}
        if self.root:
            self._see_folder(self.root)

    def absolute(self, path: str, folder: str | None = None) -> str:
        """The path in one spelling, against where the shell stands or a given folder."""
        spelled = self._home + path[1:] if self._home and (path == "~" or path.startswith("~/")) else path
        return normal_path(spelled, folder or self.shell.path or self.root)

    def relative(self, path: str) -> str | None:
        """A path as it is called from the root; None where it lies elsewhere."""
        return path[len(self.root) + 1 :] if self.root and path.startswith(f"{self.root}/") else None

    def relative_files(self) -> Iterator[str]:
        """Files of the session's folder, as they are called there."""
        return (relative for path in self.files if (relative := self.relative(path)))

    @property
    def named(self) -> Iterator[str]:
        """The last two parts of every path that any text has named."""
        return self._said.last_two_parts()

    def standing(self, path: str) -> Standing:
        """What is known of an absolute path."""
        if path in self.files or path in self.folders:
            return Standing(True, "file" if path in self.files else "folder")
        for name in with_parents(path):
            above, _, last = name.rpartition("/")
            if name in self.missing:
                return Standing(False, self.missing[name])
            if name != path and name in self.files:
                return Standing(False, "below_a_file")
            if above in self._listed and last not in self._listed[above]:
                return Standing(False, "not_listed")
        for base, pattern, matches in self._globs:
            inside = path[len(base) + 1 : MAX_PATH] if path.startswith(f"{base}/") else "."
            if path not in matches and not _HIDDEN.search(inside) and pattern.fullmatch(inside):
                return Standing(False, "not_globbed")
        return Standing(None, self._said.how(path, self.relative(path) or path))

    def heard(self, text: str) -> None:
        """Words of somebody but the model, who may have made what they speak of."""
        self._said.hear(text)
        self._may_be_there(text)

    def take(self, call: ToolCall, text: str, *, failed: bool) -> None:
        """A call and what came back for it."""
        if call.raw_arguments is not None:
            return
        shown_text, channel = without_reminders(text), channel_of(call.name)
        if channel == "shell":
            self._said.hear(shown_text)
            self._ran(command_text(call.name, call.arguments), shown_text, failed)
            return
        written_path = path_argument(call.arguments)
        path = self.absolute(written_path) if written_path else None
        if failed:
            self._refused(path, shown_text[:400])
            return
        self._said.hear(shown_text)
        if may_change_anything(call):
            self._forget()
        elif plain_name(call.name) in _LISTERS:
            self._globbed(path or self.shell.path or self.root or "", call.arguments.get("pattern"), shown_text)
        elif plain_name(call.name) in _SEARCHERS:
            self._searched(path, shown_text)
        elif plain_name(call.name) in _FOLDER_LISTERS:
            self._see_folder(path or self.shell.path or self.root or "")
        elif channel == "file" and path:
            self.see_file(path)

    def see_file(self, path: str) -> None:
        folder, _, name = path.rpartition("/")
        self.files.add(path)
        self.missing.pop(path, None)
        self._see_folder(folder)
        if folder in self._listed:
            self._listed[folder].add(name)

    def _see_folder(self, path: str) -> None:
        for folder in with_parents(path):
            if folder in self.folders:
                return
            self.folders.add(folder)
            self.missing.pop(folder, None)

    def _refused(self, path: str | None, message: str) -> None:
        if path is None:
            return
        if "EISDIR" in message:
            self._see_folder(path)
        elif _IS_THERE.search(message):
            self.see_file(path)
            self.too_large |= {path} if "exceeds maximum" in message else set()
        elif _IS_MISSING.search(message):
            self._miss(path)

    def _miss(self, path: str) -> None:
        self.missing[path] = "failed_before"
        self._missing_by_name.setdefault(path.rpartition("/")[2], []).append(path)
        self.files.discard(path)
        self.folders.discard(path)

    def _may_be_there(self, text: str) -> None:
        """Whatever a text names is not known to be missing any more."""
        for word in PATH_WORD.findall(text[:MAX_TEXT]) if self._missing_by_name else ():
            for path in self._missing_by_name.pop(word.rpartition("/")[2].rstrip("."), ()):
                self.missing.pop(path, None)

    def _globbed(self, base: str, pattern: object, text: str) -> None:
        lines = [line for line in text.split("\n") if line and len(line) < MAX_PATH and " " not in line]
        paths = frozenset(self.absolute(line) for line in lines)
        for path in paths:
            self.see_file(path)
        compiled = _glob_pattern(pattern) if isinstance(pattern, str) else None
        if compiled is not None and base and len(paths) < _MAX_FOUND and "truncated" not in text:
            self._globs = [*self._globs[-_MAX_GLOBS:], (base, compiled, paths)]

    def _searched(self, path: str | None, text: str) -> None:
        if path is not None and path not in self.folders:
            if _FILE_NAME.search(path):
                self.see_file(path)
            else:
                self._see_folder(path)
        for name in _FOUND_LINE.findall(text[:MAX_TEXT]):
            self.see_file(self.absolute(name))

    def _ran(self, command: str, output: str, failed: bool) -> None:
        here = self.shell.path
        self.shell.take(command, output, failed=failed)
        change = may_change(command)
        if change == "moves":
            self._forget()
        elif change == "writes":
            self._listed.clear()
            self._globs.clear()
            self._may_be_there(command)
        if self.shell.path is not None and not failed:
            self._see_folder(self.shell.path)
        if failed and here is not None:
            for names in _GONE.findall(output[:4000]):
                name = names[0] or names[1]
                if name in command and not _ODD.search(name):
                    self._miss(self.absolute(name, here))
        elif here is not None and not failed:
            self._listed_by(command, output, self.shell.path or here)

    def _listed_by(self, command: str, output: str, here: str) -> None:
        simple = lone_command(command.rpartition("&&")[2])
        words = [word.literal or "*" for word in simple.words] if simple is not None and not simple.redirects else []
        if not words or any(_ODD.search(word) for word in words[1:]):
            return
        if words[0] == "ls":
            self._listed_by_ls(words[1:], output, here)
        elif words[0] == "find" or words[:2] == ["git", "ls-files"]:
            for name in _LISTED_LINE.findall(output[:MAX_TEXT]):
                path = self.absolute(name, here)
                if _FILE_NAME.search(path) and path not in self.folders:
                    self.see_file(path)

    def _listed_by_ls(self, words: list[str], output: str, here: str) -> None:
        flags = "".join(word for word in words if word.startswith("-"))
        targets = [word for word in words if not word.startswith("-")]
        if len(targets) > 1 or re.search(r"[Rd]", flags):
            return
        folder = self.absolute(targets[0], here) if targets else here
        rows = [row for row in output.split("\n") if row.strip() and not row.startswith("total ")]
        if targets and len(rows) == 1 and rows[0].endswith(targets[0]):
            self.see_file(folder)
            return
        names = set(_HIDDEN_NAMES) if not re.search("[aA]", flags) else set[str]()
        for row in rows[:5000]:
            name = (row.split(None, 8)[-1].split(" -> ")[0] if "l" in flags else row).rstrip("/@*")
            names.add(name)
            if "l" in flags and row.startswith("d") and name not in (".", ".."):
                self._see_folder(f"{folder}/{name}")
            elif _FILE_NAME.search(name):
                self.files.add(f"{folder}/{name}")
        self._see_folder(folder)
        if rows:
            self._listed[folder] = names

    def _forget(self) -> None:
        """The tree may be another one now."""
        self.missing.clear()
        self._missing_by_name.clear()
        self._listed.clear()
        self._globs.clear()


def with_parents(path: str) -> Iterator[str]:
    """A path and the folders above it."""
    while path and path != "/":
        yield path
        path = path.rpartition("/")[0]


def _glob_pattern(pattern: str) -> re.Pattern[str] | None:
    """The paths, from where the search began, that a glob takes; None for one that is not surely understood."""
    # More stars could be tried in too many ways.
    is_wild = pattern.count("**") > 1 or any(part.replace("**", "").count("*") > 2 for part in pattern.split("/"))
    if re.search(r"^/|[{\[!]", pattern) or len(pattern) > MAX_PATH or is_wild:
        return None
    means = {"**/": r"(?:[^/]+/)*", "**": r".*", "*": r"[^/]*", "?": r"[^/]"}
    parts: Iterable[str] = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    return re.compile("".join(means.get(part, re.escape(part)) for part in parts))
