"""A task from a seed: a few modules of right code, and a copy of them in which something is wrong.

easy    one fault in one small module; the prompt says what must change, and where
medium  two or three modules, one or two faults; the prompt says which function is wrong, the test says how
hard    four modules, two or three faults; the prompt says that tests fail
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from string import Template
from typing import Any, NamedTuple

from composer_replication.envs.workspace.in_sandbox import canonical
from composer_replication.envs.workspace.task import (
    COLOURS,
    EXTRAS,
    PLACES,
    THINGS,
    Check,
    Difficulty,
    Task,
    edits_between,
)
from composer_replication.errors import InputError, explain

# Small functions as templates: what they are when right, what can be wrong with them, and what they must return.
#
# `$f` is the function, `$a` and `$b` its parameters, `$K` a constant of the module and `$k` its value, `$w` and `$v`
# two words. The reference gets the value or the words first, then the arguments.

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


IN_ONE_FUNCTION = tuple(dict.fromkeys(fault.family for kernel in KERNELS for fault in kernel.faults))
OF_FILES = ("missing_function", "moved_import", "renamed_function", "files_disagree")
FAMILIES: tuple[str, ...] = (*IN_ONE_FUNCTION, *OF_FILES)
FIRST_TRAINING_SEED = 10_000
"""Where tasks to learn from start unless a seed is given. Seeds 0 to 999 are for cards and evaluation."""
TWIN_RATE = 0.7
ENDINGS = ("", " Make the tests pass.", " Run the tests when it is fixed.", " Fix it, run the tests and finish.")
ABOUT_ONE = ("{name} in {path} is wrong; {test} says what is right.", "{name} does not do what {test} says. Find it.")
ABOUT_ALL = (
    "Some tests fail. The tests are right: read them, find what is wrong in the code and fix it.",
    "The tests do not pass. Fix the code, not the tests.",
    "Find out why tests fail and repair the code. Leave the tests as they are.",
)


class Size(NamedTuple):
    """How large the tasks of a difficulty are: the fewest and the most of each."""

    functions: tuple[int, int]
    other_modules: tuple[int, int]
    faults: tuple[int, int]
    families: tuple[str, ...]


SIZES: dict[str, Size] = {
    "easy": Size((1, 2), (0, 1), (1, 1), tuple(family for family in FAMILIES if family != "files_disagree")),
    "medium": Size((2, 3), (1, 2), (1, 2), FAMILIES),
    "hard": Size((3, 4), (2, 2), (2, 3), FAMILIES),
}


class Said(NamedTuple):
    """What is wrong: where, with which function, and in words."""

    module: Module
    function: str
    text: str


# A function of a kernel with its names filled in, and the file it stands in: right, wrong, its tests and checks.


@dataclass(frozen=True, kw_only=True)
class Function:
    """A kernel with its names filled in. The first cases are shown in a test, the others only judge."""

    name: str
    constant: str
    source: str
    faults: tuple[Fault, ...]
    cases: tuple[tuple[str, Any], ...]
    shown: int
    twins: dict[str, Function] = field(default_factory=dict[str, "Function"])


@dataclass(kw_only=True)
class Module:
    """A module: its imports and functions, and which of them are wrong."""

    path: str
    functions: list[Function]
    imports: tuple[str, ...] = ()
    wrong_imports: tuple[str, ...] = ()
    faults: dict[str, Fault] = field(default_factory=dict[str, Fault])

    @property
    def name(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".")

    @property
    def test_path(self) -> str:
        return f"tests/test_{self.path.rpartition('/')[2]}"

    def text(self, *, right: bool) -> str:
        """The file: imports, constants, functions. Functions that share a constant have it once."""
        constants: dict[str, None] = {}
        sources: list[str] = []
        for function in self.functions:
            parts = [function.constant, function.source]
            fault = self.faults.get(function.name)
            if fault is not None and not right:
                parts = [part.replace(fault.right, fault.wrong) for part in parts]
            constants |= {parts[0]: None} if parts[0] else {}
            sources += [parts[1]] if parts[1] else []
        imports = self.wrong_imports if self.wrong_imports and not right else self.imports
        head = "\n".join(block for block in ("".join(f"{line}\n" for line in imports), "".join(constants)) if block)
        return "\n\n".join([head] * bool(head) + sources)

    def tests(self) -> str:
        """What the agent can read and run: the shown cases of every function."""
        names = ", ".join(sorted(function.name for function in self.functions))
        blocks = [f"from {self.name} import {names}\n"]
        for function in self.functions:
            lines = [f"    assert {call} {_is(value)}" for call, value in function.cases[: function.shown]]
            blocks.append("\n".join([f"def test_{function.name}():", *lines, ""]))
        return "\n\n".join(blocks)

    def checks(self) -> list[Check]:
        """Every case, shown or not, for the judge."""
        return [
            Check(test=f"test_{function.name}", module=self.name, expression=call, expected=canonical(value))
            for function in self.functions
            for call, value in function.cases
        ]


def _is(value: object) -> str:
    if isinstance(value, bool):
        return f"is {value}"
    return f'== "{value}"' if isinstance(value, str) else f"== {value!r}"


@dataclass(kw_only=True)
class _Draft:
    """Modules as they are put together, and what is wrong with them."""

    draw: random.Random
    size: Size
    place: str
    things: list[str]
    extras: list[str]
    modules: list[Module] = field(default_factory=list[Module])
    said: list[Said] = field(default_factory=list[Said])

    def module(self, first: Sequence[Kernel] = (), *, exactly: bool = False) -> Module:
        """A module about one thing, with these functions first and others behind them."""
        thing = self.things.pop()
        other_kernels = [kernel for kernel in KERNELS if kernel not in first]
        count = len(first) if exactly else max(self.draw.randint(*self.size.functions), len(first))
        kernels = [*first, *self.draw.sample(other_kernels, count - len(first))]
        functions = [fill(kernel, self.draw, thing, self.extras.pop()) for kernel in kernels]
        self.modules.append(Module(path=f"{self.place}/{thing}s.py", functions=functions))
        return self.modules[-1]

    def break_function(self, module: Module, function: Function, fault: Fault) -> None:
        module.faults[function.name] = fault
        self.said.append(Said(module, function.name, fault.said))


def generate_task(seed: int, *, difficulty: Difficulty = "easy") -> Task:
    """The task of a seed: the same on any machine."""
    if difficulty not in SIZES:
        raise InputError(explain("difficulty", got=repr(difficulty), expected=" or ".join(SIZES)))
    draw = random.Random(f"workspace:{difficulty}:{seed}")  # noqa: S311 (a task, not a secret)
    size = SIZES[difficulty]
    words = [draw.sample(vocabulary, len(vocabulary)) for vocabulary in (THINGS, EXTRAS)]
    draft = _Draft(draw=draw, size=size, place=draw.choice(PLACES), things=words[0], extras=words[1])
    families = draw.sample(size.families, draw.randint(*size.faults))
    for family in families:
        BREAKERS.get(family, _break_one_function)(draft, family)
    for _ in range(draw.randint(*size.other_modules)):
        draft.module()
    draw.shuffle(draft.modules)
    tests = {module.test_path: module.tests() for module in draft.modules}
    wrong = {module.path: module.text(right=False) for module in draft.modules} | tests
    right = {module.path: module.text(right=True) for module in draft.modules} | tests
    if draw.random() < 0.3:
        about = ", ".join(module.name.rpartition(".")[2] for module in draft.modules)
        wrong["README.md"] = right["README.md"] = f"# {draft.place}\n\nCode about {about}.\n"
    return Task(
        seed=seed,
        difficulty=difficulty,
        family="+".join(families),
        prompt=_prompt(draft, difficulty),
        files=dict(sorted(wrong.items())),
        solution=edits_between(wrong, right),
        checks=tuple(check for module in draft.modules for check in module.checks()),
    )


def _prompt(draft: _Draft, difficulty: Difficulty) -> str:
    if difficulty == "hard":
        return draft.draw.choice(ABOUT_ALL)
    if difficulty == "easy":
        complaint = draft.said[0]
        start = draft.draw.choice(("In {path}, {text}.", "Please fix {path}: {text}."))
        return start.format(path=complaint.module.path, text=complaint.text) + draft.draw.choice(ENDINGS)
    about = [
        draft.draw.choice(ABOUT_ONE).format(
            name=complaint.function, path=complaint.module.path, test=complaint.module.test_path
        )
        for complaint in draft.said
    ]
    return " ".join(about) + draft.draw.choice(ENDINGS)


def _break_one_function(draft: _Draft, family: str) -> None:
    kernels = [kernel for kernel in KERNELS if any(fault.family == family for fault in kernel.faults)]
    module = draft.module([draft.draw.choice(kernels)])
    function = module.functions[0]
    fault = draft.draw.choice([fault for fault in function.faults if fault.family == family])
    twin = function.twins.get(fault.twin)
    names = {module_function.name for module_function in module.functions}
    if twin is not None and twin.name not in names and draft.draw.random() < TWIN_RATE:
        module.functions.append(twin)
    draft.break_function(module, function, fault)


def _leave_one_out(draft: _Draft, family: str) -> None:
    plain = [kernel for kernel in KERNELS if kernel.source.count("\n") == 2]
    module = draft.module(draft.draw.sample(plain, 2))
    function = module.functions[0]
    signature = function.source.partition("def ")[2].partition(":")[0]
    says = function.source.partition("return ")[2].strip()
    text = f"{signature} is missing, it must return {says}"
    draft.break_function(module, function, Fault(family, function.source, "", text))


def _import_wrongly(draft: _Draft, family: str) -> None:
    """A function of one module, used in another that imports it from where it is not, or by a name it has no more."""
    home = draft.module([draft.draw.choice(KERNELS[:3])])
    function = home.functions[0]
    user = draft.module([draft.draw.choice(KERNELS[3:])])
    parameter = function.source.partition("(")[2].partition(")")[0]
    name = f"twice_{function.name}"
    twice = replace(
        function,
        name=name,
        constant="",
        source=f"def {name}({parameter}):\n    return 2 * {function.name}({parameter})\n",
        cases=tuple((call.replace(function.name, name), 2 * value) for call, value in function.cases),
        faults=(),
    )
    user.functions.insert(0, twice)
    user.imports = (f"from {home.name} import {function.name}",)
    if family == "moved_import":
        wrong = f"{draft.place}.{draft.things.pop()}s"
        user.wrong_imports = (f"from {wrong} import {function.name}",)
        draft.said.append(Said(user, name, f"{function.name} must be imported from {home.name}, not {wrong}"))
    else:
        old = function.name.replace("_with", "_and").replace("_times", "_by")
        user.wrong_imports = (f"from {home.name} import {old}",)
        text = f"{old} is now called {function.name}"
        draft.break_function(user, twice, Fault(family, f"* {function.name}(", f"* {old}(", text))


def _disagree(draft: _Draft, family: str) -> None:
    """The same constant in two files; it is wrong in both, and wrong in two ways."""
    to, back = KERNELS[0], KERNELS[1]
    state, extra = draft.draw.getstate(), draft.extras[-1]
    first = draft.module([to], exactly=True)
    draft.draw.setstate(state)
    draft.extras.append(extra)
    second = draft.module([back], exactly=True)
    for module, step in ((first, 3), (second, -3)):
        function = module.functions[0]
        constant, value = function.constant.strip().split(" = ")
        wrong = f"{constant} = {int(value) + step}"
        text = f"{constant} must be {value}, as in the other file that has it"
        draft.break_function(module, function, Fault(family, function.constant.strip(), wrong, text))


BREAKERS = {
    "missing_function": _leave_one_out,
    "moved_import": _import_wrongly,
    "renamed_function": _import_wrongly,
    "files_disagree": _disagree,
}


def fill(kernel: Kernel, draw: random.Random, thing: str, extra: str) -> Function:
    """A function of this kind; every word and number is drawn."""
    value = draw.randrange(3, 6) if "first" in kernel.name else draw.randrange(5, 40)
    wrong = value + draw.choice((-2, -1, 1, 2, 10))
    words = draw.sample(COLOURS, 3)
    prices = draw.sample(range(3, 60), 2)
    looks_up = kernel.name == "$t_code"
    names = {
        **{"t": thing, "ts": f"{thing}s", "e": extra},
        **{"a": thing, "as": f"{thing}s", "a_list": f"{thing}_list", "b": extra, "y": f"{thing[:-1]}"},
        **{"K": f"{thing}_codes".upper() if looks_up else extra.upper(), "k": str(value)},
        **{"x": str(prices[0] + wrong if looks_up else wrong), "w": words[0], "v": words[1], "u": words[2]},
        **{"p": str(prices[0]), "q": str(prices[1])},
    }
    names["f"] = _filled(kernel.name, names)
    reference_value: Any = (*words[:2], *prices) if looks_up else words if "label" in kernel.name else value
    argument_sets = [(words[0],), (words[1],)] if looks_up else kernel.arguments(draw, value)
    function = Function(
        name=names["f"],
        constant=_filled(kernel.constant, names),
        source=_filled(kernel.source, names),
        faults=tuple(_filled_fault(fault, names) for fault in kernel.faults),
        cases=_cases(names["f"], kernel.reference, reference_value, argument_sets),
        shown=kernel.shown,
    )
    for fault in function.faults:
        if fault.twin_reference is not None:
            source = function.source.replace(function.name, fault.twin).replace(fault.right, fault.wrong)
            cases = _cases(fault.twin, fault.twin_reference, reference_value, argument_sets)
            function.twins[fault.twin] = replace(function, name=fault.twin, source=source, cases=cases, faults=())
    return function


def _filled_fault(fault: Fault, names: dict[str, str]) -> Fault:
    right, wrong, message, twin = (_filled(text, names) for text in (fault.right, fault.wrong, fault.said, fault.twin))
    return replace(fault, right=right, wrong=wrong, said=message, twin=twin)


def _cases(
    name: str, reference: Callable[..., Any], reference_value: Any, argument_sets: list[Arguments]
) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (f"{name}({', '.join(map(_literal, arguments))})", reference(reference_value, *arguments))
        for arguments in argument_sets
    )


def _filled(text: str, names: dict[str, str]) -> str:
    return Template(text.replace("$t_", "${t}_")).substitute(names)


def _literal(value: object) -> str:
    """Python's own notation, with the double quotes that the files use."""
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return repr(value)
