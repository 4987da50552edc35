"""Declarations of options, and how the rest of the package reads them:

@table("replay")
class ReplayConfig:
    max_usd: float = option(5.0, "Never spend more than this.", at_least=0)
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from typing import Any, NamedTuple, TypeVar, cast, dataclass_transform

from composer_replication.config.values import Bounds, coerce, optional_inner, type_text, value_text

_T = TypeVar("_T")
_DOC, _BOUNDS = "doc", "bounds"


@dataclass_transform(frozen_default=True, kw_only_default=True)
def table(path: str) -> Callable[[type[_T]], type[_T]]:
    """Return a decorator that makes a class of options a frozen dataclass, which checks and converts its values.

    `path` is the table's path in a file, by which errors name options. A method `_check` may raise for options that are
    valid on their own but not together.
    """

    def decorate(config_class: type[_T]) -> type[_T]:
        def post_init(self: object) -> None:
            for spec in options_of(frozen_class):
                if spec.section_class is None:
                    value = coerce(
                        getattr(self, spec.name), spec.annotation, path=dotted(path, spec.name), bounds=spec.bounds
                    )
                    object.__setattr__(
                        self, spec.name, value
                    )  # the class is frozen, but its constructor may still convert
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
    """Declare an option with a default, one sentence of documentation and, for numbers, bounds."""
    metadata = {_DOC: doc, _BOUNDS: Bounds(at_least=at_least, above=above, at_most=at_most, below=below)}
    if isinstance(default, dict):  # each config gets its own copy
        items = cast("dict[str, object]", default)
        return cast(_T, dataclasses.field(default_factory=lambda: dict(items), metadata=metadata))
    return dataclasses.field(default=default, metadata=metadata)


def section(config_class: type[_T], doc: str) -> _T:
    """Declare a table inside this table."""
    return dataclasses.field(default_factory=config_class, metadata={_DOC: doc, _BOUNDS: Bounds()})


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionSpec:
    """A declared option or section."""

    name: str
    annotation: object
    default: object
    doc: str
    bounds: Bounds

    @property
    def section_class(self) -> type[object] | None:
        """The config class of a section, or None for an option."""
        is_section = dataclasses.is_dataclass(self.annotation)
        return cast("type[object]", self.annotation) if is_section else None

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.annotation) is tuple

    @property
    def scalar(self) -> type[object]:
        """The type that one typed word is converted to."""
        kind: Any = optional_inner(self.annotation) or self.annotation
        return kind if kind in (int, float) else str


class OptionDoc(NamedTuple):
    """A line of --help and of the reference page."""

    path: str
    type_text: str
    default: str
    sentence: str


@functools.cache
def options_of(config_class: type) -> tuple[OptionSpec, ...]:
    """Return the options and sections of a config class, in the order of their declaration."""
    hints = typing.get_type_hints(config_class)
    return tuple(_spec(field, hints[field.name], config_class.__name__) for field in dataclasses.fields(config_class))


def describe(config_class: type, prefix: str = "") -> list[OptionDoc]:
    """Return a line for every option of `config_class`, including those of its sections."""
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
    """Join names to a path; the root table is the empty string."""
    return ".".join(filter(None, path))


def _spec(field: dataclasses.Field[object], annotation: object, class_name: str) -> OptionSpec:
    if _DOC not in field.metadata:
        raise TypeError(f"{class_name}.{field.name}: declare it with option() or section()")
    default = field.default if field.default_factory is MISSING else field.default_factory()
    if optional_inner(annotation) is not None and default is not None:
        raise TypeError(f"{class_name}.{field.name}: an optional option defaults to None, which TOML cannot write")
    doc, bounds = (field.metadata[name] for name in (_DOC, _BOUNDS))
    return OptionSpec(name=field.name, annotation=annotation, default=default, doc=doc, bounds=bounds)
