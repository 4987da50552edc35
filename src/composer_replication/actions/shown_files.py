"""Whole files out of what tools show: line numbers taken off, notes of the harness too, parts and cuts refused.

A view does not say whether the last line ends in a newline; text files do, so one is added where none is shown.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import orjson

from composer_replication.actions.known_tools import is_label
from composer_replication.actions.names import LINE_NUMBER
from composer_replication.actions.shell.dollars import NotUnderstood
from composer_replication.actions.shell.tree import Simple, parse_script
from composer_replication.actions.tools import path_argument, plain_name, word_set
from composer_replication.types import ToolCall

FILE_CHANGED_NOTE = re.compile(r"Note: (\S+) was modified")
_READERS = word_set("read read_file view view_file cat open_file str_replace_editor str_replace_based_edit_tool")
_PATH_KEYS = word_set("file_path path absolute_path filePath filepath file filename target_file command")
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
    path = path_argument({**call.arguments, "path": call.arguments.get("path", call.arguments.get("filePath"))})
    others = [name for name, value in call.arguments.items() if value is not None and not is_label(call.name, name)]
    if path is None or plain_name(call.name) not in _READERS or not _PATH_KEYS.issuperset(others):
        return None
    whole = _whole_text(text)
    return Shown(path, whole) if whole is not None else None


def file_in_output(command: str, output: str) -> Shown | None:
    """The file that a plain `cat file` printed."""
    if not command.lstrip().startswith("cat"):
        return None
    try:
        script = parse_script(command)
    except NotUnderstood:
        return None
    simple = script[0].pipelines[0].commands[0] if len(script) == 1 and len(script[0].pipelines) == 1 else None
    if not isinstance(simple, Simple) or len(script[0].pipelines[0].commands) > 1 or simple.sets or simple.redirects:
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
