"""Read and write the files of tensors that processes exchange: rollouts, batches, and weights in shared memory.

Each file is in safetensors format, with a JSON record in its metadata. It is renamed into place when it is complete, so
readers never see a partial file, even if the writer is killed.
"""

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
from composer_replication.tensor_file import read_tensors
from composer_replication.trainer.rollouts.hint_distillation import ErringTurn
from composer_replication.trainer.rollouts.sites import Rollout

_RECORD = "record"
_UNFINISHED = ".unfinished"


@dataclass(frozen=True, slots=True)
class NumberedFiles:
    """The files named like `STEM-000007.safetensors` in a folder. The record in each file names its kind, which is
    checked when the file is read.

    The kind includes the version of the schema, so that files of another version are recognized.
    """

    folder: Path
    stem: str
    kind: str

    def path(self, number: int) -> Path:
        """Return the path of the file with this number, which need not exist."""
        return self.folder / f"{self.stem}-{number:06d}.safetensors"

    def paths(self) -> dict[int, Path]:
        """Return the paths of the existing files, keyed by number in ascending order."""
        # "state-000004.safetensors" -> 4; "state-old.safetensors" is ignored.
        paths = {
            path.stem.removeprefix(f"{self.stem}-"): path for path in self.folder.glob(f"{self.stem}-*.safetensors")
        }
        return {int(number): path for number, path in sorted(paths.items()) if number.isdigit()}

    def write(
        self, number: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any], *, durable: bool = True
    ) -> None:
        """Write tensors and a record to a file. With `durable`, wait until they are on disk."""
        from safetensors.torch import save_file

        path = self.path(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not `atomic.staged`: safetensors writes to a path several times as fast as through bytes in memory.
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{_UNFINISHED}")
        try:
            # safetensors rejects non-contiguous views.
            plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
            text = json.dumps({"kind": self.kind, **record}, allow_nan=False)
            save_file(plain, unfinished, metadata={_RECORD: text})
            # Content before name, so that a crash cannot leave a name without its content.
            if durable:
                _sync(unfinished)
            unfinished.replace(path)
            if durable:
                _sync(path.parent)
        finally:
            unfinished.unlink(missing_ok=True)

    def read(self, number: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return copies of the tensors in a file, and its record. Raises ArtefactCorruptError if the record is of
        another kind.
        """
        path = self.path(number)
        if not path.is_file():
            raise ArtefactNotFoundError(explain(str(path), got="no such file", expected=f"a file of {self.kind}"))
        tensors, metadata = read_tensors(path)
        try:
            record: dict[str, Any] = json.loads(metadata.get(_RECORD, "{}"))
        except ValueError as error:
            raise ArtefactCorruptError(explain(str(path), got=str(error), expected=f"a file of {self.kind}")) from error
        if record.get("kind") != self.kind:
            got = f"a record of kind {record.get('kind')!r}"
            raise ArtefactCorruptError(explain(str(path), got=got, expected=f"a record of kind {self.kind!r}"))
        return tensors, record

    def remove_unfinished(self) -> None:
        """Remove the unfinished files of writers that were killed. Call this only while no other process is writing."""
        for path in self.folder.glob(f".*{_UNFINISHED}"):
            path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_ROLLOUT_FIELDS = ("rollout_id", "prompt", "messages", "signals", "raised", "tools")


@dataclass(frozen=True, eq=False, kw_only=True)
class SavedRollouts:
    """The rollouts of a batch, in the order of their prompts.

    `columns` are the environment's reports about each rollout, for reward functions.
    """

    rollouts: Sequence[Rollout]
    columns: Sequence[Mapping[str, Any]]
    weights_version: int

    def save(self, folder: Path, number: int) -> None:
        tensors: dict[str, Tensor] = {}
        for index, rollout in enumerate(self.rollouts):
            tensors[f"prompt.{index}"] = torch.tensor(list(rollout.prompt_ids), dtype=torch.int32)
            tensors[f"completion.{index}"] = torch.tensor(list(rollout.completion_ids), dtype=torch.int32)
            # None means that the policy sampled all tokens.
            if rollout.sampled is not None:
                tensors[f"sampled.{index}"] = torch.tensor(list(rollout.sampled), dtype=torch.uint8)
        entries = [{name: getattr(rollout, name) for name in _ROLLOUT_FIELDS} for rollout in self.rollouts]
        record = {"rollouts": entries, "columns": list(self.columns), "version": self.weights_version}
        self._files(folder).write(number, tensors, record)

    @classmethod
    def load(cls, folder: Path, number: int) -> SavedRollouts:
        tensors, record = cls._files(folder).read(number)
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

    @staticmethod
    def _files(folder: Path) -> NumberedFiles:
        return NumberedFiles(folder, "rollouts", "rollouts, schema 1")


_MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108 (a memory file system on every Linux)

_FOLDER_NOTE = "shared_memory.json"
"""The file in a run's folder with the path of its shared memory."""
_PRIVATE_MODE = 0o700


def shared_memory_folder(run: Path) -> Path:
    """Return the folder for a run's weights. If an earlier start of the run was killed and its folder still exists,
    that folder is reused.

    The folder is in memory if the system has a memory file system, and in the run's folder otherwise. Because every
    user can create folders in /dev/shm, an existing folder is reused only if no other user can have written weights to
    it.
    """
    note = run / _FOLDER_NOTE
    if note.is_file() and _is_private(earlier_folder := Path(json.loads(note.read_text(encoding="utf-8"))["folder"])):
        return earlier_folder
    run.mkdir(parents=True, exist_ok=True)
    if _MEMORY_FOLDER.is_dir():
        # mkdtemp creates the folder with mode 0700 and an unpredictable name.
        folder = Path(tempfile.mkdtemp(prefix="composer-monarch-", dir=_MEMORY_FOLDER))
    else:
        folder = run / "weights"
        folder.mkdir(mode=_PRIVATE_MODE, exist_ok=True)
    atomic_write_json(note, {"folder": str(folder)})
    # Nobody else may change the note, which could make us load other weights.
    note.chmod(0o600)
    return folder


def remove_shared_memory_note(run: Path) -> None:
    """Remove the file that records the path of the shared-memory folder. The folder itself is removed by
    `SharedWeights.remove`.
    """
    (run / _FOLDER_NOTE).unlink(missing_ok=True)


def _is_private(folder: Path) -> bool:
    """Return whether the path is a real folder (not a link) that belongs to this user and is inaccessible to other
    users.
    """
    try:
        state = folder.lstat()
    except OSError:
        return False
    # 0o077: no permission for the group or for others.
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o077


class SharedWeights:
    """The policy's weights in shared memory. Version n holds the weights after n batches.

    The trainer writes each version once, and every process on the host maps it into memory, so the weights are not
    copied to disk or sent through a socket. As arguments of an endpoint, they would be pickled at only tens of MB per
    second. A version outlives its writer, so a restarted process finds it. There is one writer and any number of
    readers.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files = NumberedFiles(self.folder, "weights", "weights")

    def versions(self) -> list[int]:
        return list(self._files.paths())

    def publish(self, model: nn.Module, version: int) -> None:
        """Write a new version of the weights. All older versions are deleted except the previous one, which a reader
        may still be opening.
        """
        self.folder.mkdir(mode=_PRIVATE_MODE, parents=True, exist_ok=True)
        # This process is the only writer, so unfinished files are from a process that was killed.
        self._files.remove_unfinished()
        tensors = {name: parameter for name, parameter in model.named_parameters()}  # noqa: C416 (tied ones count once)
        self._files.write(version, tensors, {"version": version}, durable=False)
        for number, path in self._files.paths().items():
            if number < version - 1:
                path.unlink(missing_ok=True)

    @torch.no_grad()
    def load_into(self, model: nn.Module, version: int) -> None:
        """Copy a version of the weights from its mapped file into a model with the same parameters."""
        from safetensors import safe_open

        path = self._files.path(version)
        if not path.is_file():
            fix = "The trainer publishes a version after each batch and after a restart. Check that it is running."
            got = f"versions {self.versions()}"
            raise ArtefactNotFoundError(explain("shared weights", got=got, expected=f"version {version}", fix=fix))
        parameters = dict(model.named_parameters())
        with safe_open(str(path), framework="pt") as file:
            names = set(file.keys())
            # All names are compared before the first copy, so that a wrong model is never partially overwritten.
            if names != parameters.keys():
                got = f"{len(names ^ parameters.keys())} parameters that only the model or only the file has"
                raise StaleArtefactError(
                    explain(f"shared weights {path.name}", got=got, expected="weights of the same model")
                )
            for name, parameter in parameters.items():
                value = file.get_tensor(name)
                if value.shape != parameter.shape:
                    expected = tuple(parameter.shape)
                    raise ShapeError(explain(f"shared weights {name}", got=tuple(value.shape), expected=expected))
                parameter.copy_(value)

    def remove_versions(self) -> None:
        for path in self._files.paths().values():
            path.unlink(missing_ok=True)
        self._files.remove_unfinished()

    def remove(self) -> None:
        """Delete all versions and their folder, because shared memory is not freed when the process ends."""
        self.remove_versions()
        # A folder with other files is kept.
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()


_ROW_TENSORS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "sampled_mask", "advantages")
_TURN_FIELDS = ("start", "end", "teacher_start", "kind", "hint", "turn_id", "wrong_start")


@dataclass(frozen=True, eq=False, kw_only=True)
class StepBatch:
    """A batch of rollouts for the trainer, with prompts padded on the left and completions padded on the right.

    It is stored in a file, so that a restarted actor can find it; as an argument, it would also have to be pickled.
    `sampled_mask` marks the tokens that the policy sampled. `old_logprobs` (B, C) are the log-probs of these tokens
    under the weights that sampled them; None means that those are the weights to be trained, of version
    `weights_version`. `sites` are the turns of each row on which channel 2 (hint distillation) trains. `pairs` are the
    `dpo_*` tensors of `compose_loss`, or empty if there are no pairs; the trainer adds the reference log-probs.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    sampled_mask: Tensor
    advantages: Tensor
    sites: tuple[tuple[ErringTurn, ...], ...]
    old_logprobs: Tensor | None = None
    weights_version: int | None = None
    pairs: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def __post_init__(self) -> None:
        rows, width = self.completion_ids.shape
        expected = {
            # Checked when a batch is built and when it is read, because a wrong shape could broadcast silently.
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
        """A (B, C) mask of the tokens that the policy sampled and that are not padding."""
        return (self.completion_mask * self.sampled_mask).bool()

    def save(self, folder: Path, number: int) -> None:
        tensors: dict[str, Tensor] = {name: getattr(self, name) for name in _ROW_TENSORS}
        if self.old_logprobs is not None:
            tensors["old_logprobs"] = self.old_logprobs
        tensors |= {f"pairs.{name}": value for name, value in self.pairs.items()}
        turns: list[list[dict[str, Any]]] = []
        for row, row_turns in enumerate(self.sites):
            turns.append([{name: getattr(turn, name) for name in _TURN_FIELDS} for turn in row_turns])
            for index, turn in enumerate(row_turns):
                tensors[f"site.{row}.{index}"] = turn.teacher_ids
                # The context with an unrelated hint, if the loss subtracts its effect (the contrast).
                if turn.wrong_ids is not None:
                    tensors[f"wrong.{row}.{index}"] = turn.wrong_ids
        record = {"number": number, "weights_version": self.weights_version, "sites": turns}
        self._files(folder).write(number, tensors, record)

    @classmethod
    def load(cls, folder: Path, number: int) -> StepBatch:
        files = cls._files(folder)
        tensors, record = files.read(number)
        # Training on a copied or renamed file would use the wrong batch.
        if record["number"] != number:
            got = f"batch {record['number']}"
            raise ArtefactCorruptError(explain(str(files.path(number)), got=got, expected=f"batch {number}"))
        sites = tuple(
            tuple(
                ErringTurn(
                    **turn,
                    teacher_ids=tensors[f"site.{row}.{index}"],
                    wrong_ids=tensors.get(f"wrong.{row}.{index}"),
                )
                for index, turn in enumerate(row_turns)
            )
            for row, row_turns in enumerate(record["sites"])
        )
        pairs = {name.removeprefix("pairs."): value for name, value in tensors.items() if name.startswith("pairs.")}
        return cls(
            **{name: tensors[name] for name in _ROW_TENSORS},
            sites=sites,
            old_logprobs=tensors.get("old_logprobs"),
            weights_version=record["weights_version"],
            pairs=pairs,
        )

    @staticmethod
    def exists(folder: Path, number: int) -> bool:
        return StepBatch._files(folder).path(number).is_file()

    @staticmethod
    def _files(folder: Path) -> NumberedFiles:
        return NumberedFiles(folder, "batch", "batch of rollouts, schema 1")
