"""Which paths a session has shown to be there or not: by tools that took or refused them, by listings, by searches."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import orjson

from composer_replication.sites.actions.shell_command import may_change
from composer_replication.sites.actions.shell_keys import folder_after
from composer_replication.sites.actions.shell_tree import lone_command, parse_script
from composer_replication.sites.actions.shell_words import NotUnderstood
from composer_replication.sites.actions.tools import (
    LINE_NUMBER,
    PATH,
    channel_of,
    command_text,
    is_label,
    normal_path,
    path_argument,
    plain_name,
    word_set,
)
from composer_replication.types import ToolCall

if TYPE_CHECKING:
    pass


_HOME = re.compile(r"/(?:Users|home)/[^/]+")
_NO_SUCH_FILE = re.compile(
    r"'?([^\s:']+)'?: (?:open: |stat: )?No such file or directory|no such file or directory: (\S+)"
)
_REPORTS_MISSING = re.compile(
    r"\b(?:file|path|directory)\b[^\n]{0,300}(?:does not exist|not found)|no such file or directory(?!, posix_spawn)",
    re.IGNORECASE,
)
_REPORTS_EXISTING = re.compile(
    r"exceeds maximum|has not been read|not found in file|matches of the string|modified since"
)
_SEARCH_HIT = re.compile(r"^([^\s:][^:\n]{0,300}\.\w+)(?::\d+.*)?$", re.MULTILINE)
_LISTED_PATH = re.compile(r"^(\.{0,2}/?[^\s:]{1,300})$", re.MULTILINE)
_HIDDEN_NAMES = frozenset({".git", ".github", ".gitignore", ".claude", ".vscode"})
_HIDDEN_PART = re.compile(r"(?:^|/)\.")
_SHELL_SPECIAL = re.compile(r"[*?$`{\[]")
_FILE_NAME = re.compile(r"\.\w{1,8}$")
_MAX_GLOBS = 50
_MAX_RESULTS = 100  # where searches of several agents stop
_LISTERS = word_set("glob find_file")
_SEARCHERS = word_set("grep search_file_content grep_search")
_FOLDER_LISTERS = word_set("ls list list_directory list_dir list_files directory_tree")


class PathStatus(NamedTuple):
    """Whether a path is there (None: nobody can say), and how that is known."""

    exists: bool | None
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
        self._mentions = _MentionedPaths(self.root)
        self._missing_by_name: dict[str, list[str]] = {}
        if self.root:
            self._add_folder(self.root)

    def absolute(self, path: str, folder: str | None = None) -> str:
        """The path in one spelling, against where the shell stands or a given folder."""
        expanded = self._home + path[1:] if self._home and (path == "~" or path.startswith("~/")) else path
        return normal_path(expanded, folder or self.shell.path or self.root)

    def relative(self, path: str) -> str | None:
        """A path as it is called from the root; None where it lies elsewhere."""
        return path[len(self.root) + 1 :] if self.root and path.startswith(f"{self.root}/") else None

    def relative_files(self) -> Iterator[str]:
        """Files of the session's folder, as they are called there."""
        return (relative for path in self.files if (relative := self.relative(path)))

    @property
    def mentioned_endings(self) -> Iterator[str]:
        """The last two parts of every path that any text has named."""
        return self._mentions.last_two_parts()

    def status(self, path: str) -> PathStatus:
        """What is known of an absolute path."""
        if path in self.files or path in self.folders:
            return PathStatus(True, "file" if path in self.files else "folder")
        for name in with_parents(path):
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
        return PathStatus(None, self._mentions.how_mentioned(path, self.relative(path) or path))

    def add_message(self, text: str) -> None:
        """Words of somebody but the model, who may have made what they speak of."""
        self._mentions.add_text(text)
        self._drop_missing_if_mentioned(text)

    def add_call(self, call: ToolCall, text: str, *, failed: bool) -> None:
        """A call and what came back for it."""
        if call.raw_arguments is not None:
            return
        shown_text, channel = without_reminders(text), channel_of(call.name)
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
        if may_change_anything(call):
            self._drop_cached()
        elif plain_name(call.name) in _LISTERS:
            self._add_glob(path or self.shell.path or self.root or "", call.arguments.get("pattern"), shown_text)
        elif plain_name(call.name) in _SEARCHERS:
            self._add_search(path, shown_text)
        elif plain_name(call.name) in _FOLDER_LISTERS:
            self._add_folder(path or self.shell.path or self.root or "")
        elif channel == "file" and path:
            self.add_file(path)

    def add_file(self, path: str) -> None:
        folder, _, name = path.rpartition("/")
        self.files.add(path)
        self.missing.pop(path, None)
        self._add_folder(folder)
        if folder in self._listed:
            self._listed[folder].add(name)

    def _add_folder(self, path: str) -> None:
        for folder in with_parents(path):
            if folder in self.folders:
                return
            self.folders.add(folder)
            self.missing.pop(folder, None)

    def _add_refusal(self, path: str | None, message: str) -> None:
        if path is None:
            return
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

    def _drop_missing_if_mentioned(self, text: str) -> None:
        """Whatever a text names is not known to be missing any more."""
        for word in PATH_WORD.findall(text[:MAX_TEXT]) if self._missing_by_name else ():
            for path in self._missing_by_name.pop(word.rpartition("/")[2].rstrip("."), ()):
                self.missing.pop(path, None)

    def _add_glob(self, base: str, pattern: object, text: str) -> None:
        lines = [line for line in text.split("\n") if line and len(line) < MAX_PATH and " " not in line]
        paths = frozenset(self.absolute(line) for line in lines)
        for path in paths:
            self.add_file(path)
        compiled = _glob_regex(pattern) if isinstance(pattern, str) else None
        if compiled is not None and base and len(paths) < _MAX_RESULTS and "truncated" not in text:
            self._globs = [*self._globs[-_MAX_GLOBS:], (base, compiled, paths)]

    def _add_search(self, path: str | None, text: str) -> None:
        if path is not None and path not in self.folders:
            if _FILE_NAME.search(path):
                self.add_file(path)
            else:
                self._add_folder(path)
        for name in _SEARCH_HIT.findall(text[:MAX_TEXT]):
            self.add_file(self.absolute(name))

    def _add_command(self, command: str, output: str, failed: bool) -> None:
        cwd = self.shell.path
        self.shell.follow(command, output, failed=failed)
        change = may_change(command)
        if change == "moves":
            self._drop_cached()
        elif change == "writes":
            self._listed.clear()
            self._globs.clear()
            self._drop_missing_if_mentioned(command)
        if self.shell.path is not None and not failed:
            self._add_folder(self.shell.path)
        if failed and cwd is not None:
            for names in _NO_SUCH_FILE.findall(output[:4000]):
                name = names[0] or names[1]
                if name in command and not _SHELL_SPECIAL.search(name):
                    self._add_missing(self.absolute(name, cwd))
        elif cwd is not None and not failed:
            self._add_listing(command, output, self.shell.path or cwd)

    def _add_listing(self, command: str, output: str, cwd: str) -> None:
        simple = lone_command(command.rpartition("&&")[2])
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
        if len(targets) > 1 or re.search(r"[Rd]", flags):
            return
        folder = self.absolute(targets[0], cwd) if targets else cwd
        rows = [row for row in output.split("\n") if row.strip() and not row.startswith("total ")]
        if targets and len(rows) == 1 and rows[0].endswith(targets[0]):
            self.add_file(folder)
            return
        names = set(_HIDDEN_NAMES) if not re.search("[aA]", flags) else set[str]()
        for row in rows[:5000]:
            name = (row.split(None, 8)[-1].split(" -> ")[0] if "l" in flags else row).rstrip("/@*")
            names.add(name)
            if "l" in flags and row.startswith("d") and name not in (".", ".."):
                self._add_folder(f"{folder}/{name}")
            elif _FILE_NAME.search(name):
                self.files.add(f"{folder}/{name}")
        self._add_folder(folder)
        if rows:
            self._listed[folder] = names

    def _drop_cached(self) -> None:
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


