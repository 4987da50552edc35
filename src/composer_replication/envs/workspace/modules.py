"""A function of a kernel with its names filled in, and the file it stands in: right, wrong, its tests and checks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from string import Template
from typing import Any

from composer_replication.envs.workspace.in_sandbox import canonical
from composer_replication.envs.workspace.kernels import Arguments, Fault, Kernel
from composer_replication.envs.workspace.task import Check
from composer_replication.envs.workspace.vocabulary import COLOURS


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
