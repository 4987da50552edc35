"""Track which paths exist, as far as a session has shown.

`KnownPaths` learns from tools that accepted or rejected a path, from listings and from searches. `ShellFolder` tracks
the working folder of the shell. The functions at the end extract the part of a file that a tool has shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import orjson

from composer_replication.sites.actions.shell_command import change_kind
from composer_replication.sites.actions.shell_equality import folder_after
from composer_replication.sites.actions.shell_lexer import UnsupportedShellSyntax
from composer_replication.sites.actions.shell_parser import parse_script, single_command
from composer_replication.sites.actions.tools import (
    LINE_NUMBER_PREFIX,
    PATH_KEYS,
    command_text,
    is_descriptive_parameter,
    normal_path,
    path_argument,
    plain_name,
    tool_channel,
    word_set,
)
from composer_replication.types import ToolCall

# "/home/<name>" in "/home/<name>/src/app"; not "/srv/app"
_HOME = re.compile(r"/(?:Users|home)/[^/]+")
# "ls: cannot access 'a.py': No such file or directory" -> "a.py", in zsh "no such file or directory: a.py" -> "a.py"
_NO_SUCH_FILE = re.compile(
    r"'?([^\s:']+)'?: (?:open: |stat: )?No such file or directory|no such file or directory: (\S+)"
)
# "File does not exist." and "Path not found"; not "no such file or directory, posix_spawn '/bin/zsh'", where the shell
# itself could not start
_REPORTS_MISSING = re.compile(
    r"\b(?:file|path|directory)\b[^\n]{0,300}(?:does not exist|not found)|no such file or directory(?!, posix_spawn)",
    re.IGNORECASE,
)
# Errors that prove that the file exists: "File has not been read yet", "String to replace not found in file"
_REPORTS_EXISTING = re.compile(
    r"exceeds maximum|has not been read|not found in file|matches of the string|modified since"
)
# "src/a.py:12:import os" and "src/a.py" -> "src/a.py"; not "12:import os"
_SEARCH_HIT = re.compile(r"^([^\s:][^:\n]{0,300}\.\w+)(?::\d+.*)?$", re.MULTILINE)
# A whole line with one path, as printed by find and `git ls-files`: "./src/a.py"; not "find: x: Permission denied"
_LISTED_PATH = re.compile(r"^(\.{0,2}/?[^\s:]{1,300})$", re.MULTILINE)
_HIDDEN_NAMES = frozenset({".git", ".github", ".gitignore", ".claude", ".vscode"})
# ".git/config" and "src/.env", which a glob does not match; not "src/a.py"
_HIDDEN_PART = re.compile(r"(?:^|/)\.")
# "*.py", "$DIR/a" and "{a,b}": words that the shell expands, so they are not paths themselves
_SHELL_SPECIAL = re.compile(r"[*?$`{\[]")
# ".py" in "src/a.py"; not "Makefile" or "src/"
_FILE_NAME = re.compile(r"\.\w{1,8}$")
_MAX_GLOBS = 50
_MAX_RESULTS = 100  # several agents stop a search at this number, so longer results may be incomplete
_LISTERS = word_set("glob find_file")
_SEARCHERS = word_set("grep search_file_content grep_search")
_FOLDER_LISTERS = word_set("ls list list_directory list_dir list_files directory_tree")


class PathStatus(NamedTuple):
    """Whether a path exists (None: unknown), and the evidence, such as `file` or `not_listed`."""

    exists: bool | None
    why: str

    @property
    def is_folder(self) -> bool:
        """Whether the path is known to be a folder."""
        return self.why == "folder"


class KnownPaths:
    """The paths that a session has revealed so far, and the working folder of its shell.

    Calls and messages are added in the order of the session. Paths are absolute if the session's folder is known.
    """

    def __init__(self, cwd: str | None, shell: ShellFolder) -> None:
        self.root = None if cwd is None else normal_path(cwd, None)
        home = _HOME.match(cwd or "")
        self._home = home[0] if home else None
        self.shell = shell
        self.files: set[str] = set()
        self.folders: set[str] = set()
        self.missing: dict[str, str] = {}  # path -> the evidence
        self.too_large: set[str] = set()  # files that the reading tool refused to show in one call
        self._listed: dict[str, set[str]] = {}  # folder -> all its entries, if a listing has shown them
        # (base folder, glob as a regular expression, matching paths)
        self._globs: list[tuple[str, re.Pattern[str], frozenset[str]]] = []
        self._mentions = _MentionedPaths(self.root)
        self._missing_by_name: dict[str, list[str]] = {}
        if self.root:
            self._add_folder(self.root)

    def absolute(self, path: str, folder: str | None = None) -> str:
        """Return the normalized absolute path, resolved against `folder` or else against the shell's folder."""
        expanded = self._home + path[1:] if self._home and (path == "~" or path.startswith("~/")) else path
        return normal_path(expanded, folder or self.shell.path or self.root)

    def relative(self, path: str) -> str | None:
        """Return a path relative to the session's folder, or None if the path is outside."""
        return path[len(self.root) + 1 :] if self.root and path.startswith(f"{self.root}/") else None

    def relative_files(self) -> Iterator[str]:
        """Yield the known files in the session's folder, relative to it."""
        return (relative for path in self.files if (relative := self.relative(path)))

    @property
    def mentioned_endings(self) -> Iterator[str]:
        """The last two components of every path that any text has mentioned."""
        return self._mentions.last_components()

    def status(self, path: str) -> PathStatus:
        """Return what is known about an absolute path."""
        if path in self.files or path in self.folders:
            return PathStatus(True, "file" if path in self.files else "folder")
        for name in path_with_parents(path):
            parent, _, last = name.rpartition("/")
            if name in self.missing:
                return PathStatus(False, self.missing[name])
            if name != path and name in self.files:
                return PathStatus(False, "below_a_file")
            if parent in self._listed and last not in self._listed[parent]:
                return PathStatus(False, "not_listed")
        for base, pattern, matches in self._globs:
            inside = path[len(base) + 1 : MAX_PATH] if path.startswith(f"{base}/") else "."
            if path not in matches and not _HIDDEN_PART.search(inside) and pattern.fullmatch(inside):
                return PathStatus(False, "not_globbed")
        return PathStatus(None, self._mentions.mention_level(path, self.relative(path) or path))

    def add_message(self, text: str) -> None:
        """Add a message from anyone except the model. Its author may have created the paths that it mentions."""
        self._mentions.add_text(text)
        self._forget_mentioned_missing(text)

    def add_call(self, call: ToolCall, text: str, *, failed: bool) -> None:
        """Add a call and its result."""
        if call.raw_arguments is not None:  # invalid JSON: the call was not run
            return
        shown_text, channel = remove_reminders(text), tool_channel(call.name)
        if channel == "shell":
            self._mentions.add_text(shown_text)
            self._add_command(command_text(call.name, call.arguments), shown_text, failed)
            return
        written_path = path_argument(call.arguments)
        path = self.absolute(written_path) if written_path else None
        if failed:
            self._add_refusal(path, shown_text[:400])
            return
        self._mentions.add_text(shown_text)
        if starts_writing_agent(call):
            self._forget_uncertain()
        elif plain_name(call.name) in _LISTERS:
            self._add_glob(path or self.shell.path or self.root or "", call.arguments.get("pattern"), shown_text)
        elif plain_name(call.name) in _SEARCHERS:
            self._add_search(path, shown_text)
        elif plain_name(call.name) in _FOLDER_LISTERS:
            self._add_folder(path or self.shell.path or self.root or "")
        elif channel == "file" and path:
            self.add_file(path)

    def add_file(self, path: str) -> None:
        """Record that a file and all its parent folders exist."""
        folder, _, name = path.rpartition("/")
        self.files.add(path)
        self.missing.pop(path, None)
        self._add_folder(folder)
        if folder in self._listed:
            self._listed[folder].add(name)

    def _add_folder(self, path: str) -> None:
        """Record that a folder and all its parent folders exist."""
        for folder in path_with_parents(path):
            if folder in self.folders:
                return
            self.folders.add(folder)
            self.missing.pop(folder, None)

    def _add_refusal(self, path: str | None, message: str) -> None:
        if path is None:
            return
        # An error may also reveal something about the path: it is a folder, it exists, or it is missing.
        if "EISDIR" in message:
            self._add_folder(path)
        elif _REPORTS_EXISTING.search(message):
            self.add_file(path)
            self.too_large |= {path} if "exceeds maximum" in message else set()
        elif _REPORTS_MISSING.search(message):
            self._add_missing(path)

    def _add_missing(self, path: str) -> None:
        self.missing[path] = "failed_before"
        self._missing_by_name.setdefault(path.rpartition("/")[2], []).append(path)
        self.files.discard(path)
        self.folders.discard(path)

    def _forget_mentioned_missing(self, text: str) -> None:
        """Stop treating a path as missing if the text mentions its name, since it may have been created."""
        for word in PATH_WORD.findall(text[:MAX_TEXT]) if self._missing_by_name else ():
            for path in self._missing_by_name.pop(word.rpartition("/")[2].rstrip("."), ()):
                self.missing.pop(path, None)

    def _add_glob(self, base: str, pattern: object, text: str) -> None:
        lines = [line for line in text.split("\n") if line and len(line) < MAX_PATH and " " not in line]
        paths = frozenset(self.absolute(line) for line in lines)
        for path in paths:
            self.add_file(path)
        # A complete result also proves that every other path that matches the pattern is missing.
        compiled = _compile_glob(pattern) if isinstance(pattern, str) else None
        if compiled is not None and base and len(paths) < _MAX_RESULTS and "truncated" not in text:
            self._globs = [*self._globs[-_MAX_GLOBS:], (base, compiled, paths)]

    def _add_search(self, path: str | None, text: str) -> None:
        # A successful search proves that the searched path exists.
        if path is not None and path not in self.folders:
            if _FILE_NAME.search(path):
                self.add_file(path)
            else:
                self._add_folder(path)
        for name in _SEARCH_HIT.findall(text[:MAX_TEXT]):
            self.add_file(self.absolute(name))

    def _add_command(self, command: str, output: str, failed: bool) -> None:
        cwd = self.shell.path
        self.shell.update(command, output, failed=failed)
        change = change_kind(command)
        if change == "moves":
            self._forget_uncertain()
        elif change == "writes":
            # New files may have been created anywhere, so listings may no longer be complete.
            self._listed.clear()
            self._globs.clear()
            self._forget_mentioned_missing(command)
        if self.shell.path is not None and not failed:
            self._add_folder(self.shell.path)
        if failed and cwd is not None:
            for names in _NO_SUCH_FILE.findall(output[:4000]):
                name = names[0] or names[1]
                # Only a path in the command itself: a script may complain about a path relative to another folder.
                if name in command and not _SHELL_SPECIAL.search(name):
                    self._add_missing(self.absolute(name, cwd))
        elif cwd is not None and not failed:
            self._add_listing(command, output, self.shell.path or cwd)

    def _add_listing(self, command: str, output: str, cwd: str) -> None:
        # `cd src && ls`: the output comes from the last command.
        simple = single_command(command.rpartition("&&")[2])
        words = [word.literal or "*" for word in simple.words] if simple is not None and not simple.redirects else []
        if not words or any(_SHELL_SPECIAL.search(word) for word in words[1:]):
            return
        if words[0] == "ls":
            self._add_ls_listing(words[1:], output, cwd)
        elif words[0] == "find" or words[:2] == ["git", "ls-files"]:
            for name in _LISTED_PATH.findall(output[:MAX_TEXT]):
                path = self.absolute(name, cwd)
                if _FILE_NAME.search(path) and path not in self.folders:
                    self.add_file(path)

    def _add_ls_listing(self, words: list[str], output: str, cwd: str) -> None:
        flags = "".join(word for word in words if word.startswith("-"))
        targets = [word for word in words if not word.startswith("-")]
        # With several targets, -R or -d, the names do not belong to a single folder.
        if len(targets) > 1 or re.search(r"[Rd]", flags):
            return
        folder = self.absolute(targets[0], cwd) if targets else cwd
        rows = [row for row in output.split("\n") if row.strip() and not row.startswith("total ")]
        if targets and len(rows) == 1 and rows[0].endswith(targets[0]):  # `ls file` prints the file itself
            self.add_file(folder)
            return
        # Without -a or -A, ls omits hidden names, so common hidden names count as listed.
        names = set(_HIDDEN_NAMES) if not re.search("[aA]", flags) else set[str]()
        for row in rows[:5000]:
            # "drwxr-xr-x 2 ann ann 4096 Jan 1 10:00 src -> lib": the name is the ninth column
            name = (row.split(None, 8)[-1].split(" -> ")[0] if "l" in flags else row).rstrip("/@*")
            names.add(name)
            if "l" in flags and row.startswith("d") and name not in (".", ".."):
                self._add_folder(f"{folder}/{name}")
            elif _FILE_NAME.search(name):
                self.files.add(f"{folder}/{name}")
        self._add_folder(folder)
        if rows:
            self._listed[folder] = names

    def _forget_uncertain(self) -> None:
        """Forget what may be outdated after a command such as git checkout, which can change the whole tree."""
        self.missing.clear()
        self._missing_by_name.clear()
        self._listed.clear()
        self._globs.clear()


