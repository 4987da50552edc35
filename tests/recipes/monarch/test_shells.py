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
WHAT_TO_TYPE = ('pip install "composer-replication[monarch]"', "`make test-monarch`", "constraints/monarch.txt")


def test_each_actor_is_named_and_says_what_to_install():
    result = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    looked = json.loads(result.stdout)
    messages = [looked.pop("run"), *(actor.pop() for actor in looked.values())]
    assert looked == {
        "GeneratorActor": ["monarch", "generator", ["rollout"]],
        "RewarderActor": ["monarch", "rewarder", ["score"]],
        "TeacherPoolActor": ["monarch", "teacher_pool", ["replay", "pairs", "spent"]],
        "TrainerActor": ["monarch", "trainer", ["train_outer_step", "num_batches"]],
    }
    assert len(messages) == 5
    for message in messages:
        assert all(command in message for command in WHAT_TO_TYPE), message
