"""What a tool shows of a file: whole or a part, out of line numbers, envelopes and notes.

A view that is cut is no whole one. It does not say whether the last line ends in a newline; text files do, so one is
added where none is shown.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import orjson

from composer_replication.actions.shell.tree import lone_command
from composer_replication.actions.tools import LINE_NUMBER, PATH, is_label, path_argument, plain_name, word_set
from composer_replication.types import ToolCall

CHANGED_NOTE = re.compile(r"Note: (\S+) was modified")
_LOOKING_AGENTS = frozenset({"Explore", "Plan"})
_READERS = word_set("read read_file view view_file cat open_file str_replace_editor str_replace_based_edit_tool")
_PATH_KEYS = frozenset({*PATH, "command"})
_MAX_LINES = 2000  # where the readers of several agents stop
_MAX_LINE = 2000
_MAX_DIGITS = 6  # no session reads a file of a million lines
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


class Part(NamedTuple):
    """Lines from the one with the number `first`; one that is cut is None. `has_end`: the file ends with the last."""

    first: int
    lines: list[str | None]
    has_end: bool


def part_in_view(call: ToolCall, text: str) -> Part | None:
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
    is_all = len(lines) < limit if isinstance(limit, int) and limit > 0 else len(lines) != _MAX_LINES
    return Part(first, lines, has_end=is_all and plain_name(call.name) == "read")


def without_reminders(text: str) -> str:
    """What a tool showed, without what the agent put behind it."""
    end = len(text)
    while (behind := _end_without(text, end, " \t\r\n\f\v")) and text.endswith(_REMINDER_END, 0, behind):
        start = text.rfind(_REMINDER, 0, behind)
        if start < 0:
            break
        end = _end_without(text, start, "\n")
    return text[:end]


def _end_without(text: str, end: int, blanks: str) -> int:
    """Where the text up to `end` ends if blanks there are left out; no text is copied, however often it is asked."""
    while end and text[end - 1] in blanks:
        end -= 1
    return end


def file_in_view(call: ToolCall, text: str) -> Shown | None:
    """The file a reading tool showed in full; None where it was asked for a part, or shows one."""
    path = path_argument(call.arguments)
    names = [name for name, value in call.arguments.items() if value is not None and not is_label(call.name, name)]
    if path is None or plain_name(call.name) not in _READERS or not _PATH_KEYS.issuperset(names):
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
    text = _TAIL.sub("", _HEAD.sub("", without_reminders(text), count=1))
    lines = text.split("\n")
    if _CUT.search(text) or len(lines) > _MAX_LINES or any(len(line) > _MAX_LINE for line in lines):
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
    return plain_name(call.name) in ("task", "agent") and call.arguments.get("subagent_type") not in _LOOKING_AGENTS
