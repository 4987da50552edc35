"""A file has at most 700 lines and a function at most 80. There is no `utils`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from repository import CODE_FOLDERS, ROOT, python_files, relative, repository_files

MAX_FILE, MAX_FUNCTION = 700, 80
CATCH_ALL_NAMES = {"utils", "util", "helpers", "misc", "common"}


class Size(NamedTuple):
    what: str
    lines: int
    is_file: bool

    def is_over(self, file_limit: int, function_limit: int) -> bool:
        return self.lines > (file_limit if self.is_file else function_limit)


def sizes_of(source: str, name: str) -> Iterator[Size]:
    """The file and each of its functions, methods and inner functions included."""
    yield Size(name, len(source.splitlines()), is_file=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            yield Size(f"{name}:{node.lineno} {node.name}", lines, is_file=False)


def too_long(sizes: Iterator[Size]) -> list[str]:
    return [f"{size.what}: {size.lines} lines" for size in sizes if size.is_over(MAX_FILE, MAX_FUNCTION)]


@pytest.mark.parametrize("folder", CODE_FOLDERS)
def test_no_file_and_no_function_is_over_the_limit(folder):
    files = python_files(folder)
    assert files, f"{folder}/ holds no Python file"
    sizes = (size for path in files for size in sizes_of(path.read_text(encoding="utf-8"), relative(path)))
    assert too_long(sizes) == []


def test_there_is_no_utils_module():
    files = [path.relative_to(ROOT) for path in repository_files()]
    parts = {part for path in files for part in (*path.parent.parts, path.stem)}
    assert sorted(parts & CATCH_ALL_NAMES) == []


def function_of(lines: int, head: str = "def f():") -> str:
    return "\n".join([head, *["    x = 1"] * (lines - 1)])


@pytest.mark.parametrize("head", ["def f():", "async def f():", "@staticmethod\ndef f():"])
def test_a_planted_long_function_is_flagged_and_one_at_the_limit_is_not(head):
    longer = len(head.splitlines()) - 1
    assert too_long(sizes_of(function_of(MAX_FUNCTION, head), "a.py")) == []
    assert too_long(sizes_of(function_of(MAX_FUNCTION + 1, head), "a.py")) == [f"a.py:{1 + longer} f: 81 lines"]


def test_a_planted_long_method_is_flagged():
    body = function_of(MAX_FUNCTION + 1).replace("\n", "\n    ")
    assert too_long(sizes_of(f"class A:\n    {body}", "a.py")) == ["a.py:2 f: 81 lines"]


def test_a_planted_long_file_is_flagged_and_one_at_the_limit_is_not():
    assert too_long(sizes_of("x = 1\n" * MAX_FILE, "a.py")) == []
    assert too_long(sizes_of("x = 1\n" * (MAX_FILE + 1), "a.py")) == ["a.py: 701 lines"]
