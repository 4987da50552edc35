"""Types of options: what each accepts, what it refuses, and what the error says."""

from __future__ import annotations

import math
import re
from typing import Literal

import pytest

from composer_replication.config.schema import Bare, _Bounds, _coerce, type_text
from composer_replication.errors import ConfigError

Choice = Literal["dpo", "simpo"]


@pytest.mark.parametrize(
    ("value", "annotation", "result"),
    [
        (True, bool, True),
        (-(2**63), int, -(2**63)),
        (2, float, 2.0),
        (1e-300, float, 1e-300),
        ("é", str, "é"),
        ("simpo", Choice, "simpo"),
        (None, float | None, None),
        (3, float | None, 3.0),
        (Bare("none"), float | None, None),
        (Bare("none"), str | None, None),
        ("none", str | None, "none"),
        (Bare("none"), str, "none"),
        (Bare("none"), Literal["none", "taid"], "none"),
        ([1, 2], tuple[float, ...], (1.0, 2.0)),
        ([], tuple[int, ...], ()),
        ({"a": 1}, dict[str, float], {"a": 1.0}),
    ],
)
def test_a_value_that_fits_is_held_as_the_declared_type(value: object, annotation: object, result: object) -> None:
    held = _coerce(value, annotation, path="a.b")
    assert held == result
    assert type(held) is type(result)


def test_the_parts_of_a_list_and_a_table_are_converted_too() -> None:
    assert repr(_coerce([1, 2], tuple[float, ...], path="a")) == "(1.0, 2.0)"
    assert repr(_coerce({"k": 3}, dict[str, float], path="a")) == "{'k': 3.0}"


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (1, bool, "bool"),
        ("true", bool, "bool"),
        (True, int, "int"),
        (1.0, int, "int"),
        ("1", int, "int"),
        (2**63, int, "int"),
        (True, float, "float"),
        ("1.0", float, "float"),
        (2**53 + 1, float, "float"),
        (10**400, float, "float"),
        (math.nan, float, "float"),
        (math.inf, float, "float"),
        (None, float, "float"),
        (1, str, "str"),
        ("\ud800", str, "str"),
        ("ppo", Choice, '"dpo" | "simpo"'),
        (True, Literal[1, 2], "1 | 2"),
        (1, Choice | None, '"dpo" | "simpo" or none'),
        ("ab", tuple[str, ...], "list of str"),
        ([1, "a"], tuple[int, ...], "list of int"),
        ({"a": True}, dict[str, float], "table of float"),
        ({"\ud800": 1.0}, dict[str, float], "table of float"),
        ([], dict[str, float], "table of float"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_path_got_and_expected(
    value: object, annotation: object, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        _coerce(value, annotation, path="a.b")
    assert caught.value.what == "a.b"
    assert caught.value.got.startswith(f"{value!r} (")
    assert caught.value.expected.startswith(expected)


@pytest.mark.parametrize(
    ("bounds", "text", "inside", "outside"),
    [
        (_Bounds(at_least=0), " >= 0", [0, 5], [-1e-9]),
        (_Bounds(above=0), " > 0", [5e-324], [0]),
        (_Bounds(at_most=1), " <= 1", [1, -5], [1.0001]),
        (_Bounds(below=1), " < 1", [0.999], [1]),
        (_Bounds(at_least=0, at_most=1), " in [0, 1]", [0, 1], [-0.1, 1.1]),
        (_Bounds(above=0, below=1), " in (0, 1)", [0.5], [0, 1]),
    ],
)
def test_bounds_hold_at_their_ends_and_are_told(
    bounds: _Bounds, text: str, inside: list[float], outside: list[float]
) -> None:
    assert type_text(float | None, bounds) == f"float{text} or none"
    for number in inside:
        assert _coerce(number, float, path="a", bounds=bounds) == number
        assert _coerce([number], tuple[float, ...], path="a", bounds=bounds) == (number,)
    for number in outside:
        for value, annotation in ((number, float), ([number], tuple[float, ...]), ({"k": number}, dict[str, float])):
            with pytest.raises(ConfigError) as caught:
                _coerce(value, annotation, path="a", bounds=bounds)
            assert f"float{text}" in caught.value.expected


@pytest.mark.parametrize("annotation", [int | str, int | str | None, list[int], tuple[int, str], bytes, None])
def test_a_type_that_toml_cannot_hold_is_the_programmers_error(annotation: object) -> None:
    with pytest.raises(TypeError, match=re.escape(str(annotation))):
        _coerce(1, annotation, path="a")
