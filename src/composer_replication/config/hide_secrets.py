"""What an error message may show of a config: no value of a key whose name looks secret, and no login of an address."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

HIDDEN = "<hidden>"
# In these names a token is a piece of text: a tokenizer, sdpo_token_clip, token_rows.
_WORDS = r"(?:key|token(?!i[sz]|_clip|_rows)|secret|passw|credential)"
_SECRET = re.compile(_WORDS, re.IGNORECASE)
_SECRET_AND_EQUALS = re.compile(rf"{_WORDS}\s*=?", re.IGNORECASE)
# `api_key = `, `"api_key": ` and the like within a text.
_ASSIGNMENT = re.compile(rf"({_WORDS}[\w-]*[\"']?\s*[=:]).*", re.IGNORECASE | re.DOTALL)
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.){2,}'|"(?:[^"\\]|\\.){2,}\"""")

_LOGIN = re.compile(r"(\w://)[^/?#\s]*@")


def looks_secret(name: str) -> bool:
    """Whether a key, or a section on a dotted path, has the name of a secret."""
    return _SECRET.search(name) is not None


def shown(value: object, path: str) -> str:
    """The repr of the value at the dotted `path`, without what a secret key holds: the path itself or a key inside."""
    return HIDDEN if looks_secret(path) else repr(_masked(value))


def shown_override(text: str, parsed: Mapping[str, object]) -> str:
    """The text `key=value` of an override that was read as `parsed`."""
    key = text.partition("=")[0]
    is_secret = looks_secret(key) or _masked(parsed) != parsed
    return f"{key.rstrip()}={HIDDEN}" if is_secret else text


def shown_garbage(text: str) -> str:
    """The text of an override in which key and value cannot be told apart, up to the first word of a secret."""
    match = _SECRET_AND_EQUALS.search(text)
    return text if match is None or match.end() == len(text) else text[: match.end()] + HIDDEN


def shown_parser_message(message: str, document: str) -> str:
    """What a parser says of `document`, without what it quotes if a secret may be in the quotation."""
    if not looks_secret(document):
        return message
    reason, at, location = message.rpartition(" (at ")
    reason = _ASSIGNMENT.sub(rf"\1{HIDDEN}", _QUOTED.sub(HIDDEN, reason if at else location))
    return f"{reason}{at}{location}" if at else reason


def _masked(value: object) -> object:
    if isinstance(value, str):
        return _LOGIN.sub(rf"\1{HIDDEN}@", _ASSIGNMENT.sub(rf"\1{HIDDEN}", value))
    if isinstance(value, dict):
        items = cast("dict[object, object]", value).items()
        return {key: HIDDEN if looks_secret(str(key)) else _masked(item) for key, item in items}
    if isinstance(value, list | tuple):
        masked = [_masked(item) for item in cast("list[object] | tuple[object, ...]", value)]
        return tuple(masked) if isinstance(value, tuple) else masked
    return value