def _glob_regex(pattern: str) -> re.Pattern[str] | None:
    """The paths, from where the search began, that a glob takes; None for one that is not surely understood."""
    # More stars could be tried in too many ways.
    is_wild = pattern.count("**") > 1 or any(part.replace("**", "").count("*") > 2 for part in pattern.split("/"))
    if re.search(r"^/|[{\[!]", pattern) or len(pattern) > MAX_PATH or is_wild:
        return None
    means = {"**/": r"(?:[^/]+/)*", "**": r".*", "*": r"[^/]*", "?": r"[^/]"}
    parts: Iterable[str] = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    return re.compile("".join(means.get(part, re.escape(part)) for part in parts))


# Which paths any text has named, whoever wrote it: that says that somebody spoke of them, not that they are there.

MAX_TEXT = 300_000
MAX_PATH = 300
_MAX_ENDS = 100_000  # of paths that a session names; deep ones have many
PATH_WORD = re.compile(r"/?[\w.@+\-]+(?:/[\w.@+\-]+)*")


class _MentionedPaths:
    """Grows with the texts of a session, which are read when somebody asks. `root` is the session's folder."""

    def __init__(self, root: str | None) -> None:
        self._inside = f"{root}/" if root else "/"
        self._unread: list[str] = []  # texts whose words nobody has asked for
        self._words: set[str] = set()  # all that looks like a path, as it was named
        self._names: set[str] = set()  # their last parts
        self._path_endings: set[str] = set()  # and what paths from elsewhere end in

    def add_text(self, text: str) -> None:
        self._unread.append(text)

    def last_two_parts(self) -> Iterator[str]:
        """Of every path that was named."""
        self._read_words()
        return ("/".join(word.rsplit("/", 2)[-2:]) for word in self._words if "/" in word)

    def how_mentioned(self, path: str, expanded: str) -> str:
        """Whether an absolute path, which is `spelled` so from the root, was named in whole or in part, in a word."""
        self._read_words()
        if path in self._words or expanded in self._words or expanded in self._path_endings:
            return "named"
        if any(end in self._words for end in _path_endings(expanded)):
            return "its_end_named"
        return "only_its_name" if expanded.rpartition("/")[2] in self._names else "unseen"

    def _read_words(self) -> None:
        for text in self._unread:
            for word in {word.rstrip(".") for word in PATH_WORD.findall(text[:MAX_TEXT])} - self._words:
                if not 2 < len(word) < MAX_PATH:
                    continue
                plain = word.removeprefix(self._inside)
                self._words.update((word, plain))
                self._names.add(plain.rpartition("/")[2])
                is_elsewhere = plain.startswith("/") or "." in plain.partition("/")[0]
                if is_elsewhere and len(self._path_endings) < _MAX_ENDS:
                    self._path_endings.update(
                        _path_endings(plain)
                    )  # of another place, or of what the project is called elsewhere
        self._unread.clear()