def path_with_parents(path: str) -> Iterator[str]:
    """Yield a path and its parent folders, excluding the root."""
    while path and path != "/":
        yield path
        path = path.rpartition("/")[0]


def _compile_glob(pattern: str) -> re.Pattern[str] | None:
    r"""Convert a glob to a regular expression for paths relative to the start of the search.

    For example, `src/**/*.py` becomes `src/(?:[^/]+/)*[^/]*\.py`. Return None if the glob is not supported.
    """
    # More asterisks could make matching take exponential time.
    is_wild = pattern.count("**") > 1 or any(part.replace("**", "").count("*") > 2 for part in pattern.split("/"))
    if re.search(r"^/|[{\[!]", pattern) or len(pattern) > MAX_PATH or is_wild:
        return None
    regexes = {"**/": r"(?:[^/]+/)*", "**": r".*", "*": r"[^/]*", "?": r"[^/]"}
    # "src/**/*.py" -> "src/", "**/", "", "*", ".py": the separators are kept because the group captures them
    parts: Iterable[str] = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    # "src/*.py" -> "src/[^/]*\.py"
    return re.compile("".join(regexes.get(part, re.escape(part)) for part in parts))


MAX_TEXT = 300_000
MAX_PATH = 300
_MAX_ENDS = 100_000  # endings of the mentioned paths; deeply nested paths have many
# "see src/a.py, please" -> "see", "src/a.py", "please"
PATH_WORD = re.compile(r"/?[\w.@+\-]+(?:/[\w.@+\-]+)*")


