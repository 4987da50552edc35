"""Mistakes as data, and the one place that says what an opportunity is.

An **opportunity** of a mistake is a turn at which the agent is about to do the right thing, and `instead` names a call
that it could make in its place and that the workspace refuses, with a failure of `kind`. A turn that puts a mistake
right is no opportunity, so every mistake is settled before the next one; it can only be made again (`repeat`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from composer_replication.envs.policies.expert import EDIT, READ
from composer_replication.envs.policies.situation import LOOKS, Move, Situation
from composer_replication.envs.workspace.files import ROOT, absolute

Instead = Callable[[Situation, Move, Random], Move | None]
_FOLDERS = ("src", "lib", "app", "core", "code")
_RENAMED = {
    "Read": ("file_path", "path"),
    "Edit": ("old_string", "old_text"),
    "Write": ("content", "text"),
    "LS": ("path", "directory"),
    "Glob": ("pattern", "glob"),
}
_WRONG_TYPE: dict[str, tuple[str, Any]] = {"Read": ("limit", "all"), "Edit": ("replace_all", "no")}
_NO_SUCH_TOOL = {"Read": "Open", "Edit": "Replace", "RunTests": "Pytest", "LS": "ListFiles", "Glob": "FindFiles"}
_WORD = re.compile(r"[A-Za-z_]\w{2,}")
_GUESSES = ("value", "result", "number", "data")
_MIN_TOLD_APART = 8  # characters: shorter texts are alike by chance


@dataclass(frozen=True, slots=True)
class Mistake:
    """`at` are the tools of right moves in whose place it can be made. `meaning` is for people.

    `kind` is that of sites/taxonomy.py; that of a repetition is the first one's.
    """

    name: str
    kind: str
    at: frozenset[str]
    meaning: str
    instead: Instead


def opportunities(situation: Situation, right: Move, random: Random) -> dict[str, Move]:
    """Every mistake that can be made here in place of the right move, with the call that it would be."""
    possible = (mistake for mistake in _TABLE if right.tool in mistake.at)
    moves = ((mistake.name, mistake.instead(situation, right, random)) for mistake in possible)
    return {name: move for name, move in moves if move is not None}


def _said(sentences: Sequence[str], path: str) -> str:
    """What an agent says that takes its mistake for the right thing."""
    return sentences[0].format(name=path.rpartition("/")[2])


def _with(move: Move, tool: str | None = None, without: str = "", **arguments: Any) -> Move:
    kept_arguments = {key: value for key, value in move.arguments.items() if key != without}
    return Move(text=move.text, tool=tool or move.tool, arguments=kept_arguments | arguments)


def _guessed_path(situation: Situation, right: Move, random: Random) -> Move | None:
    edit = situation.next_edit()
    if edit is None:
        return None
    return _elsewhere(situation, edit.path, Move(text=_said(READ, edit.path), tool="Read", arguments={}), random)


def _wrong_folder(situation: Situation, right: Move, random: Random) -> Move | None:
    return _elsewhere(situation, right.path, right, random)


def _elsewhere(situation: Situation, path: str, move: Move, random: Random) -> Move | None:
    """The same name in a folder where it is not."""
    name = path.rpartition("/")[2]
    paths = [f"{folder}/{name}" for folder in _FOLDERS]
    paths = [candidate for candidate in paths if candidate != path and situation.is_unheard_of(candidate)]
    return _with(move, file_path=absolute(random.choice(paths))) if paths else None


def _near_name(situation: Situation, right: Move, random: Random) -> Move | None:
    stem, dot, ending = right.path.rpartition(".")
    near = f"{stem.removesuffix('s') if stem.endswith('s') else stem + 's'}{dot}{ending}"
    return _with(right, file_path=absolute(near)) if situation.is_unheard_of(near) else None


def _read_folder(situation: Situation, right: Move, random: Random) -> Move | None:
    return Move(text=right.text, tool="Read", arguments={"file_path": ROOT})


def _edit_unread(situation: Situation, right: Move, random: Random) -> Move | None:
    edit = situation.next_edit()
    if edit is None or edit.path != right.path or not edit.old:
        return None
    arguments = {**right.arguments, "old_string": edit.old, "new_string": edit.new}
    return Move(text=_said(EDIT, edit.path), tool="Edit", arguments=arguments)


def _whitespace(situation: Situation, right: Move, random: Random) -> Move | None:
    return _other_text(situation, right, _other_blanks)


def _other_blanks(old: str) -> Iterator[str]:
    yield old.replace(" = ", "=", 1)
    yield re.sub(r"^( +)", r"\1\1", old, count=1, flags=re.MULTILINE)
    yield old.replace("    ", "\t")
    yield re.sub(r"(\S) (\S)", r"\1  \2", old, count=1)


def _guessed_text(situation: Situation, right: Move, random: Random) -> Move | None:
    def guesses(old: str) -> Iterator[str]:
        words = _WORD.findall(old)
        for guess in random.sample(_GUESSES, len(_GUESSES)) if words else ():
            yield re.sub(rf"\b{words[-1]}\b", guess, old, count=1)
        yield re.sub(r"\d+", lambda match: str(int(match[0][:9]) + 100), old, count=1)

    return _other_text(situation, right, guesses)


def _other_text(situation: Situation, right: Move, texts: Callable[[str], Iterator[str]]) -> Move | None:
    """The first of these texts that is not in the file, and not what is to be there."""
    old, new = right.arguments["old_string"], right.arguments["new_string"]
    held = situation.files[right.path]
    wrong = next((text for text in texts(old) if text not in held and text != new), None)
    return None if wrong is None or not new.strip() else _with(right, old_string=wrong)


def _made_before(situation: Situation, right: Move, random: Random) -> Move | None:
    for edit in situation.done_edits():
        is_told = len(edit.new.strip()) >= _MIN_TOLD_APART and edit.new not in edit.old
        held = situation.files[edit.path]
        if is_told and edit.old not in held and edit.new in held:
            arguments = {"file_path": absolute(edit.path), "old_string": edit.old, "new_string": edit.new}
            return Move(text=_said(EDIT, edit.path), tool="Edit", arguments=arguments)
    return None


def _ambiguous(situation: Situation, right: Move, random: Random) -> Move | None:
    """The longest beginning of the text, up to the end of a word, that stands in the file more than once."""
    if not right.arguments["new_string"].strip():
        return None
    old, held = right.arguments["old_string"], situation.files[right.path]
    beginnings = (old[: word.end()] for word in reversed(list(re.finditer(r"\w+", old))))
    short = next((text for text in beginnings if held.count(text) > 1), None)
    return None if short is None or short == right.arguments["new_string"] else _with(right, old_string=short)


def _noop(situation: Situation, right: Move, random: Random) -> Move | None:
    return _with(right, new_string=right.arguments["old_string"])


def _argument_name(situation: Situation, right: Move, random: Random) -> Move | None:
    right_name, wrong_name = _RENAMED[right.tool]
    arguments = {wrong_name if key == right_name else key: value for key, value in right.arguments.items()}
    return Move(text=right.text, tool=right.tool, arguments=arguments)


def _argument_missing(situation: Situation, right: Move, random: Random) -> Move | None:
    return _with(right, without="file_path")


def _argument_type(situation: Situation, right: Move, random: Random) -> Move | None:
    name, value = _WRONG_TYPE[right.tool]
    return _with(right, **{name: value})


def _unknown_tool(situation: Situation, right: Move, random: Random) -> Move | None:
    return _with(right, _NO_SUCH_TOOL[right.tool])


def _never(situation: Situation, right: Move, random: Random) -> Move | None:
    return None


REPEAT = "repeat"
_READ, _EDIT = frozenset({"Read"}), frozenset({"Edit"})
_TABLE: tuple[Mistake, ...] = (
    Mistake("guessed_path", "file_not_found", LOOKS, "reads a guessed path instead of looking first", _guessed_path),
    Mistake("read_folder", "is_directory", LOOKS, "reads a folder instead of listing it", _read_folder),
    Mistake("near_name", "file_not_found", _READ | _EDIT, "a path that is nearly the right one", _near_name),
    Mistake("wrong_folder", "file_not_found", _READ, "the right name in a wrong folder", _wrong_folder),
    Mistake("edit_unread", "edit_not_read", _READ, "changes a file without reading it", _edit_unread),
    Mistake("whitespace", "edit_no_match", _EDIT, "text with other blanks than the file has", _whitespace),
    Mistake("guessed_text", "edit_no_match", _EDIT, "text as it might be, not as it is", _guessed_text),
    Mistake("made_before", "edit_no_match", _EDIT | {"RunTests"}, "a change that was made before", _made_before),
    Mistake("ambiguous", "edit_ambiguous", _EDIT, "text that is in the file more than once", _ambiguous),
    Mistake("noop", "edit_noop", _EDIT, "a change to what is there", _noop),
    Mistake("argument_name", "input_validation", frozenset(_RENAMED), "a wrong name of an argument", _argument_name),
    Mistake("argument_missing", "input_validation", _READ | _EDIT, "the path is left out", _argument_missing),
    Mistake("argument_type", "input_validation", frozenset(_WRONG_TYPE), "a value of another type", _argument_type),
    Mistake("unknown_tool", "tool_not_found", frozenset(_NO_SUCH_TOOL), "a tool that is not there", _unknown_tool),
    # Its opportunity is the turn after a mistake that was not itself a repetition: there, no other can be made.
    Mistake(REPEAT, "", frozenset(), "the call that has just failed, once more", _never),
)
MISTAKES: Mapping[str, Mistake] = {mistake.name: mistake for mistake in _TABLE}