def _path_endings(path: str) -> Iterator[str]:
    """What a path ends in, of two parts and more."""
    parts = path.strip("/").split("/")
    return ("/".join(parts[start:]) for start in range(len(parts) - 1))


# Where the shell stands: some tools keep it between calls, and say so when they put it back.

_FOLDER_RESET = re.compile(r"Shell cwd was reset to (\S.{0,400})")
_CHANGES_FOLDER = re.compile(r"\b(?:cd|pushd|popd)\b")


class ShellFolder:
    """`path` is None where it cannot be said."""

    def __init__(self, cwd: str | None) -> None:
        self.path = None if cwd is None else normal_path(cwd, None)

    @staticmethod
    def may_change_folder(command: str, output: str) -> bool:
        """Whether a command may leave the shell elsewhere, or says where it stands."""
        return (
            _CHANGES_FOLDER.search(command) is not None
            or _FOLDER_RESET.search(output, max(0, len(output) - 600)) is not None
        )

    def follow(self, command: str, output: str, *, failed: bool) -> None:
        """After a command; one that failed leaves the shell where it was."""
        reset = _FOLDER_RESET.search(output, max(0, len(output) - 600))
        if reset is not None:
            self.path = normal_path(reset[1].strip(), None)
        elif not failed and _CHANGES_FOLDER.search(command):
            try:
                folder = folder_after(parse_script(command), self.path)
            except NotUnderstood:
                folder = None
            self.path = None if folder is None else normal_path(folder, None)


# What a tool shows of a file: whole or a part, out of line numbers, envelopes and notes.
#
# A view that is cut is no whole one. It does not say whether the last line ends in a newline; text files do, so one is
# added where none is shown.

CHANGED_NOTE = re.compile(r"Note: (\S+) was modified")
_READ_ONLY_AGENTS = frozenset({"Explore", "Plan"})
_READERS = word_set("read read_file view view_file cat open_file str_replace_editor str_replace_based_edit_tool")
_PATH_KEYS = frozenset({*PATH, "command"})
_MAX_LINES = 2000  # where the readers of several agents stop
_MAX_LINE = 2000
_MAX_DIGITS = 6  # no session reads a file of a million lines
_REMINDER, _REMINDER_END = "<system-reminder>", "</system-reminder>"
_VIEW_HEADER = re.compile(r"\AHere's the (?:result|content)[^\n]{0,400}:\n|\A<file>\n")
_VIEW_FOOTER = re.compile(r"(?:\n+\(End of file[^\n]{0,80}\))?\n</file>\s*\Z")
_TRUNCATED = re.compile(
    r"\[[^\]\n]{0,80}truncated[^\]\n]{0,80}\]|<response clipped>|\.\.\. ?[\[(]?\d+ (?:more )?(?:lines|characters)"
    r"|\(File has more lines|content (?:has been|was) truncated|\(Showing lines",
    re.IGNORECASE,
)
_ENVELOPE = re.compile(r"\A(?:Exit code: \d+\n)?(?:[A-Z][\w ]{0,30}: [^\n]{0,80}\n){0,6}Output:\n")


