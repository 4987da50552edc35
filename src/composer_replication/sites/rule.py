"""A rule: how one kind of failure looks in one channel. Custom rules are made and registered the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from composer_replication.actions.shell.command import Command
from composer_replication.actions.tools import Channel
from composer_replication.errors import InputError, explain
from composer_replication.sites.taxonomy import BLAMES, USUAL_BLAME
from composer_replication.sites.view import View
from composer_replication.types import Blame

Where = Literal["start", "line", "end"]
CHANNELS: tuple[Channel, ...] = ("shell", "file", "other")
OwnLine = Callable[[str], bool]
# Nobody's error message is longer, and a pattern never has to look further.
_MAX_LINE = 1000
_MAX_END = 300
_MAX_SHOWN = 300
_MESSAGE_END = re.compile(r"\n\s*\n|\s*</|\s*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRule:
    """`pattern` is tried on single lines, or where the message starts or ends.

    `needles` are words in lower case, cheap to look for, of which one has to be there. `accept` has the last word: it
    knows what the command itself says.
    """

    kind: str
    pattern: re.Pattern[str]
    needles: tuple[str, ...]
    channels: tuple[Channel, ...] = ("shell", "file", "other")
    where: Where = "line"
    blame: Blame | None = None
    confidence: float = 0.9
    accept: Callable[[re.Match[str], Command], bool] | None = None

    def __post_init__(self) -> None:
        if self.kind not in USUAL_BLAME and self.blame is None:
            expected = f"one of {', '.join(USUAL_BLAME)}, or a blame beside a kind of your own"
            raise InputError(explain("rule, kind", got=repr(self.kind), expected=expected))
        if self.blame is not None and self.blame not in BLAMES:
            raise InputError(explain("rule, blame", got=repr(self.blame), expected=f"one of {', '.join(BLAMES)}"))
        if not 0 < self.confidence <= 1:
            raise InputError(explain("rule, confidence", got=self.confidence, expected="above 0 and at most 1"))
        if not self.needles or any(needle != needle.lower() for needle in self.needles):
            raise InputError(explain("rule, needles", got=self.needles, expected="at least one word in lower case"))
        if self.pattern.flags & re.DOTALL:
            raise InputError("rule, pattern: dot must not match a line end: messages of different lines are no message")

    @property
    def whose(self) -> Blame:
        return self.blame or USUAL_BLAME[self.kind]

    def matches(self, view: View, command: Command, is_own: OwnLine | None = None) -> Iterator[tuple[int, int]]:
        """Spans of the view that are this failure; with `is_own`, only in lines that it takes."""
        if not view.has_any(self.needles):
            return
        for start, line in self._places(view):
            if is_own is not None and not is_own(line):
                continue
            match = self.pattern.match(line) if self.where == "start" else self.pattern.search(line)
            if match is not None and (self.accept is None or self.accept(match, command)):
                yield self._span(match, start)

    def _span(self, match: re.Match[str], offset: int) -> tuple[int, int]:
        """What to show: the whole line, or the message to its end; what stands beside the words is what they say."""
        if self.where == "line":
            return offset, offset + max(len(match.string.rstrip()), match.end())
        end = _MESSAGE_END.search(match.string, match.end())
        limit = min(len(match.string), match.start() + _MAX_SHOWN)
        return offset + match.start(), offset + max(match.end(), min(end.start() if end else limit, limit))

    def _places(self, view: View) -> Iterator[tuple[int, str]]:
        """The pieces of text that the pattern is tried on, with where they begin."""
        if self.where == "start":
            yield view.start, view.text[view.start : view.start + _MAX_LINE]
        elif self.where == "end":
            begin = max(0, len(view.text) - _MAX_END)
            yield begin, view.text[begin:]
        else:
            yield from view.lines_with(self.needles)


def rule(
    kind: str,
    pattern: str,
    *needles: str,
    channels: str = "shell file other",
    where: Where = "line",
    ignore_case: bool = True,
    blame: Blame | None = None,
    confidence: float = 0.9,
    accept: Callable[[re.Match[str], Command], bool] | None = None,
) -> FailureRule:
    """A rule from plain words. `^` and `$` are ends of a line."""
    words = channels.split()
    chosen = tuple[Channel, ...](channel for channel in CHANNELS if channel in words)
    return FailureRule(
        kind=kind,
        pattern=re.compile(pattern, re.MULTILINE | (re.IGNORECASE if ignore_case else 0)),
        needles=needles,
        channels=chosen,
        where=where,
        blame=blame,
        confidence=confidence,
        accept=accept,
    )


_registered: list[FailureRule] = []


def register_rule(rule: FailureRule) -> None:
    """Try this rule first from now on; the one registered first goes first."""
    if not isinstance(rule, FailureRule):
        raise InputError(explain("rule", got=type(rule).__name__, expected="a FailureRule, as `rule(...)` makes one"))
    _registered.append(rule)


def unregister_rule(rule: FailureRule) -> None:
    """Take back what `register_rule` was given."""
    if rule not in _registered:
        raise InputError(explain("rule", got=rule.kind, expected="a rule that was registered"))
    _registered.remove(rule)


def registered_rules() -> tuple[FailureRule, ...]:
    return tuple(_registered)
