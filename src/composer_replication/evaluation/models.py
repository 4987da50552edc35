"""Which models an evaluation compares, and with which settings; loads no torch, so that wrong input fails at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from composer_replication.config import CrfConfig, config_hash, load
from composer_replication.config.values import RESOLVED_NAME
from composer_replication.errors import InputError, explain
from composer_replication.runs import ARTEFACTS, RunDir
from composer_replication.runs.artefacts import control_folders
from composer_replication.runs.lineage import RECORD, describe_unfinished, read_training


class Models(NamedTuple):
    """Names of the models to compare: folders, hub names or adapters."""

    before: str
    after: str
    controls: tuple[str, ...] = ()


def with_settings_of_training(
    settings: CrfConfig, run: RunDir, after: str | None, overrides: Sequence[str] = ()
) -> CrfConfig:
    """Return the settings that the weights were trained with, below the overrides, or `settings` if they are unknown.

    A model is evaluated with the template, windows and contexts that it was trained on.
    """
    root = Path(settings.train.output) if settings.train.output is not None else run.root
    weights = after or _trained(root)
    path = None if weights is None else trained_with(weights)
    if path is None:
        return settings
    config = load(CrfConfig, path, overrides)
    return replace(config, train=replace(config.train, output=settings.train.output))


def trained_with(weights: str) -> Path | None:
    """Return the file of settings beside trained weights, or None if there is none or it has changed since."""
    folder = Path(weights)
    path = folder.parent / RESOLVED_NAME
    try:
        return path if config_hash(load(CrfConfig, path)) == read_training(folder).get("config_hash") else None
    except (OSError, ValueError):  # weights from elsewhere, or settings that were edited by hand
        return None


def models_of(
    config: CrfConfig,
    run: RunDir,
    *,
    before: str | None = None,
    after: str | None = None,
    control: str | Sequence[str] = (),
) -> Models:
    """Return the models to compare: those given by name, otherwise the weights, start and controls of the run's
    training.

    Raises InputError if there is no trained model or nothing to compare it with.
    """
    controls = [control] if isinstance(control, str) else list(control)
    root = Path(config.train.output) if config.train.output is not None else run.root
    if after is None:
        after = _trained(root)
        # All shuffles that the training left, unless the user named controls.
        controls = controls or [weights for folder in control_folders(root) if (weights := _trained(folder))]
        if after is None:
            partial_training = describe_unfinished(root)
            got = partial_training or "no trained weights in the run"
            fix = "" if partial_training else "Run `crf train`, or name a model."
            raise InputError(explain("--after", got=got, expected="a trained model", fix=fix))
    if before is None:
        before = _start_of(Path(after)) or config.train.model
        if before is None:
            got = f"no {RECORD} in {after} that names the initial model"
            raise InputError(
                explain("--before", got=got, expected="the model to compare with", fix="Pass --before MODEL.")
            )
    return Models(before, after, tuple(controls))


def _trained(root: Path) -> str | None:
    paths = (root / ARTEFACTS[name].file_name for name in ("adapter", "model"))
    return next((str(path) for path in paths if path.is_dir()), None)


def _start_of(folder: Path) -> str | None:
    start_weights = read_training(folder).get("start_weights")  # weights from elsewhere have no training record
    return start_weights if isinstance(start_weights, str) else None
