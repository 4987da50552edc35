"""What the tests' runs name: episodes of the workspace for the generator, its reward for the rewarder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from composer_replication.ablation.episodes import SCHEMAS, Episode
from composer_replication.envs.trl_environment import task_rows


class WorkspaceEpisode(Episode):
    tools = SCHEMAS

    @property
    def columns(self) -> dict[str, float]:
        return {"files_worth": self.workspace.reward().value}


def episodes(tokenizer: Any, rows: Sequence[Mapping[str, Any]], lucks: Sequence[str]) -> list[WorkspaceEpisode]:
    return [WorkspaceEpisode(tokenizer, int(row["seed"]), luck) for row, luck in zip(rows, lucks, strict=True)]


async def files_worth(files_worth: float) -> float:
    """The share of the broken tests that pass now, from the world itself; by name, as verifiers asks."""
    return files_worth


def brevity(completion: str) -> float:
    """A second reward, which tells rollouts of one worth apart."""
    return -len(completion) / 10_000


def tasks(first: int, count: int) -> list[dict[str, Any]]:
    return [dict(row) for row in task_rows(range(first, first + count))]