class _MentionedPaths:
    """The paths mentioned by any text in a session, whoever wrote it. They need not exist.

    Texts are searched only on the first query, since most sessions never make a query. `root` is the session's folder.
    """

    def __init__(self, root: str | None) -> None:
        self._root_prefix = f"{root}/" if root else "/"
        self._unprocessed_texts: list[str] = []  # texts that have not been searched yet
        self._words: set[str] = set()  # everything that looks like a path, as mentioned
        self._names: set[str] = set()  # their last components
        self._endings: set[str] = set()  # endings of paths outside the session's folder

    def add_text(self, text: str) -> None:
        """Add a text, to be searched at the next query."""
        self._unprocessed_texts.append(text)

    def last_components(self) -> Iterator[str]:
        """Yield the last two components of every mentioned path."""
        self._process_texts()
        return ("/".join(word.rsplit("/", 2)[-2:]) for word in self._words if "/" in word)

    def mention_level(self, path: str, relative: str) -> str:
        """Return how fully an absolute path was mentioned: `named`, `its_end_named`, `only_its_name` or `unseen`.

        `relative` is the same path relative to the root.
        """
        self._process_texts()
        if path in self._words or relative in self._words or relative in self._endings:
            return "named"
        if any(end in self._words for end in _path_endings(relative)):
            return "its_end_named"
        return "only_its_name" if relative.rpartition("/")[2] in self._names else "unseen"

    def _process_texts(self) -> None:
        for text in self._unprocessed_texts:
            for word in {word.rstrip(".") for word in PATH_WORD.findall(text[:MAX_TEXT])} - self._words:
                if not 2 < len(word) < MAX_PATH:
                    continue
                plain = word.removeprefix(self._root_prefix)
                self._words.update((word, plain))
                self._names.add(plain.rpartition("/")[2])
                # "/opt/app/x.py", "../lib/x.py" and "example.org/x.py" are probably outside the session's folder.
                is_elsewhere = plain.startswith("/") or "." in plain.partition("/")[0]
                if is_elsewhere and len(self._endings) < _MAX_ENDS:
                    # Another folder may hold a copy of the project, so only the endings of such paths are compared.
                    self._endings.update(_path_endings(plain))
        self._unprocessed_texts.clear()


