"""Every third-party package that our code imports is declared: by the core, or by an extra that the code asks for."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from repository import PACKAGE, ROOT, SRC, python_files, relative

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
# Distributions of packages that the tested set does not contain, where the two names differ.
OTHER_NAMES = {
    "data_juicer": "py-data-juicer",
    "kingfisher_sdk": "kingfisher-secret-scanner",
    "monarch": "torchmonarch",
}

PEERS = {
    "triton": "comes with torch's builds for GPUs; its kernels are used where it is there",
    "vllm": "installed by whoever samples with it; the Monarch recipe uses it where it is there",
}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names_of(requirements: list[str]) -> set[str]:
    return {normal(re.split(r"[\s<>=!~;\[]", each, maxsplit=1)[0]) for each in requirements}


CORE = names_of(PROJECT["dependencies"])


@cache
def distributions_of(package: str) -> frozenset[str]:
    """The distributions that a top-level package may come from."""
    names = importlib.metadata.packages_distributions().get(package, [OTHER_NAMES.get(package, package)])
    return frozenset(map(normal, names))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports_of(node: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, top-level package) of every import statement that a run may reach."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((child.lineno, each.name.partition(".")[0]) for each in child.names)
        elif isinstance(child, ast.ImportFrom) and not child.level and child.module:
            yield child.lineno, child.module.partition(".")[0]
        if not is_type_checking(child):
            yield from imports_of(child)


def required_of(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(line, top-level package, extra) of every `require("package", extra="extra")`, and of `importing` alike."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("require", "importing"):
            extras = [each.value for each in node.keywords if each.arg == "extra"]
            if len(extras) == 1 and isinstance(extras[0], ast.Constant) and isinstance(node.args[0], ast.Constant):
                yield node.lineno, str(node.args[0].value).partition(".")[0], str(extras[0].value)


@cache
def tree_of(path: Path) -> ast.AST:
    return ast.parse(path.read_text(encoding="utf-8"))


def extras_of(path: Path) -> set[str]:
    """The extras that a file asks for; in a recipe, those of the whole recipe."""
    recipes = PACKAGE / "recipes"
    files = path.parent.glob("*.py") if path.is_relative_to(recipes) and path.parent != recipes else [path]
    return {extra for each in files for _, _, extra in required_of(tree_of(each))}


def ours() -> list[tuple[Path, ast.AST]]:
    return [(path, tree_of(path)) for path in python_files("src")]


def foreign(packages: Iterator[tuple[int, str]]) -> list[tuple[int, str]]:
    own = {*sys.stdlib_module_names, *(path.stem for path in SRC.iterdir())}
    return [(line, package) for line, package in packages if package not in own]


def test_every_import_is_declared():
    undeclared = []
    for path, tree in ours():
        declared = CORE | names_of([each for extra in extras_of(path) for each in EXTRAS[extra]])
        undeclared += [
            f"{relative(path)}:{line}: {package}"
            for line, package in foreign(imports_of(tree))
            if package not in PEERS and not distributions_of(package) & declared
        ]
    assert not undeclared, "\n".join(undeclared)


def test_what_an_extra_is_asked_for_is_in_it():
    undeclared = [
        f"{relative(path)}:{line}: {package} is not in [{extra}]"
        for path, tree in ours()
        for line, package, extra in required_of(tree)
        if not distributions_of(package) & (CORE | names_of(EXTRAS[extra]))
    ]
    assert not undeclared, "\n".join(undeclared)
