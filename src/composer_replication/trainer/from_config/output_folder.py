"""Where `crf train` writes, and whether it begins or goes on: checkpoints, metrics, trained weights, the config."""

from __future__ import annotations

import contextlib
import os
import shutil
import tomllib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from composer_replication.atomic import atomic_write_json, try_lock
from composer_replication.canonical_json import decode_object, nested_items
from composer_replication.config import CrfConfig, load
from composer_replication.config.values import (
    RESOLVED_NAME,
    to_toml,
    value_text,
    write_resolved,
)
from composer_replication.errors import (
    ArtefactNotFoundError,
    ConfigError,
    RunError,
    StaleArtefactError,
    explain,
)
from composer_replication.runs import ARTEFACTS, RunDir
from composer_replication.runs.artefacts import control_folder
from composer_replication.runs.lineage import read_training
from composer_replication.trainer.checkpoints.manifest import (
    MANIFEST,
    check_manifest,
    checkpoints_in,
    newest_complete,
)

MODEL_FOLDER = "model"
_LOCK = ".train.lock"
_MADE_OF = "made_of.json"
_READ_BY_TRAINING = ("loss.", "render.", "split.", "train.")
# Where things are does not change what is trained.
_ABOUT_PLACES = frozenset({"train.run", "train.output", "train.resume"})