def _path_endings(path: str) -> Iterator[str]:
    """Yield the endings of a path with at least two components: `a/b/c` has `a/b/c` and `b/c`."""
    parts = path.strip("/").split("/")
    return ("/".join(parts[start:]) for start in range(len(parts) - 1))


# "Shell cwd was reset to /repo" -> "/repo": Claude Code writes it after a command that left the session's folder
_FOLDER_RESET = re.compile(r"Shell cwd was reset to (\S.{0,400})")
# "cd src && ls"; not "abcd"
_CHANGES_FOLDER = re.compile(r"\b(?:cd|pushd|popd)\b")


class ShellFolder:
    """The working folder of a shell that persists between calls. `path` is None if it cannot be determined."""

    def __init__(self, cwd: str | None) -> None:
        self.path = None if cwd is None else normal_path(cwd, None)

    @staticmethod
    def may_change_folder(command: str, output: str) -> bool:
        """Return whether a command may change the working folder, or whether its output names that folder."""
        return (
            _CHANGES_FOLDER.search(command) is not None
            or _FOLDER_RESET.search(output, max(0, len(output) - 600)) is not None
        )

    def update(self, command: str, output: str, *, failed: bool) -> None:
        """Update the folder after a command. A failed command does not change the folder, unless the output says so."""
        reset = _FOLDER_RESET.search(output, max(0, len(output) - 600))
        if reset is not None:
            self.path = normal_path(reset[1].strip(), None)
        elif not failed and _CHANGES_FOLDER.search(command):
            try:
                folder = folder_after(parse_script(command), self.path)
            except UnsupportedShellSyntax:
                folder = None
            self.path = None if folder is None else normal_path(folder, None)


