"""Generate a task from a seed: a few modules of correct code, and a copy of them with faults.

easy    one fault; the prompt says what to change and where
medium  two modules or more, one or two faults; the prompt names the wrong functions, and their tests say what is right
hard    four modules or more, two or three faults; the prompt only says that tests fail

A module consists of functions. Each function is a `Kernel` (a template) with its names and numbers filled in. The
texts of tasks and the order of random draws are data: results refer to tasks by seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from string import Template
from typing import Any, NamedTuple

from composer_replication.envs.workspace.in_sandbox import canonical
from composer_replication.envs.workspace.task import (
    COLORS,
    EXTRAS,
    PLACES,
    THINGS,
    Check,
    Difficulty,
    Task,
    edits_between,
)
from composer_replication.errors import InputError, explain

FIRST_TRAINING_SEED = 10_000
"""The default first seed of training tasks. Seeds 0 to 999 are for model cards and evaluation."""

Arguments = tuple[Any, ...]


def generate_task(seed: int, *, difficulty: Difficulty = "easy") -> Task:
    """Return the task of a seed, which is the same on every machine. Raises InputError for an unknown difficulty."""
    if difficulty not in _SIZES:
        raise InputError(explain("difficulty", got=repr(difficulty), expected=" or ".join(_SIZES)))
    rng = random.Random(f"workspace:{difficulty}:{seed}")  # noqa: S311 (a task, not a secret)
    size = _SIZES[difficulty]
    words = [rng.sample(vocabulary, len(vocabulary)) for vocabulary in (THINGS, EXTRAS)]
    draft = _Draft(rng=rng, size=size, package=rng.choice(PLACES), things=words[0], extras=words[1])
    families = rng.sample(size.families, rng.randint(*size.faults))
    for family in families:
        _BREAKERS.get(family, _break_one_function)(draft, family)
    # Every breaker adds the modules it needs; the rest have no fault.
    for _ in range(rng.randint(*size.other_modules)):
        draft.module()
    rng.shuffle(draft.modules)
    tests = {module.test_path: module.tests() for module in draft.modules}
    wrong = {module.path: module.text(right=False) for module in draft.modules} | tests
    right = {module.path: module.text(right=True) for module in draft.modules} | tests
    # Some tasks have a README, a file that needs no change.
    if rng.random() < 0.3:
        about = ", ".join(module.name.rpartition(".")[2] for module in draft.modules)
        wrong["README.md"] = right["README.md"] = f"# {draft.package}\n\nCode about {about}.\n"
    return Task(
        seed=seed,
        difficulty=difficulty,
        family="+".join(families),
        prompt=_prompt(draft, difficulty),
        files=dict(sorted(wrong.items())),
        solution=edits_between(wrong, right),
        checks=tuple(check for module in draft.modules for check in module.checks()),
    )


@dataclass(frozen=True)
class Fault:
    """A way to break a function: replace `right`, which occurs in it once, by `wrong`.

    `complaint` describes the fault in an easy task's prompt. A fault may have a twin: a function for which the wrong
    line is right. In a file with both functions, an edit of that line alone is ambiguous.
    """

    family: str
    right: str
    wrong: str
    complaint: str
    twin: str = ""
    twin_reference: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Kernel:
    """A function as a template, with a reference implementation and the faults that it can have.

    Placeholders: `$f` is the function, `$a` and `$b` its parameters, `$K` a constant of the module and `$k` its value,
    `$x` a wrong value, `$y` a wrong name, `$w`, `$v` and `$u` words, `$p` and `$q` numbers, `$t` and `$e` the nouns
    that names are made of. `reference` takes the value (or words) first, then the arguments of the call.
    """

    name: str
    source: str
    reference: Callable[..., Any]
    arguments: Callable[[random.Random, int], list[Arguments]]
    faults: tuple[Fault, ...]
    constant: str = ""
    num_shown: int = 2  # the first cases are in the test file, the rest are hidden


def _number(rng: random.Random, _value: int) -> list[Arguments]:
    return [(number,) for number in rng.sample(range(2, 90), 4)]


def _two_numbers(rng: random.Random, _value: int) -> list[Arguments]:
    return [tuple(rng.sample(range(2, 60), 2)) for _ in range(4)]


def _around(rng: random.Random, value: int) -> list[Arguments]:
    """Return numbers around a limit. The first three are below, above and at it, so the test shows every case."""
    near = [value - 1, value + 1, value, value - rng.randrange(2, 9), value + rng.randrange(2, 20)]
    return [(number,) for number in near]


def _lists_around(rng: random.Random, value: int) -> list[Arguments]:
    return [(rng.sample([value - 1, value, value + 1, value + rng.randrange(2, 9)], 4),) for _ in range(4)]


def _long_lists(rng: random.Random, value: int) -> list[Arguments]:
    return [(rng.sample(range(1, 60), value + extra),) for extra in (2, 1, 3, 4)]


def _signed(rng: random.Random, value: int) -> list[Arguments]:
    """Return numbers below and above 0, but not `-value`, for which `safe_$t` returns 0 with or without its fault."""
    low = -rng.randrange(2, 40)
    more_numbers = [rng.randrange(2, 40), -rng.randrange(41, 90), rng.randrange(41, 90)]
    return [(number,) for number in (low - (low == -value), *more_numbers)]


def _words(rng: random.Random, _value: int) -> list[Arguments]:
    return [(word,) for word in rng.sample(EXTRAS, 4)]


def _word_lists(rng: random.Random, _value: int) -> list[Arguments]:
    return [(rng.sample(EXTRAS, count),) for count in (2, 3, 3, 4)]


def _flags(rng: random.Random, _value: int) -> list[Arguments]:
    return [(rng.randrange(2, 60),), (rng.randrange(2, 60), rng.randrange(2, 9)), (rng.randrange(60, 99),)]


# Faults that several kernels share.
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
        num_shown=3,
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
        num_shown=3,
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


# Faults within a function come from the kernels. The others need a whole function or several modules (`_BREAKERS`).
_KERNEL_FAMILIES = tuple(dict.fromkeys(fault.family for kernel in KERNELS for fault in kernel.faults))
_MODULE_FAMILIES = ("missing_function", "moved_import", "renamed_function", "files_disagree")
FAMILIES: tuple[str, ...] = (*_KERNEL_FAMILIES, *_MODULE_FAMILIES)
_TWIN_RATE = 0.7
"""The probability that a module gets the twin of its faulty function, if there is one."""
# The wording of prompts is data: the embedded student was trained on it.
_ENDINGS = ("", " Make the tests pass.", " Run the tests when it is fixed.", " Fix it, run the tests and finish.")
_MEDIUM_PROMPTS = (
    "{name} in {path} is wrong; {test} says what is right.",
    "{name} does not do what {test} says. Find it.",
)
_HARD_PROMPTS = (
    "Some tests fail. The tests are right: read them, find what is wrong in the code and fix it.",
    "The tests do not pass. Fix the code, not the tests.",
    "Find out why tests fail and repair the code. Leave the tests as they are.",
)


class _Size(NamedTuple):
    """The size of a difficulty's tasks; each pair is the minimum and the maximum."""

    functions: tuple[int, int]
    other_modules: tuple[int, int]
    faults: tuple[int, int]
    families: tuple[str, ...]


