"""Configs that begin with a preset: recommended settings, kept once, in recipes/presets/*.toml."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from composer_replication.config import CrfConfig
from composer_replication.config.loader import from_tables, read_table
from composer_replication.errors import InputError, explain

PRESET_FILES: tuple[str, ...] = ("composer", "dapo")
PRESETS = Path(__file__).parents[1] / "recipes" / "presets"


def preset_path(name: str) -> Path:
    """The file of a preset."""
    if name not in PRESET_FILES:
        raise InputError(explain("preset", got=repr(name), expected=f"one of {', '.join(PRESET_FILES)}"))
    return PRESETS / f"{name}.toml"


def starter_text() -> str:
    """A config to start from, with a word on each of its keys."""
    return (PRESETS.parent / "starter.toml").read_text(encoding="utf-8")


def load_with_preset(path: str | os.PathLike[str] | None = None, overrides: Iterable[str] = ()) -> CrfConfig:
    """A config from the defaults, then the preset that `train.preset` names, then the file, then the overrides."""
    return tables_with_preset([] if path is None else [read_table(path)], overrides)


def tables_with_preset(tables: Iterable[tuple[Mapping[str, Any], str]], overrides: Iterable[str] = ()) -> CrfConfig:
    """The same of tables that were read already, each with what errors call it; later ones win."""
    tables, overrides = list(tables), list(overrides)
    config = from_tables(CrfConfig, tables, overrides)  # whatever is wrong is told here, by its own name
    if config.train.preset == "none":
        return config
    path = preset_path(config.train.preset)
    preset = tomllib.loads(path.read_text(encoding="utf-8"))
    return from_tables(CrfConfig, [(preset, f"preset {path.stem}"), *tables], overrides)
