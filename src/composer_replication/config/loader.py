"""Config files and overrides become config objects; whatever is wrong is told with its dotted path and its origin."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

from composer_replication.config.hidden import shown, shown_garbage, shown_override, shown_parser_message
from composer_replication.config.schema import OptionSpec, describe, dotted, options_of
from composer_replication.config.values import Bare, coerce
from composer_replication.errors import ConfigError, explain

_T = TypeVar("_T")
_MAX_DEPTH = 100  # far below where Python's own recursion ends, which depends on the caller


def load(config_class: type[_T], path: str | os.PathLike[str] | None = None, overrides: Iterable[str] = ()) -> _T:
    """A config from its defaults, then the TOML file at `path`, then `overrides` such as "loss.alpha_sdpo=0.2".

    The value of an override is TOML; what is not TOML is a string, and `none` unsets an optional option.
    """
    given = _Table()
    if path is not None:
        given.merge(_parse(_read(Path(path)), f"config file {os.fspath(path)}"))
    return _build(config_class, given, overrides)


def loads(config_class: type[_T], text: str, overrides: Iterable[str] = ()) -> _T:
    """`load` from the text of a TOML file."""
    return _build(config_class, _parse(text, "config text"), overrides)


@dataclass(slots=True)
class _Setting:
    """A value that somebody gave, and where."""

    value: object
    origin: str


@dataclass(slots=True)
class _Table:
    """A TOML table that may have been filled from several places."""

    origins: list[str] = field(default_factory=list[str])
    items: dict[str, _Table | _Setting] = field(default_factory=dict[str, "_Table | _Setting"])

    @property
    def origin(self) -> str:
        return " and ".join(dict.fromkeys(self.origins)) or "defaults"

    def merge(self, other: _Table) -> None:
        """Take over what `other` holds; tables unite, values are replaced."""
        self.origins += other.origins
        for key, item in other.items.items():
            mine = self.items.get(key)
            if isinstance(mine, _Table) and isinstance(item, _Table):
                mine.merge(item)
            else:
                self.items[key] = item

    def plain(self) -> dict[str, object]:
        return {key: item.plain() if isinstance(item, _Table) else item.value for key, item in self.items.items()}


def _build(config_class: type[_T], given: _Table, overrides: Iterable[str]) -> _T:
    for override in overrides:
        given.merge(_parse_override(override))
    return _Builder(config_class).build(config_class, given, "")


def _parse(text: str, origin: str) -> _Table:
    try:
        values = tomllib.loads(text)
    except ValueError as error:  # a TOMLDecodeError, or the one of int() for thousands of digits
        raise ConfigError(f"{origin}: not valid TOML: {shown_parser_message(str(error), text)}") from None
    except RecursionError:
        raise _too_deep(origin) from None
    _check_depth(values, origin)
    return _table(values, origin)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {path}: not valid UTF-8: {error}") from error


def _check_depth(values: Mapping[str, object], origin: str) -> None:
    """Level by level, so that whoever walks through the values afterwards may use recursion."""
    level: list[object] = [values]
    for _ in range(_MAX_DEPTH + 1):
        level = [child for each in level for child in _children(each) if isinstance(child, dict | list)]
        if not level:
            return
    raise _too_deep(origin)


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return cast("dict[str, object]", value).values()
    return cast("list[object]", value) if isinstance(value, list) else ()


def _too_deep(origin: str) -> ConfigError:
    return ConfigError(
        explain(origin, got="deeper nesting of arrays or tables", expected=f"at most {_MAX_DEPTH} levels")
    )


def _table(values: Mapping[str, object], origin: str) -> _Table:
    table = _Table([origin])
    for key, value in values.items():
        is_table = isinstance(value, dict)
        table.items[key] = _table(cast("dict[str, object]", value), origin) if is_table else _Setting(value, origin)
    return table


def _parse_override(text: str) -> _Table:
    key_text, equals, value_text = text.partition("=")
    keys = _parse_key(key_text)
    if not equals or not keys:
        got = repr(shown_garbage(text))
        expected = "a dotted key, '=' and a value: loss.alpha_sdpo=0.2"
        raise ConfigError(explain(f"override {got}", got=got, expected=expected))
    try:
        value = _parse_value(value_text)
    except RecursionError:
        raise _too_deep(f"override of {key_text.strip()}") from None
    for key in reversed(keys):
        value = {key: value}
    values = cast("dict[str, object]", value)
    _check_depth(values, f"override of {key_text.strip()}")
    return _table(values, f"override {shown_override(text, values)!r}")


def _parse_key(text: str) -> list[str]:
    """The parts of a dotted key, read by TOML's own rules so that quoted parts work; empty when it is none."""
    try:
        node: object = {} if "\n" in text else tomllib.loads(f"{text} = 0")
    except tomllib.TOMLDecodeError:
        return []
    keys: list[str] = []
    while isinstance(node, dict) and node:
        [(key, node)] = cast("dict[str, object]", node).items()
        keys.append(key)
    return keys


def _parse_value(text: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except ValueError:
        return Bare(text.strip())
    return parsed["value"] if len(parsed) == 1 else Bare(text.strip())  # a line break could smuggle in more keys


class _Builder:
    """Turns tables into config objects; knows the root class for its suggestions."""

    def __init__(self, root: type) -> None:
        self._root = root

    def build(self, config_class: type[_T], given: _Table, section: str) -> _T:
        specs = {spec.name: spec for spec in options_of(config_class)}
        for key, item in given.items.items():
            if key not in specs:
                raise self._unknown(key, item, section, specs)
        values = {name: self._value(spec, given, dotted(section, name)) for name, spec in specs.items()}
        try:
            return config_class(**{name: value for name, value in values.items() if value is not _USE_DEFAULT})
        except ConfigError as error:  # options that are right each and wrong together
            raise ConfigError(f"{given.origin}: {error}") from error

    def _value(self, spec: OptionSpec, given: _Table, path: str) -> object:
        item = given.items.get(spec.name)
        if spec.section_class is not None:
            if isinstance(item, _Setting):
                raise ConfigError(f"{item.origin}: {explain(path, got=shown(item.value, path), expected='a table')}")
            return self.build(spec.section_class, item or _Table(), path)
        if item is None:
            if spec.is_required:
                raise ConfigError(f"{path} is required: {spec.doc}")
            return _USE_DEFAULT
        value = item.plain() if isinstance(item, _Table) else item.value
        try:
            return coerce(value, spec.annotation, path=path, bounds=spec.bounds)
        except ConfigError as error:
            raise ConfigError(f"{item.origin}: {error}") from None

    def _unknown(self, key: str, item: _Table | _Setting, section: str, known: Mapping[str, OptionSpec]) -> ConfigError:
        suggestion = self._suggest(key, section, known)
        return ConfigError(
            explain(
                f"{item.origin}: unknown key",
                got=dotted(section, key),
                expected=f"one of {', '.join(dotted(section, name) for name in known)}",
                fix=f"Did you mean {suggestion}?" if suggestion else "",
            )
        )

    def _suggest(self, key: str, section: str, known: Mapping[str, OptionSpec]) -> str:
        """The nearest key of this section, or else the path of the nearest one anywhere: the table may be wrong."""
        near = difflib.get_close_matches(key, known, n=1)
        if near:
            return dotted(section, near[0])
        paths = {row.path.rpartition(".")[2]: row.path for row in describe(self._root)}
        return next((paths[name] for name in difflib.get_close_matches(key, paths, n=1)), "")


_USE_DEFAULT = object()
