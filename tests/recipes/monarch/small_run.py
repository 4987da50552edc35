"""A run of three batches in the workspace, with all three channels: `python small_run.py FOLDER TEACHERS_URL`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

PRICES = {"a/one": (1.0, 2.0), "b/two": (1.0, 2.0)}
BATCHES = 3


def read_settings(folder: Path, url: str, **changes: Any) -> Any:
    from composer_replication.envs.student import student_folder
    from composer_replication.recipes.monarch.policy_trainer import LossSettings
    from composer_replication.recipes.monarch.run import BatchSettings, RunSettings
    from composer_replication.trainer.objective.channels import LossKnobs

    teachers = tuple(
        {"slug": slug, "input_per_mtok": price[0], "output_per_mtok": price[1], "base_url": url}
        for slug, price in PRICES.items()
    )
    named = {
        "model": str(student_folder()),
        "folder": str(folder),
        "num_batches": BATCHES,
        "prompts_per_batch": 2,
        "rewards": ("recipes.monarch.world:files_worth", "recipes.monarch.world:brevity"),
        "batch": BatchSettings(num_generations=2),
        "loss": LossSettings(knobs=LossKnobs(alpha_sdpo=0.1, beta_replay=0.05, sdpo_jsd_beta=1.0)),
        "trainer": {"learning_rate": 1e-4, "num_iterations": 2},
        "generator": {"episodes": "recipes.monarch.world:episodes"},
        "teachers": teachers,
    }
    return RunSettings(**{**named, **changes})


async def train(
    settings: Any, prepare: Callable[[Any, dict[str, int]], None] | None = None
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """What came of each batch, and how often each role died."""
    from composer_replication.recipes.monarch.run import ActorRun
    from recipes.monarch.world import tasks

    async with ActorRun(settings, tasks(20_000, 4)) as run:
        pids = dict(zip(run.actors, await asyncio.gather(*(each.pid() for each in run.actors.values())), strict=True))
        if prepare is not None:
            prepare(run, pids)
        records = await run.train()
        return records, {role: each.num_deaths for role, each in run.actors.items()}


def main() -> None:
    folder, url = Path(sys.argv[1]), sys.argv[2]

    def tell(_run: Any, pids: dict[str, int]) -> None:
        (folder / "pids.json").write_text(json.dumps(pids), encoding="utf-8")

    asyncio.run(train(read_settings(folder, url), tell))


if __name__ == "__main__":
    main()
