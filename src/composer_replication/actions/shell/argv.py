"""One program with its words in one spelling: options sorted, operands as the program reads them, paths normalised."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from composer_replication.actions.paths import normal_path
from composer_replication.actions.shell.options import CommandLine, Option, Program, read_line
from composer_replication.actions.shell.programs import PROGRAMS, SAME_SUBCOMMAND, SUBCOMMANDS
from composer_replication.actions.shell.words import Piece, Word, literal_word

Key = list[object]
_LONGEST_PATH = 512


@dataclass(frozen=True, slots=True)
class Place:
    """Where a command runs: a folder, `.` where the start is not known; `number` is of a place nobody can name."""

    folder: str = "."
    number: int = 0

    def path(self, text: str) -> str:
        if self.number and not text.startswith(("/", "~")):
            return f"?{self.number}:{normal_path(text, None)}"
        return normal_path(text, self.folder)


def words_key(words: Sequence[Word], place: Place) -> Key:
    """The key of a program and its words."""
    name = words[0].literal
    if name is None:
        return plain_key(words)
    if name in SUBCOMMANDS and len(words) > 1:
        return _subcommand_key(name, words, place)
    program = PROGRAMS.get(name)
    rest_key = line_key(words[1:], program, place) if program is not None else None
    return [name, rest_key] if rest_key is not None else plain_key(words, place)


def plain_key(words: Sequence[Word], place: Place | None = None) -> Key:
    """Words in order; only a program that is named by a path is brought into one spelling."""
    first: object = words[0].key
    if place is not None and isinstance(first, str) and "/" in first:
        first = place.path(first)
    return ["words", first, *(word.key for word in words[1:])]


def line_key(words: Sequence[Word], program: Program, place: Place) -> Key | None:
    """The words behind a program's name; None where they are not surely understood."""
    line = read_line(words, program)
    if line is None or _is_odd(line, program):
        return None
    names = {option.name for option in line.options}
    operands = list(line.operands)
    if program.pattern and operands and not names & {program.pattern, *program.no_pattern.split(",")}:
        line.options.append(Option(program.pattern, operands.pop(0)))
        line.dashes_at = None
    if not operands and not line.rest and program.default:
        operands = [literal_word(program.default)]
    if program.assumed and not line.rest and not names & {"n", "c"}:
        line.options.append(Option(program.assumed[0], literal_word(program.assumed[2:])))
    options: Key = [
        [name, None if value is None else value.key]
        for name, value in sorted(line.options, key=lambda option: option.name)
    ]
    keyed = _operand_keys(operands, program, place, line.dashes_at)
    if program.any_order and not line.rest and not names & set(program.ordered_with.split(",")) and _is_flat(keyed):
        keyed.sort(key=json.dumps)
    dashes = line.dashes_at if program.keeps_dashes else None
    return [options, keyed, dashes, [word.key for word in line.rest]]


def path_key(word: Word, place: Place, *, keeps_slash: bool = False) -> object:
    """A path in one spelling; of one with a glob, the folders before the glob."""
    text = word.literal
    if text is not None:
        if text in ("", "-") or text.startswith(":"):
            return text  # standard input, or one of git's magic words
        slash = "/" if keeps_slash and text.endswith("/") else ""
        return place.path(text) + slash
    first = word.pieces[0]
    if first.kind not in ("text", "glob"):
        return word.key
    folder, slash, start = first.text.rpartition("/") if first.kind == "text" else ("", "", "")
    if not slash and first.kind == "text":
        start = first.text
    rest = word.pieces[1:] if first.kind == "text" else word.pieces
    spelled = place.path(f"{folder}{slash}" or ".").removesuffix("/")
    return [list(piece) for piece in (Piece("text", f"{spelled}/{start}"), *rest)]


def _operand_keys(operands: Sequence[Word], program: Program, location: Place, dashes_at: int | None) -> Key:
    kind = program.operands
    if program.paths_after_dashes and dashes_at is not None:
        names, paths = operands[:dashes_at], operands[dashes_at:]
        return [*(word.key for word in names), *(path_key(word, location) for word in paths)]
    if kind == "words":
        return [word.key for word in operands]
    if kind == "tests":
        return [_test_key(word, location) for word in operands]
    first_is_path = kind in ("paths", "path then words", "pattern then paths")
    others_are = kind != "path then words"
    return [
        path_key(word, location, keeps_slash=program.keeps_slash)
        if (first_is_path if number == 0 else others_are)
        else word.key
        for number, word in enumerate(operands)
    ]


def _test_key(word: Word, location: Place) -> object:
    """`tests/test_a.py::test_b`: a path, and names inside it."""
    text = word.literal
    if text is None:
        return word.key
    path, mark, names = text.partition("::")
    return location.path(path) + mark + names


def _is_odd(line: CommandLine, program: Program) -> bool:
    """What would be read wrongly: `tail +5` counts lines, and `tar -C` moves what is named after it."""
    if program.number == "n":
        return any((word.literal or "").startswith("+") for word in line.operands)
    moves = program is PROGRAMS["tar"] and any(option.name == "C" for option in line.options)
    return moves and bool(line.operands)


def _is_flat(keys: Key) -> bool:
    """Whether no operand lies inside another, as in `mkdir a a/b`, where the order decides."""
    paths = {key for key in keys if isinstance(key, str)}
    if any(len(path) > _LONGEST_PATH for path in paths):
        return False
    return not any(path[: slash.start()] in paths for path in paths for slash in re.finditer("/", path))


def _subcommand_key(name: str, words: Sequence[Word], location: Place) -> Key:
    settings, at = list[object](), 1
    if name == "git":
        settings, at, location = _git_settings(words, location)
    subcommand = words[at].literal if at < len(words) else None
    if subcommand is None:
        return plain_key(words, location)
    spelled = SAME_SUBCOMMAND.get(name, {}).get(subcommand, (subcommand,))
    program = SUBCOMMANDS[name].get(spelled[0])
    rest = [*(literal_word(text) for text in spelled[1:]), *words[at + 1 :]]
    rest_key = line_key(rest, program, location) if program is not None else None
    return [name, settings, spelled[0], rest_key if rest_key is not None else ["words", *(word.key for word in rest)]]


def _git_settings(words: Sequence[Word], location: Place) -> tuple[Key, int, Place]:
    """`git -C folder -c key=value --no-pager …`: what stands before the command, and where it then runs."""
    settings, at, start = list[object](), 1, location
    while at + 1 < len(words):
        text, value = words[at].literal, words[at + 1].literal
        if text == "-C" and value and not location.number:
            location = Place(location.path(value))
            at += 2
        elif text == "-c" and value:
            settings.append(["-c", value])
            at += 2
        elif text in ("--no-pager", "-P"):
            settings.append("--no-pager")
            at += 1
        else:
            break
    if location.folder != start.folder:
        settings.append(["-C", location.folder])
    return settings, at, location
