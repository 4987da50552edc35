"""Simulated metrics of training runs: healthy ones with noise that remembers itself, and ones that collapse."""

from __future__ import annotations

import random
from collections.abc import Iterator

Line = tuple[int, dict[str, float]]


def noise(draw: random.Random, memory: float) -> Iterator[float]:
    """Unit noise of which each value keeps a share of the one before it."""
    value = draw.gauss(0, 1)
    while True:
        yield value
        value = memory * value + draw.gauss(0, (1 - memory**2) ** 0.5)


def healthy(seed: int, steps: int = 1000, eval_every: int = 10) -> Iterator[Line]:
    """Entropy falls by half, lengths double, errors fall to a quarter, the reward rises; all of it noisily."""
    draw = random.Random(seed)
    entropy, length, calls, kl = (noise(draw, memory) for memory in (0.5, 0.5, 0.3, 0.5))
    errors, reward = noise(draw, 0.2), noise(draw, 0.0)
    for step in range(1, steps + 1):
        gone = step / steps
        logs = {
            "entropy": max(0.0, (1.2 - 0.7 * gone) * (1 + 0.15 * next(entropy))),
            "completions/mean_length": max(1.0, (300 + 300 * gone) * (1 + 0.25 * next(length))),
            "tools/call_frequency": max(0.0, (2.5 - gone) * (1 + 0.2 * next(calls))),
            "kl_to_start": max(0.0, 0.25 * gone + 0.05 * next(kl)),
            "sites/per_100_turns": max(0.0, 30 - 22 * gone + 6 * next(errors)),
        }
        if step % eval_every == 0:
            logs["eval_reward"] = min(1.0, max(0.0, 0.35 + 0.3 * gone + 0.06 * next(reward)))
        yield step, logs


def tool_use_collapse(seed: int, steps: int = 600, after: int = 400, over: int = 60) -> Iterator[Line]:
    """The users' story: the held-out score holds at 0.65 and falls to 0 after some 400 steps."""
    draw = random.Random(seed)
    for step, logs in healthy(seed, steps):
        if "eval_reward" in logs:
            left = min(1.0, max(0.0, 1 - (step - after) / over))
            logs["eval_reward"] = max(0.0, (0.65 + draw.gauss(0, 0.04)) * left)
        yield step, logs


def rewards_of_few_rollouts(
    seed: int, steps: int = 600, *, falls_after: int | None = None, over: int = 60
) -> Iterator[Line]:
    """A reward a step, the mean of three tries at one new task: about 0.6 at first, 0.85 later, 0 after a fall.

    Tries at one task are alike (some tasks are easy, some hard), so that most steps have 0 or 1.
    """
    draw = random.Random(f"few {seed}")
    for step in range(1, steps + 1):
        solved = 0.6 + 0.25 * min(1.0, step / 100)
        if falls_after is not None:
            solved *= min(1.0, max(0.0, 1 - (step - falls_after) / over))
        easy = draw.betavariate(2 * solved, 2 * (1 - solved)) if 0 < solved < 1 else solved
        yield step, {"reward": sum(draw.random() < easy for _ in range(3)) / 3}
