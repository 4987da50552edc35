"""The program of the sandboxed process: one request comes in as a line of JSON, one answer goes out.

It is started by its path with `python -I -S`, so it imports the standard library alone and nothing of this package.
What it is asked: to run the tests of a set of files, or for the values of expressions over them. What it answers is
evidence, not a verdict: the code under test runs in the same process and could have written any of it.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import tempfile
import traceback
import types
from typing import Any

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


class ShowBothSides(ast.NodeTransformer):
    """`assert a == b` says both values when it fails, as pytest does."""

    def visit_Assert(self, node: ast.Assert) -> Any:
        test = node.test
        if node.msg is not None or not isinstance(test, ast.Compare) or len(test.ops) != 1:
            return node
        sign = COMPARISONS[type(test.ops[0])]
        sides = [ast.Name(name, ast.Store()) for name in ("_left", "_right")]
        loaded = [ast.Name(each.id, ast.Load()) for each in sides]
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
        return [ast.copy_location(ast.fix_missing_locations(each), node) for each in (*assigned, check)]


def canonical(value: Any, depth: int = 0) -> str:
    """A value as text in which types differ: 1, 1.0, True, "1", [1] and (1,) are six texts."""
    kind = type(value)
    if kind in (int, float, bool, str, type(None)):
        return repr(value)
    if depth < 20 and kind in (list, tuple):
        return f"{kind.__name__}({', '.join(canonical(each, depth + 1) for each in value)})"
    if depth < 20 and kind is dict:
        pairs = [f"{canonical(key, depth + 1)}: {canonical(each, depth + 1)}" for key, each in value.items()]
        return "dict(" + ", ".join(sorted(pairs)) + ")"
    if depth < 20 and kind in (set, frozenset):
        return f"{kind.__name__}({', '.join(sorted(canonical(each, depth + 1) for each in value))})"
    return f"<{kind.__name__}>"


def run_tests(root: str, paths: list[str]) -> dict[str, Any]:
    """Every `test_` function of the files, in the order they are written; a file that cannot be run is one error."""
    lines: list[str] = []
    passed = failed = 0
    for path in paths:
        try:
            with open(os.path.join(root, path), encoding="utf-8") as file:
                tree = ShowBothSides().visit(ast.parse(file.read(), os.path.join(root, path)))
            module = types.ModuleType(path.removesuffix(".py").replace("/", "."))
            exec(compile(tree, os.path.join(root, path), "exec"), module.__dict__)
        except BaseException as error:
            failed += 1
            lines.append(f"ERROR {path} - {said(error, root)}")
            continue
        for name, test in list(vars(module).items()):
            if not name.startswith("test_") or not callable(test):
                continue
            try:
                test()
                passed += 1
            except BaseException as error:
                failed += 1
                lines.append(f"FAILED {path}::{name} - {said(error, root)}")
    return {"lines": lines, "passed": passed, "failed": failed}


def said(error: BaseException, root: str) -> str:
    """An error in one line, with the place in the workspace's own code where it came from."""
    text = str(error) if isinstance(error, AssertionError) and str(error) else f"{type(error).__name__}: {error}"
    frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename.startswith(root)]
    place = f" ({os.path.relpath(frames[-1].filename, root)}:{frames[-1].lineno})" if frames else ""
    return text.replace(root, "/workspace") + place


def values(expressions: list[list[str]]) -> list[str]:
    """The value of each expression in the names of its module, or what it raised."""
    answers: list[str] = []
    for module, expression in expressions:
        try:
            space = dict(vars(__import__(module, fromlist=["*"])))
            answers.append(canonical(eval(expression, space)))
        except BaseException as error:
            answers.append(f"raises {type(error).__name__}")
    return answers


def write_files(root: str, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = os.path.join(root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)


def answer(request: dict[str, Any], root: str) -> Any:
    write_files(root, request["files"])
    os.chdir(root)
    sys.path.insert(0, root)
    sys.dont_write_bytecode = True
    return values(request["expressions"]) if "expressions" in request else run_tests(root, request["paths"])


def main() -> None:
    request = json.loads(sys.stdin.readline())
    channel = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for each in (0, 1, 2):
        os.dup2(nothing, each)
    with tempfile.TemporaryDirectory() as folder:
        reply = answer(request, os.path.realpath(folder))
    os.write(channel, json.dumps(reply).encode())


if __name__ == "__main__":
    main()
