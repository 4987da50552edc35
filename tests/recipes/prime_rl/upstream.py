"""A checkout of PRIME-RL, named by PRIME_RL_SOURCE: read as text, and imported without what needs a GPU.

Its package lies in two folders; `wandb`, which it imports and these tests never call, is an empty module.
"""

from __future__ import annotations

import ast
import importlib.machinery
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from recipes.prime_rl.contract import SOURCE

VARIABLE = "PRIME_RL_SOURCE"
_FOLDERS = (SOURCE, "packages/prime-rl-configs/src/prime_rl")


def checkout() -> Path:
    """The folder, or a skip that says what is missing."""
    named = os.environ.get(VARIABLE, "")
    if not named:
        pytest.skip(f"{VARIABLE} names no checkout of PRIME-RL, which is not on PyPI")
    folder = Path(named)
    assert (folder / SOURCE).is_dir(), f"{VARIABLE}: {folder} has no {SOURCE}"
    return folder


def imported(name: str) -> ModuleType:
    """A module of the checkout by its own name."""
    folder = checkout()
    for library in ("verifiers", "pydantic_config", "msgspec", "jaxtyping", "beartype"):
        pytest.importorskip(library)
    for package in ("prime_rl", "prime_rl.utils"):
        inner = package.partition(".")[2]
        _put(package, [str(folder / each / inner) for each in _FOLDERS])
    _put("wandb", [])
    return importlib.import_module(name)


def _put(name: str, path: list[str]) -> None:
    if name in sys.modules:
        return
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=bool(path))
    if path:
        module.__path__ = path
    sys.modules[name] = module


class Names:
    """Classes and functions of one file, read without running it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._tree = ast.parse((checkout() / path).read_text(encoding="utf-8"))

    def node(self, name: str) -> ast.AST:
        body: list[ast.stmt] = self._tree.body
        found: ast.AST | None = None
        for part in name.split("."):
            kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            found = next((each for each in body if isinstance(each, kinds) and each.name == part), None)
            assert found is not None, f"PRIME-RL: {name} is gone from {self._path}"
            body = found.body
        assert found is not None
        return found

    def fields(self, name: str) -> list[str]:
        """Those that a class declares itself, and those of bases in the same file."""
        node = self.node(name)
        assert isinstance(node, ast.ClassDef)
        here = {each.name for each in self._tree.body if isinstance(each, ast.ClassDef)}
        bases = [each.id for each in node.bases if isinstance(each, ast.Name) and each.id in here]
        own = [
            each.target.id
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        ]
        return [field for base in bases for field in self.fields(base)] + own

    def parameters(self, name: str) -> list[str]:
        node = self.node(name)
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        return [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
