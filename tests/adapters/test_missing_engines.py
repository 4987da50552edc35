"""Without the engine, its adapter says what to install."""

from __future__ import annotations

import importlib

import pytest

from composer_replication.errors import MissingExtraError
from composer_replication.optional import available


@pytest.mark.parametrize(
    ("module", "extra"), [("verifiers_environment", "verifiers"), ("openenv_server", "openenv")], ids=str
)
def test_an_adapter_without_its_engine_names_the_extra(module, extra):
    if available(extra):
        pytest.skip(f"{extra} is installed here")
    with pytest.raises(MissingExtraError, match=rf'pip install "composer-replication\[{extra}\]"'):
        importlib.import_module(f"composer_replication.envs.{module}")
