"""Play the workspace with scripted agents: an expert, and agents that make mistakes at set rates.

`expert_move` returns the right next call for any transcript. A `FlawedAgent` follows it, except where it randomly makes
one of the `MISTAKES`. After a mistake, it makes the correction at another set rate, or gives up. Its random choices
depend only on the seed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NamedTuple, Protocol

from composer_replication.envs.policies.situation import LOOK_TOOLS, Move, Situation
from composer_replication.envs.workspace.files import ROOT, absolute
from composer_replication.envs.workspace.task import Edit
from composer_replication.errors import InputError, explain

# The sentences of agents are data: they appear in logs, and the embedded student was trained on them.
_LOOK_TEXTS = ("I look at what is there.", "First I list the files.")
_READ_TEXTS = ("I read {name}.", "I read {name} before I change it.")
_READ_TEST_TEXTS = ("I read the test.", "I read {name} to see what is expected.")
_EDIT_TEXTS = ("I change {name}.", "Now I change {name}.")
_TEST_FIRST_TEXTS = ("I run the tests to see what fails.",)
_TEST_TEXTS = ("I run the tests.", "Now I run the tests.")
_FINISH_TEXTS = ("It is done.", "The tests pass.")
_GIVE_UP_TEXT = "I stop here."
# Put before the sentence of a correction, by the kind of the failure.
_CORRECTION_TEXTS = {
    "file_not_found": "That path is not there.",
    "is_directory": "That is a folder.",
    "edit_not_read": "It has to be read first.",
    "edit_no_match": "The text has to be exactly as it is in the file.",
    "edit_ambiguous": "The text has to be unique.",
    "edit_noop": "Nothing would have changed.",
    "input_validation": "The arguments were wrong.",
    "tool_not_found": "There is no such tool.",
}
_RATE_TOLERANCE = 1e-9  # rates such as 0.1 + 0.2 + 0.7 add up to slightly more than 1


class _ScriptedMove(NamedTuple):
    """A move and its role in the script, with the same meaning as in `PlayedTurn`."""

    move: Move
    mistake: str | None = None
    corrects: tuple[int, ...] = ()
    could: tuple[str, ...] = ()


class _Player(Protocol):
    """Plays one episode for a policy."""

    def choose(self, situation: Situation) -> _ScriptedMove: ...


class Policy(Protocol):
    """An agent that can play episodes. `force` maps turns to the mistakes that must be made in these turns."""

    @property
    def name(self) -> str: ...

    def start(self, seed: str, force: Mapping[int, str]) -> _Player: ...


@dataclass(frozen=True, kw_only=True)
class FlawedAgent:
    """An agent that makes mistakes at set rates and otherwise plays like the expert.

    Args:
        name: The policy's name in episodes and logs.
        rates: The probability of each mistake, by name, per opportunity.
        corrects: The share of mistakes that the agent corrects; after the others it gives up.

    Raises InputError for an unknown mistake and for a rate outside [0, 1]. At most one mistake is made per turn, so
    InputError is also raised if the rates of mistakes that can replace the same tool add up to more than 1.
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
        # Mistakes that can replace the same tool compete for the same turn.
        for tool in frozenset[str]().union(*(mistake.at for mistake in MISTAKES.values())):
            competing = [name for name in self.rates if tool in MISTAKES[name].at]
            total = sum(self.rates[name] for name in competing)
            if total > 1 + _RATE_TOLERANCE:
                got = f"{total:g} for {', '.join(competing)}, which can be made in place of {tool}"
                raise InputError(explain("rates", got=got, expected="at most 1 together"))

    def start(self, seed: str, force: Mapping[int, str]) -> _FlawedPlayer:
        return _FlawedPlayer(self, seed, force)


