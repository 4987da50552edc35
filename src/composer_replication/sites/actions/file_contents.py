"""Track the content of files, as far as a session has shown it.

`FileTexts` covers all files in a session: the known text, whether the agent counts the file as read, and whether the
file may have changed since. `FileText` is a single file: its known lines, with gaps, and later edits.
`_CommandChanges` records which files were written by shell commands.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from composer_replication.sites.actions.edits import Operation, Put, Replace, edit_operations
from composer_replication.sites.actions.known_paths import (
    CHANGED_NOTE,
    file_printed_by_cat,
    file_shown_by_tool,
    shown_excerpt,
    starts_writing_agent,
)
from composer_replication.sites.actions.shell_command import change_kind, files_written_by
from composer_replication.sites.actions.tools import (
    command_text,
    is_edit,
    is_read_only_tool_call,
    normal_path,
    path_argument,
    plain_name,
    tool_channel,
    word_set,
)
from composer_replication.types import ToolCall

if TYPE_CHECKING:
    from composer_replication.sites.actions.known_paths import ShellFolder


_SEARCH_TOOLS = word_set(
    "grep glob ls list list_directory list_dir list_files search_file_content find_file grep_search"
)
# "src/a.py:12:x = 1" -> ("src/a.py", "12", "x = 1"), "12:x = 1" -> ("", "12", "x = 1"); not "x = 1"
_SEARCH_HIT = re.compile(r"^(?:([^\s:][^:\n]{0,300}?)[:-])?(\d{1,6})[:-](.*)$", re.MULTILINE)
_MAX_TEXT = 400_000
_MAX_HEAD = 4000
# "look at @src/a.py" -> "src/a.py"; not "ann@host.org"
_AT_MENTION = re.compile(r"(?:^|[\s\"'(])@([\w./~-]{2,300})")
# "This session is being continued from a previous conversation": files read earlier may still count as read
_CONTINUED_SESSION = re.compile(r"\AThis session is being continued from a previous")
# "Implement the following plan:" begins a session that carries out a plan from an earlier session
_PLAN_REQUEST = re.compile(r"\AImplement the following plan")
AGENT_EXIT = "<command-name>/exit<"
"""In the user's message after the agent was exited. On restart, it remembers only files read or written in full."""
# "I've just renamed the module" and "we fixed it"; not "you changed it"
_USER_CHANGED_FILES = re.compile(
    r"\b(?:i|we)(?:'ve| have)?(?: just| now| already| also)? (?:changed|edited|reworked|fixed|updated|formatted|renamed"
    r"|moved|removed|deleted|added|reverted|merged|rebased|pulled|committed|undid|rewrote)\b",
    re.IGNORECASE,
)
# "File has not been read yet. Read it first before writing to it."
_REFUSED_UNREAD = re.compile(r"has not been read")


