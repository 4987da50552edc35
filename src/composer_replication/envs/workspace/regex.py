"""Match regular expressions in bounded time, for the Grep tool, whose patterns come from a model.

Python's `re` can take exponential time. Here a pattern is compiled to a program of instructions (a Thompson NFA), and
the matcher tracks the set of states it may be in: every state is visited at most once per character, and all visits of
a search share a budget. Syntax and error messages are ripgrep's, as in the harness that the workspace imitates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

_BUDGET = 2_000_000  # visits of states per search


class BudgetError(RuntimeError):
    """Raised if a search visits more states than its budget allows."""


class Regex:
    """A compiled pattern. All lines that it is matched against share one budget."""

    def __init__(self, pattern: str) -> None:
        self._program = _compile(pattern)
        self._budget = _BUDGET

    def matches(self, line: str) -> bool:
        """Return whether the pattern matches anywhere in the line. Raises BudgetError if the search takes too long."""
        states: set[int] = set()
        for position in range(len(line) + 1):
            # A match may start at any character, so the start state is added at each.
            if self._enter(0, line, position, states):
                return True
            following: set[int] = set()
            if position < len(line):
                char = line[position]
                for state in states:
                    test = self._program[state].test
                    if test is not None and test(char) and self._enter(state + 1, line, position + 1, following):
                        return True
            states = following
        return False

    def _enter(self, state: int, line: str, position: int, states: set[int]) -> bool:
        """Add a state and all states reachable from it without consuming a character.

        Return whether a match state is among them.
        """
        waiting = [state]
        while waiting:
            state = waiting.pop()
            if state in states:
                continue
            self._budget -= 1
            if self._budget < 0:
                raise BudgetError
            states.add(state)
            instruction = self._program[state]
            if instruction.op == "match":
                return True
            if instruction.op == "jump":
                waiting.append(instruction.first)
            elif instruction.op == "split":
                waiting += (instruction.first, instruction.second)
            elif instruction.op != "char" and _holds(instruction.op, line, position):
                waiting.append(state + 1)
        return False


def _holds(assertion: str, line: str, position: int) -> bool:
    if assertion in ("start", "end"):
        return position == (0 if assertion == "start" else len(line))
    is_word = CLASSES["w"]
    before, after = position > 0 and is_word(line[position - 1]), position < len(line) and is_word(line[position])
    return (before != after) == (assertion == "edge")


# Limits on a pattern: characters, instructions after compilation, nested groups.
MAX_PATTERN, MAX_PROGRAM, MAX_DEPTH = 1000, 3000, 50
CharTest = Callable[[str], bool]


class PatternError(ValueError):
    """Raised for an invalid pattern, with the same message as ripgrep's."""


# Unicode classes, as in ripgrep: "é" is a word character, "٣" a digit.
CLASSES: dict[str, CharTest] = {"d": str.isdigit, "w": lambda char: char.isalnum() or char == "_", "s": str.isspace}
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_EDGES = {"b": "edge", "B": "no edge", "A": "start", "z": "end"}


@dataclass(slots=True)
class _Instruction:
    """One instruction of a program.

    `op` is "char" (consume a character that passes `test`), "jump" (go to `first`), "split" (go to `first` and
    `second`), "match" (the end), or an assertion: "start", "end", "edge" (of a word) or "no edge".
    """

    op: str
    test: CharTest | None = None
    first: int = 0
    second: int = 0


