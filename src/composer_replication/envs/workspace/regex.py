"""Whether a pattern matches a line: every state is visited at most once a character, and visits have a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

BUDGET = 2_000_000


class BudgetError(RuntimeError):
    """The search visited more states than it may."""


class Regex:
    """A compiled pattern with a budget of its own."""

    def __init__(self, pattern: str) -> None:
        self._program = compiled(pattern)
        self._left = BUDGET

    def matches(self, line: str) -> bool:
        """Whether the pattern matches anywhere in the line."""
        states: set[int] = set()
        for at in range(len(line) + 1):
            if self._enter(0, line, at, states):
                return True
            following: set[int] = set()
            if at < len(line):
                char = line[at]
                for state in states:
                    test = self._program[state].test
                    if test is not None and test(char) and self._enter(state + 1, line, at + 1, following):
                        return True
            states = following
        return False

    def _enter(self, state: int, line: str, at: int, states: set[int]) -> bool:
        """Adds a place and all that can be reached from it without a character; whether the end is among them."""
        waiting = [state]
        while waiting:
            state = waiting.pop()
            if state in states:
                continue
            self._left -= 1
            if self._left < 0:
                raise BudgetError
            states.add(state)
            step = self._program[state]
            if step.does == "match":
                return True
            if step.does == "jump":
                waiting.append(step.first)
            elif step.does == "split":
                waiting += (step.first, step.second)
            elif step.does != "char" and _holds(step.does, line, at):
                waiting.append(state + 1)
        return False


def _holds(assertion: str, line: str, at: int) -> bool:
    if assertion in ("start", "end"):
        return at == (0 if assertion == "start" else len(line))
    is_word = CLASSES["w"]
    before, after = at > 0 and is_word(line[at - 1]), at < len(line) and is_word(line[at])
    return (before != after) == (assertion == "edge")


# A pattern as a program of steps, or what is wrong with it: recursive descent, and a bound on all that may grow.

MAX_PATTERN, MAX_PROGRAM, MAX_DEPTH = 1000, 3000, 50
CharTest = Callable[[str], bool]


class PatternError(ValueError):
    """What is wrong with a pattern, in ripgrep's words."""


CLASSES: dict[str, CharTest] = {"d": str.isdigit, "w": lambda char: char.isalnum() or char == "_", "s": str.isspace}
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_EDGES = {"b": "edge", "B": "no edge", "A": "start", "z": "end"}


@dataclass(slots=True)
class _Instruction:
    """One instruction: a character to match, a choice between two places, an assertion, or the end."""

    does: str
    test: CharTest | None = None
    first: int = 0
    second: int = 0


