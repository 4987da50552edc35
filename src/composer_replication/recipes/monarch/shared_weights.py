"""The policy's weights in shared memory: the trainer writes a version once, every process of the host maps it.

A version is a safetensors file on a memory file system. It has no copy on a disk and crosses no socket (an argument of
an endpoint is pickled and does both: tens of MB a second). It outlives its writer, so whoever is started anew finds it.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path

import torch
from torch import nn

from composer_replication.atomic import atomic_write_json
from composer_replication.errors import ArtefactNotFoundError, ShapeError, StaleArtefactError, explain
from composer_replication.recipes.monarch.tensor_file import (
    numbered_files,
    numbered_path,
    remove_unfinished,
    write_tensor_file,
)

_STEM, _KIND = "weights", "weights"
_MEMORY = Path("/dev/shm")  # noqa: S108 (every Linux has it; files in it are memory)


_NOTE = "shared_memory.json"
_PRIVATE = 0o700


def shared_memory_folder(run: Path) -> Path:
    """Where a run's versions are: the folder of an earlier start that was killed, else a new one.

    In memory where the system has a file system for that, else beside the run. Everybody may write beside our folder in
    memory, so an earlier one counts only if nobody but us can have written into it: weights would be theirs.
    """
    note = run / _NOTE
    if note.is_file() and _is_private(earlier_folder := Path(json.loads(note.read_text(encoding="utf-8"))["folder"])):
        return earlier_folder
    run.mkdir(parents=True, exist_ok=True)
    if _MEMORY.is_dir():
        folder = Path(tempfile.mkdtemp(prefix="composer-monarch-", dir=_MEMORY))
    else:
        folder = run / "weights"
        folder.mkdir(mode=_PRIVATE, exist_ok=True)
    atomic_write_json(note, {"folder": str(folder)})
    note.chmod(0o600)
    return folder


def forget_shared_memory(run: Path) -> None:
    """The note of where it was; `SharedWeights.remove` removes what was there."""
    (run / _NOTE).unlink(missing_ok=True)


def _is_private(folder: Path) -> bool:
    """Whether this is a folder itself (no link to one), our own, and closed to everybody else."""
    try:
        state = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o077


class SharedWeights:
    """The versions in one folder. Version n are the weights after n batches; one writer, any number of readers."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def versions(self) -> list[int]:
        return list(numbered_files(self.folder, _STEM))

    def publish(self, model: nn.Module, version: int) -> None:
        """Write a version, and remove those before the last one: a reader may still be opening that."""
        self.folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        remove_unfinished(self.folder)
        tensors = {name: parameter for name, parameter in model.named_parameters()}  # noqa: C416 (names once: tied ones are one)
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
        parameters = dict(model.named_parameters())
        with safe_open(str(path), framework="pt") as file:
            names = set(file.keys())
            if names != parameters.keys():
                got = f"{len(names ^ parameters.keys())} parameters that one of the two has not"
                raise StaleArtefactError(explain(f"shared weights {path.name}", got=got, expected="the same model"))
            for name, parameter in parameters.items():
                value = file.get_tensor(name)
                if value.shape != parameter.shape:
                    expected = tuple(parameter.shape)
                    raise ShapeError(explain(f"shared weights {name}", got=tuple(value.shape), expected=expected))
                parameter.copy_(value)

    def remove_versions(self) -> None:
        for path in numbered_files(self.folder, _STEM).values():
            path.unlink(missing_ok=True)
        remove_unfinished(self.folder)

    def remove(self) -> None:
        """All versions, and the folder with them: shared memory is not given back by itself."""
        self.remove_versions()
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()