@dataclass
class _PatternParser:
    """A recursive-descent parser. Each method parses a part of the pattern and appends the instructions for it."""

    pattern: str
    position: int = 0
    ignore_case: bool = False
    depth: int = 0
    program: list[_Instruction] = field(default_factory=list[_Instruction])

    def error(self, reason: str) -> PatternError:
        return PatternError(
            f"regex parse error:\n    {self.pattern[:200]}\n    {' ' * min(self.position, 199)}^\nerror: {reason}"
        )

    def peek(self) -> str:
        return self.pattern[self.position] if self.position < len(self.pattern) else ""

    def add(self, instruction: _Instruction) -> int:
        if len(self.program) >= MAX_PROGRAM:
            raise self.error("compiled regex exceeds size limit")
        self.program.append(instruction)
        return len(self.program) - 1

    def parse(self) -> list[_Instruction]:
        """Parse the whole pattern and return its program. Raises PatternError for an invalid pattern."""
        self.ignore_case = self.pattern.startswith("(?i)")
        self.position = 4 * self.ignore_case
        self.alternation()
        if self.peek():
            raise self.error("unopened group")
        self.add(_Instruction("match"))
        return self.program

    def alternation(self) -> None:
        """Parse alternatives separated by `|`.

        The program of each alternative but the last starts with a split to the next alternative, and ends with a jump
        to the end.
        """
        # Jumps to the end are written before the end is known, and get their target at the bottom.
        ends: list[int] = []
        start = len(self.program)
        self.sequence()
        while self.peek() == "|":
            self.position += 1
            # The split that is inserted next moves all jumps by one.
            ends = [end + 1 for end in [*ends, self.add(_Instruction("jump"))]]
            self.insert(start, _Instruction("split", first=start + 1, second=len(self.program) + 1))
            start = len(self.program)
            self.sequence()
        for end in ends:
            self.program[end].first = len(self.program)

    def insert(self, index: int, instruction: _Instruction) -> None:
        """Insert an instruction, and adjust the jump targets of the instructions after it."""
        self.add(instruction)  # checks the size
        self.program.insert(index, self.program.pop())
        for later in self.program[index + 1 :]:
            later.first += later.first >= index
            later.second += later.second >= index

    def sequence(self) -> None:
        while self.peek() not in ("", "|", ")"):
            start = len(self.program)
            self.atom()
            while self.peek() and self.peek() in "*+?{":
                if not self.repeat(start):
                    break

    def atom(self) -> None:
        char = self.peek()
        self.position += 1
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
            self.position -= 1
            raise self.error("repetition operator missing expression")
        else:
            self.literal(char)

    def literal(self, char: str) -> None:
        same = {char, char.lower(), char.upper()} if self.ignore_case else {char}
        self.add(_Instruction("char", same.__contains__))

    def group(self) -> None:
        if self.peek() == "?":
            rest = self.pattern[self.position :]
            # These cannot be matched by tracking states, and ripgrep does not support them either.
            if rest[:2] in ("?=", "?!") or rest[:3] in ("?<=", "?<!"):
                raise self.error("look-around, including look-ahead and look-behind, is not supported")
            # A group's name (`(?P<name>...)`) has no effect: only whether a line matches counts.
            is_named = rest.startswith(("?P<", "?<")) and ">" in rest
            if not (rest.startswith("?:") or is_named):
                raise self.error("unrecognized flag")
            self.position += rest.index(">") + 1 if is_named else 2
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error("exceeded the maximum number of nested parentheses/brackets")
        self.alternation()
        self.depth -= 1
        if self.peek() != ")":
            raise self.error("unclosed group")
        self.position += 1

    def escape(self) -> None:
        char = self.peek()
        self.position += 1
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
        self.position += negated
        tests: list[CharTest] = []
        # A "]" directly after the bracket is a character: "[]a]" matches "]" and "a".
        while self.peek() != "]" or not tests:
            low = self.member(tests)
            if low is None or self.peek() != "-" or self.pattern[self.position + 1 : self.position + 2] in ("]", ""):
                tests += [low.__eq__] if low is not None else []
                continue
            self.position += 1
            high = self.member(tests)
            if high is None or high < low:
                raise self.error("invalid character class range, the start must be <= the end")
            tests.append(lambda char, low=low, high=high: low <= char <= high)
        self.position += 1
        forms = (str.lower, str.upper) if self.ignore_case else (str,)
        self.add(
            _Instruction("char", lambda char: any(test(form(char)) for test in tests for form in forms) != negated)
        )

    def member(self, tests: list[CharTest]) -> str | None:
        r"""Parse a member of a bracket expression.

        Return its character, or, for a class such as `\d`, add a test to `tests` and return None.
        """
        char = self.peek()
        if not char:
            raise self.error("unclosed character class")
        self.position += 1
        if char != "\\":
            return char
        char = self.peek()
        self.position += 1
        if char.lower() in CLASSES and char:
            tests.append(self.escaped(char))
            return None
        if not char:
            raise self.error("incomplete escape sequence")
        return _CONTROLS.get(char, char)

    def repeat(self, start: int) -> bool:
        """Parse a repetition operator and repeat the instructions from `start` accordingly.

        Return False if the operator turns out to be a brace that is a literal character.
        """
        low, high = self.bounds()
        if low is None:
            self.literal("{")
            self.position += 1
            return False
        # Lazy or greedy decides where a match ends, not whether there is one.
        self.position += self.peek() == "?"
        body = self.program[start:]
        del self.program[start:]
        # There is no counter: `a{2,4}` becomes two copies and two optional copies. MAX_PROGRAM bounds their number.
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
            for split in splits:
                self.program[split].second = len(self.program)
        return True

    def copy(self, body: list[_Instruction], start: int) -> None:
        shift = len(self.program) - start
        for instruction in body:
            first, second = instruction.first + shift, instruction.second + shift
            self.add(_Instruction(instruction.op, instruction.test, first, second))

    def bounds(self) -> tuple[int | None, int | None]:
        """Parse `*`, `+`, `?` or a count in braces, and return the minimum and the maximum count.

        The maximum is None if it is unlimited. Minimum and maximum are None if the text is not a repetition.
        """
        simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if self.peek() in simple:
            self.position += 1
            return simple[self.pattern[self.position - 1]]
        # "{2}", "{2,}" or "{2,4}"; anything else, such as "{,4}" or "{a}", is literal text.
        end = self.pattern.find("}", self.position)
        parts = self.pattern[self.position + 1 : end].split(",") if end >= 0 else []
        numbers = [part.isascii() and part.isdigit() and len(part) <= 4 for part in parts]
        if numbers not in ([True], [True, True]) and not (numbers == [True, False] and not parts[1]):
            return None, None
        self.position = end + 1
        low = int(parts[0])
        high = low if len(parts) == 1 else int(parts[1]) if parts[1] else None
        if high is not None and high < low:
            raise self.error("invalid repetition count range, the start must be <= the end")
        return low, high


def _compile(pattern: str) -> list[_Instruction]:
    """Compile a pattern and return its program. Raises PatternError for an invalid pattern."""
    if len(pattern) > MAX_PATTERN:
        raise PatternError("regex parse error:\nerror: compiled regex exceeds size limit")
    return _PatternParser(pattern).parse()
