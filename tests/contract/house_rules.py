"""Rules that keep the tree readable: functions of the package's sources, so that planted trees can be judged too."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache

from layer_rules import PACKAGE, collect_imports

_VAGUE = """
each found made told given said kept place places named wanted own other others taken settled gone left begun known seen
asked shown owed luck
"""
VAGUE_NAMES = frozenset(_VAGUE.split())
"""Words that say nothing of what a variable holds: a participle or a pronoun, where a noun of the domain belongs."""

Sources = Mapping[str, str]
"""Sources by dotted name; that of a package ends with `.__init__`."""


def vague_names(sources: Sources) -> list[str]:
    """Return the variables and parameters with a vague name, each as `module:line name`."""
    return [
        f"{_short(module)}:{line} {name}"
        for module, source in sources.items()
        for line, name in _names_bound_in(ast.parse(source))
        if name in VAGUE_NAMES
    ]


def _names_bound_in(tree: ast.AST) -> list[tuple[int, str]]:
    names = [(node.lineno, node.arg) for node in ast.walk(tree) if isinstance(node, ast.arg)]
    stored = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return names + [(node.lineno, node.id) for node in stored]


def longest_chain(sources: Sources) -> list[str]:
    """The longest way through modules of which each loads the next when it is imported."""
    imports = _all_imports(sources, at_import_alone=True)

    @cache
    def chain(module: str) -> tuple[str, ...]:
        return (module, *max((chain(target) for target in imports[module]), key=len, default=()))

    return [_short(module) for module in max(map(chain, imports), key=len)]


def _all_imports(sources: Sources, *, at_import_alone: bool) -> dict[str, set[str]]:
    """What each module imports of the others. A package's `__init__` is loaded with it, but names no dependency."""
    known = {name.removesuffix(".__init__"): name for name in sources}
    found: dict[str, set[str]] = {}
    for name, source in sources.items():
        is_package = name.endswith(".__init__")
        imports = collect_imports(source, name.removesuffix(".__init__"), known.keys(), is_package=is_package)
        kept = [each for each in imports if each.place == "module" or not at_import_alone]
        found[name] = {known[each.target] for each in kept if each.target in known} - {name}
    return found


def _short(name: str) -> str:
    return name.removesuffix(".__init__").removeprefix(f"{PACKAGE}.")