class ShownFile(NamedTuple):
    path: str
    text: str


class _ShownPart(NamedTuple):
    """Lines from the one with the number `first`; one that is cut is None. `has_end`: the file ends with the last."""

    first: int
    lines: list[str | None]
    has_end: bool


def part_in_view(call: ToolCall, text: str) -> _ShownPart | None:
    """The numbered lines that a tool showed, the first run of them; None where there are none."""
    lines, first = list[str | None](), 0
    for line in without_reminders(text).split("\n"):
        match = LINE_NUMBER.match(line)
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
    limit = call.arguments.get("limit")
    is_last_part = len(lines) < limit if isinstance(limit, int) and limit > 0 else len(lines) != _MAX_LINES
    return _ShownPart(first, lines, has_end=is_last_part and plain_name(call.name) == "read")


def without_reminders(text: str) -> str:
    """What a tool showed, without what the agent put behind it."""
    end = len(text)
    while (text_end := _end_before(text, end, " \t\r\n\f\v")) and text.endswith(_REMINDER_END, 0, text_end):
        start = text.rfind(_REMINDER, 0, text_end)
        if start < 0:
            break
        end = _end_before(text, start, "\n")
    return text[:end]


def _end_before(text: str, end: int, blanks: str) -> int:
    """Where the text up to `end` ends if blanks there are left out; no text is copied, however often it is asked."""
    while end and text[end - 1] in blanks:
        end -= 1
    return end


def file_in_view(call: ToolCall, text: str) -> ShownFile | None:
    """The file a reading tool showed in full; None where it was asked for a part, or shows one."""
    path = path_argument(call.arguments)
    names = [name for name, value in call.arguments.items() if value is not None and not is_label(call.name, name)]
    if path is None or plain_name(call.name) not in _READERS or not _PATH_KEYS.issuperset(names):
        return None
    whole = _whole_text(text)
    return ShownFile(path, whole) if whole is not None else None


def file_in_output(command: str, output: str) -> ShownFile | None:
    """The file that a plain `cat file` printed."""
    if not command.lstrip().startswith("cat"):
        return None
    simple = lone_command(command)
    if simple is None or simple.redirects:
        return None
    words = [word.literal for word in simple.words]
    path = words[-1]
    if words[0] != "cat" or path is None or path.startswith("-") or words[1:-1] not in ([], ["-n"]):
        return None
    whole = _whole_text(_output_of(output))
    return ShownFile(path, whole) if whole is not None else None


def _output_of(text: str) -> str:
    """What was printed, out of the envelopes some tools put around it."""
    if text.startswith('{"output"'):
        try:
            value: object = orjson.loads(text)
        except orjson.JSONDecodeError:
            return text
        inner = value.get("output") if isinstance(value, dict) else None
        return inner if isinstance(inner, str) else text
    return _ENVELOPE.sub("", text, count=1)


def _whole_text(text: str) -> str | None:
    text = _VIEW_FOOTER.sub("", _VIEW_HEADER.sub("", without_reminders(text), count=1))
    lines = text.split("\n")
    if _TRUNCATED.search(text) or len(lines) > _MAX_LINES or any(len(line) > _MAX_LINE for line in lines):
        return None
    numbers = [LINE_NUMBER.match(line) for line in lines]
    while len(lines) > 1 and not lines[-1] and numbers[-1] is None and numbers[0] is not None:
        lines, numbers = lines[:-1], numbers[:-1]
    if numbers[0] is not None and int(numbers[0][1]) == 1 and None not in numbers:
        matches = [match for match in numbers if match is not None]
        if [int(match[1]) for match in matches] != list(range(1, len(matches) + 1)):
            return None
        lines = [line[match.end() :] for line, match in zip(lines, matches, strict=True)]
    elif numbers[0] is not None and sum(match is not None for match in numbers) > 1:
        return None  # numbered from elsewhere, or with gaps
    whole = "\n".join(lines)
    return whole if whole.endswith("\n") or not whole else f"{whole}\n"


def may_change_anything(call: ToolCall) -> bool:
    """Whether a call hands over to another agent that may write."""
    return plain_name(call.name) in ("task", "agent") and call.arguments.get("subagent_type") not in _READ_ONLY_AGENTS