class _FlawedPlayer:
    """Plays one episode for an agent. Random choices at a turn depend only on the seed and the turn's number."""

    def __init__(self, agent: FlawedAgent, seed: str, force: Mapping[int, str]) -> None:
        self._agent, self._seed, self._force = agent, seed, force
        self._style = Style.of(seed)
        self._uncorrected: list[int] = []  # turns of the current mistake and, if there is one, of its repetition
        self._will_correct = True

    def choose(self, situation: Situation) -> _ScriptedMove:
        number = len(situation.turns)
        # Each turn has a generator of its own, so that a forced mistake does not change later random choices.
        random = Random(f"{self._seed}/{number}")  # noqa: S311 (an episode, not a secret)
        if self._uncorrected:
            return self._after_mistake(situation, random)
        right_move = expert_move(situation, self._style)
        moves = opportunities(situation, right_move, random)
        mistake = self._draw_mistake(number, moves, random)
        if mistake is None:
            return _ScriptedMove(right_move, could=tuple(moves))
        self._uncorrected = [number]
        self._will_correct = random.random() < self._agent.corrects
        return _ScriptedMove(moves[mistake], mistake, could=tuple(moves))

    def _draw_mistake(self, number: int, moves: Mapping[str, Move], random: Random) -> str | None:
        """Return the mistake to make at this turn, or None."""
        if number in self._force:
            return self._forced_mistake(number, moves)
        # One random number is compared with cumulative rates, so that each mistake has exactly its own rate.
        remaining = random.random()
        for name in moves:
            remaining -= self._agent.rates.get(name, 0.0)
            if remaining < 0:
                return name
        return None

    def _forced_mistake(self, number: int, moves: Mapping[str, Move]) -> str:
        name = self._force[number]
        if name not in moves:
            raise InputError(explain(f"force at turn {number}", got=name, expected=f"one of {sorted(moves)}"))
        return name

    def _after_mistake(self, situation: Situation, random: Random) -> _ScriptedMove:
        number, last = len(situation.turns), situation.turns[-1]
        # A mistake can be repeated once. After that the agent corrects it or gives up.
        could = (REPEAT,) if len(self._uncorrected) == 1 else ()
        if could and self._draw_mistake(number, {REPEAT: last.move}, random) == REPEAT:
            self._uncorrected.append(number)
            return _ScriptedMove(last.move, REPEAT, could=could)
        corrected_turns, self._uncorrected = tuple(self._uncorrected), []
        if not self._will_correct:
            return _ScriptedMove(Move(text=_GIVE_UP_TEXT, tool="Finish", arguments={}), could=could)
        return _ScriptedMove(self._correction(situation, corrected_turns[0]), corrects=corrected_turns, could=could)

    def _correction(self, situation: Situation, turn: int) -> Move:
        """Return the move that corrects a mistake.

        It is the expert's move, except that the agent lists the root folder after reading a folder, and searches for
        the file after guessing a path that was never shown.
        """
        failed = situation.turns[turn]
        right_move = expert_move(situation, self._style)
        edit = situation.next_edit()
        text = f"{_CORRECTION_TEXTS[failed.outcome.kind or '']} {right_move.text}"
        if failed.mistake == "read_folder":
            return Move(text=text, tool="LS", arguments={"path": ROOT})
        if failed.mistake == "guessed_path" and edit is not None:
            # A path that the transcript has shown needs no search.
            if situation.has_shown(edit.path):
                return Move(text=text, tool="Read", arguments={"file_path": absolute(edit.path)})
            name = edit.path.rpartition("/")[2]
            return Move(text=text, tool="Glob", arguments={"pattern": f"**/{name}", "path": ROOT})
        return replace(right_move, text=text)


