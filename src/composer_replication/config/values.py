"""Values of options: conversion to the declared type and bounds, redaction in messages, and a config as TOML."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from composer_replication.atomic import atomic_write_text
from composer_replication.errors import ConfigError, explain

_INT64 = range(-(2**63), 2**63)


class Bare(str):
    """Text of an override that is not TOML and is taken literally; `none` unsets an optional option."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The interval a number must lie in."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def allow(self, number: float) -> bool:
        return (
            (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        low = self.at_least if self.above is None else self.above
        high = self.at_most if self.below is None else self.below
        if low is not None and high is not None:
            return f" in {'[' if self.above is None else '('}{low:g}, {high:g}{']' if self.below is None else ')'}"
        if low is not None:
            return f" {'>=' if self.above is None else '>'} {low:g}"
        if high is not None:
            return f" {'<=' if self.below is None else '<'} {high:g}"
        return ""


UNBOUNDED = Bounds()


class _MismatchError(Exception):
    """A value does not fit the type. The text, if any, adds what the expected type does not say."""


def coerce(value: object, annotation: object, *, path: str, bounds: Bounds = UNBOUNDED) -> object:
    """Convert `value` to the type `annotation`. Raises ConfigError with the dotted `path` if it does not fit."""
    try:
        return _convert(value, annotation, bounds)
    except _MismatchError as error:
        kind = "str" if isinstance(value, str) else type(value).__name__
        expected = type_text(annotation, bounds)
        message = explain(path, got=f"{shown(value, path)} ({kind})", expected=expected, fix=str(error))
        raise ConfigError(message) from None


def type_text(annotation: object, bounds: Bounds = UNBOUNDED) -> str:
    """Return the type of an option as --help and error messages write it."""
    inner = optional_inner(annotation)
    if inner is not None:
        return f"{type_text(inner, bounds)} or none"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " | ".join(f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in arguments)
    if origin is tuple:
        return f"list of {type_text(arguments[0], bounds)}"
    if origin is dict:
        return f"table of {type_text(arguments[1], bounds)}"
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    if annotation is object:
        return "any value"
    return f"{name}{bounds}" if annotation in (int, float) else name


def optional_inner(annotation: object) -> object | None:
    """Return X if `annotation` is `X | None`, else None."""
    if typing.get_origin(annotation) not in (types.UnionType, typing.Union):
        return None
    inside = [member for member in typing.get_args(annotation) if member is not types.NoneType]
    if len(inside) != 1 or len(typing.get_args(annotation)) != 2:
        raise TypeError(f"an option cannot be {annotation}: of unions, only `X | None` can be written in TOML")
    return cast(object, inside[0])


def _convert(value: object, annotation: object, bounds: Bounds) -> object:
    inner = optional_inner(annotation)
    if inner is not None:
        unset = value is None or (isinstance(value, Bare) and value == "none")
        return None if unset else _convert(value, inner, bounds)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return _to_choice(value, arguments)
    if origin is tuple and arguments[1:] == (...,):
        return _to_tuple(value, arguments, bounds)
    if origin is dict:
        return _to_dict(value, arguments, bounds)
    converter = _SCALARS.get(annotation)
    if converter is None:
        raise TypeError(f"an option cannot be {annotation}: there is no way to read it from TOML")
    return converter(value, bounds)


def _to_bool(value: object, _: Bounds) -> bool:
    if not isinstance(value, bool):
        raise _MismatchError
    return value


def _to_int(value: object, bounds: Bounds) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not bounds.allow(value):
        raise _MismatchError
    if value not in _INT64:
        raise _MismatchError("Integers have at most 64 bits: TOML readers keep no more")
    return int(value)


def _to_float(value: object, bounds: Bounds) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _MismatchError
    if isinstance(value, int) and (value not in _INT64 or float(value) != value):
        raise _MismatchError("No float is exactly this integer")
    if not math.isfinite(value):
        raise _MismatchError("NaN and infinities are refused: an absent limit is written by leaving the key out")
    if not bounds.allow(value):
        raise _MismatchError
    return float(value)


def _to_str(value: object, _: Bounds) -> str:
    if not isinstance(value, str):
        raise _MismatchError("Text that reads as another type needs quotes")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _MismatchError("It holds half of a surrogate pair, which is not text") from None
    return str(value)


def _to_choice(value: object, choices: tuple[object, ...]) -> object:
    for choice in choices:
        if value == choice and isinstance(value, bool) == isinstance(choice, bool):
            return choice
    raise _MismatchError


def _to_tuple(value: object, arguments: tuple[object, ...], bounds: Bounds) -> tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise _MismatchError
    return tuple(_convert(item, arguments[0], bounds) for item in cast("list[object] | tuple[object, ...]", value))


def _to_dict(value: object, arguments: tuple[object, ...], bounds: Bounds) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _MismatchError
    items = cast("Mapping[object, object]", value).items()
    return {_to_str(key, bounds): _convert(item, arguments[1], bounds) for key, item in items}


def _to_any(value: object, bounds: Bounds) -> object:
    """Accept any TOML value except dates: for tables that another library reads."""
    if isinstance(value, list | tuple):
        return [_to_any(entry, bounds) for entry in cast("list[object]", value)]
    if isinstance(value, dict):
        return _to_dict(cast("dict[object, object]", value), (str, object), bounds)
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return _SCALARS[kind](value, bounds)
    raise _MismatchError


_SCALARS: Mapping[object, Callable[[object, Bounds], object]] = {
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    str: _to_str,
    object: _to_any,
}


# ---- what error messages may show: no value of a key whose name looks secret, and no login in a URL

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


def looks_secret(name: str) -> bool:
    """Return whether a key, or a section on a dotted path, is named like a secret."""
    return _SECRET.search(name) is not None


def shown(value: object, path: str) -> str:
    """Return the repr of the value at the dotted `path`, with the values of secret keys hidden."""
    return HIDDEN if looks_secret(path) else repr(_masked(value))


def shown_override(text: str, parsed: Mapping[str, object]) -> str:
    """Return the text `key=value` of an override that was parsed as `parsed`, without secrets."""
    key = text.partition("=")[0]
    is_secret = looks_secret(key) or _masked(parsed) != parsed
    return f"{key.rstrip()}={HIDDEN}" if is_secret else text


def shown_garbage(text: str) -> str:
    """Return the text of an override that has no key and value, up to the first word that looks secret."""
    match = _SECRET_AND_EQUALS.search(text)
    return text if match is None or match.end() == len(text) else text[: match.end()] + HIDDEN


def shown_parser_message(message: str, document: str) -> str:
    """Return a parser's message about `document`, without quotations if the document may hold a secret."""
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


# ---- a config as TOML, which reproduces a run

RESOLVED_NAME = "config.resolved.toml"
# "max_steps" needs no quotes as a key; "a.b" does
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
# the quote and the backslash in 'say "hi" \\ bye', and control characters
_MUST_ESCAPE = re.compile(r'[\x00-\x1f\x7f"\\]')
_SHORT_ESCAPES = {"\b": r"\b", "\t": r"\t", "\n": r"\n", "\f": r"\f", "\r": r"\r", '"': r"\"", "\\": r"\\"}


def to_toml(config: object) -> str:
    """Return TOML that loads to an equal config. Options without a value are comments, as TOML has no null."""
    return "\n".join(_section_lines(config, ())).lstrip("\n") + "\n"


def write_resolved(config: object, run_dir_path: str | os.PathLike[str]) -> Path:
    """Write the config into the run directory and return its path."""
    path = Path(run_dir_path) / RESOLVED_NAME
    atomic_write_text(path, to_toml(config))
    return path


def config_hash(config: object) -> str:
    """Return the SHA-256 of the options that have a value, sorted by path."""
    lines = sorted(f"{'.'.join(map(_key_text, path))} = {value_text(value)}" for path, value in _set_options(config))
    return hashlib.sha256("\n".join(lines).encode("utf-8")).hexdigest()


def value_text(value: object) -> str:
    """Return one value in TOML; None, which TOML does not have, becomes `unset`."""
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
