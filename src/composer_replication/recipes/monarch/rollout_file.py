"""The rollouts of a batch as a file: what was sampled, with the messages and what its world said of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_replication.recipes.monarch.tensor_file import numbered_path, read_tensor_file, write_tensor_file
from composer_replication.rollouts.conversation import Rollout

_KIND, _STEM = "rollouts, schema 1", "rollouts"
_PLAIN = ("rollout_id", "prompt", "messages", "signals", "raised", "tools")


@dataclass(frozen=True, eq=False, kw_only=True)
class KeptRollouts:
    """In the order of their prompts; `columns` are of each rollout what its world says, for reward functions."""

    rollouts: Sequence[Rollout]
    columns: Sequence[Mapping[str, Any]]
    weights_version: int

    def save(self, folder: Path, number: int) -> None:
        tensors: dict[str, Tensor] = {}
        for index, rollout in enumerate(self.rollouts):
            tensors[f"prompt.{index}"] = torch.tensor(list(rollout.prompt_ids), dtype=torch.int32)
            tensors[f"completion.{index}"] = torch.tensor(list(rollout.completion_ids), dtype=torch.int32)
            if rollout.sampled is not None:
                tensors[f"sampled.{index}"] = torch.tensor(list(rollout.sampled), dtype=torch.uint8)
        entries = [{name: getattr(rollout, name) for name in _PLAIN} for rollout in self.rollouts]
        record = {"kind": _KIND, "rollouts": entries, "columns": list(self.columns), "version": self.weights_version}
        write_tensor_file(numbered_path(folder, _STEM, number), tensors, record, lasting=True)

    @classmethod
    def load(cls, folder: Path, number: int) -> KeptRollouts:
        tensors, record = read_tensor_file(numbered_path(folder, _STEM, number), _KIND)
        rollouts = [
            Rollout(
                **entry,
                prompt_ids=tensors[f"prompt.{index}"].tolist(),
                completion_ids=tensors[f"completion.{index}"].tolist(),
                sampled=tensors[f"sampled.{index}"].tolist() if f"sampled.{index}" in tensors else None,
            )
            for index, entry in enumerate(record["rollouts"])
        ]
        return cls(rollouts=rollouts, columns=record["columns"], weights_version=record["version"])
