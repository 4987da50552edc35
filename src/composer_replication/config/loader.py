"""Load configs from files and overrides. Errors name the option by its dotted path, and the origin of its value."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from composer_replication.config.schema import Bare, OptionSpec, describe, dotted, options_of
from composer_replication.config.values import shown, shown_invalid_override, shown_override, shown_parser_message
from composer_replication.errors import ConfigError, explain

_T = TypeVar("_T")
_MAX_DEPTH = 100  # well below Python's recursion limit, of which the caller may have used a part
_USE_DEFAULT = object()


def load(config_class: type[_T], path: str | os.PathLike[str] | None = None, overrides: Iterable[str] = ()) -> _T:
    """Return a config from the defaults, the TOML file at `path`, and `overrides` such as "loss.alpha_sdpo=0.2".

    Later sources take precedence. The value of an override is TOML or else plain text; `none` unsets an optional
    option.
    """
    return from_tables(config_class, [] if path is None else [read_table(path)], overrides)


def loads(config_class: type[_T], text: str, overrides: Iterable[str] = ()) -> _T:
    """Return a config from the text of a TOML file."""
    return from_tables(config_class, [(_parse(text, "config text"), "config text")], overrides)


def read_table(path: str | os.PathLike[str]) -> tuple[dict[str, Any], str]:
    """Return the contents of a TOML file, and a name for the file in error messages."""
    origin = f"config file {os.fspath(path)}"
    return _parse(_read(Path(path)), origin), origin


def from_tables(
    config_class: type[_T], tables: Iterable[tuple[Mapping[str, Any], str]], overrides: Iterable[str] = ()
) -> _T:
    """Return a config from tables, each with a name for error messages; later ones take precedence."""
    settings = _Settings()
    for values, origin in tables:
        settings.add(values, origin)
    for override in overrides:
        settings.add(*_parse_override(override))
    return _Builder(config_class, settings).build(config_class, settings.values, "")


class _Settings:
    """Merged tables, with the origin of each value."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._origins: dict[str, list[str]] = defaultdict(list)

    def add(self, values: Mapping[str, Any], origin: str) -> None:
        self._add(self.values, values, "", origin)

    def origin(self, path: str) -> str:
        return " and ".join(dict.fromkeys(self._origins[path])) or "defaults"

    def _add(self, mine: dict[str, Any], values: Mapping[str, Any], path: str, origin: str) -> None:
        self._origins[path].append(origin)
        for key, value in values.items():
            if not isinstance(value, dict):
                mine[key], self._origins[dotted(path, key)] = value, [origin]
                continue
            if not isinstance(mine.get(key), dict):
                mine[key], self._origins[dotted(path, key)] = {}, []
            self._add(mine[key], cast("dict[str, Any]", value), dotted(path, key), origin)


def _parse(text: str, origin: str) -> dict[str, Any]:
    try:
        values = tomllib.loads(text)
    except ValueError as error:  # a TOMLDecodeError, or the error that int() raises for thousands of digits
        raise ConfigError(f"{origin}: not valid TOML: {shown_parser_message(str(error), text)}") from None
    except RecursionError:
        raise _too_deep(origin) from None
    _check_depth(values, origin)
    return values


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        fix = "Check the name, or omit --config and use flags and --set"
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}. {fix}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {path}: not valid UTF-8: {error}") from error


def _check_depth(values: Mapping[str, object], origin: str) -> None:
    # An iterative check, so that all later code may recurse.
    level: list[object] = [values]
    for _ in range(_MAX_DEPTH + 1):
        level = [child for parent in level for child in _children(parent) if isinstance(child, dict | list)]
        if not level:
            return
    raise _too_deep(origin)


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return cast("dict[str, object]", value).values()
    return cast("list[object]", value) if isinstance(value, list) else ()


def _too_deep(origin: str) -> ConfigError:
    return ConfigError(
        explain(origin, got="arrays or tables nested more deeply", expected=f"at most {_MAX_DEPTH} levels")
    )


