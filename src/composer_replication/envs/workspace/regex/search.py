"""Whether a pattern matches a line: every state is visited at most once a character, and visits have a budget."""

from __future__ import annotations

from composer_replication.envs.workspace.regex.program import CLASSES, compiled

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
