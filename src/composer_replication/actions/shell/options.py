"""A program's options, read by a table: which letters stand alone, which take a value, what may change places.

Where a word is not in the table nothing is known of the words around it either, and the whole line keeps its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from composer_replication.actions.shell.words import Word, literal_word

Operands = Literal["words", "paths", "word then paths", "pattern then paths", "path then words", "tests"]


@dataclass(frozen=True, kw_only=True)
class Program:
    """What is certain about a program's command line.

    `long` lists long options: `all=a` is the letter a, `include:` takes a value, `regexp:=e` is the letter e and takes
    one, `color?` takes one only after `=`. Of options in one group of `decides` (names joined by commas) the order
    decides, so two of a group keep the whole line as it is.
    """

    flags: str = ""
    valued: str = ""
    attached: str = ""  # letters with a value only in the same word
    long: str = ""
    alias: str = ""  # "Rr": -R is -r
    decides: str = ""
    number: str = ""  # the option that `-5` stands for
    operands: Operands = "words"
    any_order: bool = False  # of operands
    ordered_with: str = ""  # options with which the order of operands matters after all
    permutes: bool = True  # options may follow operands
    keeps_slash: bool = False
    keeps_dashes: bool = False  # `--` says something
    paths_after_dashes: bool = False
    default: str = ""  # the operand where there is none
    assumed: str = ""  # "n=10": an option's value where no option of its group is given
    pattern: str = ""  # the option that the first operand stands for
    no_pattern: str = ""  # options with which there is no pattern

    @cached_property
    def long_options(self) -> dict[str, tuple[str, str]]:
        """Name -> (name it counts as, "" or ":" or "?")."""
        options: dict[str, tuple[str, str]] = {}
        for entry in self.long.split():
            name, _, letter = entry.partition("=")
            mark = name[-1] if name[-1] in ":?" else ""
            name = name.removesuffix(mark) if mark else name
            options[name] = (letter or name, mark)
        return options

    @cached_property
    def groups(self) -> list[frozenset[str]]:
        return [frozenset(group.split(",")) for group in self.decides.split()]

    @cached_property
    def aliases(self) -> dict[str, str]:
        return {pair[0]: pair[1] for pair in self.alias.split()}


class Option(NamedTuple):
    name: str
    value: Word | None


@dataclass
class CommandLine:
    """Options and operands apart. `rest` begins with a word that may expand into options: it keeps its order."""

    options: list[Option] = field(default_factory=list[Option])
    operands: list[Word] = field(default_factory=list[Word])
    rest: list[Word] = field(default_factory=list[Word])
    dashes_at: int | None = None


def read_line(words: Sequence[Word], program: Program) -> CommandLine | None:
    """The words behind the program's name; None where they are not surely understood."""
    line, at = CommandLine(), 0
    while at < len(words):
        word = words[at]
        at += 1
        text = word.literal
        if word.splits:
            line.rest = list(words[at - 1 :])
            break
        if text == "--":
            line.dashes_at = len(line.operands)
            line.operands += words[at:]
            if any(operand.splits for operand in words[at:]):
                return None
            break
        if not _opens_option(word):
            line.operands.append(word)
            if not program.permutes:
                line.operands += words[at:]
                break
            continue
        following = words[at] if at < len(words) else None
        num_values = _take_option(word, following, program, line.options)
        if num_values is None:
            return None
        at += num_values
    return line if _order_is_free(line.options, program) else None


def _opens_option(word: Word) -> bool:
    first = word.pieces[0] if word.pieces else None
    return first is not None and first.kind == "text" and first.text.startswith("-") and word.literal != "-"


def _take_option(word: Word, following: Word | None, program: Program, options: list[Option]) -> int | None:
    """Adds what a word says; how many words after it were its value, or None if it is not known."""
    text = word.literal
    if text is None:
        return _take_expanding(word, program, options)
    if text.startswith("--"):
        return _take_long(text[2:], following, program, options)
    if text[1:].isdigit() and program.number:
        options.append(Option(program.number, literal_word(text[1:])))
        return 0
    for index, letter in enumerate(text[1:], start=1):
        name, value = program.aliases.get(letter, letter), text[index + 1 :]
        if letter in program.flags:
            options.append(Option(name, None))
        elif letter in program.attached:
            options.append(Option(name, literal_word(value) if value else None))
            return 0
        elif letter not in program.valued:
            return None
        elif value:
            options.append(Option(name, literal_word(value)))
            return 0
        else:
            return _take_value(name, following, options)
    return 0


def _take_long(text: str, following: Word | None, program: Program, options: list[Option]) -> int | None:
    name, equals, value = text.partition("=")
    known_name, mark = program.long_options.get(name, (None, ""))
    if equals:
        # A long option with its value in the same word says all there is to say, known or not.
        options.append(Option(known_name or f"--{name}", literal_word(value)))
        return 0
    if known_name is None:
        return None
    if mark == ":":
        return _take_value(known_name, following, options)
    options.append(Option(known_name, None))
    return 0


def _take_expanding(word: Word, program: Program, options: list[Option]) -> int | None:
    """`--name="$X"`: one word whatever X is."""
    name, equals, value = word.pieces[0].text.partition("=")
    if not equals or not name.startswith("--"):
        return None
    known_name, _ = program.long_options.get(name[2:], (None, ""))
    pieces = (word.pieces[0]._replace(text=value), *word.pieces[1:])
    options.append(Option(known_name or name, Word(tuple(piece for piece in pieces if piece.text), word.raw)))
    return 0


def _take_value(name: str, following: Word | None, options: list[Option]) -> int | None:
    if following is None or following.splits:
        return None
    options.append(Option(name, following))
    return 1


def _order_is_free(options: list[Option], program: Program) -> bool:
    names = {option.name for option in options}
    return all(len(names & group) < 2 for group in program.groups)
