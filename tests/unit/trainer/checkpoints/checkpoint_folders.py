"""Folders with the files of a checkpoint, whose contents do not matter, and manifests of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from composer_replication.trainer.checkpoints import write_manifest

TREES = ("optimizer", "scheduler", "rng-0", "cursor-0", "extra-0")
TREE_FILES = [f"{tree}.{kind}" for tree in TREES for kind in ("json", "safetensors")]
NEEDED = ("model.safetensors", "trainer_state.json", *TREE_FILES)
MODEL = {"class": "Tiny", "config": {}, "adapters": {}, "parameters": {}, "base_weights": None}
ABOUT = {"model": MODEL, "data": {"num_processes": 1}, "weights_only": False}


def checkpoint(output: Path, step: int, *, complete: bool = True) -> Path:
    """The needed files, `a.json` and a file in a folder of its own."""
    folder = output / f"checkpoint-{step}"
    (folder / "adapter").mkdir(parents=True)
    for name in NEEDED:
        (folder / name).write_text(f"{name} of {step}")
    (folder / "a.json").write_text(f'{{"step": {step}}}')
    (folder / "adapter" / "b.safetensors").write_bytes(bytes(range(64)))
    if complete:
        write_manifest(folder, step=step, about=ABOUT)
    return folder


def change_manifest(folder: Path, **changes: Any) -> None:
    """Set fields of the manifest; one that is set to `...` is taken out."""
    fields = json.loads((folder / "manifest.json").read_bytes()) | changes
    kept = {name: value for name, value in fields.items() if value is not ...}
    (folder / "manifest.json").write_text(json.dumps(kept))


def files_of(folder: Path) -> dict[str, Any]:
    """What the manifest lists."""
    return json.loads((folder / "manifest.json").read_bytes())["files"]


def names(output: Path) -> list[str]:
    return sorted(path.name for path in output.iterdir())
