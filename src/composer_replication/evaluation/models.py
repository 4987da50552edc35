"""Choose the models that an evaluation compares, and its settings.

This module does not import torch, so invalid input is reported at once.
"""

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


class _Models(NamedTuple):
    """The models to compare; each is a folder, a hub name or an adapter."""

    before: str
    after: str
    controls: tuple[str, ...] = ()


def with_settings_of_training(
    settings: CrfConfig, run: RunDir, after: str | None, overrides: Sequence[str] = ()
) -> CrfConfig:
    """Return the settings with which the weights were trained, with the overrides applied.

    A model has to be evaluated with the template, windows and contexts that it was trained with. If the settings of the
    training are unknown, `settings` is returned.
    """
    root = Path(settings.train.output) if settings.train.output is not None else run.root
    weights = after or _trained_weights(root)
    path = None if weights is None else training_settings(weights)
    if path is None:
        return settings
    config = load(CrfConfig, path, overrides)
    return replace(config, train=replace(config.train, output=settings.train.output))


def training_settings(weights: str) -> Path | None:
    """Return the path of the settings file from the training that wrote `weights`.

    The result is None if the file does not exist or was edited.
    """
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
) -> _Models:
    """Return the models to compare.

    A model that is not named is taken from the run's own training: its initial model, its result, or its controls.
    Raises InputError if there is no trained model, or no initial model to compare it with.
    """
    controls = [control] if isinstance(control, str) else list(control)
    root = Path(config.train.output) if config.train.output is not None else run.root
    if after is None:
        after = _trained_weights(root)
        # The controls of all shuffles in the run, unless the user named controls.
        controls = controls or [weights for folder in control_folders(root) if (weights := _trained_weights(folder))]
        if after is None:
            partial_training = describe_unfinished(root)
            got = partial_training or "no trained weights in the run"
            fix = "" if partial_training else "Run `crf train`, or name a model."
            raise InputError(explain("--after", got=got, expected="a trained model", fix=fix))
    if before is None:
        before = _initial_model(Path(after)) or config.train.model
        if before is None:
            got = f"no {RECORD} in {after} that names the initial model"
            raise InputError(
                explain("--before", got=got, expected="the initial model to compare with", fix="Pass --before MODEL.")
            )
    return _Models(before, after, tuple(controls))


def _trained_weights(root: Path) -> str | None:
    paths = (root / ARTEFACTS[name].file_name for name in ("adapter", "model"))
    return next((str(path) for path in paths if path.is_dir()), None)


def _initial_model(folder: Path) -> str | None:
    start_weights = read_training(folder).get("start_weights")  # weights from elsewhere have no training record
    return start_weights if isinstance(start_weights, str) else None
