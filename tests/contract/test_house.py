"""The tree stays one that can be read: variables are named by what they hold, and chains of imports have a limit."""

from __future__ import annotations

import pytest
from house_rules import longest_chain, vague_names
from repository import SRC, python_files

LONGEST_CHAIN = 18
MOST_VAGUE_NAMES = 276  # in the tree of 19 November 2026; there are to be fewer, so lower this when there are


@pytest.fixture(scope="module")
def sources():
    return {
        ".".join(path.relative_to(SRC).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in python_files("src")
    }


def test_the_longest_chain_of_imports(sources):
    chain = longest_chain(sources)
    assert len(chain) <= LONGEST_CHAIN, " -> ".join(chain)


def test_no_more_variables_have_a_vague_name(sources):
    names = vague_names(sources)
    assert len(names) <= MOST_VAGUE_NAMES, names[-20:]


def planted(**modules: str) -> dict[str, str]:
    return {f"composer_replication.{name.replace('__', '.')}": source for name, source in modules.items()}


def test_a_planted_chain_is_followed_through_module_level_imports_alone():
    line = "from composer_replication import {}\n"
    late = "def f():\n    from composer_replication import d\n"
    assert longest_chain(planted(a=line.format("b"), b=line.format("c"), c=late, d="")) == ["a", "b", "c"]


def test_planted_vague_names_are_named():
    source = "def f(given, path):\n    for each in given:\n        site = each\n    return [found for found in path]\n"
    assert vague_names(planted(a=source)) == ["a:1 given", "a:2 each", "a:4 found"]