# Returns the wrong call, or None if the mistake cannot be made here, for example because the call would be right.
_MakeWrongCall = Callable[[Situation, Move, Random], Move | None]
_FOLDERS = ("src", "lib", "app", "core", "code")
# The right and a wrong name of one argument of each tool.
_ARGUMENT_NAMES = {
    "Read": ("file_path", "path"),
    "Edit": ("old_string", "old_text"),
    "Write": ("content", "text"),
    "LS": ("path", "directory"),
    "Glob": ("pattern", "glob"),
}
# An argument of each tool, and a value of the wrong type for it.
_WRONG_TYPES: dict[str, tuple[str, Any]] = {"Read": ("limit", "all"), "Edit": ("replace_all", "no")}
# Plausible names of tools that the workspace does not have.
_UNKNOWN_TOOLS = {"Read": "Open", "Edit": "Replace", "RunTests": "Pytest", "LS": "ListFiles", "Glob": "FindFiles"}
# "return price + TAX" -> "return", "price", "TAX"; not "x" or "12", which are too short or no name
_WORD = re.compile(r"[A-Za-z_]\w{2,}")
_GUESSES = ("value", "result", "number", "data")
_MIN_DISTINCT_CHARS = 8  # a shorter text may occur in a file by chance


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake that an agent can make instead of the right move.

    A turn is an opportunity for the mistake if the right move comes next, the tool of this move is in `at`, and
    `instead` returns a call that the workspace refuses with a failure of kind `kind` (as in sites/rule.py). A turn that
    corrects a mistake is not an opportunity, so a mistake is corrected before the next one is made. Until then, the
    agent can only repeat the failed call. This repetition is the mistake named `repeat`, and its kind is that of the
    first mistake. `meaning` describes the mistake for human readers.
    """

    name: str
    kind: str
    at: frozenset[str]
    meaning: str
    instead: _MakeWrongCall


def opportunities(situation: Situation, right_move: Move, random: Random) -> dict[str, Move]:
    """Map the name of every mistake that can be made here to the call that replaces the right move."""
    possible = (mistake for mistake in _MISTAKE_TABLE if right_move.tool in mistake.at)
    moves = ((mistake.name, mistake.instead(situation, right_move, random)) for mistake in possible)
    return {name: move for name, move in moves if move is not None}


def _plain_text(sentences: Sequence[str], path: str) -> str:
    """Return the first of the sentences, whatever the agent's style, because the agent believes that its mistake is
    right.
    """
    return sentences[0].format(name=path.rpartition("/")[2])


def _modify_call(move: Move, tool: str | None = None, without: str = "", **arguments: Any) -> Move:
    remaining = {key: value for key, value in move.arguments.items() if key != without}
    return Move(text=move.text, tool=tool or move.tool, arguments=remaining | arguments)


def _guessed_path(situation: Situation, right_move: Move, random: Random) -> Move | None:
    edit = situation.next_edit()
    if edit is None:
        return None
    return _in_wrong_folder(
        situation, edit.path, Move(text=_plain_text(_READ_TEXTS, edit.path), tool="Read", arguments={}), random
    )


def _wrong_folder(situation: Situation, right_move: Move, random: Random) -> Move | None:
    return _in_wrong_folder(situation, right_move.path, right_move, random)


def _in_wrong_folder(situation: Situation, path: str, move: Move, random: Random) -> Move | None:
    """Return the move with the file's folder replaced by one that does not contain the file, or None if there is
    none.
    """
    name = path.rpartition("/")[2]
    paths = [f"{folder}/{name}" for folder in _FOLDERS]
    paths = [candidate for candidate in paths if candidate != path and situation.is_unheard_of(candidate)]
    return _modify_call(move, file_path=absolute(random.choice(paths))) if paths else None


def _near_name(situation: Situation, right_move: Move, random: Random) -> Move | None:
    # "shop/prices.py" -> "shop/price.py", and "shop/price.py" -> "shop/prices.py"
    stem, dot, ending = right_move.path.rpartition(".")
    near = f"{stem.removesuffix('s') if stem.endswith('s') else stem + 's'}{dot}{ending}"
    return _modify_call(right_move, file_path=absolute(near)) if situation.is_unheard_of(near) else None


def _read_folder(situation: Situation, right_move: Move, random: Random) -> Move | None:
    return Move(text=right_move.text, tool="Read", arguments={"file_path": ROOT})


def _edit_unread(situation: Situation, right_move: Move, random: Random) -> Move | None:
    edit = situation.next_edit()
    if edit is None or edit.path != right_move.path or not edit.old:
        return None
    arguments = {**right_move.arguments, "old_string": edit.old, "new_string": edit.new}
    return Move(text=_plain_text(_EDIT_TEXTS, edit.path), tool="Edit", arguments=arguments)


def _whitespace(situation: Situation, right_move: Move, random: Random) -> Move | None:
    return _with_unmatched_text(situation, right_move, _spacing_variants)


def _spacing_variants(old: str) -> Iterator[str]:
    """Yield variants of the text with different whitespace.

    The variants have no spaces around "=", a doubled indentation, tabs for indentation, and a doubled space.
    """
    yield old.replace(" = ", "=", 1)
    # "    return a" -> "        return a"
    yield re.sub(r"^( +)", r"\1\1", old, count=1, flags=re.MULTILINE)
    yield old.replace("    ", "\t")
    # "return a + b" -> "return  a + b"
    yield re.sub(r"(\S) (\S)", r"\1  \2", old, count=1)


def _guessed_text(situation: Situation, right_move: Move, random: Random) -> Move | None:
    def guesses(old: str) -> Iterator[str]:
        words = _WORD.findall(old)
        for guess in random.sample(_GUESSES, len(_GUESSES)) if words else ():
            # "return price" with the guess "value" -> "return value"
            yield re.sub(rf"\b{words[-1]}\b", guess, old, count=1)
        # "TAX = 7" -> "TAX = 107"; digits beyond the ninth are cut, so that no number takes long to convert
        yield re.sub(r"\d+", lambda match: str(int(match[0][:9]) + 100), old, count=1)

    return _with_unmatched_text(situation, right_move, guesses)


def _with_unmatched_text(situation: Situation, right_move: Move, texts: Callable[[str], Iterator[str]]) -> Move | None:
    """Return the edit with a wrong old text, which does not occur in the file, or None if there is no such text.

    The wrong text is the first of `texts(old)` that is neither in the file nor equal to the new text.
    """
    old, new = right_move.arguments["old_string"], right_move.arguments["new_string"]
    file_text = situation.files[right_move.path]
    wrong = next((text for text in texts(old) if text not in file_text and text != new), None)
    return None if wrong is None or not new.strip() else _modify_call(right_move, old_string=wrong)


def _made_before(situation: Situation, right_move: Move, random: Random) -> Move | None:
    for edit in situation.done_edits():
        is_distinct = len(edit.new.strip()) >= _MIN_DISTINCT_CHARS and edit.new not in edit.old
        file_text = situation.files[edit.path]
        if is_distinct and edit.old not in file_text and edit.new in file_text:
            arguments = {"file_path": absolute(edit.path), "old_string": edit.old, "new_string": edit.new}
            return Move(text=_plain_text(_EDIT_TEXTS, edit.path), tool="Edit", arguments=arguments)
    return None


def _ambiguous(situation: Situation, right_move: Move, random: Random) -> Move | None:
    """Return the edit with its old text shortened until it is ambiguous, or None if this is impossible.

    The old text becomes its longest prefix of whole words that occurs more than once in the file.
    """
    if not right_move.arguments["new_string"].strip():
        return None
    old, file_text = right_move.arguments["old_string"], situation.files[right_move.path]
    prefixes = (old[: word.end()] for word in reversed(list(re.finditer(r"\w+", old))))
    short = next((text for text in prefixes if file_text.count(text) > 1), None)
    return (
        None
        if short is None or short == right_move.arguments["new_string"]
        else _modify_call(right_move, old_string=short)
    )


def _noop(situation: Situation, right_move: Move, random: Random) -> Move | None:
    return _modify_call(right_move, new_string=right_move.arguments["old_string"])


def _argument_name(situation: Situation, right_move: Move, random: Random) -> Move | None:
    right_name, wrong_name = _ARGUMENT_NAMES[right_move.tool]
    arguments = {wrong_name if key == right_name else key: value for key, value in right_move.arguments.items()}
    return Move(text=right_move.text, tool=right_move.tool, arguments=arguments)


def _argument_missing(situation: Situation, right_move: Move, random: Random) -> Move | None:
    return _modify_call(right_move, without="file_path")


def _argument_type(situation: Situation, right_move: Move, random: Random) -> Move | None:
    name, value = _WRONG_TYPES[right_move.tool]
    return _modify_call(right_move, **{name: value})


def _unknown_tool(situation: Situation, right_move: Move, random: Random) -> Move | None:
    return _modify_call(right_move, _UNKNOWN_TOOLS[right_move.tool])


def _no_call(situation: Situation, right_move: Move, random: Random) -> Move | None:
    return None


REPEAT = "repeat"
_READ, _EDIT = frozenset({"Read"}), frozenset({"Edit"})


_MISTAKE_TABLE: tuple[Mistake, ...] = (
    Mistake(
        "guessed_path", "file_not_found", LOOK_TOOLS, "reads a guessed path instead of looking first", _guessed_path
    ),
    Mistake("read_folder", "is_directory", LOOK_TOOLS, "reads a folder instead of listing it", _read_folder),
    Mistake("near_name", "file_not_found", _READ | _EDIT, "a path that is nearly the right one", _near_name),
    Mistake("wrong_folder", "file_not_found", _READ, "the right name in a wrong folder", _wrong_folder),
    Mistake("edit_unread", "edit_not_read", _READ, "changes a file without reading it", _edit_unread),
    Mistake("whitespace", "edit_no_match", _EDIT, "text with different whitespace than the file's", _whitespace),
    Mistake("guessed_text", "edit_no_match", _EDIT, "guessed text instead of the file's", _guessed_text),
    Mistake("made_before", "edit_no_match", _EDIT | {"RunTests"}, "an edit that was already made", _made_before),
    Mistake("ambiguous", "edit_ambiguous", _EDIT, "text that is in the file more than once", _ambiguous),
    Mistake("noop", "edit_noop", _EDIT, "an edit that changes nothing", _noop),
    Mistake("argument_name", "input_validation", frozenset(_ARGUMENT_NAMES), "a wrong argument name", _argument_name),
    Mistake("argument_missing", "input_validation", _READ | _EDIT, "leaves out the path", _argument_missing),
    Mistake("argument_type", "input_validation", frozenset(_WRONG_TYPES), "a value of the wrong type", _argument_type),
    Mistake("unknown_tool", "tool_not_found", frozenset(_UNKNOWN_TOOLS), "a tool that does not exist", _unknown_tool),
    # Made by `_after_mistake`, at the turn after a mistake that was not itself a repetition.
    Mistake(REPEAT, "", frozenset(), "repeats the call that has just failed", _no_call),
)
MISTAKES: Mapping[str, Mistake] = {mistake.name: mistake for mistake in _MISTAKE_TABLE}


@dataclass(frozen=True, slots=True)
class Style:
    """Choices that do not affect the result: the tool used to look around first, and the sentences to say."""

    look: str = "Glob"
    words: int = 0

    @staticmethod
    def of(seed: int | str) -> Style:
        random = Random(f"style {seed}")  # noqa: S311 (an episode, not a secret)
        return Style(random.choice(("Glob", "LS")), random.randrange(1000))

    def say(self, sentences: Sequence[str], number: int, **names: str) -> str:
        return sentences[(self.words + number) % len(sentences)].format(**names)


def expert_move(situation: Situation, style: Style) -> Move:
    """Return the expert's next move. It uses only the transcript and the task's solution."""
    number, edit = len(situation.turns), situation.next_edit()

    def move(sentences: Sequence[str], tool: str, path: str = "", **arguments: str) -> Move:
        text = style.say(sentences, number, name=path.rpartition("/")[2])
        call_arguments = {"file_path": absolute(path), **arguments} if path else arguments
        return Move(text=text, tool=tool, arguments=call_arguments)

    # Look; in hard tasks, run and read the tests; read and edit file by file; run the tests; finish.
    if edit is not None and not situation.has_looked and edit.path not in situation.read:
        return _look_move(situation, style)
    if edit is not None and situation.task.difficulty == "hard":
        if not situation.has_run_tests:
            return move(_TEST_FIRST_TEXTS, "RunTests")
        test = _find_test(situation, edit)
        if test is not None and test not in situation.read:
            return move(_READ_TEST_TEXTS, "Read", test)
    if edit is not None:
        # The harness refuses edits of existing files that were not read.
        if edit.path in situation.files and edit.path not in situation.read:
            return move(_READ_TEXTS, "Read", edit.path)
        if not edit.old:
            return move(_EDIT_TEXTS, "Write", edit.path, content=edit.new)
        return move(_EDIT_TEXTS, "Edit", edit.path, old_string=edit.old, new_string=edit.new)
    if not situation.is_tested:
        return move(_TEST_TEXTS, "RunTests")
    return move(_FINISH_TEXTS, "Finish")


def _look_move(situation: Situation, style: Style) -> Move:
    """Return the move that lists the files of the workspace."""
    text = style.say(_LOOK_TEXTS, len(situation.turns))
    arguments = {"path": ROOT} if style.look == "LS" else {"pattern": "**/*", "path": ROOT}
    return Move(text=text, tool=style.look, arguments=arguments)


def _find_test(situation: Situation, edit: Edit) -> str | None:
    """Return the path of the edited file's test, or else of any test, or None if there are no tests."""
    tests = sorted(path for path in situation.files if path.rpartition("/")[2].startswith("test_"))
    stem = edit.path.rpartition("/")[2].removesuffix(".py")
    return next((path for path in tests if stem in path), tests[0] if tests else None)


EXPERT = FlawedAgent(name="expert")
# The default agent of `crf world`. Rates are per opportunity.
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
