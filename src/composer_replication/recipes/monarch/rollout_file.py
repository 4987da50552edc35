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
        for place, each in enumerate(self.rollouts):
            tensors[f"prompt.{place}"] = torch.tensor(list(each.prompt_ids), dtype=torch.int32)
            tensors[f"completion.{place}"] = torch.tensor(list(each.completion_ids), dtype=torch.int32)
            if each.sampled is not None:
                tensors[f"sampled.{place}"] = torch.tensor(list(each.sampled), dtype=torch.uint8)
        said = [{name: getattr(each, name) for name in _PLAIN} for each in self.rollouts]
        record = {"kind": _KIND, "rollouts": said, "columns": list(self.columns), "version": self.weights_version}
        write_tensor_file(numbered_path(folder, _STEM, number), tensors, record, lasting=True)

    @classmethod
    def load(cls, folder: Path, number: int) -> KeptRollouts:
        tensors, record = read_tensor_file(numbered_path(folder, _STEM, number), _KIND)
        rollouts = [
            Rollout(
                **said,
                prompt_ids=tensors[f"prompt.{place}"].tolist(),
                completion_ids=tensors[f"completion.{place}"].tolist(),
                sampled=tensors[f"sampled.{place}"].tolist() if f"sampled.{place}" in tensors else None,
            )
            for place, said in enumerate(record["rollouts"])
        ]
        return cls(rollouts=rollouts, columns=record["columns"], weights_version=record["version"])