class FileTexts:
    """The files in a session by normalized path, as far as they were shown.

    `read` contains the files that a file tool has shown or written. Claude Code refuses to edit any others.
    """

    def __init__(self, cwd: str | None, shell: ShellFolder) -> None:
        self.cwd = cwd
        self.is_continued = self.starts_with_summary = self.has_plan = False
        self._mentioned: set[str] = set()
        self._read_in_full: set[str] = set()
        self._refused_as_unread: set[str] = set()  # edits rejected because the file had not been read
        self.read: dict[str, None] = {}  # in the order of the last use
        self._files: dict[str, FileText] = {}
        self._edits: dict[str, list[Replace]] = {}
        self._by_name: dict[str, list[str]] = {}  # by file name, without the folder
        # Times are counts of the events that may have changed files.
        self._now = 0
        self._maybe_changed_at = 0  # a person or a command may have changed any file
        self._tree_changed_at = 0  # all files may have been replaced: git checkout, another agent
        self._reworked_at = 0  # a formatter ran, or the user reported changes
        self._checked_at: dict[str, int] = {}  # when the doubt about a file was last updated
        self._last_used_at: dict[str, int] = {}  # when a file tool last showed or wrote a file
        self._commands = _CommandChanges(shell)

    def get(self, path: str) -> FileText | None:
        """Return what is known about a file, or None if nothing is known.

        Before that, update the record of whether the file may have changed since it was shown.
        """
        name = normal_path(path, self.cwd)
        text = self._files.get(name)
        if text is not None:
            checked_at = self._checked_at[name]
            text.may_be_reworked = text.may_be_reworked or checked_at < self._reworked_at
            if checked_at < self._tree_changed_at:
                text.doubt = 2
            elif checked_at < self._maybe_changed_at:
                text.doubt = max(text.doubt, 1)
            self._checked_at[name] = self._now
        return text

    def edits(self, path: str) -> list[Replace]:
        """Return the replacements that were made in a file, in order."""
        return self._edits.get(normal_path(path, self.cwd), [])

    def add_message(self, text: str) -> None:
        """Add a message from anyone except the model. Its author may have changed files in the meantime."""
        if text.strip():
            self._now += 1
            self._maybe_changed_at = self._now
            self._reworked_at = self._now if _USER_CHANGED_FILES.search(text[:_MAX_HEAD]) else self._reworked_at
        is_start = not self.read and _CONTINUED_SESSION.search(text[:_MAX_HEAD]) is not None
        self.starts_with_summary = self.starts_with_summary or is_start
        self.has_plan = self.has_plan or _PLAN_REQUEST.search(text[:_MAX_HEAD]) is not None
        self.is_continued = (
            self.is_continued or self.has_plan or _CONTINUED_SESSION.search(text[:_MAX_HEAD]) is not None
        )
        # After a restart, Claude Code remembers only the files that it has read or written in full.
        if AGENT_EXIT in text:
            self.read = {path: None for path in self.read if path in self._read_in_full}
        self._mentioned.update(normal_path(path, self.cwd) for path in _AT_MENTION.findall(text[:_MAX_TEXT]))
        for path in CHANGED_NOTE.findall(text):
            self._mark_changed(path)

    def was_read(self, path: str) -> bool | None:
        """Return whether the agent counts a file as read.

        None means unknown: the file may have been read before the log begins, or because the user mentioned it.
        """
        name = normal_path(path, self.cwd)
        if name in self.read:
            return True
        if name in self._refused_as_unread:
            return False
        return None if self.is_continued or name in self._mentioned else False

    def was_read_in_full(self, path: str) -> bool:
        """Return whether a file tool has shown or written the whole file in one call."""
        return normal_path(path, self.cwd) in self._read_in_full

    def change_by_command(self, path: str) -> ChangeCertainty:
        """Return whether a command has changed a file since a file tool last touched it.

        The answer is `surely`, `maybe` or "" (no).
        """
        name = normal_path(path, self.cwd)
        touched_at = self._last_used_at.get(name)
        return "" if touched_at is None else self._commands.last_change(touched_at, name)

    def was_mentioned(self, path: str) -> bool:
        """Return whether a person mentioned a file with `@`, which shows the file to the agent."""
        return normal_path(path, self.cwd) in self._mentioned

    def add_failed_call(self, call: ToolCall, text: str) -> None:
        """Add a failed call and its result."""
        path = path_argument(call.arguments)
        if tool_channel(call.name) == "shell":
            self._commands.add_failure(text)
        if path and tool_channel(call.name) == "file" and _REFUSED_UNREAD.search(text[:_MAX_HEAD]):
            self._refused_as_unread.add(normal_path(path, self.cwd))
            self.read.pop(normal_path(path, self.cwd), None)

    def add_call(self, call: ToolCall, text: str) -> None:
        """Add a successful call and its result."""
        if call.raw_arguments is not None:
            return
        path = path_argument(call.arguments)
        if tool_channel(call.name) == "shell":
            self._add_command(command_text(call.name, call.arguments), text)
        elif path and plain_name(call.name) in _SEARCH_TOOLS:
            self._add_search(path, text)
        elif is_read_only_tool_call(call.name, call.arguments):
            self._add_view(call, path, text)
        elif tool_channel(call.name) == "file" and is_edit(call.name):
            self._add_edit(call, path, text)
        elif starts_writing_agent(call):
            self._now += 1
            self._tree_changed_at = self._now

    def _add_view(self, call: ToolCall, path: str | None, text: str) -> None:
        if path is None:
            return
        self._mark_read(path, in_full=not (call.arguments.get("offset") or call.arguments.get("limit")))
        # Numbered lines keep their numbers even in a partial view. Without numbers, the view must be the whole file.
        part = shown_excerpt(call, text)
        whole = file_shown_by_tool(call, text) if part is None or not part.has_end else None
        if part is not None and whole is None:
            self._get_or_create(path).add_lines(part.first, part.lines, has_end=part.has_end)
        elif whole is not None:
            self._get_or_create(path).write(whole.text)

    def _add_search(self, path: str, text: str) -> None:
        file = self.get(path)
        for hit_path, line_number, line in _SEARCH_HIT.findall(text[:_MAX_TEXT]) if file is not None else ():
            if file is not None and (not hit_path or normal_path(hit_path, self.cwd) == normal_path(path, self.cwd)):
                file.add_line(int(line_number), line)

    def _add_edit(self, call: ToolCall, path: str | None, text: str) -> None:
        operations = edit_operations(call, self.cwd)
        if operations is None:
            self._mark_changed(path or "")
            return
        for operation in operations:
            self._mark_read(operation.path, in_full=isinstance(operation, Put))
            self._apply(operation)
        part = shown_excerpt(call, text) if path else None
        file = self.get(path) if path else None
        if part is not None and file is not None and not file.is_whole:
            file.add_lines(part.first, part.lines)

    def _apply(self, operation: Operation) -> None:
        if isinstance(operation, Put):
            self._get_or_create(operation.path).write(operation.text)
        elif isinstance(operation, Replace):
            self._get_or_create(operation.path).replace(operation.old, operation.new, everywhere=operation.everywhere)
            self._edits.setdefault(operation.path, []).append(operation)
        else:
            self._mark_changed(operation.path)

    def _add_command(self, command: str, output: str) -> None:
        change = change_kind(command)
        self._now += change != "nothing"
        self._commands.add(self._now, command, output, change_kind=change != "nothing")
        if change == "moves":
            self._tree_changed_at = self._now
        elif change == "formats":
            self._maybe_changed_at = self._reworked_at = self._now
        elif change == "writes":
            # Every file named in the command may have changed: "cp src/a.py b.py" -> "cp", "a.py", "b.py".
            words = {word.rpartition("/")[2] for word in re.findall(r"[^\s'\"=:;|&<>()]+", command)}
            for name in (name for word in words for name in self._by_name.get(word, ())):
                self._mark_changed(name)
        shown_file = file_printed_by_cat(command, output)
        # The shell's folder is not tracked here, so only an absolute path is certain.
        if shown_file is not None and shown_file.path.startswith("/"):
            self._get_or_create(shown_file.path).write(shown_file.text)

    def _mark_read(self, path: str, *, in_full: bool) -> None:
        name = normal_path(path, self.cwd)
        self._refused_as_unread.discard(name)
        if in_full:
            self._read_in_full.add(name)
        # Removed and added again, so that `read` stays in the order of last use.
        self.read.pop(name, None)
        self.read[name] = None
        self._last_used_at[name] = self._now

    def _mark_changed(self, path: str) -> None:
        file = self.get(path)
        if file is not None:
            file.doubt = 2

    def _get_or_create(self, path: str) -> FileText:
        """Return the file at a path, created if it is new."""
        name = normal_path(path, self.cwd)
        if name not in self._files:
            self._files[name], self._checked_at[name] = FileText(), self._now
            self._by_name.setdefault(name.rpartition("/")[2], []).append(name)
        file = self.get(path)
        assert file is not None
        return file


