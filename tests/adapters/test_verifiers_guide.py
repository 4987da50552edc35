"""The guide's blocks for verifiers run as a newcomer would run them."""

from __future__ import annotations

import json

import pytest

from adapters.engine_guide import play
from adapters.scripted_episodes import expert
from adapters.scripted_model import serving

pytest.importorskip("verifiers.v1")
from composer_replication.envs.workspace import generate_task

pytestmark = [pytest.mark.envs, pytest.mark.filterwarnings("ignore")]


def test_the_blocks_run(tmp_path):
    tasks = [generate_task(seed) for seed in range(3)] + [generate_task(100 + at, difficulty="medium") for at in (0, 1)]
    scripts = {task.prompt: [[(name, json.dumps(given))] for name, given in expert(task)] for task in tasks}
    with serving(scripts) as address:
        assert len(list(play("verifiers", address, tmp_path))) == 3
