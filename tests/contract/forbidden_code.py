"""What may not be written in src, found by `ast`: one short name per finding."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

UNPICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
LOADERS = re.compile(r"Auto\w+\.from_(?:pretrained|config)$")
BROAD = {"Exception", "BaseException"}


class Finding(NamedTuple):
    name: str
    line: int


def find_forbidden(source: str) -> list[Finding]:
    """Everything in `source` that the rules of the architecture page forbid."""
    nodes = ast.walk(ast.parse(source))
    return [Finding(name, getattr(node, "lineno", 0)) for node in nodes for name in _names(node)]


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from _in_import(node)
    elif isinstance(node, ast.Call):
        yield from _in_call(node)
    elif isinstance(node, ast.ExceptHandler):
        if node.type is None or BROAD & set(_named(node.type)):
            yield "broad except"
    elif isinstance(node, ast.Name | ast.Attribute):
        if _last_name(node) == "NotImplementedError":
            yield "NotImplementedError"
    elif isinstance(node, ast.Constant) and node.value == "trust_remote_code":
        yield "trust_remote_code"


def _in_import(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    names = [alias.name for alias in node.names]
    modules = names if isinstance(node, ast.Import) else [node.module or ""]
    if UNPICKLERS & {part for module in modules for part in module.split(".")} or "pickle" in names:
        yield "pickle"
    if isinstance(node, ast.ImportFrom) and modules[0].partition(".")[0] == "torch" and "load" in names:
        yield "torch.load"


def _in_call(node: ast.Call) -> Iterator[str]:
    called = _dotted(node.func)
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if called in {"eval", "exec", "builtins.eval", "builtins.exec", "os.system", "os.popen"}:
        yield called.rpartition(".")[2]
    if called in {"torch.load", "torch.hub.load", "torch.serialization.load"}:
        yield "torch.load"
    if _is_true(keywords.get("allow_pickle")):
        yield "pickle"
    if "trust_remote_code" in keywords and not _is_false(keywords["trust_remote_code"]):
        yield "trust_remote_code"
    # Left out, transformers asks on the terminal, and whoever answers "y" runs a stranger's code.
    if LOADERS.search(called) and "trust_remote_code" not in keywords:
        yield "trust_remote_code not said"
    if "shell" in keywords and not _is_false(keywords["shell"]):
        yield "shell"
    if called.rpartition(".")[2] == "suppress" and BROAD & {name for arg in node.args for name in _named(arg)}:
        yield "broad except"


def _named(node: ast.expr) -> list[str]:
    """The class names in `Exception`, `builtins.Exception` or `(OSError, Exception)`."""
    return [_last_name(each) for each in (node.elts if isinstance(node, ast.Tuple) else [node])]


def _last_name(node: ast.expr) -> str:
    return _dotted(node).rpartition(".")[2]


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False
