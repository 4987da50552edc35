"""A client that is not installed is missed when an executor is made, by the name of its extra; never at import."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

EXECUTORS = {
    "modal": ("modal", "ModalExecutor", "modal"),
    "ray": ("ray", "RayExecutor", "ray"),
    "hf_jobs": ("huggingface_hub", "HFJobsExecutor", "serverless"),
}


@pytest.mark.parametrize("module", EXECUTORS)
def test_a_missing_client_is_named_with_its_extra(module, monkeypatch):
    package, executor, extra = EXECUTORS[module]
    monkeypatch.setitem(sys.modules, package, None)  # cannot be imported
    home = import_module(f"composer_replication.diloco.serverless.{module}")
    with pytest.raises(RuntimeError, match=rf"composer-replication\[{extra}\]"):
        getattr(home, executor)()
