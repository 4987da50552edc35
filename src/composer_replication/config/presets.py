"""Load configs based on a preset: recommended settings in recipes/presets/*.toml."""

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
    """Return the file of a preset. Raises InputError for an unknown name."""
    if name not in PRESET_FILES:
        raise InputError(explain("preset", got=repr(name), expected=f"one of {', '.join(PRESET_FILES)}"))
    return PRESETS / f"{name}.toml"


def starter_text() -> str:
    """Return the starter config: TOML with a comment on each key."""
    return (PRESETS.parent / "starter.toml").read_text(encoding="utf-8")


def load_with_preset(path: str | os.PathLike[str] | None = None, overrides: Iterable[str] = ()) -> CrfConfig:
    """Return a config from the defaults, the preset of `train.preset`, the file and the overrides. Later ones win."""
    return tables_with_preset([] if path is None else [read_table(path)], overrides)


def tables_with_preset(tables: Iterable[tuple[Mapping[str, Any], str]], overrides: Iterable[str] = ()) -> CrfConfig:
    """Do the same as `load_with_preset` for tables, each with its name for error messages."""
    tables, overrides = list(tables), list(overrides)
    # Errors are raised here, before the preset is added, so that they name the right origin.
    config = from_tables(CrfConfig, tables, overrides)
    if config.train.preset == "none":
        return config
    path = preset_path(config.train.preset)
    preset = tomllib.loads(path.read_text(encoding="utf-8"))
    return from_tables(CrfConfig, [(preset, f"preset {path.stem}"), *tables], overrides)
