"""The tree stays one that can be read: the longest chain of imports has a limit."""

from __future__ import annotations

import pytest
from house_rules import longest_chain
from repository import SRC, python_files

LONGEST_CHAIN = 18


@pytest.fixture(scope="module")
def sources():
    return {
        ".".join(path.relative_to(SRC).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in python_files("src")
    }


def test_the_longest_chain_of_imports(sources):
    chain = longest_chain(sources)
    assert len(chain) <= LONGEST_CHAIN, " -> ".join(chain)


def planted(**modules: str) -> dict[str, str]:
    return {f"composer_replication.{name.replace('__', '.')}": source for name, source in modules.items()}


def test_a_planted_chain_is_followed_through_module_level_imports_alone():
    line = "from composer_replication import {}\n"
    late = "def f():\n    from composer_replication import d\n"
    assert longest_chain(planted(a=line.format("b"), b=line.format("c"), c=late, d="")) == ["a", "b", "c"]
