"""Other people, when asked for: e-mail addresses, phone numbers, and names where a line says that one stands there.

A name is only known by what it stands beside: an e-mail address, an author's line of git, `Signed-off-by`. What is
found once is replaced in the whole text. Names in plain sentences are not found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

_EMAIL = re.compile(r"@(?<=[\w%+-]@)[A-Za-z0-9-]{1,60}(?:\.[A-Za-z0-9-]{1,60}){1,5}")
_LOCAL = re.compile(r"[A-Za-z0-9_.%+-]{1,64}")
# Addresses that belong to nobody, and versions: `pkg@1.2.3`, `git@github.com`.
_NOBODY = re.compile(
    r"(?i)(?:git|noreply|no-reply|donotreply|user|users|you|your|name|me|info|root|admin|test|example|"
    r"foo|bar|email|someone)@"
    r"|[\w.%+-]{1,64}@(?:(?:[\w-]++\.)*+(?<=@|\.)(?:test|invalid|localhost|local)$|(?:[\w-]{1,40}+\.)"
    r"{0,3}example\.(?:com|org|net)$"
    r"|[\d.]+$|[\w.-]*\.(?:js|ts|tsx|py|json|md|css|png|jpg|svg|service|target|socket|timer|mount|git|local|test)$)"
    r"|noreply@anthropic\.com$"
)
# With a country, or in the groups of North America; digits alone are no number of a phone.
_PHONE = re.compile(
    r"(?<![\w.+/#=-])(?:\+\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d{2,4}(?:[ .-]?\d{2,4}){2,4}|\(\d{3}\) ?"
    r"\d{3}-\d{4}|\d{3}-\d{3}-\d{4})(?![\w-]|\.\d)"
)
_WORD = r"[^\W\d_][\w.'\u2019-]{0,30}"
_NAME = rf"{_WORD}(?: {_WORD}){{1,3}}"
# `Ada Lovelace <ada@...>`, and the lines where git, mail and package files keep a name.
_BEFORE_ADDRESS = re.compile(rf"(?P<name>{_NAME}) \\*[<(]\\*[\w.%+-]{{1,64}}@")
_LINE = re.compile(
    rf"(?im)^[ \t>+-]{{0,8}}(?:author|committer|commit|tagger|from|to|cc|signed-off-by|co-authored-by|r"
    rf"eviewed-by|acked-by|tested-by"
    rf"|reported-by|maintainer|full name|display name)\s?:\s{{1,9}}(?-i:(?P<name>{_NAME}))(?=\s*(?:$|<|\())"
)
_NO_NAMES = re.compile(
    r"(?i)\b(?:claude|github|gitlab|copilot|dependabot|bot|actions?|team|support|anthropic|openai|codex|the)\b"
)


def people_in(text: str) -> Iterator[str]:
    """Every e-mail address, phone number and name in a text, longest first: a name may hold another."""
    found = {*_addresses(text), *(match[0] for match in _PHONE.finditer(text) if _is_phone(match[0]))}
    for match in (*_BEFORE_ADDRESS.finditer(text), *_LINE.finditer(text)):
        name = match["name"].strip()
        if name[0].isupper() and not _NO_NAMES.search(name):
            found.add(name)
    yield from sorted(found, key=lambda each: (-len(each), each))


def _addresses(text: str) -> Iterator[str]:
    for match in _EMAIL.finditer(text) if "@" in text else ():
        at = match.start()
        local = _LOCAL.match(text[max(0, at - 64) : at][::-1])
        address = (local[0][::-1] if local else "") + match[0]
        if local and not _NOBODY.match(address) and not text.startswith((":", "/"), match.end()):
            yield address.lstrip(".%+-")


def _is_phone(number: str) -> bool:
    return 9 <= sum(map(str.isdigit, number)) <= 15


def without_people(text: str, pseudonym: Callable[[str], str]) -> str:
    """The text with other people as pseudonyms; the same object when there are none."""
    for each in people_in(text):
        text = re.sub(rf"(?<!\w){re.escape(each)}(?!\w)", lambda _, person=each: pseudonym(person), text)
    return text
