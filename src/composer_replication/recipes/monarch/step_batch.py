"""One batch of rollouts as the trainer needs it, as a file: an actor is told its number, and reads it itself.

A file because whoever is started anew has to find the batch again, and because an argument would be pickled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_replication.errors import ArtefactCorruptError, ShapeError, explain
from composer_replication.recipes.monarch.tensor_file import numbered_path, read_tensor_file, write_tensor_file
from composer_replication.rollouts.sites import TaughtTurn

_KIND, _STEM = "batch of rollouts, schema 1", "batch"
_ROWS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "sampled_mask", "advantages")
_PLAIN = ("start", "end", "teacher_start", "kind", "hint", "turn_id", "wrong_start")


@dataclass(frozen=True, eq=False, kw_only=True)
class StepBatch:
    """Prompts padded at their left, completions at their right; `sampled_mask` marks what the policy wrote itself.

    `old_logprobs` (B, C) are those of the weights that sampled; None where these are the weights that train
    (`weights_version` then says which). `sites` are the taught turns of each row. `pairs` are the `dpo_*` tensors of
    `compose_loss` without reference log-probs, which are the trainer's to compute; empty where there are none.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    sampled_mask: Tensor
    advantages: Tensor
    sites: tuple[tuple[TaughtTurn, ...], ...]
    old_logprobs: Tensor | None = None
    weights_version: int | None = None
    pairs: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def __post_init__(self) -> None:
        rows, width = self.completion_ids.shape
        expected = {
            "prompt_mask": self.prompt_ids.shape,
            "completion_mask": (rows, width),
            "sampled_mask": (rows, width),
            "advantages": (rows,),
        }
        if self.old_logprobs is not None:
            expected["old_logprobs"] = (rows, width)
        for name, shape in expected.items():
            tensor: Tensor = getattr(self, name)
            if tuple(tensor.shape) != tuple(shape):
                raise ShapeError(explain(f"batch: {name}", got=tuple(tensor.shape), expected=tuple(shape)))
        if len(self.sites) != rows or self.prompt_ids.shape[0] != rows:
            got = f"{len(self.sites)} lists of sites, {self.prompt_ids.shape[0]} prompts"
            raise ShapeError(explain("batch", got=got, expected=f"one of each for {rows} completions"))

    @property
    def input_ids(self) -> Tensor:
        return torch.cat([self.prompt_ids, self.completion_ids], 1)

    @property
    def attention_mask(self) -> Tensor:
        return torch.cat([self.prompt_mask, self.completion_mask], 1)

    @property
    def loss_mask(self) -> Tensor:
        """(B, C): the tokens that the policy sampled."""
        return (self.completion_mask * self.sampled_mask).bool()

    def save(self, folder: Path, number: int) -> None:
        tensors: dict[str, Tensor] = {name: getattr(self, name) for name in _ROWS}
        if self.old_logprobs is not None:
            tensors["old_logprobs"] = self.old_logprobs
        tensors |= {f"pairs.{name}": value for name, value in self.pairs.items()}
        turns: list[list[dict[str, Any]]] = []
        for row, taught in enumerate(self.sites):
            turns.append([{name: getattr(turn, name) for name in _PLAIN} for turn in taught])
            for index, turn in enumerate(taught):
                tensors[f"site.{row}.{index}"] = turn.teacher_ids
                if turn.wrong_ids is not None:
                    tensors[f"wrong.{row}.{index}"] = turn.wrong_ids
        record = {"kind": _KIND, "number": number, "weights_version": self.weights_version, "sites": turns}
        write_tensor_file(numbered_path(folder, _STEM, number), tensors, record, lasting=True)

    @classmethod
    def load(cls, folder: Path, number: int) -> StepBatch:
        path = numbered_path(folder, _STEM, number)
        tensors, record = read_tensor_file(path, _KIND)
        if record["number"] != number:
            raise ArtefactCorruptError(explain(str(path), got=f"batch {record['number']}", expected=f"batch {number}"))
        sites = tuple(
            tuple(
                TaughtTurn(
                    **turn,
                    teacher_ids=tensors[f"site.{row}.{index}"],
                    wrong_ids=tensors.get(f"wrong.{row}.{index}"),
                )
                for index, turn in enumerate(taught)
            )
            for row, taught in enumerate(record["sites"])
        )
        pairs = {name.removeprefix("pairs."): value for name, value in tensors.items() if name.startswith("pairs.")}
        return cls(
            **{name: tensors[name] for name in _ROWS},
            sites=sites,
            old_logprobs=tensors.get("old_logprobs"),
            weights_version=record["weights_version"],
            pairs=pairs,
        )

    @staticmethod
    def is_there(folder: Path, number: int) -> bool:
        return numbered_path(folder, _STEM, number).is_file()
