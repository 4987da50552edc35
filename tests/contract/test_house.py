"""The tree stays one that can be read: variables are named by what they hold, and chains of imports have a limit."""

from __future__ import annotations

import pytest
from house_rules import (
    duplicate_classes,
    longest_chain,
    needless_tolerance,
    package_sources,
    patterns_without_example,
    single_importers,
    vague_names,
)

LONGEST_CHAIN = 18
MOST_VAGUE_NAMES = 0


MOST_SINGLE_IMPORTERS = 25
MOST_DUPLICATE_CLASSES = 12
MOST_BARE_PATTERNS = 0


@pytest.fixture(scope="module")
def sources():
    return package_sources()


def test_the_longest_chain_of_imports(sources):
    chain = longest_chain(sources)
    assert len(chain) <= LONGEST_CHAIN, " -> ".join(chain)


def test_no_more_variables_have_a_vague_name(sources):
    names = vague_names(sources)
    assert len(names) <= MOST_VAGUE_NAMES, names[-20:]


def test_each_tolerated_name_is_still_needed(sources):
    assert needless_tolerance(sources) == []
    assert needless_tolerance({}) != []


def test_small_modules_are_part_of_their_one_importer(sources):
    modules = single_importers(sources)
    assert len(modules) <= MOST_SINGLE_IMPORTERS, modules


def test_a_class_has_a_name_of_its_own(sources):
    classes = duplicate_classes(sources)
    assert len(classes) <= MOST_DUPLICATE_CLASSES, classes


def test_a_regular_expression_has_an_example_beside_it(sources):
    patterns = patterns_without_example(sources)
    assert len(patterns) <= MOST_BARE_PATTERNS, patterns


def planted(**modules: str) -> dict[str, str]:
    return {f"composer_replication.{name.replace('__', '.')}": source for name, source in modules.items()}


def test_a_planted_chain_is_followed_through_module_level_imports_alone():
    line = "from composer_replication import {}\n"
    late = "def f():\n    from composer_replication import d\n"
    assert longest_chain(planted(a=line.format("b"), b=line.format("c"), c=late, d="")) == ["a", "b", "c"]


def test_planted_vague_names_are_named():
    source = "def f(given, path):\n    for each in given:\n        site = each\n    return [found for found in path]\n"
    assert vague_names(planted(a=source)) == ["a:1 given", "a:2 each", "a:4 found"]


def test_a_planted_module_with_one_importer_is_named():
    line = "from composer_replication import {}\n"
    late = "def f():\n    from composer_replication import d\n"
    long = "x = 1\n" * 250
    tree = planted(a=line.format("b") + line.format("c"), b=line.format("c"), c=late, d="", e=line.format("f"), f=long)
    assert single_importers(tree) == ["b <- a", "d <- c"]


def test_planted_classes_of_one_name_are_named():
    assert duplicate_classes(planted(a="class Plan: ...", b="def f():\n    class Plan: ...", c="class Part: ...")) == [
        "Plan"
    ]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('A = re.compile("a+")', ["a:1"]),
        ('# finds letters\nA = re.compile("a+")', ["a:2"]),
        ('# "caab" -> "aa"\nA = re.compile("a+")', []),
        ('# "caab" -> "aa"\n\nA = re.compile("a+")', ["a:3"]),
        ('A = re.compile("a+")  # "caab" -> "aa"', []),
        ('A = (\n    # "caab" -> "aa"\n    re.compile("a+"),\n)', []),
        ('def f():\n    # "caab" -> "aa"\n    x = 1\n    return re.compile("a+")', ["a:4"]),
    ],
)
def test_planted_patterns_without_example_are_named(source, lines):
    assert patterns_without_example(planted(a=source)) == lines
