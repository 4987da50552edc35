"""Agents that err at set rates, and put their mistakes right at a set rate; everything else they do as the expert."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NamedTuple, Protocol

from composer_replication.envs.policies.situation import LOOKS, Move, Situation
from composer_replication.envs.workspace.files import ROOT, absolute
from composer_replication.envs.workspace.task import Edit
from composer_replication.errors import InputError, explain

_AGAIN = {
    "file_not_found": "That path is not there.",
    "is_directory": "That is a folder.",
    "edit_not_read": "It has to be read first.",
    "edit_no_match": "The text has to be exactly as it is in the file.",
    "edit_ambiguous": "The text has to be unique.",
    "edit_noop": "Nothing would have changed.",
    "input_validation": "The arguments were wrong.",
    "tool_not_found": "There is no such tool.",
}
_GIVES_UP = "I stop here."
_ROUNDING = 1e-9


class _ScriptedMove(NamedTuple):
    """A move, with what is scripted about it: as in `PlayedTurn`."""

    move: Move
    mistake: str | None = None
    corrects: tuple[int, ...] = ()
    could: tuple[str, ...] = ()


class _Player(Protocol):
    """A policy within one episode."""

    def choose(self, situation: Situation) -> _ScriptedMove: ...


class Policy(Protocol):
    """Who plays. `force` maps turns to mistakes that are to be made there."""

    @property
    def name(self) -> str: ...

    def start(self, seed: str, force: Mapping[int, str]) -> _Player: ...


@dataclass(frozen=True, kw_only=True)
class FlawedAgent:
    """`rates` are those of mistakes, each per opportunity of it; `corrects` is the share of mistakes put right.

    At most one mistake is made at a turn: the rates of those that can be made in place of one tool add up to at most 1.
    """

    name: str = "flawed"
    rates: Mapping[str, float] = field(default_factory=dict[str, float])
    corrects: float = 1.0

    def __post_init__(self) -> None:
        unknown = sorted(set(self.rates) - set(MISTAKES))
        if unknown:
            raise InputError(explain("rates", got=f"{unknown}", expected=f"names among {sorted(MISTAKES)}"))
        for name, rate in (*self.rates.items(), ("corrects", self.corrects)):
            if not 0 <= rate <= 1:
                raise InputError(explain(f"rate of {name}", got=f"{rate:g}", expected="from 0 to 1"))
        for tool in frozenset[str]().union(*(mistake.at for mistake in MISTAKES.values())):
            together = [name for name in self.rates if tool in MISTAKES[name].at]
            total = sum(self.rates[name] for name in together)
            if total > 1 + _ROUNDING:
                got = f"{total:g} for {', '.join(together)}, which can be made in place of {tool}"
                raise InputError(explain("rates", got=got, expected="at most 1 together"))

    def start(self, seed: str, force: Mapping[int, str]) -> _FlawedPlayer:
        return _FlawedPlayer(self, seed, force)


class _FlawedPlayer:
    """One episode of an agent. What it draws at a turn depends on the seed and the turn alone."""

    def __init__(self, agent: FlawedAgent, seed: str, force: Mapping[int, str]) -> None:
        self._agent, self._seed, self._force = agent, seed, force
        self._style = Style.of(seed)
        self._open: list[int] = []  # mistakes that are not settled yet: one, and perhaps its repetition
        self._will_correct = True

    def choose(self, situation: Situation) -> _ScriptedMove:
        number = len(situation.turns)
        random = Random(f"{self._seed}/{number}")  # noqa: S311 (an episode, not a secret)
        if self._open:
            return self._after_mistake(situation, random)
        right = expert_move(situation, self._style)
        moves = opportunities(situation, right, random)
        mistake = self._drawn(number, moves, random)
        if mistake is None:
            return _ScriptedMove(right, could=tuple(moves))
        self._open = [number]
        self._will_correct = random.random() < self._agent.corrects
        return _ScriptedMove(moves[mistake], mistake, could=tuple(moves))

    def _drawn(self, number: int, moves: Mapping[str, Move], random: Random) -> str | None:
        """One draw for all: each mistake comes at its own rate, whichever others could be made."""
        if number in self._force:
            return self._forced(number, moves)
        remaining = random.random()
        for name in moves:
            remaining -= self._agent.rates.get(name, 0.0)
            if remaining < 0:
                return name
        return None

    def _forced(self, number: int, moves: Mapping[str, Move]) -> str:
        name = self._force[number]
        if name not in moves:
            raise InputError(explain(f"force at turn {number}", got=name, expected=f"one of {sorted(moves)}"))
        return name

    def _after_mistake(self, situation: Situation, random: Random) -> _ScriptedMove:
        number, last = len(situation.turns), situation.turns[-1]
        could = (REPEAT,) if len(self._open) == 1 else ()
        if could and self._drawn(number, {REPEAT: last.move}, random) == REPEAT:
            self._open.append(number)
            return _ScriptedMove(last.move, REPEAT, could=could)
        corrected_turns, self._open = tuple(self._open), []
        if not self._will_correct:
            return _ScriptedMove(Move(text=_GIVES_UP, tool="Finish", arguments={}), could=could)
        return _ScriptedMove(self._remedy(situation, corrected_turns[0]), corrects=corrected_turns, could=could)

    def _remedy(self, situation: Situation, turn: int) -> Move:
        """What the expert does here; after a guess, where a file is sought or known, exactly what was missing."""
        failed = situation.turns[turn]
        right = expert_move(situation, self._style)
        edit = situation.next_edit()
        text = f"{_AGAIN[failed.outcome.kind or '']} {right.text}"
        if failed.mistake == "read_folder":
            return Move(text=text, tool="LS", arguments={"path": ROOT})
        if failed.mistake == "guessed_path" and edit is not None:
            if situation.has_shown(edit.path):
                return Move(text=text, tool="Read", arguments={"file_path": absolute(edit.path)})
            name = edit.path.rpartition("/")[2]
            return Move(text=text, tool="Glob", arguments={"pattern": f"**/{name}", "path": ROOT})
        return replace(right, text=text)


# Mistakes as data, and the one place that says what an opportunity is.
#
# An **opportunity** of a mistake is a turn at which the agent is about to do the right thing, and `instead` names a
# call that it could make in its place and that the workspace refuses, with a failure of `kind`. A turn that puts a
# mistake right is no opportunity, so every mistake is settled before the next one; it can only be made again
# (`repeat`).

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

    `kind` is that of sites/rule.py; that of a repetition is the first one's.
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


# The expert: looks, reads, changes, runs the tests, finishes. It goes on from any transcript, and solves the task.

READ = ("I read {name}.", "I read {name} before I change it.")


EDIT = ("I change {name}.", "Now I change {name}.")


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


_LOOK = ("I look at what is there.", "First I list the files.")


_READ_TEST = ("I read the test.", "I read {name} to see what is expected.")


_TEST_FIRST = ("I run the tests to see what fails.",)
_TEST = ("I run the tests.", "Now I run the tests.")
_FINISH = ("It is done.", "The tests pass.")


@dataclass(frozen=True, slots=True)
class Style:
    """How an agent works where it does not matter: with which tool it looks, and which words it chooses."""

    look: str = "Glob"
    words: int = 0

    @staticmethod
    def of(seed: int | str) -> Style:
        random = Random(f"style {seed}")  # noqa: S311 (an episode, not a secret)
        return Style(random.choice(("Glob", "LS")), random.randrange(1000))

    def say(self, sentences: Sequence[str], number: int, **names: str) -> str:
        return sentences[(self.words + number) % len(sentences)].format(**names)


def expert_move(situation: Situation, style: Style) -> Move:
    """What the expert does next. All it knows is the transcript, and the solution."""
    number, edit = len(situation.turns), situation.next_edit()

    def move(sentences: Sequence[str], tool: str, path: str = "", **arguments: str) -> Move:
        text = style.say(sentences, number, name=path.rpartition("/")[2])
        call_arguments = {"file_path": absolute(path), **arguments} if path else arguments
        return Move(text=text, tool=tool, arguments=call_arguments)

    if edit is not None and not situation.has_looked and edit.path not in situation.read:
        return look(situation, style)
    if edit is not None and situation.task.difficulty == "hard":
        if not situation.has_run_tests:
            return move(_TEST_FIRST, "RunTests")
        test = _test_of(situation, edit)
        if test is not None and test not in situation.read:
            return move(_READ_TEST, "Read", test)
    if edit is not None:
        if edit.path in situation.files and edit.path not in situation.read:
            return move(READ, "Read", edit.path)
        if not edit.old:
            return move(EDIT, "Write", edit.path, content=edit.new)
        return move(EDIT, "Edit", edit.path, old_string=edit.old, new_string=edit.new)
    if not situation.is_tested:
        return move(_TEST, "RunTests")
    return move(_FINISH, "Finish")


def look(situation: Situation, style: Style) -> Move:
    """The look at what is there."""
    text = style.say(_LOOK, len(situation.turns))
    arguments = {"path": ROOT} if style.look == "LS" else {"pattern": "**/*", "path": ROOT}
    return Move(text=text, tool=style.look, arguments=arguments)


def _test_of(situation: Situation, edit: Edit) -> str | None:
    """The test that is about the file to be changed, or any."""
    tests = sorted(path for path in situation.files if path.rpartition("/")[2].startswith("test_"))
    stem = edit.path.rpartition("/")[2].removesuffix(".py")
    return next((path for path in tests if stem in path), tests[0] if tests else None)


EXPERT = FlawedAgent(name="expert")
CARELESS = FlawedAgent(
    name="careless",
    rates={
        **{"guessed_path": 0.15, "read_folder": 0.05, "near_name": 0.04, "wrong_folder": 0.05, "edit_unread": 0.2},
        **{"whitespace": 0.07, "guessed_text": 0.08, "made_before": 0.03, "ambiguous": 0.1, "noop": 0.03},
        **{"argument_name": 0.05, "argument_missing": 0.02, "argument_type": 0.03, "unknown_tool": 0.04, REPEAT: 0.15},
    },
    corrects=0.8,
)
AGENTS: Mapping[str, FlawedAgent] = {agent.name: agent for agent in (EXPERT, CARELESS)}
