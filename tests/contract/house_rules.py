"""Rules that keep the tree readable: functions of the package's sources, so that planted trees can be judged too.

`python tests/contract/house_rules.py` is the lint of `make check`: it prints what breaks a rule, and exits with 1.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache

from layer_rules import PACKAGE, collect_imports
from repository import SRC, python_files

_VAGUE = """
each found made told given said kept place places named wanted own other others taken settled gone left begun known seen
asked shown owed luck
"""
VAGUE_NAMES = frozenset(_VAGUE.split())
"""Words that say nothing of what a variable holds: a participle or a pronoun, where a noun of the domain belongs."""

# Vague names that stay: fields of stored files and of the frozen surface, and parameters that tests and subclasses of
# users name.
TOLERATED = frozenset(
    {
        *("batch.render.dialect own", "batch.render.dialect others", "hint_generator.context places"),
        *("cli.doctor found", "cli.replicas.launches place"),
        *("cli.replicas.launches begun", "ingestion.source_files other", "privacy.scrubber seen"),
        *("sites.judge.project_files shown", "sites.judge.judged_calls said", "trainer.objective.fingerprint other"),
        *("trainer.rollouts.generation.talks said", "trainer.rollouts.generation.talks places"),
        "trainer.sessions.reference other",
    }
)
_SHORT_MODULE = 250

Sources = Mapping[str, str]
"""Sources by dotted name; that of a package ends with `.__init__`."""


def vague_names(sources: Sources) -> list[str]:
    """Return the variables and parameters with a vague name, each as `module:line name`."""
    return [
        f"{module}:{line} {name}"
        for module, line, name in _vague_bindings(sources)
        if f"{module} {name}" not in TOLERATED
    ]


def needless_tolerance(sources: Sources) -> list[str]:
    """Return the entries of `TOLERATED` that no source needs any more."""
    return sorted(TOLERATED - {f"{module} {name}" for module, _, name in _vague_bindings(sources)})


def _vague_bindings(sources: Sources) -> Iterator[tuple[str, int, str]]:
    for module, source in sources.items():
        for line, name in _names_bound_in(ast.parse(source)):
            if name in VAGUE_NAMES:
                yield _short(module), line, name


def _names_bound_in(tree: ast.AST) -> list[tuple[int, str]]:
    names = [(node.lineno, node.arg) for node in ast.walk(tree) if isinstance(node, ast.arg)]
    stored = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return names + [(node.lineno, node.id) for node in stored]


def duplicate_classes(sources: Sources) -> list[str]:
    """Return the names of classes that are defined more than once."""
    counts: Counter[str] = Counter()
    for source in sources.values():
        counts.update(node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
    return sorted(name for name, count in counts.items() if count > 1)


def single_importers(sources: Sources) -> list[str]:
    """Return the modules below 250 lines that one other module imports: they belong into it."""
    importers: dict[str, set[str]] = defaultdict(set)
    for module, targets in _all_imports(sources, at_import_alone=False).items():
        for target in targets:
            importers[target].add(module)
    return [
        f"{_short(module)} <- {_short(*importers[module])}"
        for module, source in sources.items()
        if not module.endswith(".__init__") and len(importers[module]) == 1 and source.count("\n") < _SHORT_MODULE
    ]


def patterns_without_example(sources: Sources) -> list[str]:
    """Return the compiled regular expressions that have no comment with an example above them or beside them."""
    return [f"{_short(module)}:{line}" for module, source in sources.items() for line in _bare_patterns(source)]


def _bare_patterns(source: str) -> Iterator[int]:
    if "re.compile" not in source:
        return
    lines = source.splitlines()
    for statement in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.If | ast.For | ast.With):
            continue
        calls = (node for node in ast.walk(statement) if isinstance(node, ast.Call))
        patterns = [call for call in calls if ast.unparse(call.func) == "re.compile"]
        if not patterns:
            continue
        first = statement.lineno - 1
        while first > 0 and lines[first - 1].lstrip().startswith("#"):
            first -= 1
        beside = lines[first : statement.end_lineno]
        if not any(_is_example(line) for line in beside):
            yield from (pattern.lineno for pattern in patterns)


def _is_example(line: str) -> bool:
    """Whether a line has a comment that quotes a text, as in `# "a=1" -> "1"`."""
    _, mark, comment = line.partition("# ")
    return bool(mark) and any(quote in comment for quote in "\"'`")


def longest_chain(sources: Sources) -> list[str]:
    """The longest way through modules of which each loads the next when it is imported."""
    imports = _all_imports(sources, at_import_alone=True)

    @cache
    def chain(module: str) -> tuple[str, ...]:
        return (module, *max((chain(target) for target in imports[module]), key=len, default=()))

    return [_short(module) for module in max(map(chain, imports), key=len)]


def _all_imports(sources: Sources, *, at_import_alone: bool) -> dict[str, set[str]]:
    """Return what each module imports of the others. A package's `__init__` is loaded with it, but is no dependency."""
    known = {name.removesuffix(".__init__"): name for name in sources}
    targets: dict[str, set[str]] = {}
    for name, source in sources.items():
        is_package = name.endswith(".__init__")
        imports = collect_imports(source, name.removesuffix(".__init__"), known.keys(), is_package=is_package)
        places = {"module"} if at_import_alone else {"module", "function"}
        targets[name] = {known[line.target] for line in imports if line.place in places and line.target in known} - {
            name
        }
    return targets


def _short(name: str) -> str:
    return name.removesuffix(".__init__").removeprefix(f"{PACKAGE}.")


def package_sources() -> dict[str, str]:
    """Return the sources of the package by dotted name."""
    return {
        ".".join(path.relative_to(SRC).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in python_files("src")
    }


def main() -> int:
    sources = package_sources()
    names = vague_names(sources)
    print(*(f"{name}: name what it holds" for name in names), sep="\n", end="\n" if names else "")
    return int(bool(names))


if __name__ == "__main__":
    sys.exit(main())
