"""Units import only from the layers below them, and load third-party packages only where the table says so."""

from __future__ import annotations

import ast

import pytest
from layer_rules import LAYERS, LAZY_ALIASES, MODULE_LAYERS, PACKAGE, collect_imports, unit_of, violations
from repository import PACKAGE as PACKAGE_FOLDER
from repository import modules

MODULES = modules()
ALIASES = sorted(name for name in MODULES if unit_of(name) in {"opsd", "distillation", "replaysim"})


def complaints(source: str, module: str, *, is_package: bool = False) -> list[str]:
    return list(violations(source, module, set(MODULES), is_package=is_package))


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_imports_only_what_its_layer_allows(module):
    path = MODULES[module]
    assert complaints(path.read_text(encoding="utf-8"), module, is_package=path.name == "__init__.py") == []


def test_every_unit_is_in_the_layer_table():
    assert len(MODULES) > 40
    assert sorted({unit_of(module) for module in MODULES} - set(LAYERS)) == []


def test_no_layer_reaches_itself_through_another():
    def below(unit: str, seen: frozenset[str] = frozenset()) -> set[str]:
        assert unit not in seen, f"{unit} is above and below itself"
        return {unit}.union(*(below(other, seen | {unit}) for other in LAYERS[unit].ours if other != unit))

    for unit in set(LAYERS) - {"cli"}:
        below(unit)


def test_the_tables_name_only_modules_that_exist():
    named = [*MODULE_LAYERS, *(target for targets in LAZY_ALIASES.values() for target in targets)]
    assert [name for name in named if f"{PACKAGE}.{name}" not in MODULES] == []


def test_loss_and_batch_do_not_know_each_other():
    assert "batch" not in LAYERS["loss"].ours
    assert "loss" not in LAYERS["batch"].ours


def test_no_recipe_may_import_a_trainer_or_another_recipe():
    recipes = {unit: layer.ours for unit, layer in LAYERS.items() if unit.startswith("recipes.")}
    assert {"recipes.monarch", "recipes.prime_rl", "recipes.verl"} <= recipes.keys()
    for unit, ours in recipes.items():
        assert (ours & {"trainer", *recipes}) - {unit} == set()


def test_the_lazy_aliases_are_the_ones_in_use():
    for owner, targets in LAZY_ALIASES.items():
        module = f"{PACKAGE}.{owner}".rstrip(".")
        source = MODULES[module].read_text(encoding="utf-8")
        lazy = {each.target for each in collect_imports(source, module, set(MODULES)) if each.place == "string"}
        assert lazy == {f"{PACKAGE}.{target}" for target in targets}


@pytest.mark.parametrize("module", ALIASES)
def test_an_alias_module_is_at_most_ten_lines_of_imports(module):
    text = MODULES[module].read_text(encoding="utf-8")
    body = ast.parse(text).body
    lines = text.splitlines()[body[0].end_lineno :]  # behind the docstring, which may be a map
    assert len([line for line in lines if line.strip()]) < 10
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.Expr)
    assert all(isinstance(node, allowed) for node in body)


def test_the_aliases_are_where_users_know_them():
    assert {"opsd", "distillation", "distillation.simpo", "distillation.taid", "distillation.entropy_aware_opd"} <= {
        name.removeprefix(f"{PACKAGE}.") for name in ALIASES
    }
    assert (PACKAGE_FOLDER / "opsd.py").is_file()


PLANTED = {
    "a layer above": (
        "loss.new",
        "from composer_replication.trainer.objective.compose import compose_loss",
        "may not import",
    ),
    "a layer above, in a function": ("loss.new", "def f():\n    import composer_replication.batch", "may not import"),
    "a sibling": ("batch.new", "from composer_replication.loss import rows", "batch may not import loss"),
    "a submodule as a name": ("loss.new", "from composer_replication import batch", "loss may not import batch"),
    "a relative import": ("loss.linear.new", "from ...batch import smoke_chat", "loss may not import batch"),
    "under TYPE_CHECKING": (
        "loss.new",
        "if TYPE_CHECKING:\n    import composer_replication.runs",
        "may not import runs",
    ),
    "a lazy name in a string": ("batch.new", "HOME = 'composer_replication.loss.jsd'", "batch may not import loss"),
    "a module loaded by name": ("runs.new", "import_module('composer_replication.loss')", "runs may not import loss"),
    "an alias used as an import": (
        "loss",
        "from composer_replication.trainer.objective import compose",
        "may not import",
    ),
    "an alias loaded too early": (
        "loss",
        "import_module('composer_replication.trainer.objective.compose')",
        "may not import",
    ),
    "the package itself": ("loss.new", "import composer_replication", "may not import composer_replication"),
    "torch in config": ("config.new", "import torch.nn", "torch may not be loaded"),
    "torch in a function of config": ("config.new", "def f():\n    import torch", "torch is not a package"),
    "orjson in config": ("config.new", "import orjson", "orjson may not be loaded"),
    "transformers in batch": ("batch.new", "from transformers import AutoTokenizer", "transformers may not be loaded"),
    "transformers in a class": ("batch.new", "class A:\n    import transformers", "transformers may not be loaded"),
    "transformers in a try": ("batch.new", "try:\n    import transformers\nfinally: ...", "may not be loaded"),
    "triton elsewhere in loss": ("loss.linear.new", "import triton.language as tl", "triton may not be loaded"),
    "triton rows at import": (
        "loss.linear.new",
        "from composer_replication.loss.linear import triton_kernels",
        "only inside",
    ),
    "triton rows at import, relative": ("loss.linear.new", "from .triton_kernels import x", "only inside a function"),
    "another engine": ("recipes.prime_rl.new", "def f():\n    import verl", "verl is not a package"),
    "an extra by name": ("runs.new", "def f():\n    require('httpx', extra='replay')", "httpx is not a package"),
    "another recipe": (
        "recipes.verl.new",
        "import composer_replication.recipes.prime_rl",
        "may not import recipes.prime",
    ),
    "a trainer of ours in a recipe": (
        "recipes.monarch.new",
        "from composer_replication.trainer import composer_trainer",
        "recipes.monarch may not import trainer",
    ),
    "a trainer of ours in a function of a recipe": (
        "recipes.verl.new",
        "def f():\n    from ...trainer import offline",
        "recipes.verl may not import trainer",
    ),
    "a unit nobody planned": ("helpers.new", "import torch", "not in the layer table"),
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_violation_is_flagged(case):
    module, source, expected = PLANTED[case]
    found = complaints(source, f"{PACKAGE}.{module}", is_package=f"{PACKAGE}.{module}" in MODULES)
    assert len(found) == 1, found
    assert expected in found[0]


ALLOWED = {
    "a layer below": ("trainer.objective.new", "from composer_replication.loss.jsd import JSD\nimport torch, math"),
    "its own unit": ("loss.new", "from . import rows\nfrom composer_replication.loss.linear import head"),
    "triton rows in a function": ("loss.linear.new", "def f():\n    from . import triton_kernels"),
    "transformers on use": ("batch.new", "def f():\n    import transformers"),
    "a sentence that names a module": ("loss.new", "'see composer_replication.batch for more'"),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_what_the_table_allows_is_not_flagged(case):
    module, source = ALLOWED[case]
    assert complaints(source, f"{PACKAGE}.{module}") == []