# "Note: /repo/a.py was modified, either by the user or by a linter." -> "/repo/a.py", from Claude Code
CHANGED_NOTE = re.compile(r"Note: (\S+) was modified")
_READ_ONLY_AGENTS = frozenset({"Explore", "Plan"})
_READERS = word_set("read read_file view view_file cat open_file str_replace_editor str_replace_based_edit_tool")
_PATH_KEYS = frozenset({*PATH_KEYS, "command"})
_MAX_LINES = 2000  # several agents' readers stop at this line, so a view of this length may be incomplete
_MAX_LINE = 2000  # longer lines are truncated
_MAX_DIGITS = 6  # longer numbers are not line numbers: no session reads a file with a million lines
_REMINDER, _REMINDER_END = "<system-reminder>", "</system-reminder>"
# "Here's the result of running `cat -n` on /repo/a.py:\n" and "<file>\n"
_VIEW_HEADER = re.compile(r"\AHere's the (?:result|content)[^\n]{0,400}:\n|\A<file>\n")
# "\n\n(End of file - total 3 lines)\n</file>" and "\n</file>"
_VIEW_FOOTER = re.compile(r"(?:\n+\(End of file[^\n]{0,80}\))?\n</file>\s*\Z")
# "[output truncated]", "... 120 more lines", "<response clipped>", "(File has more lines. Use offset)"
_TRUNCATED = re.compile(
    r"\[[^\]\n]{0,80}truncated[^\]\n]{0,80}\]|<response clipped>|\.\.\. ?[\[(]?\d+ (?:more )?(?:lines|characters)"
    r"|\(File has more lines|content (?:has been|was) truncated|\(Showing lines",
    re.IGNORECASE,
)
# "Exit code: 0\nWall time: 0.1 seconds\nOutput:\n", which Codex puts before a command's output
_ENVELOPE = re.compile(r"\A(?:Exit code: \d+\n)?(?:[A-Z][\w ]{0,30}: [^\n]{0,80}\n){0,6}Output:\n")


class _ShownFile(NamedTuple):
    """A file that a tool has shown in full."""

    path: str
    text: str


class _FileExcerpt(NamedTuple):
    """Consecutive lines of a file, starting at line number `first`. A truncated line is None.

    `has_end` is set if the last of these lines is the last line of the file.
    """

    first: int
    lines: list[str | None]
    has_end: bool


def shown_excerpt(call: ToolCall, text: str) -> _FileExcerpt | None:
    """Return the first run of numbered lines that a tool showed, or None if it showed none."""
    lines, first = list[str | None](), 0
    for line in remove_reminders(text).split("\n"):
        match = LINE_NUMBER_PREFIX.match(line)
        if match is None or len(match[1]) > _MAX_DIGITS or int(match[1]) != first + len(lines):
            if lines:
                break
            if match is None or len(match[1]) > _MAX_DIGITS:
                continue
            first = int(match[1])
        line_text = line[match.end() :]
        lines.append(None if len(line_text) >= _MAX_LINE or line_text.endswith("[truncated]") else line_text)
    if not lines or first < 1:
        return None
    # A view with fewer lines than the limit reaches the end of the file. This is only certain for `Read`.
    limit = call.arguments.get("limit")
    reaches_end = len(lines) < limit if isinstance(limit, int) and limit > 0 else len(lines) != _MAX_LINES
    return _FileExcerpt(first, lines, has_end=reaches_end and plain_name(call.name) == "read")


