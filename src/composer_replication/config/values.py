"""Convert values of options to text: for error messages, with secrets hidden, and as TOML."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from composer_replication.atomic import atomic_write_text

HIDDEN = "<hidden>"
# "hub_token", "API_KEY", "passwd"; not "tokenizer", "sdpo_token_clip" or "token_rows", where a token is a piece of text
_WORDS = r"(?:key|token(?!i[sz]|_clip|_rows)|secret|passw|credential)"
# "hub_token" -> "token"
_SECRET = re.compile(_WORDS, re.IGNORECASE)
# "hub_token = x" -> "token ="
_SECRET_AND_EQUALS = re.compile(rf"{_WORDS}\s*=?", re.IGNORECASE)
# 'api_key = x', '"api_key": x' -> the name and the sign; the rest is hidden
_ASSIGNMENT = re.compile(rf"({_WORDS}[\w-]*[\"']?\s*[=:]).*", re.IGNORECASE | re.DOTALL)
# "'some text'" or '"some text"', with escapes; not a single character such as "'x'"
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.){2,}'|"(?:[^"\\]|\\.){2,}\"""")
# "https://me:pw@host/" -> "s://me:pw@"
_LOGIN = re.compile(r"(\w://)[^/?#\s]*@")


def _looks_secret(name: str) -> bool:
    """Return whether a key or a dotted path contains a word for secrets."""
    return _SECRET.search(name) is not None


def shown(value: object, path: str) -> str:
    """Return the repr of the value at the dotted `path`, with the values of secret keys hidden."""
    return HIDDEN if _looks_secret(path) else repr(_masked(value))


def shown_override(text: str, parsed: Mapping[str, object]) -> str:
    """Return the override `key=value` with secrets hidden; `parsed` is its parsed value."""
    key = text.partition("=")[0]
    is_secret = _looks_secret(key) or _masked(parsed) != parsed
    return f"{key.rstrip()}={HIDDEN}" if is_secret else text


def shown_invalid_override(text: str) -> str:
    """Return the text of an invalid override up to the first word for secrets."""
    match = _SECRET_AND_EQUALS.search(text)
    return text if match is None or match.end() == len(text) else text[: match.end()] + HIDDEN


def shown_parser_message(message: str, document: str) -> str:
    """Return a parser's message about `document`, with its quotations hidden if the document may contain a secret."""
    if not _looks_secret(document):
        return message
    reason, at, location = message.rpartition(" (at ")
    reason = _ASSIGNMENT.sub(rf"\1{HIDDEN}", _QUOTED.sub(HIDDEN, reason if at else location))
    return f"{reason}{at}{location}" if at else reason


def _masked(value: object) -> object:
    if isinstance(value, str):
        return _LOGIN.sub(rf"\1{HIDDEN}@", _ASSIGNMENT.sub(rf"\1{HIDDEN}", value))
    if isinstance(value, dict):
        items = cast("dict[object, object]", value).items()
        return {key: HIDDEN if _looks_secret(str(key)) else _masked(item) for key, item in items}
    if isinstance(value, list | tuple):
        masked = [_masked(item) for item in cast("list[object] | tuple[object, ...]", value)]
        return tuple(masked) if isinstance(value, tuple) else masked
    return value


# A config as TOML, from which a run can be reproduced.

RESOLVED_NAME = "config.resolved.toml"
# "max_steps" needs no quotes as a key; "a.b" does
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
# the quote and the backslash in 'say "hi" \\ bye', and control characters
_MUST_ESCAPE = re.compile(r'[\x00-\x1f\x7f"\\]')
_SHORT_ESCAPES = {"\b": r"\b", "\t": r"\t", "\n": r"\n", "\f": r"\f", "\r": r"\r", '"': r"\"", "\\": r"\\"}


def to_toml(config: object) -> str:
    """Return TOML that loads to an equal config. Options without a value become comments, since TOML has no null."""
    return "\n".join(_section_lines(config, ())).lstrip("\n") + "\n"


def write_resolved(config: object, run_dir_path: str | os.PathLike[str]) -> Path:
    """Write the config to the run directory and return the path."""
    path = Path(run_dir_path) / RESOLVED_NAME
    atomic_write_text(path, to_toml(config))
    return path


def config_hash(config: object) -> str:
    """Return the SHA-256 of all options with a value, sorted by path."""
    lines = sorted(f"{'.'.join(map(_key_text, path))} = {value_text(value)}" for path, value in _set_options(config))
    return hashlib.sha256("\n".join(lines).encode("utf-8")).hexdigest()


def value_text(value: object) -> str:
    """Return a value in TOML; None, which TOML cannot represent, becomes `unset`."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _string_text(value)
    if isinstance(value, Mapping):
        items = sorted(cast("Mapping[str, object]", value).items())
        return "{" + ", ".join(f"{_key_text(key)} = {value_text(item)}" for key, item in items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(value_text, cast("Sequence[object]", value))) + "]"
    raise TypeError(f"TOML has no {type(value).__name__}: {value!r}")


def _section_lines(config: object, path: tuple[str, ...]) -> Iterator[str]:
    # Options come first: in TOML, whatever follows a table's header belongs to that table.
    fields = _fields(config)
    if path:
        yield f"\n[{'.'.join(map(_key_text, path))}]"
    for name, value in fields:
        if value is None:
            yield f"# {_key_text(name)} unset"
        elif not dataclasses.is_dataclass(value):
            yield f"{_key_text(name)} = {value_text(value)}"
    for name, value in fields:
        if dataclasses.is_dataclass(value):
            yield from _section_lines(value, (*path, name))


def _set_options(config: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    for name, value in _fields(config):
        if dataclasses.is_dataclass(value):
            yield from _set_options(value, (*path, name))
        elif value is not None:
            yield (*path, name), value


def _fields(config: object) -> list[tuple[str, object]]:
    if not dataclasses.is_dataclass(config):
        raise TypeError(f"expected a config dataclass, got {type(config).__name__}")
    return [(field.name, getattr(config, field.name)) for field in dataclasses.fields(config)]


def _key_text(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string_text(key)


def _string_text(text: str) -> str:
    escaped = _MUST_ESCAPE.sub(lambda match: _SHORT_ESCAPES.get(match[0], f"\\u{ord(match[0]):04x}"), text)
    return f'"{escaped}"'
