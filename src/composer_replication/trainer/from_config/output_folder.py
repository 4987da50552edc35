"""Manage the folder to which `crf train` writes checkpoints, metrics, weights and config, and from which it resumes."""

from __future__ import annotations

import contextlib
import os
import shutil
import tomllib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from composer_replication.atomic import atomic_write_json, staged_path, try_lock
from composer_replication.canonical_json import decode_object, nested_items
from composer_replication.config import CrfConfig, load
from composer_replication.config.values import RESOLVED_NAME, to_toml, value_text, write_resolved
from composer_replication.errors import ArtefactNotFoundError, ConfigError, RunError, StaleArtefactError, explain
from composer_replication.runs import ARTEFACTS, RunDir
from composer_replication.runs.artefacts import Source, control_folder
from composer_replication.runs.lineage import hash_source, read_training
from composer_replication.runs.split import NAME as SPLIT
from composer_replication.trainer.checkpoints.manifest import MANIFEST, check_manifest, checkpoints_in, newest_complete

MODEL_FOLDER = "model"
_SOURCES = ("conversations", "tools", SPLIT, "sites", "pairs")
_LOCK = ".train.lock"
_SOURCES_NAME = "made_of.json"
_READ_BY_TRAINING = ("loss.", "render.", "split.", "train.")
# Paths do not affect the weights that a training produces.
_PATH_OPTIONS = frozenset({"train.run", "train.output", "train.resume"})