def remove_reminders(text: str) -> str:
    """Return what a tool showed, without the reminders that Claude Code appends to results."""
    end = len(text)
    # A result may end with several reminders, so they are removed one by one from the end.
    while (text_end := _strip_end(text, end, " \t\r\n\f\v")) and text.endswith(_REMINDER_END, 0, text_end):
        start = text.rfind(_REMINDER, 0, text_end)
        if start < 0:
            break
        end = _strip_end(text, start, "\n")
    return text[:end]


def _strip_end(text: str, end: int, blanks: str) -> int:
    """Return the position after the last nonblank character before `end`, without copying the text."""
    while end and text[end - 1] in blanks:
        end -= 1
    return end


def file_shown_by_tool(call: ToolCall, text: str) -> _ShownFile | None:
    """Return the file that a reading tool showed in full, or None if only a part was requested or shown."""
    path = path_argument(call.arguments)
    names = [
        name
        for name, value in call.arguments.items()
        if value is not None and not is_descriptive_parameter(call.name, name)
    ]
    if path is None or plain_name(call.name) not in _READERS or not _PATH_KEYS.issuperset(names):
        return None
    whole = _text_without_line_numbers(text)
    return _ShownFile(path, whole) if whole is not None else None


def file_printed_by_cat(command: str, output: str) -> _ShownFile | None:
    """Return the file printed by a plain `cat file`, or None for any other command."""
    if not command.lstrip().startswith("cat"):
        return None
    simple = single_command(command)
    if simple is None or simple.redirects:
        return None
    words = [word.literal for word in simple.words]
    path = words[-1]
    if words[0] != "cat" or path is None or path.startswith("-") or words[1:-1] not in ([], ["-n"]):
        return None
    whole = _text_without_line_numbers(_output_without_envelope(output))
    return _ShownFile(path, whole) if whole is not None else None


def _output_without_envelope(text: str) -> str:
    """Return the output of a command, without the envelope that some tools put around it."""
    if text.startswith('{"output"'):
        try:
            value: object = orjson.loads(text)
        except orjson.JSONDecodeError:
            return text
        inner = value.get("output") if isinstance(value, dict) else None
        return inner if isinstance(inner, str) else text
    return _ENVELOPE.sub("", text, count=1)


def _text_without_line_numbers(text: str) -> str | None:
    """Return the text of a file from a view of it, without line numbers, or None if the view is truncated.

    A view does not show whether the last line ends in a newline. A newline is added, since text files normally end in
    one.
    """
    text = _VIEW_FOOTER.sub("", _VIEW_HEADER.sub("", remove_reminders(text), count=1))
    lines = text.split("\n")
    if _TRUNCATED.search(text) or len(lines) > _MAX_LINES or any(len(line) > _MAX_LINE for line in lines):
        return None
    # Unnumbered blank lines after the last numbered line belong to the view, not to the file.
    numbers = [LINE_NUMBER_PREFIX.match(line) for line in lines]
    while len(lines) > 1 and not lines[-1] and numbers[-1] is None and numbers[0] is not None:
        lines, numbers = lines[:-1], numbers[:-1]
    if numbers[0] is not None and int(numbers[0][1]) == 1 and None not in numbers:
        matches = [match for match in numbers if match is not None]
        if [int(match[1]) for match in matches] != list(range(1, len(matches) + 1)):
            return None
        lines = [line[match.end() :] for line, match in zip(lines, matches, strict=True)]
    elif numbers[0] is not None and sum(match is not None for match in numbers) > 1:
        return None  # the numbers do not start at 1, or have gaps
    whole = "\n".join(lines)
    return whole if whole.endswith("\n") or not whole else f"{whole}\n"


def starts_writing_agent(call: ToolCall) -> bool:
    """Return whether a call starts another agent, which may write files."""
    return plain_name(call.name) in ("task", "agent") and call.arguments.get("subagent_type") not in _READ_ONLY_AGENTS
