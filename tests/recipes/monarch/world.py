"""What the tests' runs name: episodes of the workspace for the generator, its reward for the rewarder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from composer_replication.envs.trl_environment import task_rows
from composer_replication.evaluation.ablation.workspace import SCHEMAS, TaskEpisode


class WorkspaceEpisode(TaskEpisode):
    """With `padding` ends before its prompt, for prompts of other lengths."""

    tools = SCHEMAS

    def __init__(self, tokenizer: Any, row: Mapping[str, Any], seed: str) -> None:
        super().__init__(tokenizer, int(row["seed"]), seed)
        self.prompt_ids = [tokenizer.eos_token_id] * row.get("padding", 0) + self.prompt_ids

    @property
    def columns(self) -> dict[str, float]:
        return {"files_worth": self.workspace.reward().value}


def episodes(tokenizer: Any, rows: Sequence[Mapping[str, Any]], seeds: Sequence[str]) -> list[WorkspaceEpisode]:
    return [WorkspaceEpisode(tokenizer, row, seed) for row, seed in zip(rows, seeds, strict=True)]


class _Inflated(WorkspaceEpisode):
    """Says that the policy wrote more than it did."""

    def hear(self, said: list[int]) -> list[int] | None:
        return super().hear(said * 2)


def inflated(tokenizer: Any, rows: Sequence[Mapping[str, Any]], seeds: Sequence[str]) -> list[_Inflated]:
    return [_Inflated(tokenizer, row, seed) for row, seed in zip(rows, seeds, strict=True)]


async def files_worth(files_worth: float) -> float:
    """The share of the broken tests that pass now, from the world itself; by name, as verifiers asks."""
    return files_worth


def brevity(completion: str) -> float:
    """A second reward, which tells rollouts of one worth apart."""
    return -len(completion) / 10_000


def tasks(first: int, count: int) -> list[dict[str, Any]]:
    return [dict(row) for row in task_rows(range(first, first + count))]
