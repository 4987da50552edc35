"""verl warns of every engine that it does not find when it is imported; from here on warnings are errors again."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import pytest

HAS_VERL = find_spec("verl") is not None
collect_ignore_glob = [] if HAS_VERL else ["test_*.py"]

if HAS_VERL:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from recipes.verl import cpu_engine  # first: it says which platform verl is on

        import composer_replication.recipes.verl.teacher_server  # isort: skip
        import composer_replication.recipes.verl.trainer  # isort: skip


@pytest.fixture(scope="session", autouse=True)
def one_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    """verl's engines want a process group, also where there is one process."""
    cpu_engine.join_group(tmp_path_factory.mktemp("group"))
