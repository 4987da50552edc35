"""A task from a seed: a few modules of right code, and a copy of them in which something is wrong.

easy    one fault in one small module; the prompt says what must change, and where
medium  two or three modules, one or two faults; the prompt says which function is wrong, the test says how
hard    four modules, two or three faults; the prompt says that tests fail
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from composer_replication.envs.workspace.edits import edits_between
from composer_replication.envs.workspace.kernels import KERNELS, Fault, Kernel
from composer_replication.envs.workspace.modules import Function, Module, fill
from composer_replication.envs.workspace.task import Difficulty, Task
from composer_replication.envs.workspace.vocabulary import EXTRAS, PLACES, THINGS
from composer_replication.errors import InputError, explain

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


@dataclass(kw_only=True)
class Draft:
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
    draft = Draft(draw=draw, size=size, place=draw.choice(PLACES), things=words[0], extras=words[1])
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


def _prompt(draft: Draft, difficulty: Difficulty) -> str:
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


def _break_one_function(draft: Draft, family: str) -> None:
    kernels = [kernel for kernel in KERNELS if any(fault.family == family for fault in kernel.faults)]
    module = draft.module([draft.draw.choice(kernels)])
    function = module.functions[0]
    fault = draft.draw.choice([fault for fault in function.faults if fault.family == family])
    twin = function.twins.get(fault.twin)
    names = {module_function.name for module_function in module.functions}
    if twin is not None and twin.name not in names and draft.draw.random() < TWIN_RATE:
        module.functions.append(twin)
    draft.break_function(module, function, fault)


def _leave_one_out(draft: Draft, family: str) -> None:
    plain = [kernel for kernel in KERNELS if kernel.source.count("\n") == 2]
    module = draft.module(draft.draw.sample(plain, 2))
    function = module.functions[0]
    signature = function.source.partition("def ")[2].partition(":")[0]
    says = function.source.partition("return ")[2].strip()
    text = f"{signature} is missing, it must return {says}"
    draft.break_function(module, function, Fault(family, function.source, "", text))


def _import_wrongly(draft: Draft, family: str) -> None:
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


def _disagree(draft: Draft, family: str) -> None:
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