@dataclass(frozen=True)
class TrainingFolder:
    """The run directory itself, or the folder that `train.output` names; the names in it are the same."""

    root: Path

    @classmethod
    def of(cls, config: CrfConfig) -> TrainingFolder:
        """A control has a folder of its own in that of the training that it is the control of."""
        if config.train.output is not None:
            root = Path(config.train.output)
        elif config.train.run is not None:
            root = RunDir.open(config.train.run).root
        else:
            fix = "Name the folder for checkpoints and metrics."
            raise ConfigError(explain("train.output without train.run", got="none", expected="a folder", fix=fix))
        return cls(root if config.train.control == "none" else control_folder(root, config.train.shuffle))

    @property
    def checkpoints(self) -> Path:
        return self.root / ARTEFACTS["checkpoints"].file_name

    @property
    def warmup(self) -> Path:
        """Checkpoints and metrics of a warm-up, which comes before all others."""
        return self.checkpoints / "warmup"

    @property
    def has_warmup(self) -> bool:
        """Whether a warm-up was begun here that can be gone on from."""
        return any(_has_manifest(folder) for _, folder in checkpoints_in(self.warmup))

    def take_warmup(self, other: TrainingFolder) -> None:
        """Begin with a copy of another training's warm-up; what that began with is compared before it is used."""
        making = self.checkpoints / f".{self.warmup.name}.making"
        shutil.rmtree(making, ignore_errors=True)
        shutil.copytree(other.warmup, making)
        making.rename(self.warmup)

    @property
    def has_begun(self) -> bool:
        """Whether a training has left something here, finished or not."""
        names = (ARTEFACTS[name].file_name for name in ("adapter", "checkpoints"))
        return any((self.root / name).exists() for name in (*names, MODEL_FOLDER))

    def record(self, *, is_adapter: bool) -> dict[str, Any] | None:
        """What `training.json` says of the weights that are here; None without any."""
        return read_training(self.trained(is_adapter=is_adapter)) or None

    def made_of(self) -> dict[str, str] | None:
        """The files that a training began with, by name, with their hashes; None where none has begun."""
        path = self.checkpoints / _MADE_OF
        record: dict[str, Any] | None = decode_object(path.read_bytes()) if path.exists() else None
        return None if record is None else record["sources"]

    def set_aside(self) -> Path:
        """Move what a training has left into a folder of its own, so that another can begin here."""
        earlier = self.root / ARTEFACTS["earlier"].file_name
        number = 1 + max((int(folder.name) for folder in earlier.glob("[0-9]*")), default=0)
        destination = earlier / str(number)
        destination.mkdir(parents=True)
        names = ("adapter", "model", "metrics", "config", "control", "ref_logprobs", "checkpoints")
        for path in (self.root / ARTEFACTS[name].file_name for name in names):
            if path.exists():
                path.rename(destination / path.name)
        return destination

    def check_made_of(self, sessions: str, sources: Mapping[str, str], changes: Sequence[str]) -> None:
        """Refuse to go on with other sessions than a training began with; one that begins notes its own.

        `sessions` is their digest, `sources` the artefacts that they were read from, by name, with their hashes.
        """
        path, now = self.checkpoints / _MADE_OF, {"sessions": sessions, "sources": dict(sources)}
        has_begun = self.newest_step() is not None or self.has_warmup
        record: dict[str, Any] | None = decode_object(path.read_bytes()) if path.exists() else None
        if not has_begun:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            atomic_write_json(path, now)
        elif record is not None and record["sessions"] != sessions:
            before = record["sources"]
            changed = [name for name in {**before, **sources} if before.get(name) != sources.get(name)]
            got = f"a training that began with other sessions{f', before {_and(changed)} changed' if changed else ''}"
            options = f" Set otherwise than when the run began: {'; '.join(changes)}." if changes else ""
            fix = "To train anew beside it: `--set train.output=FOLDER`."
            raise StaleArtefactError(explain(str(self.checkpoints), got=got, expected="these", fix=fix) + options)

    @property
    def metrics(self) -> Path:
        return self.root / ARTEFACTS["metrics"].file_name

    @property
    def config(self) -> Path:
        return self.root / RESOLVED_NAME

    def trained(self, *, is_adapter: bool) -> Path:
        """Where the weights go that a finished run has made."""
        return self.root / (ARTEFACTS["adapter"].file_name if is_adapter else MODEL_FOLDER)

    @contextlib.contextmanager
    def held(self, *, is_main: bool = True) -> Generator[None, None, None]:
        """For one training at a time; of several processes of one training, the main one holds it."""
        self.root.mkdir(parents=True, exist_ok=True)
        if not is_main:
            yield
            return
        descriptor = os.open(self.root / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not try_lock(descriptor):
                fix = "Wait until it is done, or set train.output."
                got = "another process training there"
                raise RunError(explain(str(self.root), got=got, expected="the folder for itself", fix=fix))
            yield
        finally:
            os.close(descriptor)  # gives the lock back; the file stays, since removing it would let two hold two

    def newest_step(self) -> int | None:
        """The step of the newest checkpoint whose manifest holds; what its files hold is checked when it is loaded."""
        steps = [step for (step, _), folder in checkpoints_in(self.checkpoints) if _has_manifest(folder)]
        return max(steps, default=None)

    def newest_checkpoint(self) -> Path | None:
        """The folder that a run goes on from: the newest whose files are all as they were saved, which are read."""
        return newest_complete(self.checkpoints)

    def resumption(self, steps: int) -> str:
        """Return what a training of so many steps that has begun here does next, with the options it began with."""
        newest = self.newest_step()
        warm_up = [step for (step, _), folder in checkpoints_in(self.warmup) if _has_manifest(folder)]
        if newest is None and not warm_up:
            return f"starts from the beginning: none of its {steps:,} steps was saved"
        if newest is None:
            done = f"resumes from step {max(warm_up):,} of its warm-up: none of its {steps:,} steps was made"
        else:
            done = f"resumes from step {newest:,} of {steps:,}"
        unknown = f"; with which options it began is not known, as {self.config.name} is not there"
        return done if self.config.exists() else done + unknown

    def resumes(self, *, asked: bool, wanted: bool) -> bool:
        """Whether to go on from a checkpoint: `asked` insists on one, `wanted` takes one that is there."""
        newest = self.newest_step()
        if newest is None:
            self._refuse_what_cannot_be_read()
        if newest is None and asked and not self.has_warmup:
            fix = "Leave --resume out to begin."
            got = "no complete checkpoint"
            raise ArtefactNotFoundError(explain(str(self.checkpoints), got=got, expected="one", fix=fix))
        if (newest is not None or self.has_warmup) and not (asked or wanted):
            fix = "A new run needs a folder of its own (train.output), or an empty one."
            got = f"checkpoint-{newest} of an earlier run" if newest is not None else "a warm-up of an earlier run"
            raise RunError(explain(f"{self.checkpoints}, with train.resume = false", got=got, expected="none", fix=fix))
        return newest is not None

    def _refuse_what_cannot_be_read(self) -> None:
        """Finished checkpoints of another version are a run, too: training anew over them would lose it.

        One without a manifest was being written when its run was stopped, and is passed over.
        """
        for _, folder in sorted(checkpoints_in(self.checkpoints), reverse=True):
            if (folder / MANIFEST).exists():
                try:
                    check_manifest(folder, hashes=False)
                except RunError as error:
                    fix = "Go on with the version that saved it, or begin anew in another folder: train.output."
                    got = f"{folder.name}, which cannot be read ({error})"
                    raise RunError(
                        explain(str(self.checkpoints), got=got, expected="one of this version", fix=fix)
                    ) from error

    def write_config(self, config: CrfConfig) -> Path:
        self.root.mkdir(parents=True, exist_ok=True)
        return write_resolved(config, self.root)

    def with_first_primary(self, config: CrfConfig) -> CrfConfig:
        """A training that has begun keeps the primary figure that it began with: a later one is not named beforehand.

        An evaluation that is asked for another finds this one beside the weights, and says so.
        """
        if not self.config.exists() or (self.newest_step() is None and not self.has_warmup):
            return config
        try:
            first = load(CrfConfig, self.config).evaluation.primary
            return replace(config, evaluation=replace(config.evaluation, primary=first))
        except ConfigError:  # somebody edited it: nothing shows what was named
            return config

    def changed_options(self, config: CrfConfig) -> list[str]:
        """What is set otherwise than in the config that the run began with, as `path: then -> now`."""
        if not self.config.exists():
            return []
        try:
            before = dict(nested_items(tomllib.loads(self.config.read_text(encoding="utf-8"))))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError):  # somebody edited it: nothing to compare with
            return []
        now = dict(nested_items(tomllib.loads(to_toml(config))))
        paths = sorted(
            path for path in (before.keys() | now.keys()) - _ABOUT_PLACES if path.startswith(_READ_BY_TRAINING)
        )
        return [
            f"{path}: {value_text(before.get(path))} -> {value_text(now.get(path))}"
            for path in paths
            if before.get(path) != now.get(path)
        ]

    def replace_trained(self, made: Path, *, is_adapter: bool) -> Path:
        """Put a folder of finished weights in its place; what an earlier run left there goes."""
        destination = self.trained(is_adapter=is_adapter)
        if destination.exists():
            shutil.rmtree(destination)
        made.rename(destination)
        return destination


def _and(names: Sequence[str]) -> str:
    return " and ".join(names)


def _has_manifest(folder: Path) -> bool:
    try:
        check_manifest(folder, hashes=False)
    except (RunError, OSError):
        return False
    return True
