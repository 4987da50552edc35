"""A run of example sessions, and an adapter on the embedded student that changes what it says; made once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / name) for name in ("cli", "ingestion"))]
EXAMPLES = HERE.parents[2] / "examples" / "sessions"


@pytest.fixture(scope="session")
def adapter(tmp_path_factory):
    from random_adapter import make_adapter

    from composer_replication.envs.student import student_folder

    return make_adapter(tmp_path_factory.mktemp("weights") / "adapter", student_folder())


@pytest.fixture(scope="session")
def example_run(tmp_path_factory):
    """A run directory with conversations, sites and pairs."""
    from composer_replication.cli.main import main

    run = tmp_path_factory.mktemp("runs") / "run"
    assert main(["ingest", str(EXAMPLES), "-o", str(run), "--workers", "1"]) == 0
    assert main(["sites", str(run)]) == 0
    assert main(["pairs", str(run)]) == 0
    return run
