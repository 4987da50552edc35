"""Importing the package, and the parts that need no tensors, loads neither torch nor any other third-party package."""

from __future__ import annotations

import json

import pytest
from repository import SRC, fresh_python

IMPORT_BUDGET_S = 0.3

# What each light module may load besides the standard library.
LIGHT_MODULES = {
    "composer_replication": set(),
    "composer_replication.errors": set(),
    "composer_replication.optional": set(),
    "composer_replication.types": set(),
    "composer_replication.version": set(),
    "composer_replication.canonical_json": {"orjson"},
    "composer_replication.atomic": {"orjson"},
    "composer_replication.config": {"orjson"},
    "composer_replication.runs": {"orjson"},
}
HEAVY = {"torch", "transformers", "triton", "numpy", "safetensors", "rich", "trl", "peft", "torchft", "httpx"}

# Modules that a .pth file loads before our import are not our doing.
PROBE = """
import json, sys, time
sys.path.insert(0, {src!r})
before = set(sys.modules)
started = time.perf_counter()
import {module}
seconds = time.perf_counter() - started
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
foreign = sorted(loaded - set(sys.stdlib_module_names) - {{"composer_replication"}})
print(json.dumps({{"seconds": seconds, "foreign": foreign, "file": sys.modules["composer_replication"].__file__}}))
"""


def probe(module: str, cwd) -> dict:
    return json.loads(fresh_python("-I", "-c", PROBE.format(src=str(SRC), module=module), cwd=cwd))


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_a_light_module_loads_only_what_it_may(module, tmp_path):
    result = probe(module, tmp_path)
    assert result["file"] == str(SRC / "composer_replication" / "__init__.py")
    assert set(result["foreign"]) - LIGHT_MODULES[module] == set()


def test_the_probe_sees_torch_when_a_module_loads_it(tmp_path):
    assert "torch" in HEAVY & set(probe("composer_replication.loss", tmp_path)["foreign"])


def test_light_modules_work_where_torch_cannot_be_imported(tmp_path):
    blocked = f"import sys; sys.path.insert(0, {str(SRC)!r}); sys.modules.update(dict.fromkeys({sorted(HEAVY)!r}))"
    imports = "\n".join(f"import {module}" for module in LIGHT_MODULES)
    fresh_python("-I", "-c", f"{blocked}\n{imports}", cwd=tmp_path)


def test_listing_the_names_loads_nothing_and_using_one_loads_torch(tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(SRC)!r})
import composer_replication
assert "compose_loss" in dir(composer_replication)
assert "torch" not in sys.modules
composer_replication.TraceState
assert "torch" not in sys.modules
composer_replication.compose_loss
assert "torch" in sys.modules
assert not {{"transformers", "triton", "rich"}} & set(sys.modules)
"""
    fresh_python("-I", "-c", code, cwd=tmp_path)


def test_importing_the_package_stays_under_its_time_budget(tmp_path, note):
    best_s = min(probe("composer_replication", tmp_path)["seconds"] for _ in range(3))
    note(f"import composer_replication: {best_s * 1e3:.1f} ms, best of 3 (budget {IMPORT_BUDGET_S * 1e3:.0f} ms)")
    assert best_s < IMPORT_BUDGET_S
