"""The tree stays one that can be read: no crowded folder, no splinter of a module, a map in every package.

What is not there yet is listed by name; a name that is no longer needed has to go from its list.
"""

from __future__ import annotations

import pytest
from house_rules import crowded_folders, lonely_modules, longest_chain, packages_without_a_map
from repository import SRC, python_files

CROWDED: set[str] = set()
LONELY = {"privacy.kingfisher"}
ALIASES = {"distillation.entropy_aware_opd", "distillation.simpo", "distillation.taid", "replaysim.normalize"}
"""Known import paths: they hold nothing but another module's names."""
UNMAPPED: set[str] = set()
LONGEST_CHAIN = 18


@pytest.fixture(scope="module")
def sources():
    return {
        ".".join(path.relative_to(SRC).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in python_files("src")
    }


def test_no_folder_is_crowded(sources):
    assert crowded_folders(sources) == CROWDED


def test_no_short_module_has_one_importer(sources):
    assert lonely_modules(sources) == LONELY | ALIASES


def test_every_package_s_docstring_is_its_map(sources):
    assert packages_without_a_map(sources) == UNMAPPED


def test_the_longest_chain_of_imports(sources):
    chain = longest_chain(sources)
    assert len(chain) <= LONGEST_CHAIN, " -> ".join(chain)


def planted(**modules: str) -> dict[str, str]:
    return {f"composer_replication.{name.replace('__', '.')}": source for name, source in modules.items()}


def test_a_planted_crowd_is_named_and_a_full_folder_is_not():
    full = planted(**{f"a__m{number}": "" for number in range(16)})
    assert crowded_folders(full) == set()
    assert crowded_folders(full | planted(a__one_more="")) == {"a"}


def test_a_planted_splinter_is_named():
    splinter = planted(a__small="x = 1\n", a__user="from composer_replication.a.small import x\n")
    assert lonely_modules(splinter) == {"a.small"}
    assert lonely_modules(splinter | planted(a__other="from composer_replication.a import small\n")) == set()
    assert lonely_modules(splinter | planted(a__small="x = 1\n" * 40)) == set()


@pytest.mark.parametrize(
    ("docstring", "is_map"),
    [
        ("First.\n\n    read   the files\n    write  them\n", True),
        ("First.\n\n    read   the files\n", False),
        ("First.\n\n    read   the files\n    write  them\n    read  again\n", False),
        ("First.\n\n    read   the files\n    write  them\n    gone   away\n", False),
        ("Reads, and then writes.", False),
    ],
)
def test_a_planted_map_is_judged(docstring, is_map):
    package = {"composer_replication.a.__init__": f'"""{docstring}"""', **planted(a__read="", a__write="")}
    assert packages_without_a_map(package) == (set() if is_map else {"a"})


def test_a_planted_chain_is_followed_through_module_level_imports_alone():
    line = "from composer_replication import {}\n"
    late = "def f():\n    from composer_replication import d\n"
    assert longest_chain(planted(a=line.format("b"), b=line.format("c"), c=late, d="")) == ["a", "b", "c"]