def _parse_override(text: str) -> tuple[dict[str, Any], str]:
    """Return the values that an override sets, and a name for it in error messages."""
    key_text, equals, value_text = text.partition("=")
    keys = _parse_key(key_text)
    if not equals or not keys:
        got = repr(shown_invalid_override(text))
        expected = "a dotted key, '=' and a value, such as loss.alpha_sdpo=0.2"
        raise ConfigError(explain(f"override {got}", got=got, expected=expected))
    try:
        value = _parse_value(value_text)
    except RecursionError:
        raise _too_deep(f"override of {key_text.strip()}") from None
    for key in reversed(keys):
        value = {key: value}
    values = cast("dict[str, Any]", value)
    _check_depth(values, f"override of {key_text.strip()}")
    return values, f"override {shown_override(text, values)!r}"


def _parse_key(text: str) -> list[str]:
    """Return the parts of a dotted key, which may be quoted as in TOML; an empty list if it is not a valid key."""
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
    return parsed["value"] if len(parsed) == 1 else Bare(text.strip())  # a line break in the text could add more keys


class _Builder:
    """Builds config objects from merged tables. Suggestions for unknown keys come from the root class."""

    def __init__(self, root: type, settings: _Settings) -> None:
        self._root, self._settings = root, settings

    def build(self, config_class: type[_T], values: Mapping[str, Any], path: str) -> _T:
        specs = {spec.name: spec for spec in options_of(config_class)}
        for key in values:
            if key not in specs:
                raise self._unknown(key, path, specs)
        options = {name: self._option(spec, values, dotted(path, name)) for name, spec in specs.items()}
        try:
            return config_class(**{name: value for name, value in options.items() if value is not _USE_DEFAULT})
        except ConfigError as error:  # options that are valid on their own but not together
            raise ConfigError(_with_origin(self._settings.origin(path), error)) from error

    def _option(self, spec: OptionSpec, values: Mapping[str, Any], path: str) -> object:
        value = values.get(spec.name, _USE_DEFAULT)
        if spec.section_class is not None:
            if value is not _USE_DEFAULT and not isinstance(value, dict):
                location = f"{self._settings.origin(path)}: {path}"
                raise ConfigError(explain(location, got=shown(value, path), expected="a table"))
            return self.build(spec.section_class, values.get(spec.name, {}), path)
        if value is _USE_DEFAULT:
            return value
        try:
            return spec.convert(value, path)
        except ConfigError as error:
            raise ConfigError(_with_origin(self._settings.origin(path), error)) from None

    def _unknown(self, key: str, section: str, known_options: Mapping[str, OptionSpec]) -> ConfigError:
        near, path = self._suggest(key, section, known_options), dotted(section, key)
        every = f"one of {', '.join(dotted(section, name) for name in known_options)}"
        return ConfigError(
            explain(
                f"{self._settings.origin(path)}: unknown key",
                got=path,
                expected="a known key" if near else every,  # a list of dozens would hide the likely one
                fix=f"Did you mean {near}?" if near else "`crf train --options` lists all keys.",
            )
        )

    def _suggest(self, key: str, section: str, known_options: Mapping[str, OptionSpec]) -> str:
        """Return the path of the nearest key in this section, or else anywhere; an empty string if none is near."""
        near = difflib.get_close_matches(key, known_options, n=1)
        if near:
            return dotted(section, near[0])
        paths = {name: path for row in describe(self._root) for name, path in _names_and_paths(row.path)}
        return next((paths[name] for name in difflib.get_close_matches(key, paths, n=1)), "")


def _with_origin(origin: str, error: ConfigError) -> str:
    """Return the message of `error`, prefixed with the origin of the value."""
    if not error.expected:
        return f"{origin}: {error}"
    return explain(f"{origin}: {error.what}", got=error.got, expected=error.expected, fix=error.fix)


def _names_and_paths(path: str) -> Iterator[tuple[str, str]]:
    """Yield (name, path) for an option and for each table that contains it."""
    parts = path.split(".")
    for number in range(len(parts), 0, -1):
        yield parts[number - 1], ".".join(parts[:number])
