"""What begins with a dollar sign in shell text, and the here-documents in it: where each ends, and what it is."""

from __future__ import annotations

import re
from typing import NamedTuple


class NotUnderstood(ValueError):
    """Shell text outside the part of the language that is surely understood."""


class Dollar(NamedTuple):
    """An expansion in one spelling, or text (`is_text`) where it always gives the same; `end` is behind it."""

    name: str
    end: int
    is_text: bool = False


_NAME = re.compile(r"\$(?:([A-Za-z_]\w*|[0-9@*#?$!-])|\{([A-Za-z_]\w*)\})", re.ASCII)
_BRACED = re.compile(r"\$\{[^{}'\"\\`$]*\}")
# A message written as a here-document that is then put into an argument: the usual way to commit.
_CAT = re.compile(r"\$\([ \t]*cat[ \t]*<<(-?)[ \t]*(?:'(\w+)'|\"(\w+)\"|(\w+))[ \t]*\n")
_CLOSES = re.compile(r"\s*\)")
_INSIDE = re.compile(r"['\"\\()`]|<<|(?<=\s)#|\bcase\b")
_IN_QUOTES = re.compile(r"[\"\\`]|\$\(")
_ANSI = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL)
_ANSI_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ANSI_MEANS = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "e": "\x1b"}


def dollar_at(text: str, at: int) -> Dollar:
    """The expansion that begins at `at` (a process substitution too); a dollar sign that begins none is text."""
    name = _NAME.match(text, at)
    if name:
        return Dollar(f"${name[1] or name[2]}", name.end())
    if text.startswith("(", at + 1):
        return _written_message(text, at) or _substitution(text, at)
    if text.startswith("{", at + 1):
        braced = _BRACED.match(text, at)
        if braced is None:
            raise NotUnderstood("an expansion inside an expansion")
        return Dollar(braced.group(), braced.end())
    return Dollar("$", at + 1, is_text=True)


def here_body(text: str, at: int, end_mark: str, *, strips_tabs: bool) -> tuple[str, int]:
    """The lines from `at` up to the one that is the end mark, and the place behind it."""
    body: list[str] = []
    while at <= len(text):
        end = text.find("\n", at)
        line = text[at : end if end >= 0 else len(text)]
        if strips_tabs:
            line = line.lstrip("\t")
        if line == end_mark:
            return "".join(body), end if end >= 0 else len(text)
        if end < 0:
            break
        body.append(f"{line}\n")
        at = end + 1
    raise NotUnderstood("a here-document that does not end")


def ansi_text(text: str, at: int) -> tuple[str, int]:
    """What `$'…'` at `at` stands for, and the place behind it; only the plain escapes."""
    match = _ANSI.match(text, at)
    if match is None or any(escape not in _ANSI_MEANS for escape in _ANSI_ESCAPE.findall(match[1])):
        raise NotUnderstood("a quote with escapes that are not read")
    return _ANSI_ESCAPE.sub(lambda escape: _ANSI_MEANS[escape[1]], match[1]), match.end()


def _written_message(text: str, at: int) -> Dollar | None:
    cat = _CAT.match(text, at)
    if cat is None:
        return None
    end_mark = cat[2] or cat[3] or cat[4]
    body, end = here_body(text, cat.end(), end_mark, strips_tabs=bool(cat[1]))
    closes = _CLOSES.match(text, end)
    if closes is None or (cat[4] and re.search(r"[$`\\]", body)):
        raise NotUnderstood("a here-document inside an expansion")
    return Dollar(body.rstrip("\n"), closes.end(), is_text=True)


def _substitution(text: str, at: int) -> Dollar:
    """`$(…)` and `<(…)` as they stand: found by counting parentheses outside quotes."""
    stack, cursor = [")"], at + 2
    while stack:
        pattern = _IN_QUOTES if stack[-1] == '"' else _INSIDE
        match = pattern.search(text, cursor)
        if match is None or match.group() in ("<<", "#", "case", "`"):
            raise NotUnderstood("an expansion whose end is not sure")
        mark, cursor = match.group(), match.end()
        if mark == "\\":
            cursor += 1
        elif mark == "'":
            cursor = text.find("'", cursor) + 1
            if not cursor:
                raise NotUnderstood("a quote that does not end")
        elif mark == stack[-1]:
            stack.pop()
        elif mark == ")":
            raise NotUnderstood("a parenthesis that closes nothing")
        else:
            stack.append('"' if mark == '"' else ")")
    return Dollar(text[at:cursor], cursor)
