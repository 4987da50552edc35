"""verl on the CPU, and silent: it warns of every engine that it does not find, and warnings are errors after this."""

from __future__ import annotations

import os
import warnings
from importlib import import_module
from importlib.util import find_spec

import pytest

HAS_VERL = find_spec("verl") is not None
collect_ignore_glob = [] if HAS_VERL else ["test_*.py"]
# As cpu_platform.ENVIRONMENT says, which cannot be asked: importing it imports verl.
os.environ |= {
    "VERL_USE_EXTERNAL_MODULES": "composer_replication.recipes.verl.cpu_platform",
    "VERL_PLATFORM": "composer-cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}

if HAS_VERL:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _name in ("trainer", "teacher_server"):
            import_module(f"composer_replication.recipes.verl.{_name}")
        from recipes.verl import cpu_engine


@pytest.fixture(scope="session", autouse=True)
def one_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    """verl's engines want a process group, also where there is one process."""
    cpu_engine.join_group(tmp_path_factory.mktemp("group"))
