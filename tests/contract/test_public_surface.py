"""The public names are there, at the paths and with the signatures that users' code relies on."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import re
from types import ModuleType

import pytest
from expected_surface import ADDED, ARTEFACT_FILES, DOCUMENTED, PACKAGE, RECORDS, VALUES
from repository import modules
from surface_text import COVERED, expected, found, public_names, signature_from

import composer_replication

MODULES_WITH_ALL = sorted(name for name, path in modules().items() if "__all__" in path.read_text(encoding="utf-8"))


def module_at(path: str) -> ModuleType:
    return importlib.import_module(f"{PACKAGE}.{path}" if path else PACKAGE)


@pytest.mark.parametrize("path", COVERED, ids=lambda path: path or "top level")
def test_every_public_name_has_exactly_the_expected_signature(path):
    assert found(module_at(path)) == expected(path)


def test_every_module_that_exports_names_is_in_the_tables():
    assert sorted(set(MODULES_WITH_ALL) - {module_at(path).__name__ for path in COVERED}) == []


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_the_signature_table_says_what_the_public_api_page_says(shared_dir, name):
    assert f"{name}{DOCUMENTED[name]}" in page_text(shared_dir)


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_the_record_table_says_what_the_public_api_page_says(shared_dir, name):
    assert f"{name}: {RECORDS[name]}" in page_text(shared_dir)


def page_text(shared_dir) -> str:
    return " ".join((shared_dir / "design" / "public-api.md").read_text(encoding="utf-8").split())


@pytest.mark.parametrize("name", sorted(ADDED))
def test_added_parameters_can_only_be_given_by_name_and_have_defaults(name):
    added = signature_from(f"(*, {ADDED[name]})").parameters.values()
    assert all(each.default is not each.empty for each in added)


def test_a_changed_default_order_or_kind_makes_another_text():
    text = '(a, b=1.0, *, c="x"|"y", d=<factory>)'
    assert str(signature_from(text)) == "(a, b=1.0, *, c='x', d=<factory>)"
    for other in ('(a, b=2.0, *, c="x", d=<factory>)', '(a, *, b=1.0, c="x", d=<factory>)', '(b, a=1.0, *, c="x")'):
        assert str(signature_from(other)) != str(signature_from(text))


def test_the_version_is_the_documented_one():
    assert composer_replication.__version__ == VALUES["__version__"]


def test_loss_components_are_a_dataclass_with_the_documented_fields_first():
    from composer_replication import LossComponents

    names = [field.name for field in dataclasses.fields(LossComponents)]
    assert names == ["lm_ce", "sdpo_jsd", "trace_replay_dpo", "total", "active", "counts", "ran_as"]


def test_detached_components_are_the_four_documented_numbers_as_floats():
    import torch

    from composer_replication import LossComponents

    values = [torch.tensor(number, requires_grad=True) for number in (1.0, 2.0, 3.0, 6.5)]
    numbers = LossComponents(*values, active=("lm_ce",)).detached()
    assert numbers == {"lm_ce": 1.0, "sdpo_jsd": 2.0, "trace_replay_dpo": 3.0, "total": 6.5}
    assert {type(number) for number in numbers.values()} == {float}


def test_the_taid_scheduler_reads_its_t_as_a_float():
    from composer_replication.distillation import TAIDScheduler

    t = TAIDScheduler(10).t
    assert isinstance(t, float)
    assert t == pytest.approx(0.4)


def test_artefacts_keep_their_names_and_files():
    from composer_replication.runs import ARTEFACTS

    assert {name: artefact.file_name for name, artefact in ARTEFACTS.items()} == ARTEFACT_FILES


@pytest.mark.parametrize("module", MODULES_WITH_ALL)
def test_every_name_in_all_is_there_once_resolves_and_is_listed_by_dir(module):
    imported = importlib.import_module(module)
    names = imported.__all__
    assert len(set(names)) == len(names)
    assert [name for name in names if not hasattr(imported, name)] == []
    assert sorted(set(names) - set(dir(imported))) == []


@pytest.mark.parametrize(
    ("module", "table"), [("composer_replication", "_PUBLIC"), ("composer_replication.loss", "_KNOWN_PATHS")]
)
def test_every_lazy_name_resolves_to_the_object_at_its_home_and_is_in_all(module, table):
    imported = importlib.import_module(module)
    homes = getattr(imported, table)
    assert homes
    for name, home in homes.items():
        assert getattr(imported, name) is getattr(importlib.import_module(home), name)
    assert sorted(set(homes) - set(imported.__all__)) == []


@pytest.mark.parametrize("module", ["composer_replication", "composer_replication.loss"])
def test_what_type_checkers_see_is_what_the_lazy_table_holds(module):
    imported = importlib.import_module(module)
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    guarded = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {name.name: node.module for block in guarded for node in block.body for name in node.names}
    lazy = imported._PUBLIC if module == PACKAGE else imported._KNOWN_PATHS
    assert seen == lazy


@pytest.mark.parametrize("module", ["composer_replication", "composer_replication.loss"])
def test_an_unknown_attribute_is_an_attribute_error_that_names_it(module):
    with pytest.raises(AttributeError, match=rf"'{re.escape(module)}'.*'compose_los'"):
        importlib.import_module(module).compose_los  # noqa: B018


def test_known_paths_lead_to_the_same_objects():
    assert module_at("opsd").generalized_jsd_loss is composer_replication.generalized_jsd_loss
    assert module_at("loss").compose_loss is composer_replication.compose_loss
    assert module_at("loss").LossComponents is composer_replication.LossComponents
    for path in ("distillation", "distillation.simpo", "distillation.taid", "distillation.entropy_aware_opd"):
        for name in public_names(module_at(path)):
            assert getattr(module_at(path), name) is getattr(module_at("loss"), name)


def test_diloco_is_available_exactly_when_torchft_can_be_found():
    assert composer_replication._DILOCO_AVAILABLE is (importlib.util.find_spec("torchft") is not None)
