"""The calls of a session in the order of their results: which were made when, which worked, who spoke in between."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from composer_replication.actions.shell.command import Command
from composer_replication.actions.tools import command_text, only_looks
from composer_replication.types import ToolCall

_WRITES = re.compile(r"\bsed\b.{0,80}\s-\w{0,4}i|\btee\b|(?<![&2=-])>(?![&=]|\s*/dev/)")


class CallsSoFar:
    """`turn` and `number` are those of the turn and of the call that is being looked at."""

    def __init__(self) -> None:
        self.turn = self.number = 0
        self.heard_at = -1  # the last turn in which somebody but the model spoke
        self._made_at: dict[str, int] = {}
        self._worked: list[tuple[int, ToolCall]] = []

    def made(self, call: ToolCall) -> int:
        """The turn in which the call was made: what came back in it, or later, was not known then."""
        return self._made_at.get(call.id, self.turn)

    def at(self, turn: int, calls: tuple[ToolCall, ...]) -> None:
        self.turn = turn
        for call in calls:
            self._made_at[call.id] = turn

    def add_worked(self, call: ToolCall) -> None:
        self._worked.append((self.number, call))

    def worked_since(self, number: int) -> Iterator[ToolCall]:
        """Calls that worked after call number `number`, the last one first."""
        later = itertools.takewhile(lambda entry: entry[0] > number, reversed(self._worked))
        return (call for _, call in later)

    def only_looked_since(self, number: int) -> bool:
        return all(map(_looks, self.worked_since(number)))


def command_of(call: ToolCall) -> Command:
    return Command.of(command_text(call.name, call.arguments))


def _looks(call: ToolCall) -> bool:
    command = command_of(call)
    if not command.text:
        return only_looks(call.name, call.arguments)
    return command.only_shows and _WRITES.search(command.text) is None