@dataclass(frozen=True)
class TrainingFolder:
    """The folder for a training run's files: the run directory, or `train.output`. Both use the same file names."""

    root: Path

    @classmethod
    def of(cls, config: CrfConfig) -> TrainingFolder:
        """Return the folder for a config.

        A control (a training on shuffled data) has its own folder inside the folder of the training that it is compared
        with.
        """
        if config.train.output is not None:
            root = Path(config.train.output)
        elif config.train.run is not None:
            root = RunDir.open(config.train.run).root
        else:
            fix = "Set train.output to the folder for checkpoints and metrics."
            raise ConfigError(explain("train.output without train.run", got="none", expected="a folder", fix=fix))
        return cls(root if config.train.control == "none" else control_folder(root, config.train.shuffle))

    @property
    def checkpoints(self) -> Path:
        return self.root / ARTEFACTS["checkpoints"].file_name

    @property
    def warmup(self) -> Path:
        """The folder for the warm-up's checkpoints and metrics."""
        return self.checkpoints / "warmup"

    @property
    def has_warmup(self) -> bool:
        """Whether this folder contains a warm-up that can be resumed."""
        return any(_has_manifest(folder) for _, folder in checkpoints_in(self.warmup))

    def copy_warmup(self, source: TrainingFolder) -> None:
        """Copy the warm-up of another training run. Its origin is checked later, when the warm-up is used."""
        with staged_path(self.warmup) as unfinished:
            shutil.copytree(source.warmup, unfinished)

    @property
    def has_begun(self) -> bool:
        """Whether this folder contains files from a training run, finished or not."""
        names = (ARTEFACTS[name].file_name for name in ("adapter", "checkpoints"))
        return any((self.root / name).exists() for name in (*names, MODEL_FOLDER))

    def record(self, *, is_adapter: bool) -> dict[str, Any] | None:
        """Return the contents of `training.json` for the weights in this folder, or None if there are no weights."""
        return read_training(self.trained(is_adapter=is_adapter)) or None

    def made_of(self) -> dict[str, str] | None:
        """Return the hashes of the files that the training here began with, by name, or None without a training run."""
        path = self.checkpoints / _SOURCES_NAME
        record: dict[str, Any] | None = decode_object(path.read_bytes()) if path.exists() else None
        return None if record is None else record["sources"]

    def set_aside(self) -> Path:
        """Move the training run's files to a new folder `earlier/N`, and return that folder.

        Another training can then begin in this folder.
        """
        earlier = self.root / ARTEFACTS["earlier"].file_name
        # The folders are numbered 1, 2, ...
        number = 1 + max((int(folder.name) for folder in earlier.glob("[0-9]*")), default=0)
        destination = earlier / str(number)
        destination.mkdir(parents=True)
        names = ("adapter", "model", "metrics", "config", "control", "ref_logprobs", "checkpoints")
        for path in (self.root / ARTEFACTS[name].file_name for name in names):
            if path.exists():
                path.rename(destination / path.name)
        return destination

    def check_sources(self, sessions: str, sources: Mapping[str, str], changes: Sequence[str]) -> None:
        """Raise StaleArtefactError if the training here began with other sessions.

        If no training has begun, the sessions are recorded instead. `sessions` is their digest. `sources` maps the
        names of the artifacts from which they were read to the artifacts' hashes.
        """
        path, now = self.checkpoints / _SOURCES_NAME, {"sessions": sessions, "sources": dict(sources)}
        has_begun = self.newest_step() is not None or self.has_warmup
        record: dict[str, Any] | None = decode_object(path.read_bytes()) if path.exists() else None
        if not has_begun:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            atomic_write_json(path, now)
        elif record is not None and record["sessions"] != sessions:
            before = record["sources"]
            changed = [name for name in {**before, **sources} if before.get(name) != sources.get(name)]
            reason = f" ({' and '.join(changed)} changed since then)" if changed else ""
            got = f"a training that began with other sessions{reason}"
            options = f" Changed since the run began: {'; '.join(changes)}." if changes else ""
            fix = "Use another folder for a new training: `--set train.output=FOLDER`."
            raise StaleArtefactError(
                explain(str(self.checkpoints), got=got, expected="the current sessions", fix=fix) + options
            )

    @property
    def metrics(self) -> Path:
        return self.root / ARTEFACTS["metrics"].file_name

    @property
    def config(self) -> Path:
        return self.root / RESOLVED_NAME

    def trained(self, *, is_adapter: bool) -> Path:
        """Return the folder in which a finished training run stores its weights."""
        return self.root / (ARTEFACTS["adapter"].file_name if is_adapter else MODEL_FOLDER)

    @contextlib.contextmanager
    def held(self, *, is_main: bool = True) -> Generator[None, None, None]:
        """Lock the folder inside the block, so that only one training run at a time uses it.

        Raises RunError if another training run holds the lock. If a training run has several processes, only the main
        process takes the lock.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        if not is_main:
            yield
            return
        # An advisory lock, which the kernel releases if the process dies.
        descriptor = os.open(self.root / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not try_lock(descriptor):
                fix = "Wait until that training is finished, or set train.output."
                got = "another training in progress"
                raise RunError(explain(str(self.root), got=got, expected="exclusive access to the folder", fix=fix))
            yield
        finally:
            # Closing releases the lock. The file stays: if it were deleted, two processes could lock different files.
            os.close(descriptor)

    def newest_step(self) -> int | None:
        """Return the step of the newest checkpoint with a valid manifest.

        The checkpoint's files are checked when they are loaded.
        """
        steps = [step for (step, _), folder in checkpoints_in(self.checkpoints) if _has_manifest(folder)]
        return max(steps, default=None)

    def newest_checkpoint(self) -> Path | None:
        """Return the newest checkpoint whose files are all intact, or None.

        This is slow, because checking a checkpoint reads all its files.
        """
        return newest_complete(self.checkpoints)

    def resumption(self, steps: int) -> str:
        """Describe from which step the training in this folder, `steps` steps long, would resume."""
        newest = self.newest_step()
        warm_up = [step for (step, _), folder in checkpoints_in(self.warmup) if _has_manifest(folder)]
        if newest is None and not warm_up:
            return f"starts from the beginning: none of its {steps:,} steps was saved"
        if newest is None:
            progress = f"resumes from step {max(warm_up):,} of its warm-up; none of its {steps:,} steps is done yet"
        else:
            progress = f"resumes from step {newest:,} of {steps:,}"
        missing = f"; the options it began with are unknown, as {self.config.name} is missing"
        return progress if self.config.exists() else progress + missing

    def resumes(self, *, is_required: bool, is_allowed: bool) -> bool:
        """Return whether there is a checkpoint to resume from.

        If `is_required`, raises ArtefactNotFoundError if there is neither a checkpoint nor a warm-up. If resuming is
        neither required nor allowed (`is_allowed`), raises RunError if there is one.
        """
        newest = self.newest_step()
        if newest is None:
            self._refuse_unreadable_checkpoints()
        if newest is None and is_required and not self.has_warmup:
            fix = "Omit --resume to start from the beginning."
            got = "no complete checkpoint"
            raise ArtefactNotFoundError(
                explain(str(self.checkpoints), got=got, expected="a checkpoint to resume from", fix=fix)
            )
        if (newest is not None or self.has_warmup) and not (is_required or is_allowed):
            fix = "Set train.output to an empty folder for a new run."
            got = f"checkpoint-{newest} from an earlier run" if newest is not None else "a warm-up from an earlier run"
            raise RunError(
                explain(f"{self.checkpoints} with train.resume = false", got=got, expected="no checkpoints", fix=fix)
            )
        return newest is not None

    def _refuse_unreadable_checkpoints(self) -> None:
        """Raise RunError if a new training run would overwrite complete checkpoints from another version.

        A checkpoint without a manifest is ignored, because its run was stopped while writing it.
        """
        for _, folder in sorted(checkpoints_in(self.checkpoints), reverse=True):
            if (folder / MANIFEST).exists():
                try:
                    check_manifest(folder, hashes=False)
                except RunError as error:
                    fix = "Resume with the version that saved the checkpoint, or use another folder (train.output)."
                    got = f"{folder.name}, which cannot be read ({error})"
                    raise RunError(
                        explain(str(self.checkpoints), got=got, expected="a checkpoint saved by this version", fix=fix)
                    ) from error

    def write_config(self, config: CrfConfig) -> Path:
        self.root.mkdir(parents=True, exist_ok=True)
        return write_resolved(config, self.root)

    def with_first_primary(self, config: CrfConfig) -> CrfConfig:
        """Return the config with the primary evaluation result that was chosen before the training began.

        The config stored with the weights thus always has the original choice, and an evaluation that uses another
        primary result also reports the original one.
        """
        if not self.config.exists() or (self.newest_step() is None and not self.has_warmup):
            return config
        try:
            first = load(CrfConfig, self.config).evaluation.primary
            return replace(config, evaluation=replace(config.evaluation, primary=first))
        except ConfigError:  # the file was edited, so the first primary result is unknown
            return config

    def changed_options(self, config: CrfConfig) -> list[str]:
        """Return the options that have changed since the run began, as `path: before -> now`."""
        if not self.config.exists():
            return []
        try:
            before = dict(nested_items(tomllib.loads(self.config.read_text(encoding="utf-8"))))
        # The file is no longer valid TOML, so no comparison is possible.
        except (tomllib.TOMLDecodeError, UnicodeDecodeError):
            return []
        # Parse both sides from TOML, so that equal values compare equal regardless of their Python types.
        now = dict(nested_items(tomllib.loads(to_toml(config))))
        paths = sorted(
            path for path in (before.keys() | now.keys()) - _PATH_OPTIONS if path.startswith(_READ_BY_TRAINING)
        )
        return [
            f"{path}: {value_text(before.get(path))} -> {value_text(now.get(path))}"
            for path in paths
            if before.get(path) != now.get(path)
        ]

    def replace_trained(self, folder: Path, *, is_adapter: bool) -> Path:
        """Rename a folder with finished weights to its final name, replacing the weights of an earlier run."""
        destination = self.trained(is_adapter=is_adapter)
        if destination.exists():
            shutil.rmtree(destination)
        folder.rename(destination)
        return destination


def _has_manifest(folder: Path) -> bool:
    try:
        check_manifest(folder, hashes=False)
    except (RunError, OSError):
        return False
    return True


def current_sources(run: RunDir | None) -> list[Source]:
    """Return the artifacts from which a training on this run reads its data, with their current hashes."""
    return [] if run is None else [hash_source(run.root, name) for name in _SOURCES if run.path(name).exists()]
