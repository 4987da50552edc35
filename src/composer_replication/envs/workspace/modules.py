"""One file of a task's code: right, wrong, its tests and its checks."""

from __future__ import annotations

from dataclasses import dataclass, field

from composer_replication.envs.workspace.in_sandbox import canonical
from composer_replication.envs.workspace.kernels import Fault, Function
from composer_replication.envs.workspace.task import Check


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
                parts = [each.replace(fault.right, fault.wrong) for each in parts]
            constants |= {parts[0]: None} if parts[0] else {}
            sources += [parts[1]] if parts[1] else []
        imports = self.wrong_imports if self.wrong_imports and not right else self.imports
        head = "\n".join(each for each in ("".join(f"{each}\n" for each in imports), "".join(constants)) if each)
        return "\n\n".join([head] * bool(head) + sources)

    def tests(self) -> str:
        """What the agent can read and run: the shown cases of every function."""
        names = ", ".join(sorted(each.name for each in self.functions))
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
