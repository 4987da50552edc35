"""The guide's blocks for verifiers run as a newcomer would run them, against the advisers that its command starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from adapters.engine_guide import play

pytest.importorskip("verifiers.v1")
pytestmark = [pytest.mark.envs, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def address():
    command = [sys.executable, "-m", "composer_replication", "world", "advisers"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.terminate()


def test_the_blocks_run(address, tmp_path):
    assert len(list(play("verifiers", address, tmp_path))) == 3