_SIZES: dict[str, _Size] = {
    # An easy task is fixed in one file; `files_disagree` needs two.
    "easy": _Size((1, 2), (0, 1), (1, 1), tuple(family for family in FAMILIES if family != "files_disagree")),
    "medium": _Size((2, 3), (1, 2), (1, 2), FAMILIES),
    "hard": _Size((3, 4), (2, 2), (2, 3), FAMILIES),
}


class _Complaint(NamedTuple):
    """What a prompt can say about a fault: the module, the function and a sentence."""

    module: Module
    function: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Function:
    """A kernel with its names and numbers filled in. The test file has the first `num_shown` cases, the reward all."""

    name: str
    constant: str
    source: str
    faults: tuple[Fault, ...]
    cases: tuple[tuple[str, Any], ...]
    num_shown: int
    twins: dict[str, Function] = field(default_factory=dict[str, "Function"])


@dataclass(kw_only=True)
class Module:
    """A module of a task: its imports and functions, and the faults in them."""

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
        """Return the file's text, correct or with its faults. A constant that several functions share appears once."""
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
        """Return the text of the test file, which has the shown cases of every function."""
        names = ", ".join(sorted(function.name for function in self.functions))
        blocks = [f"from {self.name} import {names}\n"]
        for function in self.functions:
            lines = [f"    assert {call} {_comparison(value)}" for call, value in function.cases[: function.num_shown]]
            blocks.append("\n".join([f"def test_{function.name}():", *lines, ""]))
        return "\n\n".join(blocks)

    def checks(self) -> list[Check]:
        """Return the checks that the reward uses: all cases of all functions, shown or hidden."""
        return [
            Check(test=f"test_{function.name}", module=self.name, expression=call, expected=canonical(value))
            for function in self.functions
            for call, value in function.cases
        ]


