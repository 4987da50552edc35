"""Declare options in tables, and convert their values to the declared types:

@table("replay")
class ReplayConfig:
    max_usd: float = option(5.0, "Never spend more than this.", at_least=0)
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, Literal, NamedTuple, TypeVar, cast, dataclass_transform

from composer_replication.config.values import shown, value_text
from composer_replication.errors import ConfigError, explain

_T = TypeVar("_T")
_DOC, _BOUNDS = "doc", "bounds"
_INT64 = range(-(2**63), 2**63)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def table(path: str) -> Callable[[type[_T]], type[_T]]:
    """Return a decorator that turns a class of options into a frozen dataclass that checks and converts its values.

    `path` is the path of the table in a config file, and errors name options by it. A method `_check` may raise for
    options that are valid on their own but not together.
    """

    def decorate(config_class: type[_T]) -> type[_T]:
        def post_init(self: object) -> None:
            for spec in options_of(frozen_class):
                if spec.section_class is None:
                    value = spec.convert(getattr(self, spec.name), dotted(path, spec.name))
                    # Not plain assignment, which a frozen class refuses.
                    object.__setattr__(self, spec.name, value)
            if hasattr(self, "_check"):
                cast(Any, self)._check()

        cast(Any, config_class).__post_init__ = post_init
        frozen_class = dataclass(frozen=True, kw_only=True)(config_class)
        return frozen_class

    return decorate


def option(
    default: _T,
    doc: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> _T:
    """Declare an option with its default, one sentence of documentation and, for numbers, bounds."""
    metadata = {_DOC: doc, _BOUNDS: _Bounds(at_least=at_least, above=above, at_most=at_most, below=below)}
    if isinstance(default, dict):  # each config gets its own copy
        items = cast("dict[str, object]", default)
        return cast(_T, dataclasses.field(default_factory=lambda: dict(items), metadata=metadata))
    return dataclasses.field(default=default, metadata=metadata)


def section(config_class: type[_T], doc: str) -> _T:
    """Declare a table within this table."""
    return dataclasses.field(default_factory=config_class, metadata={_DOC: doc, _BOUNDS: _UNBOUNDED})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bounds:
    """The interval of allowed numbers."""

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


_UNBOUNDED = _Bounds()


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionSpec:
    """An option or section as declared."""

    name: str
    annotation: object
    default: object
    doc: str
    bounds: _Bounds

    @property
    def section_class(self) -> type[object] | None:
        """The config class if this is a section; None for an option."""
        is_section = dataclasses.is_dataclass(self.annotation)
        return cast("type[object]", self.annotation) if is_section else None

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.annotation) is tuple

    @property
    def scalar(self) -> type[object]:
        """The type to which a single command-line value is converted."""
        kind: Any = _optional_inner(self.annotation) or self.annotation
        return kind if kind in (int, float) else str

    def convert(self, value: object, path: str) -> object:
        """Convert a value to the type of the option. Raises ConfigError about `path` if it does not fit."""
        return _coerce(value, self.annotation, path=path, bounds=self.bounds)


class OptionDoc(NamedTuple):
    """An option as `--help` and the reference page describe it."""

    path: str
    type_text: str
    default: str
    sentence: str


class Bare(str):
    """The value of an override that is not valid TOML, taken as plain text; `none` unsets an optional option."""

    __slots__ = ()


@functools.cache
def options_of(config_class: type) -> tuple[OptionSpec, ...]:
    """Return the options and sections of a config class in the order of their declaration."""
    hints = typing.get_type_hints(config_class)
    return tuple(_spec(field, hints[field.name], config_class.__name__) for field in dataclasses.fields(config_class))


def describe(config_class: type, prefix: str = "") -> list[OptionDoc]:
    """Return a description of every option of `config_class`, including the options of its sections."""
    rows: list[OptionDoc] = []
    for spec in options_of(config_class):
        path = dotted(prefix, spec.name)
        if spec.section_class is not None:
            rows += describe(spec.section_class, path)
        else:
            rows.append(OptionDoc(path, type_text(spec.annotation, spec.bounds), value_text(spec.default), spec.doc))
    return rows


def option_at(config_class: type, path: str) -> OptionSpec:
    """Return the option at a dotted path, which must exist."""
    first, _, rest = path.partition(".")
    (spec,) = (spec for spec in options_of(config_class) if spec.name == first)
    return option_at(spec.section_class, rest) if spec.section_class is not None else spec


def dotted(*path: str) -> str:
    """Join names into a dotted path. The root table has the empty name."""
    return ".".join(filter(None, path))


def type_text(annotation: object, bounds: _Bounds = _UNBOUNDED) -> str:
    """Return the type of an option as text for `--help` and error messages."""
    inner = _optional_inner(annotation)
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


def _spec(field: dataclasses.Field[object], annotation: object, class_name: str) -> OptionSpec:
    if _DOC not in field.metadata:
        raise TypeError(f"{class_name}.{field.name}: declare it with option() or section()")
    default = field.default if field.default_factory is MISSING else field.default_factory()
    if _optional_inner(annotation) is not None and default is not None:
        raise TypeError(
            f"{class_name}.{field.name}: the default of an optional option must be None, since TOML has no null"
        )
    doc, bounds = (field.metadata[name] for name in (_DOC, _BOUNDS))
    return OptionSpec(name=field.name, annotation=annotation, default=default, doc=doc, bounds=bounds)


class _MismatchError(Exception):
    """A value that does not fit the type; the text, if any, says more than the expected type does."""


def _coerce(value: object, annotation: object, *, path: str, bounds: _Bounds = _UNBOUNDED) -> object:
    """Convert `value` to the type `annotation`. Raises ConfigError about `path` if it does not fit."""
    try:
        return _convert(value, annotation, bounds)
    except _MismatchError as error:
        kind = "str" if isinstance(value, str) else type(value).__name__
        expected = type_text(annotation, bounds)
        message = explain(path, got=f"{shown(value, path)} ({kind})", expected=expected, fix=str(error))
        raise ConfigError(message) from None


def _optional_inner(annotation: object) -> object | None:
    """Return X if `annotation` is `X | None`, otherwise None."""
    if typing.get_origin(annotation) not in (types.UnionType, typing.Union):
        return None
    inside = [member for member in typing.get_args(annotation) if member is not types.NoneType]
    if len(inside) != 1 or len(typing.get_args(annotation)) != 2:
        raise TypeError(f"an option cannot be {annotation}: of unions, only `X | None` can be written in TOML")
    return cast(object, inside[0])


def _convert(value: object, annotation: object, bounds: _Bounds) -> object:
    inner = _optional_inner(annotation)
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


def _to_bool(value: object, _: _Bounds) -> bool:
    if not isinstance(value, bool):
        raise _MismatchError
    return value


def _to_int(value: object, bounds: _Bounds) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not bounds.allow(value):
        raise _MismatchError
    if value not in _INT64:
        raise _MismatchError("Integers are limited to 64 bits, since TOML readers support no more")
    return int(value)


def _to_float(value: object, bounds: _Bounds) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _MismatchError
    if isinstance(value, int) and (value not in _INT64 or float(value) != value):
        raise _MismatchError("No float has exactly this value")
    if not math.isfinite(value):
        raise _MismatchError("NaN and infinities are not allowed; omit the key for no limit")
    if not bounds.allow(value):
        raise _MismatchError
    return float(value)


def _to_str(value: object, _: _Bounds) -> str:
    if not isinstance(value, str):
        raise _MismatchError("Text that looks like another type needs quotes")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _MismatchError("It contains half of a surrogate pair, which is not valid text") from None
    return str(value)


def _to_choice(value: object, choices: tuple[object, ...]) -> object:
    for choice in choices:
        if value == choice and isinstance(value, bool) == isinstance(choice, bool):
            return choice
    raise _MismatchError


def _to_tuple(value: object, arguments: tuple[object, ...], bounds: _Bounds) -> tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise _MismatchError
    return tuple(_convert(item, arguments[0], bounds) for item in cast("list[object] | tuple[object, ...]", value))


def _to_dict(value: object, arguments: tuple[object, ...], bounds: _Bounds) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _MismatchError
    items = cast("Mapping[object, object]", value).items()
    return {_to_str(key, bounds): _convert(item, arguments[1], bounds) for key, item in items}


def _to_any(value: object, bounds: _Bounds) -> object:
    """Accept any TOML value except dates, for tables that another library reads."""
    if isinstance(value, list | tuple):
        return [_to_any(entry, bounds) for entry in cast("list[object]", value)]
    if isinstance(value, dict):
        return _to_dict(cast("dict[object, object]", value), (str, object), bounds)
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return _SCALARS[kind](value, bounds)
    raise _MismatchError


_SCALARS: Mapping[object, Callable[[object, _Bounds], object]] = {
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    str: _to_str,
    object: _to_any,
}
