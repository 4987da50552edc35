"""Tensors and a JSON record as one safetensors file that is there whole or not at all, whoever is killed when."""

from __future__ import annotations

import json
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from composer_replication.atomic import atomic_write_json
from composer_replication.errors import (
    ArtefactCorruptError,
    ArtefactNotFoundError,
    ShapeError,
    StaleArtefactError,
    explain,
)
from composer_replication.trainer.rollouts.sites import Rollout, TaughtTurn

_RECORD = "record"
_UNFINISHED = ".unfinished"


def write_tensor_file(path: Path, tensors: Mapping[str, Tensor], record: Mapping[str, Any], *, lasting: bool) -> None:
    """`lasting` waits until the disk has it; in shared memory there is no disk to wait for."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    # Not `atomic.staged`: safetensors writes to a name, several times as fast as through bytes in between.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{_UNFINISHED}")
    try:
        plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        save_file(plain, unfinished, metadata={_RECORD: json.dumps(record, allow_nan=False)})
        if lasting:
            _sync(unfinished)
        unfinished.replace(path)
        if lasting:
            _sync(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def read_tensor_file(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Copies of the tensors, and the record, whose `kind` must be this one."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ArtefactNotFoundError(explain(str(path), got="no such file", expected=f"a {kind}"))
    try:
        with safe_open(str(path), framework="pt") as file:
            record: dict[str, Any] = json.loads((file.metadata() or {}).get(_RECORD, "{}"))
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise ArtefactCorruptError(explain(str(path), got=str(error), expected=f"a {kind}")) from error
    if record.get("kind") != kind:
        got = f"a record of kind {record.get('kind')!r}"
        raise ArtefactCorruptError(explain(str(path), got=got, expected=f"a {kind}"))
    return tensors, record


def numbered_files(folder: Path, stem: str) -> dict[int, Path]:
    """`STEM-000007.safetensors` by number."""
    paths = {path.stem.removeprefix(f"{stem}-"): path for path in folder.glob(f"{stem}-*.safetensors")}
    return {int(number): path for number, path in sorted(paths.items()) if number.isdigit()}


def numbered_path(folder: Path, stem: str, number: int) -> Path:
    return folder / f"{stem}-{number:06d}.safetensors"


def remove_unfinished(folder: Path) -> None:
    """What a killed writer left; call it where nobody else writes."""
    for path in folder.glob(f".*{_UNFINISHED}"):
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# The rollouts of a batch as a file: what was sampled, with the messages and what its world said of it.

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


# The policy's weights in shared memory: the trainer writes a version once, every process of the host maps it.
#
# A version is a safetensors file on a memory file system. It has no copy on a disk and crosses no socket (an argument
# of an endpoint is pickled and does both: tens of MB a second). It outlives its writer, so whoever is started anew
# finds it.

_SHARED_WEIGHTS_STEM, _SHARED_WEIGHTS_KIND = "weights", "weights"
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
        return list(numbered_files(self.folder, _SHARED_WEIGHTS_STEM))

    def publish(self, model: nn.Module, version: int) -> None:
        """Write a version, and remove those before the last one: a reader may still be opening that."""
        self.folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        remove_unfinished(self.folder)
        tensors = {name: parameter for name, parameter in model.named_parameters()}  # noqa: C416 (names once: tied ones are one)
        record = {"kind": _SHARED_WEIGHTS_KIND, "version": version}
        write_tensor_file(numbered_path(self.folder, _SHARED_WEIGHTS_STEM, version), tensors, record, lasting=False)
        for number, path in numbered_files(self.folder, _SHARED_WEIGHTS_STEM).items():
            if number < version - 1:
                path.unlink(missing_ok=True)

    @torch.no_grad()
    def load_into(self, model: nn.Module, version: int) -> None:
        """Copy a version into a model of the same parameters, straight from the mapped file."""
        from safetensors import safe_open

        path = numbered_path(self.folder, _SHARED_WEIGHTS_STEM, version)
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
        for path in numbered_files(self.folder, _SHARED_WEIGHTS_STEM).values():
            path.unlink(missing_ok=True)
        remove_unfinished(self.folder)

    def remove(self) -> None:
        """All versions, and the folder with them: shared memory is not given back by itself."""
        self.remove_versions()
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()


# One batch of rollouts as the trainer needs it, as a file: an actor is told its number, and reads it itself.
#
# A file because whoever is started anew has to find the batch again, and because an argument would be pickled.

_STEP_BATCH_KIND, _STEP_BATCH_STEM = "batch of rollouts, schema 1", "batch"
_ROWS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "sampled_mask", "advantages")
_STEP_BATCH_PLAIN = ("start", "end", "teacher_start", "kind", "hint", "turn_id", "wrong_start")


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
            turns.append([{name: getattr(turn, name) for name in _STEP_BATCH_PLAIN} for turn in taught])
            for index, turn in enumerate(taught):
                tensors[f"site.{row}.{index}"] = turn.teacher_ids
                if turn.wrong_ids is not None:
                    tensors[f"wrong.{row}.{index}"] = turn.wrong_ids
        record = {"kind": _STEP_BATCH_KIND, "number": number, "weights_version": self.weights_version, "sites": turns}
        write_tensor_file(numbered_path(folder, _STEP_BATCH_STEM, number), tensors, record, lasting=True)

    @classmethod
    def load(cls, folder: Path, number: int) -> StepBatch:
        path = numbered_path(folder, _STEP_BATCH_STEM, number)
        tensors, record = read_tensor_file(path, _STEP_BATCH_KIND)
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
        return numbered_path(folder, _STEP_BATCH_STEM, number).is_file()
