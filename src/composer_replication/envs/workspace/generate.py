"""A task from a seed."""

from __future__ import annotations

import random

from composer_replication.envs.workspace.task import Check, Difficulty, Edit, Task

THINGS = ("price", "score", "length", "weight", "speed", "height", "depth", "width", "cost", "delay", "level", "size")
PLACES = ("shop", "game", "road", "bank", "farm", "lab", "ship", "park", "mine", "port", "city", "mill")
EXTRAS = ("tax", "bonus", "margin", "offset", "fee", "gap", "step", "limit", "shift", "extra", "rest", "base")


def generate_task(seed: int, *, difficulty: Difficulty = "easy") -> Task:
    """The task of a seed: the same on any machine."""
    draw = random.Random(f"workspace:{difficulty}:{seed}")  # noqa: S311 (a task, not a secret)
    place, thing, extra = draw.choice(PLACES), draw.choice(THINGS), draw.choice(EXTRAS)
    right = draw.randrange(3, 40)
    wrong = right + draw.choice((-2, -1, 1, 2, 10))
    name, constant = f"{thing}_with_{extra}", f"{extra.upper()}"
    path = f"{place}/{thing}s.py"
    source = f"{constant} = {wrong}\n\n\ndef {name}({thing}):\n    return {thing} + {constant}\n"
    shown = draw.randrange(1, 50)
    tests = (
        f"from {place}.{thing}s import {name}\n\n\ndef test_{name}():\n    assert {name}({shown}) == {shown + right}\n"
    )
    hidden = draw.randrange(100, 200)
    return Task(
        seed=seed,
        difficulty=difficulty,
        family="wrong_constant",
        prompt=f"{constant} in {path} must be {right}. Fix it and run the tests.",
        files={path: source, f"tests/test_{thing}s.py": tests},
        solution=(Edit(path=path, old=f"{constant} = {wrong}", new=f"{constant} = {right}"),),
        checks=tuple(
            Check(
                test=f"test_{name}",
                module=f"{place}.{thing}s",
                expression=f"{name}({value})",
                expected=repr(value + right),
                is_broken=True,
            )
            for value in (shown, hidden)
        ),
    )