ChangeCertainty = Literal["", "maybe", "surely"]
_MAX_OUTPUT = 400_000
# Formatter output, one line per file: "reformatted a.py" (black), "Fixing a.py" (isort), "a.ts 12ms" (prettier), "a.go"
_FORMATTED = re.compile(r"^(?:reformatted |Fixing )?(\S+)(?: \d+ ?ms)?$", re.MULTILINE)


class _CommandRun(NamedTuple):
    """A command with its output, and when it ran."""

    when: int
    command: str
    output: str
    failed: bool


class _CommandChanges:
    """The files written by shell commands. Commands are analyzed lazily, at the first query.

    Times (`when`) increase during the session. No other code may update `shell`.
    """

    def __init__(self, shell: ShellFolder) -> None:
        self._shell = shell
        self._pending: list[_CommandRun] = []
        self._written_at: dict[str, int] = {}
        self._formatted_at = 0

    def add(self, when: int, command: str, output: str, *, change_kind: bool) -> None:
        """Add a successful command."""
        if change_kind or self._shell.may_change_folder(command, output):
            self._pending.append(_CommandRun(when, command, output, failed=False))

    def add_failure(self, output: str) -> None:
        """Add a failed command, which matters only if its output names the shell's folder."""
        if self._shell.may_change_folder("", output):
            self._pending.append(_CommandRun(0, "", output, failed=True))

    def last_change(self, when: int, path: str) -> ChangeCertainty:
        """Return whether a command has changed a file since time `when`: `surely`, `maybe` or "" for no.

        The answer is `maybe` if a formatter ran, since it may have skipped the file.
        """
        for run in self._pending:
            if not run.failed:
                self._apply_run(run)
            self._shell.update(run.command, run.output, failed=run.failed)
        self._pending.clear()
        if self._written_at.get(path, 0) > when:
            return "surely"
        return "maybe" if self._formatted_at > when else ""

    def _apply_run(self, run: _CommandRun) -> None:
        names, formats = files_written_by(run.command)
        self._formatted_at = run.when if formats else self._formatted_at
        # A formatter's output is parsed only if no other program that ran could have printed it.
        formatted_names = _FORMATTED.findall(run.output[:_MAX_OUTPUT]) if formats == "alone" else []
        for name in (*names, *formatted_names):
            if name.startswith("/") or self._shell.path is not None:
                self._written_at[normal_path(name, self._shell.path)] = run.when


