"""What a hint may not say: anything of the call that failed, unless it is also what is right.

A small model copies what stands before it, so a hint that quotes a mistake makes it likelier.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from composer_replication.types import ToolCall

_WORD = re.compile(r"[^\s'\"`(){}\[\],;<>|&=]+")
# A word with one of these is a name; without, it is language, of which any rule is made.
_NAME = re.compile(r"[\d_./\\:$*@#~^-]|[a-z][A-Z]")
_IN_QUOTES = re.compile(r"'([^'\n]{3,200})'|\"([^\"\n]{3,200})\"")
_EDGES = ".,:;!?…"
_MIN_WORD, _MIN_STEM, _MIN_LINE, _MAX_VALUE = 4, 5, 12, 200
_MAX_TEXT = 20_000
_SESSION_TEXT = re.compile(r"`([^`]*)`")


def quotes_call(text: str, call: ToolCall | None, right: Iterable[str], *, only_quoted: bool = False) -> list[str]:
    """Parts of the failing call that stand in a hint without being right, the longest first.

    With `only_quoted`, what stands in backticks alone is looked at: the rest of a template is its own words.
    """
    if call is None:
        return []
    allowed = list(right)
    looked_at = " \n ".join(_SESSION_TEXT.findall(text)) if only_quoted else text
    parts = sorted({*call_parts(call)}, key=lambda part: (-len(part), part))
    return [
        part
        for part in parts
        if _stands_in(part, looked_at) and not any(part in allowed_text for allowed_text in allowed)
    ]


def call_parts(call: ToolCall) -> Iterator[str]:
    """What a hint could quote of a call: its parameters, their values, lines, names, parts of paths, quotes."""
    yield from (name for name in call.arguments if len(name) >= _MIN_WORD and _NAME.search(name))
    for text in _texts(call.arguments if call.raw_arguments is None else call.raw_arguments):
        whole = " ".join(text.split())
        if _MIN_WORD <= len(whole) <= _MAX_VALUE:
            yield whole
        yield from (" ".join(line.split()) for line in text.splitlines() if len(line.strip()) >= _MIN_LINE)
        yield from (next(group for group in match.groups() if group) for match in _IN_QUOTES.finditer(text))
        for word in _WORD.findall(text):
            yield from _names(word.strip(_EDGES))


def _names(word: str) -> Iterator[str]:
    """A word that is a name; of a path its parts that are names, its last part, and that without its ending."""
    if not _NAME.search(word):
        return
    *folders, last = re.split(r"[/\\]", word)
    stem = last.rpartition(".")[0]
    yield from (name for name in (word, last) if len(name) >= _MIN_WORD)
    yield from (folder for folder in folders if len(folder) >= _MIN_WORD and _NAME.search(folder))
    if len(stem) >= _MIN_STEM:
        yield stem


def _texts(value: Any) -> Iterator[str]:
    """All texts of a value, however deep, in their order."""
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, str):
            yield node[:_MAX_TEXT]
        elif isinstance(node, Mapping):
            waiting += cast("Mapping[str, Any]", node).values()
        elif isinstance(node, list | tuple):
            waiting += cast("list[Any]", node)


def _stands_in(part: str, text: str) -> bool:
    position = text.find(part)
    while position >= 0:
        before, after = text[position - 1 : position], text[position + len(part) : position + len(part) + 1]
        if not (before.isalnum() or before == "_" or after.isalnum() or after == "_"):
            return True
        position = text.find(part, position + 1)
    return False
