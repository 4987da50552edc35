"""Every pattern of the package, read as a tree: none crosses the border between two strings, none can run away.

Strings of a record are scanned together with a NUL between them. A pattern that takes the NUL for one of its characters
would let one string speak for the next.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import pytest

from composer_replication import privacy
from composer_replication.privacy.rules import Rule

# The tree of a pattern has no public name.
sre: Any = importlib.import_module("re._constants")
parser: Any = importlib.import_module("re._parser")
NUL = 0
NOT_CATEGORIES = {sre.CATEGORY_NOT_SPACE, sre.CATEGORY_NOT_WORD, sre.CATEGORY_NOT_DIGIT}
MANY = 64  # a repetition with a higher bound than this is as good as one without


def held(value: Any) -> Iterator[re.Pattern[str]]:
    if isinstance(value, re.Pattern):
        if isinstance(value.pattern, str):
            yield value
    elif isinstance(value, Rule):
        yield value.pattern
    elif isinstance(value, tuple | list):
        for item in value:
            yield from held(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from held(item)


def patterns() -> dict[str, re.Pattern[str]]:
    found: dict[str, re.Pattern[str]] = {}
    for info in pkgutil.walk_packages(privacy.__path__, f"{privacy.__name__}."):
        module = importlib.import_module(info.name)
        if info.name == "composer_replication.privacy.outgoing":  # reads requests, which are one string each
            continue
        for value in vars(module).values():
            found.update((pattern.pattern, pattern) for pattern in held(value))
    return found


PATTERNS = patterns()


def children(argument: Any) -> Iterator[Any]:
    """The nodes below one node."""
    if isinstance(argument, parser.SubPattern):
        yield from argument
    elif isinstance(argument, tuple | list):
        for item in argument:
            if isinstance(item, parser.SubPattern | tuple | list):
                yield from children(item)


def takes_nul(operator: Any, argument: Any) -> bool:
    if operator is sre.ANY or (operator is sre.LITERAL and argument == NUL):
        return True
    if operator is sre.NOT_LITERAL:
        return argument != NUL
    if operator is not sre.IN:
        return False
    negated = argument[0][0] is sre.NEGATE
    inside = any(
        (kind is sre.LITERAL and what == NUL)
        or (kind is sre.RANGE and what[0] <= NUL <= what[1])
        or (kind is sre.CATEGORY and what in NOT_CATEGORIES)
        for kind, what in argument
    )
    return inside != negated


def nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    for operator, argument in tree:
        yield operator, argument
        yield from nodes(children(argument))


def test_there_are_patterns():
    assert len(PATTERNS) > 150


@pytest.mark.parametrize("source", PATTERNS, ids=lambda source: source[:40])
def test_no_pattern_takes_the_border_between_two_strings(source):
    tree = parser.parse(source, PATTERNS[source].flags)
    assert [node for node in nodes(tree) if takes_nul(*node)] == []


def loops(tree: Any, inside: bool = False) -> Iterator[str]:
    """Repetitions that can give characters back, inside others that can: what makes a pattern exponential."""
    for operator, argument in tree:
        gives_back = operator in (sre.MAX_REPEAT, sre.MIN_REPEAT)
        low, high = argument[:2] if gives_back else (1, 1)
        if inside and gives_back and high > 1 and low != high:
            yield f"{operator} {low}-{high}"
        committed = operator in (sre.POSSESSIVE_REPEAT, sre.ATOMIC_GROUP)
        yield from loops(children(argument), not committed and (inside or high > MANY))


@pytest.mark.parametrize("source", PATTERNS, ids=lambda source: source[:40])
def test_no_repetition_stands_inside_another_that_gives_characters_back(source):
    assert list(loops(parser.parse(source, PATTERNS[source].flags))) == []
