"""Whether two calls are about the same thing: the same change, the same place of a file, the same command."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from composer_replication.actions.edits import Operation, Replace
from composer_replication.actions.shell.command import Command, is_path
from composer_replication.actions.tools import command_text, is_label, word_set
from composer_replication.types import ToolCall

MIN_ALIKE = 0.6
_MIN_SAME_LINE = 0.8
_MIN_CONTAINED, _MIN_COMPARED, _MAX_COMPARED = 8, 20, 4000
_MIN_LINE, _TELLING, _MAX_LINES = 6, 3, 3000
_TOKEN = re.compile(r"[\w-]+|[^\w\s-]")
_WORD = re.compile(r"[\w-]+")
_NAME, _CAPITAL_INSIDE, _MAX_TEXT = re.compile(r"\w+"), re.compile(r"[a-z][A-Z]"), 100_000
_NUMBER = re.compile(r"\d{1,4}")
_FOLDERS = re.compile(r"[^\s'\"=:]*/(?=[^\s/])")
_MOVES = "cd"
_WITH_SUBCOMMAND = word_set(
    "git gh glab docker podman kubectl helm terraform aws gcloud az npm yarn pnpm bun go cargo pip pip3 uv poetry mise"
    " brew apt apt-get systemctl make just task dotnet mvn gradle"
)


def command_of(call: ToolCall) -> str:
    return command_text(call.name, call.arguments)


def asked_by(call: ToolCall) -> str:
    """All that a call asks for, without words for the reader of the log."""
    return " ".join(str(value) for key, value in call.arguments.items() if not is_label(call.name, key))


def likeness(one: str, other: str) -> float:
    """The share of words and signs that two texts have in common, in any order: in linear time, whatever they are."""
    first, second = (Counter(_TOKEN.findall(text[:_MAX_COMPARED])) for text in (one, other))
    return 2 * (first & second).total() / max(first.total() + second.total(), 1)


def likeness_of_calls(one: ToolCall, other: ToolCall) -> float:
    """The same for what two calls ask for, where a file counts by its name and not by the way to it."""
    first, second = (_FOLDERS.sub("", asked_by(call)[:_MAX_COMPARED]) for call in (one, other))
    return likeness(first, second)


def have_same_purpose(call: ToolCall, other: ToolCall, error: str) -> bool:
    """Whether a command does what the first should have done: what it leaves out are options, or what was wrong.

    Calls that are no commands have one purpose by their tool.
    """
    ours, theirs = Command.of(command_of(call)), Command.of(command_of(other))
    if _subcommands(ours) != _subcommands(theirs):
        return False
    first, second = ({*_WORD.findall(_FOLDERS.sub("", command.text))} for command in (ours, theirs))
    return all(word in error or word.startswith("-") or len(word) < 3 for word in first - second)


def _subcommands(command: Command) -> set[tuple[str, str]]:
    programs = ((name, first if name in _WITH_SUBCOMMAND else "") for name, first in command.programs)
    return {program for program in programs if program[0] != _MOVES}


def other_paths(wrong: str, right: str) -> list[str] | None:
    """What the second command names inside the paths of the first, where both have the same words but for paths.

    Folders around the first's paths are no names of their own. None where the two differ in something else.
    """
    ours, theirs = (set(text.split()) for text in (wrong, right))
    if ours <= theirs or theirs <= ours or not all("/" in word for word in ours ^ theirs):
        return None
    had, new = ({_bare(word) for word in words} for words in (ours - theirs, theirs - ours))
    inside = [word for word in new if not any(f"{path}/".startswith(f"{word}/") for path in had)]
    return inside if all(any(word.startswith(f"{path}/") for path in had) for word in inside) else None


def _bare(word: str) -> str:
    """A word without what only says that it is a path, and without the dots for all below it."""
    return word.removeprefix("./").removesuffix("...").rstrip("/")


def belong_together(one: Operation, other: Operation) -> float:
    """How surely two edits are about the same place of the same file; 0 where they are not."""
    if not isinstance(one, Replace) or not isinstance(other, Replace) or one.path != other.path:
        return 0.0
    if not _overlap(one.old, other.old) and not _overlap(one.new, other.new):
        return 0.0
    return 1.0 + likeness(one.old, other.old) + likeness(one.new, other.new)


def share_a_place(one: Operation, other: Operation) -> bool:
    """Whether what two edits replace has a line in common or is much alike, or one wrote what the other replaces.

    A text of a word or two is alike by chance, but not where more of its line is named for the very same new text.
    """
    if not isinstance(one, Replace) or not isinstance(other, Replace):
        return False
    if one.new == other.new and one.old.strip() and one.old in other.old:
        return True
    first, second = ({line.strip() for line in edit.old.split("\n")} - {""} for edit in (one, other))
    alike = max(likeness(one.old, other.old), likeness(one.new, other.old))
    return bool(first & second) or _overlap(one.old, other.old) or alike >= MIN_ALIKE


def _overlap(one: str, other_text: str) -> bool:
    """Whether one text is in the other or much like it; short ones are alike by chance."""
    shorter, longer = sorted((one.strip(), other_text.strip()), key=len)
    if len(shorter) < _MIN_CONTAINED:
        return bool(shorter) and shorter == longer
    return shorter in longer or (len(shorter) >= _MIN_COMPARED and likeness(one, other_text) >= MIN_ALIKE)


def lines_for(edits: Iterable[Operation], shown: list[str]) -> list[str]:
    """Those of the lines shown that an edit is about: where one of its telling lines stands, as many as the edit has.

    An edit that replaces no text, as a whole file that is written does, is about all of them.
    """
    shown, line_numbers = shown[:_MAX_LINES], set[int]()
    for edit in edits:
        edit_lines = edit.old.split("\n") if isinstance(edit, Replace) else []
        if not any(line.strip() for line in edit_lines):
            return shown
        for number in sorted(range(len(edit_lines)), key=lambda number: -len(edit_lines[number].strip()))[:_TELLING]:
            for position in _where(edit_lines[number].strip(), shown):
                line_numbers.update(range(position - number, position - number + len(edit_lines)))
    return [shown[number] for number in sorted(line_numbers) if 0 <= number < len(shown)]


def _where(edit_line: str, shown_lines: list[str]) -> list[int]:
    if not edit_line or (len(edit_line) < _MIN_LINE and not any(edit_line == line.strip() for line in shown_lines)):
        return []
    return [n for n, line in enumerate(shown_lines) if edit_line in line or likeness(line, edit_line) >= _MIN_SAME_LINE]


def names_in(text: str) -> set[str]:
    """What a program calls its parts: words with a line or a capital letter inside."""
    return {word for word in _NAME.findall(text[:_MAX_TEXT]) if "_" in word or _CAPITAL_INSIDE.search(word)}


def is_name(word: str) -> bool:
    """Whether a word of a command names a file, a version, or something else that has to be known."""
    if word.startswith(("-", "/dev/")) or _NUMBER.fullmatch(word):
        return False
    return ("/" in word and is_path(word)) or any(letter.isdigit() for letter in word)


def plain_words(text: str) -> list[str]:
    return [word for word in "".join(char if char.isalnum() else " " for char in text.lower()).split() if len(word) > 1]
