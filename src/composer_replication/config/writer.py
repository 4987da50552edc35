"""A config as TOML: the file that reproduces a run, and the hash that tells two runs apart."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from composer_replication.atomic import atomic_write_text

RESOLVED_NAME = "config.resolved.toml"
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_MUST_ESCAPE = re.compile(r'[\x00-\x1f\x7f"\\]')
_SHORT_ESCAPES = {"\b": r"\b", "\t": r"\t", "\n": r"\n", "\f": r"\f", "\r": r"\r", '"': r"\"", "\\": r"\\"}


def to_toml(config: object) -> str:
    """The TOML text that loads to an equal config; options without a value are comments, for TOML has no null."""
    return "\n".join(_section_lines(config, ())).lstrip("\n") + "\n"


def write_resolved(config: object, run_dir_path: str | os.PathLike[str]) -> Path:
    """Write the config into the run directory and return the path of the file."""
    path = Path(run_dir_path) / RESOLVED_NAME
    atomic_write_text(path, to_toml(config))
    return path


def config_hash(config: object) -> str:
    """SHA-256 over the options that have a value, sorted by path, so neither order nor an unset option counts."""
    lines = sorted(f"{'.'.join(map(_key_text, path))} = {value_text(value)}" for path, value in _set_options(config))
    return hashlib.sha256("\n".join(lines).encode("utf-8")).hexdigest()


def value_text(value: object) -> str:
    """One value in TOML; None, which TOML cannot write, is the word `unset`."""
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
    """Options first: in TOML, whatever follows a table's header belongs to that table."""
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
