"""The actors' classes where there is no Monarch: they can be named, and making one says what to install."""

from __future__ import annotations

import json
import subprocess
import sys

LOOK = """
import asyncio, inspect, json, sys
sys.modules["monarch"] = None
from composer_replication.recipes.monarch import actors
looked = {}
for name in actors.__all__:
    actor = getattr(actors, name)
    try:
        actor(None)
    except ImportError as error:
        said = str(error)
    own = [each for each, value in vars(actor).items() if inspect.iscoroutinefunction(value)]
    looked[name] = [actor.backend, actor.role, own, said]
assert "torch" not in sys.modules
try:
    from composer_replication.recipes.monarch.run import ActorRun
    ActorRun(None, [{}])
except ImportError as error:
    looked["run"] = str(error)
print(json.dumps(looked))
"""
INSTALL = (
    'monarch is not installed. Type: pip install "composer-replication[monarch]".'
    " In a clone, `make test-monarch` makes an environment of its own from constraints/monarch.txt"
)


def test_each_actor_is_named_and_says_what_to_install():
    result = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {
        "GeneratorActor": ["monarch", "generator", ["rollout"], INSTALL],
        "RewarderActor": ["monarch", "rewarder", ["score"], INSTALL],
        "TeacherPoolActor": ["monarch", "teacher_pool", ["replay", "pairs", "spent"], INSTALL],
        "TrainerActor": ["monarch", "trainer", ["train_outer_step", "num_batches"], INSTALL],
        "run": INSTALL,
    }
