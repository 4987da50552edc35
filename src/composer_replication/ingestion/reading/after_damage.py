"""What stands behind the damage in a JSON document: objects that are whole, and how deep they lie.

A quote inside a string is escaped, so an object with keys never parses out of the middle of one: whatever parses is
structure, also where the damage took a quote and nobody can tell any more what is inside a string and what is not. How
deep an object lies is counted back from the end of the document, where everything is closed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from composer_replication.ingestion.reading import json_text

_START = re.compile(r'[\[,]\s*(?=\{\s*")')
_BRACKET = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\]]', re.DOTALL)
_STEP = {"{": 1, "[": 1, "}": -1, "]": -1}
_DECODER = json.JSONDecoder(strict=False)
# Attempts that fail may read on to the end of the text: together they read it no more often than this.
_MAX_PASSES = 8
# An error counts the lines before it, which is this much faster than parsing them.
_COST_OF_AN_ERROR = 32


def values_behind(text: str, start: int, depth: int) -> Iterator[tuple[int, Any]]:
    """(depth, object) of the messages behind `start` that lie in the same list; then of what follows in the outermost.

    Once a list of messages is closed, another one at its depth is another conversation's.
    """
    found = list(_whole_objects(text, start))
    wanted = depth
    for (begin, end), (level, lowest) in zip(found, _depths(text, [begin for begin, _ in found]), strict=True):
        if lowest < wanted:
            wanted = 1
        if level == wanted:
            try:
                yield level, json_text.loads(text[begin:end].encode())
            except ValueError:
                continue


def _whole_objects(text: str, start: int) -> Iterator[tuple[int, int]]:
    """Where objects begin and end that parse; none lies within another."""
    budget = _MAX_PASSES * (len(text) - start)
    at = start
    while budget > 0 and (match := _START.search(text, at)) is not None:
        begin = match.end()
        try:
            _, at = _DECODER.raw_decode(text, begin)
            yield begin, at
        except json.JSONDecodeError as error:
            budget -= max(error.pos - begin, 1) + error.pos // _COST_OF_AN_ERROR
            at = begin + 1
        except (RecursionError, ValueError):  # nested or counted beyond what the parser takes: no message of anybody's
            at = _end_of_object(text, begin)
            budget -= at - begin


def _end_of_object(text: str, begin: int) -> int:
    level = 0
    for token in _BRACKET.finditer(text, begin):
        level += _STEP.get(token.group(), 0)
        if level == 0:
            return token.end()
    return len(text)


def _depths(text: str, begins: list[int]) -> list[tuple[int, int]]:
    """(depth at each place, lowest depth since the first); at the end of the text the depth is 0."""
    if not begins:
        return []
    seen: list[tuple[int, int]] = []
    level = lowest = 0
    waiting = iter([*begins, len(text)])
    next_begin = next(waiting)
    for token in _BRACKET.finditer(text, begins[0]):
        if token.start() >= next_begin:
            seen.append((level, lowest))
            next_begin = next(waiting)
        level += _STEP.get(token.group(), 0)
        lowest = min(lowest, level)
    seen += [(level, lowest)] * (len(begins) - len(seen))
    return [(at - level, low - level) for at, low in seen]
