"""Small functions as templates: what they are when right, what can be wrong with them, and what they must return.

`$f` is the function, `$a` and `$b` its parameters, `$K` a constant of the module and `$k` its value, `$w` and `$v` two
words. The reference gets the value or the words first, then the arguments.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from string import Template
from typing import Any

from composer_replication.envs.workspace.vocabulary import COLOURS, EXTRAS

Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Fault:
    """In a right function `right` stands once; with `wrong` in its place the function is broken. `said` tells it."""

    family: str
    right: str
    wrong: str
    said: str


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


@dataclass(frozen=True, kw_only=True)
class Function:
    """A kernel with its names filled in. The first cases are shown in a test, the others only judge."""

    name: str
    constant: str
    source: str
    faults: tuple[Fault, ...]
    cases: tuple[tuple[str, Any], ...]
    shown: int


def _number(draw: random.Random, _value: int) -> list[Arguments]:
    return [(each,) for each in draw.sample(range(2, 90), 4)]


def _two_numbers(draw: random.Random, _value: int) -> list[Arguments]:
    return [tuple(draw.sample(range(2, 60), 2)) for _ in range(4)]


def _around(draw: random.Random, value: int) -> list[Arguments]:
    """Below, at and above a limit, far and near: each side is shown before anything is hidden."""
    near = [value - 1, value + 1, value, value - draw.randrange(2, 9), value + draw.randrange(2, 20)]
    return [(each,) for each in near]


def _lists_around(draw: random.Random, value: int) -> list[Arguments]:
    return [(draw.sample([value - 1, value, value + 1, value + draw.randrange(2, 9)], 4),) for _ in range(4)]


def _long_lists(draw: random.Random, value: int) -> list[Arguments]:
    return [(draw.sample(range(1, 60), value + extra),) for extra in (2, 1, 3, 4)]


def _signed(draw: random.Random, _value: int) -> list[Arguments]:
    return [(-draw.randrange(2, 40),), (draw.randrange(2, 40),), (-draw.randrange(41, 90),), (draw.randrange(41, 90),)]


def _words(draw: random.Random, _value: int) -> list[Arguments]:
    return [(each,) for each in draw.sample(EXTRAS, 4)]


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
        (_CONSTANT, _NAME, Fault("wrong_operator", "$a + $K", "$a - $K", "$f must return $a + $K")),
        "$K = $k\n",
    ),
    Kernel(
        "$t_without_$e",
        "def $f($a):\n    return $a - $K\n",
        lambda k, a: a - k,
        _number,
        (_CONSTANT, _NAME, Fault("wrong_operator", "$a - $K", "$a + $K", "$f must return $a - $K")),
        "$K = $k\n",
    ),
    Kernel(
        "$t_times_$e",
        "def $f($a):\n    return $a * $K\n",
        lambda k, a: a * k,
        _number,
        (_CONSTANT, _NAME, Fault("wrong_operator", "$a * $K", "$a + $K", "$f must return $a * $K")),
        "$K = $k\n",
    ),
    Kernel(
        "cap_$t",
        "def $f($a):\n    return min($a, $K)\n",
        lambda k, a: min(a, k),
        _around,
        (_CONSTANT, Fault("wrong_operator", "min(", "max(", "$f must return min($a, $K)")),
        "$K = $k\n",
        shown=3,
    ),
    Kernel(
        "is_high_$t",
        "def $f($a):\n    return $a >= $K\n",
        lambda k, a: a >= k,
        _around,
        (_CONSTANT, Fault("off_by_one", ">=", ">", "$f must be true when $a equals $K")),
        "$K = $k\n",
        shown=3,
    ),
    Kernel(
        "count_high_$ts",
        "def $f($as):\n    high = [$a for $a in $as if $a > $K]\n    return len(high)\n",
        lambda k, items: sum(each > k for each in items),
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


def fill(kernel: Kernel, draw: random.Random, thing: str, extra: str) -> Function:
    """A function of this kind; every word and number is drawn."""
    value = draw.randrange(3, 6) if "first" in kernel.name else draw.randrange(5, 40)
    wrong = value + draw.choice((-2, -1, 1, 2, 10))
    words = draw.sample(COLOURS, 3)
    prices = draw.sample(range(3, 60), 2)
    name = Template(kernel.name.replace("$t_", "${t}_").replace("$ts", "${t}s")).substitute(t=thing, e=extra)
    looks_up = kernel.name == "$t_code"
    names = {
        **{"f": name, "a": thing, "as": f"{thing}s", "a_list": f"{thing}_list", "b": extra, "y": f"{thing[:-1]}"},
        **{"K": f"{thing}_codes".upper() if looks_up else extra.upper(), "k": str(value)},
        **{"x": str(prices[0] + wrong if looks_up else wrong), "w": words[0], "v": words[1], "u": words[2]},
        **{"p": str(prices[0]), "q": str(prices[1])},
    }
    known: Any = (*words[:2], *prices) if looks_up else words if "label" in kernel.name else value
    given = [(words[0],), (words[1],)] if looks_up else kernel.arguments(draw, value)
    return Function(
        name=name,
        constant=_filled(kernel.constant, names),
        source=_filled(kernel.source, names),
        faults=tuple(
            Fault(each.family, *(_filled(text, names) for text in (each.right, each.wrong, each.said)))
            for each in kernel.faults
        ),
        cases=tuple(
            (f"{name}({', '.join(_literal(one) for one in each)})", kernel.reference(known, *each)) for each in given
        ),
        shown=kernel.shown,
    )


def _filled(text: str, names: dict[str, str]) -> str:
    return Template(text).substitute(names)


def _literal(value: object) -> str:
    """Python's own notation, with the double quotes that the files use."""
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return repr(value)
