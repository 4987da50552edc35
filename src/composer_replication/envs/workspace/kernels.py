"""Small functions as templates: what they are when right, what can be wrong with them, and what they must return.

`$f` is the function, `$a` and `$b` its parameters, `$K` a constant of the module and `$k` its value, `$w` and `$v` two
words. The reference gets the value or the words first, then the arguments.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from composer_replication.envs.workspace.vocabulary import EXTRAS

Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Fault:
    """In a right function `right` stands once; with `wrong` in its place the function is broken. `said` tells it.

    A fault may have a twin: the name of a function for which the wrong line is right, and what that one returns. In a
    file with both of them the line alone is ambiguous.
    """

    family: str
    right: str
    wrong: str
    said: str
    twin: str = ""
    twin_reference: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Kernel:
    """One kind of function."""

    name: str
    source: str
    reference: Callable[..., Any]
    arguments: Callable[[random.Random, int], list[Arguments]]
    faults: tuple[Fault, ...]
    constant: str = ""
    shown: int = 2


def _number(draw: random.Random, _value: int) -> list[Arguments]:
    return [(number,) for number in draw.sample(range(2, 90), 4)]


def _two_numbers(draw: random.Random, _value: int) -> list[Arguments]:
    return [tuple(draw.sample(range(2, 60), 2)) for _ in range(4)]


def _around(draw: random.Random, value: int) -> list[Arguments]:
    """Below, at and above a limit, far and near: each side is shown before anything is hidden."""
    near = [value - 1, value + 1, value, value - draw.randrange(2, 9), value + draw.randrange(2, 20)]
    return [(number,) for number in near]


def _lists_around(draw: random.Random, value: int) -> list[Arguments]:
    return [(draw.sample([value - 1, value, value + 1, value + draw.randrange(2, 9)], 4),) for _ in range(4)]


def _long_lists(draw: random.Random, value: int) -> list[Arguments]:
    return [(draw.sample(range(1, 60), value + extra),) for extra in (2, 1, 3, 4)]


def _signed(draw: random.Random, value: int) -> list[Arguments]:
    """Below and above 0. The number that the value makes 0 of shows nothing, so it is not among them."""
    low = -draw.randrange(2, 40)
    other_numbers = [draw.randrange(2, 40), -draw.randrange(41, 90), draw.randrange(41, 90)]
    return [(number,) for number in (low - (low == -value), *other_numbers)]


def _words(draw: random.Random, _value: int) -> list[Arguments]:
    return [(word,) for word in draw.sample(EXTRAS, 4)]


def _word_lists(draw: random.Random, _value: int) -> list[Arguments]:
    return [(draw.sample(EXTRAS, count),) for count in (2, 3, 3, 4)]


def _flags(draw: random.Random, _value: int) -> list[Arguments]:
    return [(draw.randrange(2, 60),), (draw.randrange(2, 60), draw.randrange(2, 9)), (draw.randrange(60, 99),)]


_CONSTANT = Fault("wrong_constant", "$K = $k", "$K = $x", "$K must be $k")
_NAME = Fault("wrong_name", "return $a", "return $y", "$f uses the name $y, it must be $a")

KERNELS: tuple[Kernel, ...] = (
    Kernel(
        "$t_with_$e",
        "def $f($a):\n    return $a + $K\n",
        lambda k, a: a + k,
        _number,
        (
            _CONSTANT,
            _NAME,
            Fault(
                "wrong_operator", "$a + $K", "$a - $K", "$f must return $a + $K", "$t_without_$e", lambda k, a: a - k
            ),
        ),
        "$K = $k\n",
    ),
    Kernel(
        "$t_without_$e",
        "def $f($a):\n    return $a - $K\n",
        lambda k, a: a - k,
        _number,
        (
            _CONSTANT,
            _NAME,
            Fault("wrong_operator", "$a - $K", "$a + $K", "$f must return $a - $K", "$t_with_$e", lambda k, a: a + k),
        ),
        "$K = $k\n",
    ),
    Kernel(
        "$t_times_$e",
        "def $f($a):\n    return $a * $K\n",
        lambda k, a: a * k,
        _number,
        (
            _CONSTANT,
            _NAME,
            Fault("wrong_operator", "$a * $K", "$a + $K", "$f must return $a * $K", "$t_with_$e", lambda k, a: a + k),
        ),
        "$K = $k\n",
    ),
    Kernel(
        "cap_$t",
        "def $f($a):\n    return min($a, $K)\n",
        lambda k, a: min(a, k),
        _around,
        (
            _CONSTANT,
            Fault("wrong_operator", "min(", "max(", "$f must return min($a, $K)", "raise_$t", lambda k, a: max(a, k)),
        ),
        "$K = $k\n",
        shown=3,
    ),
    Kernel(
        "is_high_$t",
        "def $f($a):\n    return $a >= $K\n",
        lambda k, a: a >= k,
        _around,
        (
            _CONSTANT,
            Fault("off_by_one", ">=", ">", "$f must be true when $a equals $K", "is_above_$t", lambda k, a: a > k),
        ),
        "$K = $k\n",
        shown=3,
    ),
    Kernel(
        "count_high_$ts",
        "def $f($as):\n    high = [$a for $a in $as if $a > $K]\n    return len(high)\n",
        lambda k, items: sum(number > k for number in items),
        _lists_around,
        (_CONSTANT, Fault("off_by_one", "> $K", ">= $K", "$f must count only what is above $K")),
        "$K = $k\n",
    ),
    Kernel(
        "first_$ts",
        "def $f($as):\n    return $as[:$k]\n",
        lambda k, items: items[:k],
        _long_lists,
        (
            Fault("off_by_one", "[:$k]", "[1:$k]", "$f must begin with the first of $as"),
            Fault("wrong_name", "return $as", "return $a_list", "$f uses the name $a_list, it must be $as"),
        ),
    ),
    Kernel(
        "sum_to_$t",
        "def $f($a):\n    return sum(range($a + 1))\n",
        lambda _k, a: a * (a + 1) // 2,
        _number,
        (Fault("off_by_one", "range($a + 1)", "range($a)", "$f must count $a too"),),
    ),
    Kernel(
        "$t_area",
        "def $f($a, $b):\n    return $a * $b\n",
        lambda _k, a, b: a * b,
        _two_numbers,
        (
            Fault("wrong_operator", "$a * $b", "$a + $b", "$f must return $a * $b"),
            Fault("wrong_name", "* $b", "* $y", "$f uses the name $y, it must be $b"),
        ),
    ),
    Kernel(
        "scale_$t",
        "def $f($a, $b=$k):\n    return $a * $b\n",
        lambda k, a, b=None: a * (k if b is None else b),
        _flags,
        (Fault("wrong_default", "$b=$k", "$b=$x", "the default of $b in $f must be $k"),),
    ),
    Kernel(
        "safe_$t",
        "def $f($a):\n    if $a < 0:\n        return 0\n    return $a + $k\n",
        lambda k, a: 0 if a < 0 else a + k,
        _signed,
        (
            Fault("missing_branch", "    if $a < 0:\n        return 0\n", "", "$f must return 0 when $a is below 0"),
            Fault("wrong_operator", "$a < 0", "$a > 0", "$f must return 0 only when $a is below 0"),
        ),
    ),
    Kernel(
        "label_$t",
        'def $f($a):\n    return "$w " + $a\n',
        lambda words, a: f"{words[0]} {a}",
        _words,
        (Fault("wrong_text", '"$w "', '"$v "', "$f must put $w before $a"),),
    ),
    Kernel(
        "join_$ts",
        'def $f($as):\n    return "-".join($as)\n',
        lambda _k, items: "-".join(items),
        _word_lists,
        (Fault("wrong_text", '"-"', '"+"', "$f must put - between the $as"),),
    ),
    Kernel(
        "$t_code",
        "def $f($a):\n    return $K[$a]\n",
        lambda words, a: {words[0]: words[2], words[1]: words[3]}[a],
        lambda _draw, _value: [],
        (
            Fault("wrong_key", '"$w":', '"$u":', "the key of $p in $K must be $w"),
            Fault("wrong_constant", '"$w": $p', '"$w": $x', "$w in $K must be $p"),
        ),
        '$K = {"$w": $p, "$v": $q}\n',
    ),
)