@dataclass
class _PatternParser:
    """Recursive descent over the pattern; each method appends steps to the program."""

    pattern: str
    at: int = 0
    ignore_case: bool = False
    depth: int = 0
    program: list[_Instruction] = field(default_factory=list[_Instruction])

    def error(self, reason: str) -> PatternError:
        return PatternError(
            f"regex parse error:\n    {self.pattern[:200]}\n    {' ' * min(self.at, 199)}^\nerror: {reason}"
        )

    def peek(self) -> str:
        return self.pattern[self.at] if self.at < len(self.pattern) else ""

    def add(self, step: _Instruction) -> int:
        if len(self.program) >= MAX_PROGRAM:
            raise self.error("compiled regex exceeds size limit")
        self.program.append(step)
        return len(self.program) - 1

    def whole(self) -> list[_Instruction]:
        self.ignore_case = self.pattern.startswith("(?i)")
        self.at = 4 * self.ignore_case
        self.either()
        if self.peek():
            raise self.error("unopened group")
        self.add(_Instruction("match"))
        return self.program

    def either(self) -> None:
        """Alternatives: each but the last is tried beside what follows it."""
        ends: list[int] = []
        start = len(self.program)
        self.row()
        while self.peek() == "|":
            self.at += 1
            ends = [end + 1 for end in [*ends, self.add(_Instruction("jump"))]]
            self.insert(start, _Instruction("split", first=start + 1, second=len(self.program) + 1))
            start = len(self.program)
            self.row()
        for end in ends:
            self.program[end].first = len(self.program)

    def insert(self, place: int, step: _Instruction) -> None:
        """Puts a step before others, whose targets move along."""
        self.add(step)
        self.program.insert(place, self.program.pop())
        for later_step in self.program[place + 1 :]:
            later_step.first += later_step.first >= place
            later_step.second += later_step.second >= place

    def row(self) -> None:
        while self.peek() not in ("", "|", ")"):
            start = len(self.program)
            self.atom()
            while self.peek() and self.peek() in "*+?{":
                if not self.repeat(start):
                    break

    def atom(self) -> None:
        char = self.peek()
        self.at += 1
        if char == "(":
            self.group()
        elif char == "[":
            self.bracket()
        elif char == "\\":
            self.escape()
        elif char == ".":
            self.add(_Instruction("char", lambda character: character != "\n"))
        elif char in "^$":
            self.add(_Instruction("start" if char == "^" else "end"))
        elif char in "*+?":
            self.at -= 1
            raise self.error("repetition operator missing expression")
        else:
            self.literal(char)

    def literal(self, char: str) -> None:
        same = {char, char.lower(), char.upper()} if self.ignore_case else {char}
        self.add(_Instruction("char", same.__contains__))

    def group(self) -> None:
        if self.peek() == "?":
            rest = self.pattern[self.at :]
            if rest[:2] in ("?=", "?!") or rest[:3] in ("?<=", "?<!"):
                raise self.error("look-around, including look-ahead and look-behind, is not supported")
            is_named = rest.startswith(("?P<", "?<")) and ">" in rest
            if not (rest.startswith("?:") or is_named):
                raise self.error("unrecognized flag")
            self.at += rest.index(">") + 1 if is_named else 2
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error("exceeded the maximum number of nested parentheses/brackets")
        self.either()
        self.depth -= 1
        if self.peek() != ")":
            raise self.error("unclosed group")
        self.at += 1

    def escape(self) -> None:
        char = self.peek()
        self.at += 1
        if char in _EDGES:
            self.add(_Instruction(_EDGES[char]))
        elif char.isdigit() or not char:
            raise self.error("backreferences are not supported" if char else "incomplete escape sequence")
        else:
            self.add(_Instruction("char", self.escaped(char)))

    def escaped(self, char: str) -> CharTest:
        if char.lower() in CLASSES:
            test = CLASSES[char.lower()]
            return test if char.islower() else lambda character: not test(character)
        if char.isalpha() and char not in _CONTROLS:
            raise self.error("unrecognized escape sequence")
        return _CONTROLS.get(char, char).__eq__

    def bracket(self) -> None:
        negated = self.peek() == "^"
        self.at += negated
        tests: list[CharTest] = []
        while self.peek() != "]" or not tests:
            low = self.member(tests)
            if low is None or self.peek() != "-" or self.pattern[self.at + 1 : self.at + 2] in ("]", ""):
                tests += [low.__eq__] if low is not None else []
                continue
            self.at += 1
            high = self.member(tests)
            if high is None or high < low:
                raise self.error("invalid character class range, the start must be <= the end")
            tests.append(lambda char, low=low, high=high: low <= char <= high)
        self.at += 1
        forms = (str.lower, str.upper) if self.ignore_case else (str,)
        self.add(
            _Instruction("char", lambda char: any(test(form(char)) for test in tests for form in forms) != negated)
        )

    def member(self, tests: list[CharTest]) -> str | None:
        """One character of a class; a class within it is added to the tests, and no character comes back."""
        char = self.peek()
        if not char:
            raise self.error("unclosed character class")
        self.at += 1
        if char != "\\":
            return char
        char = self.peek()
        self.at += 1
        if char.lower() in CLASSES and char:
            tests.append(self.escaped(char))
            return None
        if not char:
            raise self.error("incomplete escape sequence")
        return _CONTROLS.get(char, char)

    def repeat(self, start: int) -> bool:
        """Makes a repetition of the steps from `start`; a brace that is none is a character."""
        low, high = self.bounds()
        if low is None:
            self.literal("{")
            self.at += 1
            return False
        self.at += self.peek() == "?"  # a lazy one finds the same lines
        body = self.program[start:]
        del self.program[start:]
        for _ in range(low):
            self.copy(body, start)
        if high is None:
            split = self.add(_Instruction("split"))
            self.program[split].first = split + 1
            self.copy(body, start)
            self.add(_Instruction("jump", first=split))
            self.program[split].second = len(self.program)
        else:
            splits: list[int] = []
            for _ in range(high - low):
                splits.append(self.add(_Instruction("split", first=len(self.program) + 1)))
                self.copy(body, start)
            for position in splits:
                self.program[position].second = len(self.program)
        return True

    def copy(self, body: list[_Instruction], start: int) -> None:
        shift = len(self.program) - start
        for step in body:
            self.add(_Instruction(step.does, step.test, step.first + shift, step.second + shift))

    def bounds(self) -> tuple[int | None, int | None]:
        simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if self.peek() in simple:
            self.at += 1
            return simple[self.pattern[self.at - 1]]
        end = self.pattern.find("}", self.at)
        parts = self.pattern[self.at + 1 : end].split(",") if end >= 0 else []
        numbers = [part.isascii() and part.isdigit() and len(part) <= 4 for part in parts]
        if numbers not in ([True], [True, True]) and not (numbers == [True, False] and not parts[1]):
            return None, None
        self.at = end + 1
        low = int(parts[0])
        high = low if len(parts) == 1 else int(parts[1]) if parts[1] else None
        if high is not None and high < low:
            raise self.error("invalid repetition count range, the start must be <= the end")
        return low, high


def compiled(pattern: str) -> list[_Instruction]:
    """The steps that match a pattern."""
    if len(pattern) > MAX_PATTERN:
        raise PatternError("regex parse error:\nerror: compiled regex exceeds size limit")
    return _PatternParser(pattern).whole()