def _comparison(value: object) -> str:
    """Return the right side of an assert, such as `== 3` or `is True`."""
    if isinstance(value, bool):
        return f"is {value}"
    return f'== "{value}"' if isinstance(value, str) else f"== {value!r}"


@dataclass(kw_only=True)
class _Draft:
    """A task that is being generated: its modules so far, and the complaints about them."""

    rng: random.Random
    size: _Size
    package: str
    things: list[str]
    extras: list[str]
    modules: list[Module] = field(default_factory=list[Module])
    complaints: list[_Complaint] = field(default_factory=list[_Complaint])

    def module(self, first: Sequence[Kernel] = (), *, exactly: bool = False) -> Module:
        """Add a module about one noun: the `first` kernels, then (unless `exactly`) randomly chosen ones."""
        thing = self.things.pop()
        unused_kernels = [kernel for kernel in KERNELS if kernel not in first]
        count = len(first) if exactly else max(self.rng.randint(*self.size.functions), len(first))
        kernels = [*first, *self.rng.sample(unused_kernels, count - len(first))]
        functions = [_fill_kernel(kernel, self.rng, thing, self.extras.pop()) for kernel in kernels]
        self.modules.append(Module(path=f"{self.package}/{thing}s.py", functions=functions))
        return self.modules[-1]

    def break_function(self, module: Module, function: Function, fault: Fault) -> None:
        module.faults[function.name] = fault
        self.complaints.append(_Complaint(module, function.name, fault.complaint))


def _prompt(draft: _Draft, difficulty: Difficulty) -> str:
    if difficulty == "hard":
        return draft.rng.choice(_HARD_PROMPTS)
    if difficulty == "easy":
        complaint = draft.complaints[0]
        start = draft.rng.choice(("In {path}, {text}.", "Please fix {path}: {text}."))
        return start.format(path=complaint.module.path, text=complaint.text) + draft.rng.choice(_ENDINGS)
    about = [
        draft.rng.choice(_MEDIUM_PROMPTS).format(
            name=complaint.function, path=complaint.module.path, test=complaint.module.test_path
        )
        for complaint in draft.complaints
    ]
    return " ".join(about) + draft.rng.choice(_ENDINGS)


def _break_one_function(draft: _Draft, family: str) -> None:
    kernels = [kernel for kernel in KERNELS if any(fault.family == family for fault in kernel.faults)]
    module = draft.module([draft.rng.choice(kernels)])
    function = module.functions[0]
    fault = draft.rng.choice([fault for fault in function.faults if fault.family == family])
    twin = function.twins.get(fault.twin)
    names = {module_function.name for module_function in module.functions}
    if twin is not None and twin.name not in names and draft.rng.random() < _TWIN_RATE:
        module.functions.append(twin)
    draft.break_function(module, function, fault)


def _remove_function(draft: _Draft, family: str) -> None:
    # The complaint states the body in one line, so only functions of a single `return` qualify.
    plain = [kernel for kernel in KERNELS if kernel.source.count("\n") == 2]
    module = draft.module(draft.rng.sample(plain, 2))
    function = module.functions[0]
    signature = function.source.partition("def ")[2].partition(":")[0]
    returned = function.source.partition("return ")[2].strip()
    text = f"{signature} is missing, it must return {returned}"
    draft.break_function(module, function, Fault(family, function.source, "", text))


def _break_import(draft: _Draft, family: str) -> None:
    """Let one module use a function of another, imported from a wrong module or by an old name."""
    home = draft.module([draft.rng.choice(KERNELS[:3])])
    function = home.functions[0]
    user = draft.module([draft.rng.choice(KERNELS[3:])])
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
        wrong = f"{draft.package}.{draft.things.pop()}s"
        user.wrong_imports = (f"from {wrong} import {function.name}",)
        draft.complaints.append(
            _Complaint(user, name, f"{function.name} must be imported from {home.name}, not {wrong}")
        )
    else:
        # The kernels of `home` are named `_with_`, `_without_` and `_times_`. `_without_` becomes the odd `_andout_`,
        # which stays because it is part of published tasks.
        old = function.name.replace("_with", "_and").replace("_times", "_by")
        user.wrong_imports = (f"from {home.name} import {old}",)
        text = f"{old} is now called {function.name}"
        draft.break_function(user, twice, Fault(family, f"* {function.name}(", f"* {old}(", text))