Doubt = Literal[0, 1, 2]
"""0: as shown. 1: a person or a command may have changed the file. 2: the file was changed in an unknown way."""
_GAP = "\0"  # replaces a line that was not shown; cannot occur in text


class FileText:
    """One file, as far as a session has shown it. A view that contradicts earlier views replaces them.

    Line numbers start at 1; a line that was not shown is None. If an edit changes a part that was not shown, its new
    text is stored as a separate piece, and the line numbers become invalid.
    """

    def __init__(self) -> None:
        self.doubt: Doubt = 0
        self.may_be_reworked = False  # a formatter ran, or the user reported changes: stronger than doubt 1
        self._lines: list[str | None] = []
        self._has_end = False  # the last of these lines is the last line of the file
        self._are_numbered = True
        self._pieces: list[str] = []
        self._text: str | None = ""  # cached `text`; None after a change

    @property
    def is_whole(self) -> bool:
        """Whether every line of the file is known."""
        return self._has_end and self._are_numbered and None not in self._lines

    @property
    def num_lines(self) -> int:
        """The number of lines up to the last known line."""
        return len(self._lines)

    def add_lines(self, first: int, lines: Sequence[str | None], *, has_end: bool = False) -> None:
        """Add consecutive lines from a view, starting at line number `first`. A truncated line is None."""
        start = max(first, 1) - 1
        before = self._lines[start : start + len(lines)]
        agrees = all(old is None or new is None or old == new for old, new in zip(before, lines, strict=False))
        is_complete = has_end and start == 0
        if is_complete or not agrees or not self._are_numbered or self.doubt == 2:
            self._clear()
        self._lines += [None] * (start + len(lines) - len(self._lines))
        current_lines = self._lines[start : start + len(lines)]
        self._lines[start : start + len(lines)] = [
            new if new is not None else old for old, new in zip(current_lines, lines, strict=True)
        ]
        if has_end:
            del self._lines[start + len(lines) :]
            self._has_end = True
        if is_complete:
            self.doubt, self.may_be_reworked = 0, False
        self._text = None

    def add_line(self, line_number: int, line: str) -> None:
        """Add a line from a search result, unless that line is already known."""
        is_new = line_number > len(self._lines) or (line_number > 0 and self._lines[line_number - 1] is None)
        if line_number > 0 and is_new and self._are_numbered and not self.doubt and not self._has_end:
            self.add_lines(line_number, [line])

    def write(self, text: str) -> None:
        """Replace the content of the whole file."""
        self.add_lines(1, text.split("\n"), has_end=True)

    def replace(self, old: str, new: str, *, everywhere: bool = False) -> None:
        """Apply a successful edit."""
        shown_text = self.text
        # With `everywhere`, the text may also have been replaced in gaps, so the line numbers become invalid.
        if old and old in shown_text:
            self._are_numbered = self._are_numbered and (self.is_whole or not everywhere)
            changed = shown_text.replace(old, new) if everywhere else shown_text.replace(old, new, 1)
            self._lines = [None if line == _GAP else line for line in changed.split("\n")]
            self._text = changed
            return
        self._pieces = [piece.replace(old, new) if old else piece for piece in self._pieces] + [new]
        self._are_numbered = False

    def count(self, fragment: str) -> int:
        """Return how often a text occurs in the known parts. All pieces without a position count as one occurrence."""
        count = self.text.count(fragment)
        return count or int(any(fragment in piece for piece in self._pieces))

    def contradicts(self, fragment: str, *, min_length: int = 24) -> bool:
        """Return whether, wherever the first line of a text was shown, different lines follow it."""
        first, *rest = fragment.split("\n")
        if not rest or len(first.strip()) < min_length or not self._are_numbered:
            return False
        starts = [index for index, line in enumerate(self._lines) if line is not None and line.endswith(first)]
        return bool(starts) and all(self._differs_from(start + 1, rest) for start in starts)

    def _differs_from(self, start: int, rest: list[str]) -> bool:
        current_lines = self._lines[start : start + len(rest)]
        if len(current_lines) < len(rest):
            return self._has_end
        # The fragment may end in the middle of a line, so its last line is compared as a prefix.
        *middle, last = zip(current_lines, rest, strict=True)
        if any(line is not None and line != other_line for line, other_line in middle):
            return True
        return last[0] is not None and not last[0].startswith(last[1])

    @property
    def text(self) -> str:
        """The known lines, with a placeholder for each unknown line."""
        if self._text is None:
            self._text = "\n".join(_GAP if line is None else line for line in self._lines)
        return self._text

    def is_part_of(self, whole: str) -> bool:
        """Return whether `whole` has every known line at the same line number.

        Return False if the line numbers are invalid.
        """
        lines = whole.split("\n")
        if self._are_numbered:
            return len(self._lines) <= len(lines) and all(
                line_or_gap is None or line_or_gap == line
                for line_or_gap, line in zip(self._lines, lines, strict=False)
            )
        return False

    def _clear(self) -> None:
        self._lines, self._has_end, self._are_numbered, self._pieces, self.doubt = [], False, True, [], 0
