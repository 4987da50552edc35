"""What stands between a name and its value in code: a type, a cast, a call around the literal, a default behind it.

`password: Optional[str] = "..."`, `var token string = "..."`, `char token[] = "..."`, `secret = SecretStr("...")`. One
small grammar for all languages, read only behind a name that means a secret, and never further than one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_LONGEST = 200  # between a name and the literal
_QUOTE = r"\\*[\"'`]"
# The parts of a type: a name with members and generics, an array, a pointer, a lifetime, a bar between two types.
_NAME = r"[A-Za-z_][\w.]*+(?:::[\w.]++)*+"
_BRACKETS = r"\[[^\0\n=\]]{0,60}(?:\[[^\0\n=\]]{0,40}\][^\0\n=\]]{0,40})?\](?:(?:const|mut)\s)?"
_GENERIC = r"<[^\0\n=>]{0,60}(?:<[^\0\n=>]{0,40}>[^\0\n=>]{0,20})?>"
_ROUND = r"\([^\0\n()]{0,40}\)"
_ATOM = (
    rf"(?:[&*?]{{0,2}}+(?:'[a-z]{{1,12}}\s)?(?:(?:mut|const|dyn|final|unsafe)\s)?(?:{_NAME}|{_BRACKETS}"
    rf"(?:{_NAME}(?:\s{_NAME})?)?)(?:{_BRACKETS}|{_GENERIC}|{_ROUND}|[*?!&]|\s?\*)*+)"
)
# `Annotated[str, Field(min_length=3)]`: its arguments may hold signs of their own.
_ANNOTATED = r"(?:\w+\.)?Annotated\[[^\0\n\"'`]{0,120}\]"
_TYPE = rf"(?:{_ANNOTATED}|{_ATOM}(?: ?\| ?{_ATOM}| {_ATOM}){{0,3}})"
_ASSIGNED = r"[ \t]{0,3}(?P<sign>:=|=)(?![=>])"
# A cast, a prefix of the literal, or calls around it: `(char *)`, `b`, `@`, `[]byte(`, `Field(default=`, `lambda: `.
_CALLEE = (
    r"(?:new\s)?(?:&|\[\]|::)?[A-Za-z_$][\w$]*+(?:(?:\.|::|->|\\)[A-Za-z_$][\w$]*+)*+!?(?:<[\w, ]{1,30}>)?\(\s{0,8}"
)
_KEYWORD = r"(?:[A-Za-z_]\w{0,30}\s?[=:]\s?)?(?:lambda:\s?|\(\)\s?=>\s?)?"
_PREFIX = r"(?:\([A-Za-z_][\w\s]{0,30}[*&]{0,2}\)\s?|\bstring\(\d{1,6}\)\s)?(?:\[\]\w{1,12}\{|\[|\(\s{0,8})?"
_LETTERS = r"(?:@|[bBrRfFuUNLQ]{1,2}|u8)?"
_WRAPPED = rf"\s{{0,8}}(?:\\\s{{0,8}})?{_PREFIX}(?:{_CALLEE}{_KEYWORD}){{0,3}}{_KEYWORD}{_LETTERS}(?={_QUOTE})"

TYPED = re.compile(
    rf"(?P<close>)(?:[?!]?[ \t]?:{{1,2}}[ \t]{{0,2}}{_TYPE}|[ \t]{{1,3}}(?:[Aa][Ss] )?{_TYPE}|\[[^\0\n\]]{{0,20}}\]"
    rf"|\s?\{{\s?(?:get|set|init)[^\0\n{{}}\"']{{0,40}}\}}){_ASSIGNED}{_WRAPPED}"
)
WRAPPED = re.compile(
    rf"(?P<close>\\*[\"'`]?[\])]{{0,2}})\s{{0,3}}(?P<sign>=>|:=|\+=|\?=|\?\?=|\|\|=|[:=])(?!=){_WRAPPED}"
)
# `password{"..."}`, `.equals("...")`, `").send_keys("...")`, `password).toBe('...')`: code that hands the literal over.
HANDED = re.compile(
    rf"(?P<close>\\*[\"'`]?\]?)(?P<sign>"
    rf"\{{|\)?(?:\s{{0,9}}\.\w{{2,30}}\(\){{0,1}}){{0,2}}\s{{0,9}}\.\w{{2,30}}\(\s?)(?={_QUOTE})"
)


# The arguments of a call that logs in or signs: `basic_auth("ada", Some("..."))`, `jwt.encode(payload, "...")`.
_ARGUMENT = re.compile(
    rf"\s{{0,40}}(?:\d{{1,6}}[→:|\t]\s{{0,40}})?(?:{_CALLEE})?{_KEYWORD}{_LETTERS}(?:(?P<quote>{_QUOTE})(?P<value>(?:(?!(?P=quote))[^\0"
    rf"\n]){{0,200}})(?P=quote)"
    r"|[^\0\n\"'`(),]{0,80}(?:\([^\0\n\"'`()]{0,60}\))?)\){0,2}\s{0,3}(?P<more>,)?"
)
_MOST_ARGUMENTS = 5
_A_QUOTE = re.compile("[\"'`]")
_BEFORE_TYPE = frozenset(": \t?!{[")


def arguments(text: str, begin: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """The literals among the arguments that begin at `begin`: which argument it is, and where it stands."""
    for index in range(_MOST_ARGUMENTS):
        match = _ARGUMENT.match(text, begin, begin + 2 * _LONGEST)
        if match is None:
            return
        if match["value"]:
            yield index, match.span("value")
        if match["more"] is None:
            return
        begin = match.end()


def typed(text: str, end: int) -> re.Match[str] | None:
    """A type and a sign behind a name that ends at `end`, up to the quote of its literal."""
    if text[end] not in _BEFORE_TYPE:
        return None
    newline = text.find("\n", end, end + _LONGEST)
    sign = text.find("=", end, newline if newline >= 0 else end + _LONGEST)
    if sign < 0 or not _A_QUOTE.search(text, sign, sign + _LONGEST):
        return None
    return TYPED.match(text, end, end + _LONGEST)


def wrapped(text: str, end: int) -> re.Match[str] | None:
    """A sign, then a cast, a call or a list around the literal."""
    return WRAPPED.match(text, end, end + _LONGEST)


def handed(text: str, end: int) -> re.Match[str] | None:
    """A method of the name, or braces, with the literal in them."""
    return HANDED.match(text, end, end + _LONGEST) if text[end] not in " :=" else None