def _break_shared_constant(draft: _Draft, family: str) -> None:
    """Define one constant in two modules, with a different wrong value in each."""
    to, back = KERNELS[0], KERNELS[1]  # `$t_with_$e` and `$t_without_$e`, which use the constant in opposite ways
    # Same random state and same noun `extra`: the constant has the same name and value in both modules.
    state, extra = draft.rng.getstate(), draft.extras[-1]
    first = draft.module([to], exactly=True)
    draft.rng.setstate(state)
    draft.extras.append(extra)
    second = draft.module([back], exactly=True)
    for module, step in ((first, 3), (second, -3)):
        function = module.functions[0]
        constant, value = function.constant.strip().split(" = ")
        wrong = f"{constant} = {int(value) + step}"
        text = f"{constant} must be {value}, as in the other file that has it"
        draft.break_function(module, function, Fault(family, function.constant.strip(), wrong, text))


_BREAKERS = {
    "missing_function": _remove_function,
    "moved_import": _break_import,
    "renamed_function": _break_import,
    "files_disagree": _break_shared_constant,
}


def _fill_kernel(kernel: Kernel, rng: random.Random, thing: str, extra: str) -> Function:
    """Return a function made from the template, with random words and numbers."""
    # The order of the draws is fixed: another order would change the tasks of all seeds.
    value = rng.randrange(3, 6) if "first" in kernel.name else rng.randrange(5, 40)
    wrong = value + rng.choice((-2, -1, 1, 2, 10))
    words = rng.sample(COLORS, 3)
    prices = rng.sample(range(3, 60), 2)
    is_lookup = kernel.name == "$t_code"
    names = {
        **{"t": thing, "ts": f"{thing}s", "e": extra},
        **{"a": thing, "as": f"{thing}s", "a_list": f"{thing}_list", "b": extra, "y": f"{thing[:-1]}"},
        **{"K": f"{thing}_codes".upper() if is_lookup else extra.upper(), "k": str(value)},
        **{"x": str(prices[0] + wrong if is_lookup else wrong), "w": words[0], "v": words[1], "u": words[2]},
        **{"p": str(prices[0]), "q": str(prices[1])},
    }
    names["f"] = _fill(kernel.name, names)
    reference_value: Any = (*words[:2], *prices) if is_lookup else words if "label" in kernel.name else value
    argument_sets = [(words[0],), (words[1],)] if is_lookup else kernel.arguments(rng, value)
    function = Function(
        name=names["f"],
        constant=_fill(kernel.constant, names),
        source=_fill(kernel.source, names),
        faults=tuple(_fill_fault(fault, names) for fault in kernel.faults),
        cases=_cases(names["f"], kernel.reference, reference_value, argument_sets),
        num_shown=kernel.num_shown,
    )
    # A twin is the function with the fault, under its own name: for it, the faulty line is correct.
    for fault in function.faults:
        if fault.twin_reference is not None:
            source = function.source.replace(function.name, fault.twin).replace(fault.right, fault.wrong)
            cases = _cases(fault.twin, fault.twin_reference, reference_value, argument_sets)
            function.twins[fault.twin] = replace(function, name=fault.twin, source=source, cases=cases, faults=())
    return function


def _fill_fault(fault: Fault, names: dict[str, str]) -> Fault:
    right, wrong, message, twin = (
        _fill(text, names) for text in (fault.right, fault.wrong, fault.complaint, fault.twin)
    )
    return replace(fault, right=right, wrong=wrong, complaint=message, twin=twin)


def _cases(
    name: str, reference: Callable[..., Any], reference_value: Any, argument_sets: list[Arguments]
) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (f"{name}({', '.join(map(_literal, arguments))})", reference(reference_value, *arguments))
        for arguments in argument_sets
    )


def _fill(text: str, names: dict[str, str]) -> str:
    # In "$t_with_$e" the template's name would be `t_with_`, as "_" is part of a name: braces end it.
    return Template(text.replace("$t_", "${t}_")).substitute(names)


def _literal(value: object) -> str:
    """Return the value as source code, like `repr` but with the double quotes that the files use."""
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return repr(value)
