"""What keeps the tree readable: sizes of folders, modules that stand alone, maps of packages, the depth of imports.

Each rule is a function from the modules of a package to its offenders, so that planted trees can be judged too.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import cache

from layer_rules import PACKAGE, collect_imports

MAX_FILES, MIN_LINES = 16, 40
_MAP_LINE = re.compile(r"^\s*([a-z_][a-z0-9_]*)/?\s{2,}\S", re.MULTILINE)

Sources = Mapping[str, str]
"""Sources by dotted name; that of a package ends with `.__init__`."""


def crowded_folders(sources: Sources) -> set[str]:
    """Folders with more files than a reader keeps in mind."""
    sizes = Counter(name.rpartition(".")[0] for name in sources)
    return {_short(folder) for folder, size in sizes.items() if size > MAX_FILES}


def lonely_modules(sources: Sources) -> set[str]:
    """Short modules that exactly one other imports: they were cut off for their size, and belong to that one."""
    importers: dict[str, set[str]] = defaultdict(set)
    for module, targets in _all_imports(sources, at_import_alone=False).items():
        for target in targets:
            importers[target].add(module)
    short = {name for name, source in sources.items() if len(source.splitlines()) < MIN_LINES}
    modules = {name for name in short if not name.endswith(".__init__") and len(importers[name]) == 1}
    return {_short(name) for name in modules}


def packages_without_a_map(sources: Sources) -> set[str]:
    """Packages whose docstring does not name each of their modules and folders once, a line each: `name  what`."""
    return {
        _short(name) for name, source in sources.items() if name.endswith(".__init__") and _is_unmapped(name, sources)
    }


def longest_chain(sources: Sources) -> list[str]:
    """The longest way through modules of which each loads the next when it is imported."""
    imports = _all_imports(sources, at_import_alone=True)

    @cache
    def chain(module: str) -> tuple[str, ...]:
        return (module, *max((chain(target) for target in imports[module]), key=len, default=()))

    return [_short(module) for module in max(map(chain, imports), key=len)]


def _is_unmapped(package: str, sources: Sources) -> bool:
    folder = package.removesuffix(".__init__")
    inner = [name.removeprefix(f"{folder}.").split(".") for name in sources if name.startswith(f"{folder}.")]
    expected = {parts[0] for parts in inner} - {"__init__"}
    if not expected:
        return False
    named = _MAP_LINE.findall(ast.get_docstring(ast.parse(sources[package]), clean=False) or "")
    return sorted(named) != sorted(expected)


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
