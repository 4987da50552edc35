"""One try at saving a checkpoint: what cannot be written is noted, and raised when all processes are together.

A process that raised at once would leave the others waiting for it in the middle of a save.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path

import torch
from torch import distributed

from composer_replication.errors import ComposerError, RunError, explain


def most_anywhere(value: int, device: torch.device | str) -> int:
    """The largest `value` of all processes; also a point that none passes before all have reached it."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return value
    agreed = torch.tensor([value], device=device)
    distributed.all_reduce(agreed, op=distributed.ReduceOp.MAX)
    return int(agreed.item())


class SaveAttempt:
    """Collects the first failure of this process."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder = folder
        self._device = device
        self._failure: Exception | None = None

    @contextlib.contextmanager
    def writing(self) -> Generator[None]:
        """A part of the save. What goes wrong on the disk ends the part, and is kept for `agree`."""
        from safetensors import SafetensorError  # what its writer makes of a full disk

        try:
            yield
        except (OSError, SafetensorError, ComposerError) as error:
            self._failure = self._failure or error

    def agree(self) -> None:
        """Wait for the other processes, and raise if any could not write."""
        failed = most_anywhere(int(self._failure is not None), self._device)
        if not failed:
            return
        if isinstance(self._failure, ComposerError):
            raise self._failure
        got = "another process could not write its part" if self._failure is None else str(self._failure)
        fix = "Make room and resume: earlier checkpoints are untouched, and this one is passed over."
        raise RunError(explain(f"saving {self._folder}", got=got, expected="every file written", fix=fix)) from (
            self._failure
        )
