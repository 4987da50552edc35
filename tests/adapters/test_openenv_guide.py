"""The guide's blocks for OpenEnv run as a newcomer would run them, against the server that its command starts."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from adapters.engine_guide import play

pytest.importorskip("openenv.core")
pytestmark = [pytest.mark.envs, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def address():
    command = [sys.executable, "-m", "composer_replication.envs.openenv_server", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        said = next(line for line in server.stderr if "running on" in line)
        yield re.search(r"http://127\.0\.0\.1:\d+", said)[0]
        server.terminate()


def test_the_blocks_run(address, tmp_path):
    assert len(list(play("openenv", address, tmp_path))) == 1
