"""A world without weights: what comes of a job is arithmetic. It goes on where a killed process was, and can be slow.

What happened on the way is a line a step in `steps.txt` of the job's folder.
"""

from __future__ import annotations

import random
import sys
import time

from composer_replication.config.schema import option, table
from composer_replication.evaluation.ablation.job import Job, Result, Spent, Unit
from composer_replication.evaluation.ablation.plan import Metric

METRICS = {
    "solved": Metric(better="up"),
    "failing": Metric(of="failing_calls", per="calls", times=100.0, better="down", label="failing calls per 100"),
}


@table("world")
class Options:
    """What the toy can be told."""

    effect: float = option(0.0, "Share of failing calls that is avoided.", at_least=0, at_most=1)
    steps: int = option(3, "Steps of a job.", at_least=1)
    seconds: float = option(0.0, "How long a step takes.", at_least=0)
    fail: bool = option(False, "Whether the job fails.")
    units: int = option(8, "Held-out tasks.", at_least=1)


def run_job(job: Job) -> Result:
    options = Options(**job.options)
    path = job.folder / "steps.txt"
    done = len(path.read_text().splitlines()) if path.exists() else 0
    for number in range(done, options.steps):
        time.sleep(options.seconds)
        with path.open("a") as file:
            file.write(f"{number}\n")
    if options.fail:
        print("so it goes", file=sys.stderr)
        raise RuntimeError(f"the toy broke in {job.folder}")
    units = [_unit(job.seed, number, options.effect) for number in range(options.units)]
    return Result(
        arm=job.arm,
        seed=job.seed,
        world=job.world,
        spent=Spent(rollouts=10 * options.steps, tokens=1000, steps=options.steps, seconds=time.process_time()),
        units=units,
        curve=[{"rollouts": 10 * (at + 1), "step": at + 1, "success": at / 4} for at in range(options.steps)],
        digests={"start": "0"},
        config_sha256=job.config_sha256,
    )


def _unit(seed: int, number: int, effect: float) -> Unit:
    """The same luck in every arm: what is paired."""
    luck = random.Random(1000 * seed + number)
    calls = luck.randint(5, 15)
    failing = sum(luck.random() < 0.4 * (1 - effect) for _ in range(calls))
    sums = {"solved": int(failing < 3), "calls": calls, "failing_calls": failing, "failing_calls:edit": failing // 2}
    return Unit(f"task-{number}", sums)
