"""Whole files as a session has shown and changed them: out of what tools show, with line numbers and notes taken off.

Parts of files and views that are cut are refused. A view does not say whether the last line ends in a newline; text
files do, so one is added where none is shown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import orjson

from composer_replication.actions.edits import changes_of, edit_operations, take_changes
from composer_replication.actions.paths import normal_path
from composer_replication.actions.shell.dollars import NotUnderstood
from composer_replication.actions.shell.effects import keeps_sources
from composer_replication.actions.shell.keys import folder_after
from composer_replication.actions.shell.tree import lone_command, parse_script, shell_script
from composer_replication.actions.tools import (
    LINE_NUMBER,
    PATH,
    channel_of,
    command_parameter,
    is_label,
    only_looks,
    path_argument,
    plain_name,
    word_set,
)
from composer_replication.types import ToolCall

_CHANGED_NOTE = re.compile(r"Note: (\S+) was modified")
_READERS = word_set("read read_file view view_file cat open_file str_replace_editor str_replace_based_edit_tool")
_PATH_KEYS = frozenset({*PATH, "command"})
_MAX_LINES = 2000  # where the readers of several agents stop
_MAX_LINE = 2000
_REMINDER, _REMINDER_END = "<system-reminder>", "</system-reminder>"
_HEAD = re.compile(r"\AHere's the (?:result|content)[^\n]{0,400}:\n|\A<file>\n")
_TAIL = re.compile(r"(?:\n+\(End of file[^\n]{0,80}\))?\n</file>\s*\Z")
_CUT = re.compile(
    r"\[[^\]\n]{0,80}truncated[^\]\n]{0,80}\]|<response clipped>|\.\.\. ?[\[(]?\d+ (?:more )?(?:lines|characters)"
    r"|\(File has more lines|content (?:has been|was) truncated|\(Showing lines",
    re.IGNORECASE,
)
_ENVELOPE = re.compile(r"\A(?:Exit code: \d+\n)?(?:[A-Z][\w ]{0,30}: [^\n]{0,80}\n){0,6}Output:\n")


class Shown(NamedTuple):
    path: str
    text: str


def file_in_view(call: ToolCall, text: str) -> Shown | None:
    """The file a reading tool showed in full; None where it was asked for a part, or shows one."""
    path = path_argument(call.arguments)
    others = [name for name, value in call.arguments.items() if value is not None and not is_label(call.name, name)]
    if path is None or plain_name(call.name) not in _READERS or not _PATH_KEYS.issuperset(others):
        return None
    whole = _whole_text(text)
    return Shown(path, whole) if whole is not None else None


def file_in_output(command: str, output: str) -> Shown | None:
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
    return Shown(path, whole) if whole is not None else None


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
    while text.rstrip().endswith(_REMINDER_END) and _REMINDER in text:
        text = text[: text.rindex(_REMINDER)].rstrip("\n")
    text = _TAIL.sub("", _HEAD.sub("", text, count=1))
    lines = text.split("\n")
    if _CUT.search(text) or len(lines) > _MAX_LINES or any(len(line) > _MAX_LINE for line in lines):
        return None
    numbers = [LINE_NUMBER.match(line) for line in lines]
    while len(lines) > 1 and not lines[-1] and numbers[-1] is None and numbers[0] is not None:
        lines, numbers = lines[:-1], numbers[:-1]
    if numbers[0] is not None and int(numbers[0][1]) == 1 and None not in numbers:
        found = [match for match in numbers if match is not None]
        if [int(match[1]) for match in found] != list(range(1, len(found) + 1)):
            return None
        lines = [line[match.end() :] for line, match in zip(lines, found, strict=True)]
    elif numbers[0] is not None and sum(match is not None for match in numbers) > 1:
        return None  # numbered from elsewhere, or with gaps
    whole = "\n".join(lines)
    return whole if whole.endswith("\n") or not whole else f"{whole}\n"


@dataclass
class ShownFiles:
    """Files by normal path, call by call. `folder` is where the shell stands, None where that cannot be said."""

    cwd: str | None
    files: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        self.folder = self.cwd

    def heard(self, text: str) -> None:
        """Words of the user, among which agents put a note where a file was changed by somebody else."""
        for path in _CHANGED_NOTE.findall(text):
            self.files.pop(normal_path(path, self.cwd), None)

    def take(self, call: ToolCall, text: str) -> None:
        """A call that worked, and what it showed."""
        if call.raw_arguments is not None:
            return
        operations = edit_operations(call, self.cwd)
        key = command_parameter(call.name, call.arguments)
        if operations is not None:
            changes = changes_of(operations, self.files)
            if changes is None:
                for operation in operations:
                    self.files.pop(operation.path, None)  # what it holds now was not shown
            else:
                take_changes(self.files, changes)
        elif key is not None:
            self._ran(call.arguments[key], text)
        elif only_looks(call.name, call.arguments):
            shown = file_in_view(call, text)
            if shown is not None:
                self.files[normal_path(shown.path, self.cwd)] = shown.text
        elif channel_of(call.name) == "file" or plain_name(call.name) in ("task", "agent"):
            self.files.clear()  # it may have changed any of them

    def _ran(self, command: object, output: str) -> None:
        words = [str(word) for word in cast("list[object]", command)] if isinstance(command, list) else None
        text = str(command) if words is None else shell_script(words) or " ".join(words)
        shown = file_in_output(text, output)
        if shown is not None:
            if self.folder is not None or shown.path.startswith("/"):
                self.files[normal_path(shown.path, self.folder)] = shown.text
            return
        if not keeps_sources(text):
            self.files.clear()
        if words is None:
            self._follow(text)

    def _follow(self, command: str) -> None:
        """Where the shell stands now: some tools keep it between calls, so only a way back makes it sure again."""
        try:
            self.folder = folder_after(parse_script(command), self.folder)
        except NotUnderstood:
            self.folder = self.folder if " cd " not in f" {command}" else None
