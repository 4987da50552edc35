"""Generate a task from a seed: a few modules of correct code, and a copy of them with faults.

easy    one fault; the prompt says what to change and where
medium  two modules or more, one or two faults; the prompt names the faulty functions, whose tests define what is right
hard    four modules or more, two or three faults; the prompt only says that tests fail

A module consists of functions. Each function is a `_Kernel` (a template) with its names and numbers filled in. The
texts of tasks and the order of random draws must not change, because results refer to tasks by seed.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from string import Template
from typing import Any, NamedTuple

from composer_replication.envs.workspace.in_sandbox import canonical
from composer_replication.envs.workspace.task import COLORS, EXTRAS, PLACES, THINGS, Check, Difficulty, Edit, Task
from composer_replication.errors import InputError, explain

# The default first seed of training tasks. Seeds 0 to 999 are for model cards and evaluations.
FIRST_TRAINING_SEED = 10_000

Arguments = tuple[Any, ...]


def generate_task(seed: int, *, difficulty: Difficulty = "easy") -> Task:
    """Return the task with this seed, which is the same on every machine.

    Raises InputError for an unknown difficulty.
    """
    if difficulty not in _SIZES:
        raise InputError(explain("difficulty", got=repr(difficulty), expected=" or ".join(_SIZES)))
    rng = random.Random(f"workspace:{difficulty}:{seed}")  # noqa: S311 (a task, not a secret)
    size = _SIZES[difficulty]
    words = [rng.sample(vocabulary, len(vocabulary)) for vocabulary in (THINGS, EXTRAS)]
    draft = _Draft(rng=rng, size=size, package=rng.choice(PLACES), things=words[0], extras=words[1])
    families = rng.sample(size.families, rng.randint(*size.faults))
    for family in families:
        _BREAKERS.get(family, _break_one_function)(draft, family)
    # Each breaker adds the modules that it needs; further modules have no fault.
    for _ in range(rng.randint(*size.other_modules)):
        draft.add_module()
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
        solution=_edits_between(wrong, right),
        checks=tuple(check for module in draft.modules for check in module.checks()),
    )


@dataclass(frozen=True)
class _Fault:
    """A way to break a function: replace `right`, which occurs once in it, with `wrong`.

    `complaint` describes the fault in the prompt of an easy task. A fault may have a twin, which is a function in which
    the wrong line is correct. In a file with the faulty function and its twin, an edit that names only this line is
    ambiguous.
    """

    family: str
    right: str
    wrong: str
    complaint: str
    twin: str = ""
    twin_reference: Callable[..., Any] | None = None


@dataclass(frozen=True)
class _Kernel:
    """The template of a function, with a reference implementation and possible faults.

    Placeholders: `$f` is the function, `$a` and `$b` its parameters, `$K` a constant of the module and `$k` its value,
    `$x` a wrong value, `$y` a wrong name, `$w`, `$v` and `$u` words, `$p` and `$q` numbers, `$t` and `$e` the nouns
    from which names are made. `reference` takes the value (or words) as its first argument, followed by the arguments
    of the call.
    """

    name: str
    source: str
    reference: Callable[..., Any]
    arguments: Callable[[random.Random, int], list[Arguments]]
    faults: tuple[_Fault, ...]
    constant: str = ""
    num_shown: int = 2  # so many cases are in the test file; the others are hidden


def _number(rng: random.Random, _value: int) -> list[Arguments]:
    return [(number,) for number in rng.sample(range(2, 90), 4)]


def _two_numbers(rng: random.Random, _value: int) -> list[Arguments]:
    return [tuple(rng.sample(range(2, 60), 2)) for _ in range(4)]


def _around(rng: random.Random, value: int) -> list[Arguments]:
    """Return numbers around a limit.

    The first three are below, above and at the limit, so the test that shows them to the agent covers all cases.
    """
    near = [value - 1, value + 1, value, value - rng.randrange(2, 9), value + rng.randrange(2, 20)]
    return [(number,) for number in near]


def _lists_around(rng: random.Random, value: int) -> list[Arguments]:
    return [(rng.sample([value - 1, value, value + 1, value + rng.randrange(2, 9)], 4),) for _ in range(4)]


def _long_lists(rng: random.Random, value: int) -> list[Arguments]:
    return [(rng.sample(range(1, 60), value + extra),) for extra in (2, 1, 3, 4)]


def _signed(rng: random.Random, value: int) -> list[Arguments]:
    """Return numbers below and above 0. They exclude `-value`, for which `safe_$t` returns 0 even with its fault."""
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
_CONSTANT = _Fault("wrong_constant", "$K = $k", "$K = $x", "$K must be $k")
_NAME = _Fault("wrong_name", "return $a", "return $y", "$f uses the name $y, it must be $a")
KERNELS: tuple[_Kernel, ...] = (
    _Kernel(
        "$t_with_$e",
        "def $f($a):\n    return $a + $K\n",
        lambda k, a: a + k,
        _number,
        (
            _CONSTANT,
            _NAME,
            _Fault(
                "wrong_operator", "$a + $K", "$a - $K", "$f must return $a + $K", "$t_without_$e", lambda k, a: a - k
            ),
        ),
        "$K = $k\n",
    ),
    _Kernel(
        "$t_without_$e",
        "def $f($a):\n    return $a - $K\n",
        lambda k, a: a - k,
        _number,
        (
            _CONSTANT,
            _NAME,
            _Fault("wrong_operator", "$a - $K", "$a + $K", "$f must return $a - $K", "$t_with_$e", lambda k, a: a + k),
        ),
        "$K = $k\n",
    ),
    _Kernel(
        "$t_times_$e",
        "def $f($a):\n    return $a * $K\n",
        lambda k, a: a * k,
        _number,
        (
            _CONSTANT,
            _NAME,
            _Fault("wrong_operator", "$a * $K", "$a + $K", "$f must return $a * $K", "$t_with_$e", lambda k, a: a + k),
        ),
        "$K = $k\n",
    ),
    _Kernel(
        "cap_$t",
        "def $f($a):\n    return min($a, $K)\n",
        lambda k, a: min(a, k),
        _around,
        (
            _CONSTANT,
            _Fault("wrong_operator", "min(", "max(", "$f must return min($a, $K)", "raise_$t", lambda k, a: max(a, k)),
        ),
        "$K = $k\n",
        num_shown=3,
    ),
    _Kernel(
        "is_high_$t",
        "def $f($a):\n    return $a >= $K\n",
        lambda k, a: a >= k,
        _around,
        (
            _CONSTANT,
            _Fault("off_by_one", ">=", ">", "$f must be true when $a equals $K", "is_above_$t", lambda k, a: a > k),
        ),
        "$K = $k\n",
        num_shown=3,
    ),
    _Kernel(
        "count_high_$ts",
        "def $f($as):\n    high = [$a for $a in $as if $a > $K]\n    return len(high)\n",
        lambda k, items: sum(number > k for number in items),
        _lists_around,
        (_CONSTANT, _Fault("off_by_one", "> $K", ">= $K", "$f must count only what is above $K")),
        "$K = $k\n",
    ),
    _Kernel(
        "first_$ts",
        "def $f($as):\n    return $as[:$k]\n",
        lambda k, items: items[:k],
        _long_lists,
        (
            _Fault("off_by_one", "[:$k]", "[1:$k]", "$f must begin with the first of $as"),
            _Fault("wrong_name", "return $as", "return $a_list", "$f uses the name $a_list, it must be $as"),
        ),
    ),
    _Kernel(
        "sum_to_$t",
        "def $f($a):\n    return sum(range($a + 1))\n",
        lambda _k, a: a * (a + 1) // 2,
        _number,
        (_Fault("off_by_one", "range($a + 1)", "range($a)", "$f must count $a too"),),
    ),
    _Kernel(
        "$t_area",
        "def $f($a, $b):\n    return $a * $b\n",
        lambda _k, a, b: a * b,
        _two_numbers,
        (
            _Fault("wrong_operator", "$a * $b", "$a + $b", "$f must return $a * $b"),
            _Fault("wrong_name", "* $b", "* $y", "$f uses the name $y, it must be $b"),
        ),
    ),
    _Kernel(
        "scale_$t",
        "def $f($a, $b=$k):\n    return $a * $b\n",
        lambda k, a, b=None: a * (k if b is None else b),
        _flags,
        (_Fault("wrong_default", "$b=$k", "$b=$x", "the default of $b in $f must be $k"),),
    ),
    _Kernel(
        "safe_$t",
        "def $f($a):\n    if $a < 0:\n        return 0\n    return $a + $k\n",
        lambda k, a: 0 if a < 0 else a + k,
        _signed,
        (
            _Fault("missing_branch", "    if $a < 0:\n        return 0\n", "", "$f must return 0 when $a is below 0"),
            _Fault("wrong_operator", "$a < 0", "$a > 0", "$f must return 0 only when $a is below 0"),
        ),
    ),
    _Kernel(
        "label_$t",
        'def $f($a):\n    return "$w " + $a\n',
        lambda words, a: f"{words[0]} {a}",
        _words,
        (_Fault("wrong_text", '"$w "', '"$v "', "$f must put $w before $a"),),
    ),
    _Kernel(
        "join_$ts",
        'def $f($as):\n    return "-".join($as)\n',
        lambda _k, items: "-".join(items),
        _word_lists,
        (_Fault("wrong_text", '"-"', '"+"', "$f must put - between the $as"),),
    ),
    _Kernel(
        "$t_code",
        "def $f($a):\n    return $K[$a]\n",
        lambda words, a: {words[0]: words[2], words[1]: words[3]}[a],
        lambda _draw, _value: [],
        (
            _Fault("wrong_key", '"$w":', '"$u":', "the key of $p in $K must be $w"),
            _Fault("wrong_constant", '"$w": $p', '"$w": $x', "$w in $K must be $p"),
        ),
        '$K = {"$w": $p, "$v": $q}\n',
    ),
)


# Faults in a line come from the kernels. The others concern a whole function or several modules (`_BREAKERS`).
_KERNEL_FAMILIES = tuple(dict.fromkeys(fault.family for kernel in KERNELS for fault in kernel.faults))
_MODULE_FAMILIES = ("missing_function", "moved_import", "renamed_function", "files_disagree")
FAMILIES: tuple[str, ...] = (*_KERNEL_FAMILIES, *_MODULE_FAMILIES)
# The probability that a module also gets the twin of its faulty function, if the fault has one.
_TWIN_RATE = 0.7
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
    """The size of tasks of one difficulty. Each pair is a minimum and a maximum."""

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
    """The description of a fault for the prompt: the module, the function and a sentence."""

    module: _Module
    function: str
    text: str


@dataclass(frozen=True, kw_only=True)
class _Function:
    """A kernel with its names and numbers filled in.

    The reward uses all cases; the test file uses the first `num_shown`.
    """

    name: str
    constant: str
    source: str
    faults: tuple[_Fault, ...]
    cases: tuple[tuple[str, Any], ...]
    num_shown: int
    twins: dict[str, _Function] = field(default_factory=dict[str, "_Function"])


@dataclass(kw_only=True)
class _Module:
    """A module of a task with its imports, its functions, and the faults in them."""

    path: str
    functions: list[_Function]
    imports: tuple[str, ...] = ()
    wrong_imports: tuple[str, ...] = ()
    faults: dict[str, _Fault] = field(default_factory=dict[str, _Fault])

    @property
    def name(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".")

    @property
    def test_path(self) -> str:
        return f"tests/test_{self.path.rpartition('/')[2]}"

    def text(self, *, right: bool) -> str:
        """Return the source text of the module, either correct or with its faults.

        A constant that several functions share appears only once.
        """
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
        """Return the text of the test file, with the shown cases of every function."""
        names = ", ".join(sorted(function.name for function in self.functions))
        blocks = [f"from {self.name} import {names}\n"]
        for function in self.functions:
            lines = [f"    assert {call} {_comparison(value)}" for call, value in function.cases[: function.num_shown]]
            blocks.append("\n".join([f"def test_{function.name}():", *lines, ""]))
        return "\n\n".join(blocks)

    def checks(self) -> list[Check]:
        """Return the checks that determine the reward: all cases of all functions, including hidden cases."""
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
    """A task under construction: the modules and the descriptions of their faults so far."""

    rng: random.Random
    size: _Size
    package: str
    things: list[str]
    extras: list[str]
    modules: list[_Module] = field(default_factory=list[_Module])
    complaints: list[_Complaint] = field(default_factory=list[_Complaint])

    def add_module(self, first: Sequence[_Kernel] = (), *, exactly: bool = False) -> _Module:
        """Add a module with the kernels in `first`.

        Unless `exactly` is true, randomly chosen kernels may be added to it.
        """
        thing = self.things.pop()
        unused_kernels = [kernel for kernel in KERNELS if kernel not in first]
        count = len(first) if exactly else max(self.rng.randint(*self.size.functions), len(first))
        kernels = [*first, *self.rng.sample(unused_kernels, count - len(first))]
        functions = [_fill_kernel(kernel, self.rng, thing, self.extras.pop()) for kernel in kernels]
        self.modules.append(_Module(path=f"{self.package}/{thing}s.py", functions=functions))
        return self.modules[-1]

    def break_function(self, module: _Module, function: _Function, fault: _Fault) -> None:
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
    module = draft.add_module([draft.rng.choice(kernels)])
    function = module.functions[0]
    fault = draft.rng.choice([fault for fault in function.faults if fault.family == family])
    twin = function.twins.get(fault.twin)
    names = {module_function.name for module_function in module.functions}
    if twin is not None and twin.name not in names and draft.rng.random() < _TWIN_RATE:
        module.functions.append(twin)
    draft.break_function(module, function, fault)


def _remove_function(draft: _Draft, family: str) -> None:
    # The complaint states the body in one line, so only functions that consist of a `return` qualify.
    plain = [kernel for kernel in KERNELS if kernel.source.count("\n") == 2]
    module = draft.add_module(draft.rng.sample(plain, 2))
    function = module.functions[0]
    signature = function.source.partition("def ")[2].partition(":")[0]
    returned = function.source.partition("return ")[2].strip()
    text = f"{signature} is missing, it must return {returned}"
    draft.break_function(module, function, _Fault(family, function.source, "", text))


def _break_import(draft: _Draft, family: str) -> None:
    """Add two modules, one of which imports a function of the other from the wrong module or by an old name."""
    home = draft.add_module([draft.rng.choice(KERNELS[:3])])
    function = home.functions[0]
    user = draft.add_module([draft.rng.choice(KERNELS[3:])])
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
        # The kernels of `home` have `_with_`, `_without_` or `_times_` in their names. `_without_` becomes the odd
        # `_andout_`, which has to stay because published tasks contain it.
        old = function.name.replace("_with", "_and").replace("_times", "_by")
        user.wrong_imports = (f"from {home.name} import {old}",)
        text = f"{old} is now called {function.name}"
        draft.break_function(user, twice, _Fault(family, f"* {function.name}(", f"* {old}(", text))


def _break_shared_constant(draft: _Draft, family: str) -> None:
    """Add two modules that define the same constant, each with a different wrong value."""
    to, back = KERNELS[0], KERNELS[1]  # `$t_with_$e` and `$t_without_$e`, which use the constant in opposite ways
    # With the same random state and noun, the constant gets the same name and value in both modules.
    state, extra = draft.rng.getstate(), draft.extras[-1]
    first = draft.add_module([to], exactly=True)
    draft.rng.setstate(state)
    draft.extras.append(extra)
    second = draft.add_module([back], exactly=True)
    for module, step in ((first, 3), (second, -3)):
        function = module.functions[0]
        constant, value = function.constant.strip().split(" = ")
        wrong = f"{constant} = {int(value) + step}"
        text = f"{constant} must be {value}, as in the other file that has it"
        draft.break_function(module, function, _Fault(family, function.constant.strip(), wrong, text))


_BREAKERS = {
    "missing_function": _remove_function,
    "moved_import": _break_import,
    "renamed_function": _break_import,
    "files_disagree": _break_shared_constant,
}


def _fill_kernel(kernel: _Kernel, rng: random.Random, thing: str, extra: str) -> _Function:
    """Return a function made from a kernel with random words and numbers."""
    # Do not change the order of random calls: that would change the tasks of all seeds.
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
    function = _Function(
        name=names["f"],
        constant=_fill(kernel.constant, names),
        source=_fill(kernel.source, names),
        faults=tuple(_fill_fault(fault, names) for fault in kernel.faults),
        cases=_cases(names["f"], kernel.reference, reference_value, argument_sets),
        num_shown=kernel.num_shown,
    )
    # A twin is a copy of the function with the fault and under another name, for which the fault is correct.
    for fault in function.faults:
        if fault.twin_reference is not None:
            source = function.source.replace(function.name, fault.twin).replace(fault.right, fault.wrong)
            cases = _cases(fault.twin, fault.twin_reference, reference_value, argument_sets)
            function.twins[fault.twin] = replace(function, name=fault.twin, source=source, cases=cases, faults=())
    return function


def _fill_fault(fault: _Fault, names: dict[str, str]) -> _Fault:
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
    # Braces are needed because "_" may be part of a placeholder: "$t_with_" would be read as `t_with_`.
    return Template(text.replace("$t_", "${t}_")).substitute(names)


def _literal(value: object) -> str:
    """Return a value as source code, like `repr` but with double quotes, which the generated files use."""
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return repr(value)


def _edits_of(path: str, before: str, after: str) -> list[Edit]:
    old_lines, new_lines = before.split("\n"), after.split("\n")
    # autojunk would ignore frequent lines in files of 200 lines or more, and give larger edits.
    blocks = difflib.SequenceMatcher(a=old_lines, b=new_lines, autojunk=False).get_opcodes()
    lines, shift, edits = old_lines, 0, list[Edit]()
    for tag, start, end, new_start, new_end in blocks:
        if tag == "equal":
            continue
        # `shift` converts line numbers of the old text to those of the text after the previous edits.
        first, last = start + shift, end + shift
        replacement = new_lines[new_start:new_end]
        edits.append(_unique_edit(path, lines, first, last, replacement))
        lines = [*lines[:first], *replacement, *lines[last:]]
        shift += len(replacement) - (end - start)
    return edits


def _unique_edit(path: str, lines: list[str], first: int, last: int, replacement: list[str]) -> Edit:
    """Return an edit of lines [first, last), with enough context lines to make the old text unique in the file."""
    text = "\n".join(lines)
    # A pure insertion or deletion gets a line of context, so that neither its old nor its new text is empty.
    is_pure = first == last or not replacement
    begin, end = first, last
    while (is_pure and end - begin == last - first) or text.count("\n".join(lines[begin:end])) != 1:
        begin, end = (begin - 1, end) if begin > 0 else (begin, end + 1)
    return Edit(
        path=path,
        old="\n".join(lines[begin:end]),
        new="\n".join([*lines[begin:first], *replacement, *lines[last:end]]),
    )


def _edits_between(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Edit, ...]:
    """Return edits that turn the files in `before` into those in `after` when applied in order.

    The text that an edit replaces occurs exactly once in the file when the edit is applied. New files are written
    whole.
    """
    edits: list[Edit] = []
    for path in sorted(after):
        if path not in before:
            edits.append(Edit(path=path, old="", new=after[path]))
        elif before[path] != after[path]:
            edits += _edits_of(path, before[path], after[path])
    return tuple(edits)
