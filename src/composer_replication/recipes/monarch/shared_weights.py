"""The policy's weights in shared memory: the trainer writes a version once, every process of the host maps it.

A version is a safetensors file on a memory file system. It has no copy on a disk and crosses no socket (an argument of
an endpoint is pickled and does both: tens of MB a second). It outlives its writer, so whoever is started anew finds it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

from composer_replication.errors import ArtefactNotFoundError, ShapeError, StaleArtefactError, explain
from composer_replication.recipes.monarch.tensor_file import (
    numbered_files,
    numbered_path,
    remove_unfinished,
    write_tensor_file,
)

_STEM, _KIND = "weights", "weights"
_MEMORY = Path("/dev/shm")  # noqa: S108 (every Linux has it; files in it are memory)


def shared_memory_folder(run: Path) -> Path:
    """Where a run's versions are: in memory where the system has a file system for that, else beside the run."""
    if not _MEMORY.is_dir():
        return run / "weights"
    return Path(tempfile.mkdtemp(prefix="composer-monarch-", dir=_MEMORY))


class SharedWeights:
    """The versions in one folder. Version n are the weights after n batches; one writer, any number of readers."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def versions(self) -> list[int]:
        return list(numbered_files(self.folder, _STEM))

    def publish(self, model: nn.Module, version: int) -> None:
        """Write a version, and remove those before the last one: a reader may still be opening that."""
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(self.folder)
        tensors = {name: each for name, each in model.named_parameters()}  # noqa: C416 (names once: tied ones are one)
        record = {"kind": _KIND, "version": version}
        write_tensor_file(numbered_path(self.folder, _STEM, version), tensors, record, lasting=False)
        for number, path in numbered_files(self.folder, _STEM).items():
            if number < version - 1:
                path.unlink(missing_ok=True)

    @torch.no_grad()
    def load_into(self, model: nn.Module, version: int) -> None:
        """Copy a version into a model of the same parameters, straight from the mapped file."""
        from safetensors import safe_open

        path = numbered_path(self.folder, _STEM, version)
        if not path.is_file():
            fix = "The trainer publishes a version when it has made it, and again when it is started anew."
            got = f"versions {self.versions()}"
            raise ArtefactNotFoundError(explain("shared weights", got=got, expected=f"version {version}", fix=fix))
        own = dict(model.named_parameters())
        with safe_open(str(path), framework="pt") as file:
            names = set(file.keys())
            if names != own.keys():
                got = f"{len(names ^ own.keys())} parameters that one of the two has not"
                raise StaleArtefactError(explain(f"shared weights {path.name}", got=got, expected="the same model"))
            for name, parameter in own.items():
                value = file.get_tensor(name)
                if value.shape != parameter.shape:
                    expected = tuple(parameter.shape)
                    raise ShapeError(explain(f"shared weights {name}", got=tuple(value.shape), expected=expected))
                parameter.copy_(value)

    def remove(self) -> None:
        """All versions, and the folder with them: shared memory is not given back by itself."""
        for path in numbered_files(self.folder, _STEM).values():
            path.unlink(missing_ok=True)
        remove_unfinished(self.folder)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()
