"""Run tests or evaluate expressions inside the sandbox.

Only the standard library is imported. Answers must not be trusted, because the code under test runs in the same process
and can write any answer. `Workspace.reward` therefore compares values outside the sandbox.
"""

from __future__ import annotations

import ast
import importlib
import os
import random
import re
import sys
import traceback
import types
from typing import Any

MAX_LINES, MAX_LINE, MAX_VALUE = 40, 300, 4000
# "<Price object at 0x7f3a2c10>" -> "0x7f3a2c10", which differs from run to run; not "0xff"
ADDRESS = re.compile(r"0x[0-9a-fA-F]{4,}")

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Is: "is",
    ast.IsNot: "is not",
}


class _ShowBothSides(ast.NodeTransformer):
    """AST transformer that rewrites `assert a == b` so that the failure message shows both values, as in pytest."""

    def visit_Assert(self, node: ast.Assert) -> Any:
        test = node.test
        if node.msg is not None or not isinstance(test, ast.Compare) or len(test.ops) != 1:
            return node
        # Both sides are evaluated once, into variables, because an expression may have side effects.
        sign = COMPARISONS[type(test.ops[0])]
        sides = [ast.Name(name, ast.Store()) for name in ("_left", "_right")]
        loaded = [ast.Name(side.id, ast.Load()) for side in sides]
        assigned = [
            ast.Assign([side], value) for side, value in zip(sides, (test.left, test.comparators[0]), strict=True)
        ]
        message = ast.JoinedStr(
            [
                ast.Constant("assert "),
                ast.FormattedValue(loaded[0], ord("r"), None),
                ast.Constant(f" {sign} "),
                ast.FormattedValue(loaded[1], ord("r"), None),
            ]
        )
        check = ast.Assert(ast.Compare(loaded[0], test.ops, [loaded[1]]), message)
        return [ast.copy_location(ast.fix_missing_locations(statement), node) for statement in (*assigned, check)]


def canonical(value: Any, depth: int = 0) -> str:
    """Return a value as text. Equal values of the same type give equal texts; 1, 1.0, True, "1", [1] and (1,) differ.

    Values of other types become `<TypeName>`: their `__repr__` could be the agent's own code.
    """
    kind = type(value)
    if kind in (int, float, bool, str, type(None)):
        return repr(value)
    if depth < 20 and kind in (list, tuple):
        return f"{kind.__name__}({', '.join(canonical(member, depth + 1) for member in value)})"
    if depth < 20 and kind is dict:
        pairs = [f"{canonical(key, depth + 1)}: {canonical(entry, depth + 1)}" for key, entry in value.items()]
        return "dict(" + ", ".join(sorted(pairs)) + ")"
    if depth < 20 and kind in (set, frozenset):
        return f"{kind.__name__}({', '.join(sorted(canonical(member, depth + 1) for member in value))})"
    return f"<{kind.__name__}>"


def _run_tests(root: str, paths: list[str]) -> dict[str, Any]:
    """Run the `test_` functions of the files in order. A file that cannot be executed counts as one failure."""
    lines: list[str] = []
    passed = failed = 0
    for path in paths:
        full = os.path.join(root, path)
        try:
            with open(full, encoding="utf-8") as file:
                tree = _ShowBothSides().visit(ast.parse(file.read(), full))
            # Compiled here instead of imported, so that the rewritten asserts are used.
            module = types.ModuleType(path.removesuffix(".py").replace("/", "."))
            exec(compile(tree, full, "exec"), module.__dict__)
        # BaseException, here and below: code under test may raise SystemExit or KeyboardInterrupt.
        except BaseException as error:
            failed += 1
            lines.append(f"ERROR {path} - {_error_line(error, root, full)}")
            continue
        for name, test in list(vars(module).items()):
            if not name.startswith("test_") or not callable(test):
                continue
            try:
                test()
                passed += 1
            except BaseException as error:
                failed += 1
                lines.append(f"FAILED {path}::{name} - {_error_line(error, root, full)}")
    return {"lines": lines[:MAX_LINES], "passed": passed, "failed": failed}


def _error_line(error: BaseException, root: str, test_file: str) -> str:
    """Return an error as one line, with the location that raised it unless this is the test itself."""
    # `__str__` may be code of the agent, which may raise.
    try:
        text = " ".join(str(error).split())
    except BaseException as worse:
        text = f"its message cannot be shown: {type(worse).__name__}"
    if not (isinstance(error, AssertionError) and text.startswith("assert ")):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(root)]
    is_elsewhere = bool(frames) and frames[-1].filename != test_file
    location = f" ({os.path.relpath(frames[-1].filename, root)}:{frames[-1].lineno})" if is_elsewhere else ""
    return ADDRESS.sub("0x...", text.replace(root, "/workspace"))[:MAX_LINE] + location


def _values(expressions: list[list[str]]) -> list[str]:
    """Return the canonical value of each (module, expression).

    If an expression raises, its value is "raises" and the exception's type.
    """
    answers: list[str] = []
    for module, expression in expressions:
        try:
            space = dict(vars(importlib.import_module(module)))
            answers.append(canonical(eval(expression, space))[:MAX_VALUE])
        except BaseException as error:
            answers.append(f"raises {type(error).__name__}")
    return answers


def _write_files(root: str, files: dict[str, str]) -> None:
    # newline="" writes "\r\n" as it is.
    for name, text in files.items():
        path = os.path.join(root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)


def answer(request: dict[str, Any], root: str) -> Any:
    """Write the request's files to `root`, then evaluate its expressions or run its tests there."""
    _write_files(root, request["files"])
    os.chdir(root)
    sys.path.insert(0, root)
    sys.dont_write_bytecode = True
    # Code that uses random numbers gets the same values in every run.
    random.seed(0)
    return _values(request["expressions"]) if "expressions" in request else _run_tests(root, request["paths"])
