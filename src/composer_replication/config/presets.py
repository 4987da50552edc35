"""Configs that come with the package, in recipes/: the one to start from, and presets below a file of one's own."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable
from pathlib import Path

from composer_replication.canonical_json import nested_items
from composer_replication.config import CrfConfig
from composer_replication.config.loader import load
from composer_replication.config.writer import value_text
from composer_replication.errors import InputError, explain

PRESET_FILES: tuple[str, ...] = ("composer", "dapo")
_FOLDER = Path(__file__).parents[1] / "recipes"


def preset_path(name: str) -> Path:
    """The file of a preset."""
    if name not in PRESET_FILES:
        raise InputError(explain("preset", got=repr(name), expected=f"one of {', '.join(PRESET_FILES)}"))
    return _FOLDER / "presets" / f"{name}.toml"


def starter_text() -> str:
    """A config to start from, with a word on each of its keys."""
    return (_FOLDER / "starter.toml").read_text(encoding="utf-8")


def load_with_preset(path: str | os.PathLike[str] | None = None, overrides: Iterable[str] = ()) -> CrfConfig:
    """A config from the defaults, then the preset that `train.preset` names, then the file, then the overrides."""
    overrides = list(overrides)
    given = load(CrfConfig, path, overrides)  # whatever is wrong with the file is told here, by its own name
    if given.train.preset == "none":
        return given
    table = {} if path is None else tomllib.loads(Path(path).read_text(encoding="utf-8"))
    in_file = [f"{key}={value_text(value)}" for key, value in nested_items(table)]  # known keys: they need no quotes
    return load(CrfConfig, preset_path(given.train.preset), [*in_file, *overrides])
