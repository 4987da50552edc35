"""Which weights are meant: those that a run trained, a folder with an adapter, or a model by its folder or name.

A name that is no folder is one on the hub. Of a folder the absolute path is kept: a relative one means something else
from the next folder on, and an adapter without its start weights is of no use.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_replication.atomic import atomic_write_json
from composer_replication.batch.model_folder import resolve_model
from composer_replication.envs.student import student_folder
from composer_replication.errors import ArtefactNotFoundError, InputError, explain
from composer_replication.runs import ARTEFACTS, RunDir
from composer_replication.runs.directory import MARKER
from composer_replication.runs.elsewhere import made_elsewhere
from composer_replication.runs.lineage import half_trained, read_object, read_training
from composer_replication.runs.source_paths import find_source

ADAPTER_CONFIG = "adapter_config.json"
UNKNOWN_LICENCE = "unknown: look it up"
_BASE = "base_model_name_or_path"
_MAX_CARD = 1 << 20
_LICENCE_LINE = re.compile(r"^licen[sc]e:[ \t]*[\"']?([A-Za-z0-9][\w.+-]*)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Start weights, and what was made of them: an adapter's folder, or one of weights trained whole, or neither.

    `base` is an absolute folder or a hub name; `record` is `training.json`, empty where there is none; `run` is the run
    directory that was named, if one was.
    """

    base: str
    adapter: Path | None = None
    model: Path | None = None
    record: Mapping[str, Any] = field(default_factory=dict[str, Any])
    run: RunDir | None = None

    @property
    def folder(self) -> Path | None:
        return self.adapter or self.model


def find_trained(name: str, adapter: str | None = None) -> Trained:
    """What a run directory, an output folder of a training, an adapter, or a model's folder or name stands for."""
    path = Path(name).expanduser()
    run = RunDir.open(path) if (path / MARKER).is_file() else None
    if adapter is not None:
        folder = Path(adapter).expanduser()
        if not (folder / ADAPTER_CONFIG).is_file():
            fix = "Name the folder `adapter` that `crf train` left, or another one of PEFT's."
            raise InputError(explain(f"--adapter {adapter}", got=f"no {ADAPTER_CONFIG} in it", expected="one", fix=fix))
        base = _base_of(folder) if run is not None else absolute_base(name)
        return Trained(base=base, adapter=folder, record=read_training(folder), run=run)
    folder = _weights_in(path, run)
    if folder is None and run is not None:
        fix = (
            f"`crf train --set train.run={name!r} --set train.model=MODEL` trains some; or name them: --adapter FOLDER."
        )
        progress = half_trained(run.root)
        got, fix = (progress, "") if progress else ("none", fix)
        raise ArtefactNotFoundError(explain(f"trained weights of {name}", got=got, expected="an adapter", fix=fix))
    if folder is None:
        return Trained(base=absolute_base(name))
    if (folder / ADAPTER_CONFIG).is_file():
        return Trained(base=_base_of(folder), adapter=folder, record=read_training(folder), run=run)
    record = read_training(folder)
    return Trained(base=absolute_base(str(record.get("start_weights") or name)), model=folder, record=record, run=run)


def _weights_in(path: Path, run: RunDir | None) -> Path | None:
    """The folder of trained weights: this one, one in it, or the last that a run has noted elsewhere."""
    if (path / ADAPTER_CONFIG).is_file():
        return path
    for name in ("adapter", "model"):
        folder = path / ARTEFACTS[name].file_name
        if (folder / ADAPTER_CONFIG).is_file() or (folder / "config.json").is_file():
            return folder
    if run is None:
        return None
    noted = [entry for entry in made_elsewhere(run) if entry.what == "trained weights"]
    return find_source(noted[-1].path, run.root) if noted else None


def _base_of(adapter: Path) -> str:
    """The start weights that an adapter names. A relative path was meant from where it was trained: looked for from
    here, and from the folders that the adapter lies in."""
    base = read_object(adapter / ADAPTER_CONFIG).get(_BASE) or read_training(adapter).get("start_weights")
    if not isinstance(base, str) or not base:
        fix = "Name the start weights: `crf chat MODEL --adapter FOLDER`."
        raise InputError(explain(f"{adapter / ADAPTER_CONFIG}, {_BASE}", got=repr(base), expected="a model", fix=fix))
    return absolute_base(base, near=adapter.resolve().parents)


def absolute_base(name: str, *, near: Iterable[Path] = ()) -> str:
    """A folder by its absolute path, a hub name as it is; `student` is the model that comes with the package."""
    path = Path(name).expanduser()
    for candidate in (path, *((folder / path) for folder in near)):
        if name and candidate.is_dir():
            return str(candidate.resolve())
    return resolve_model(name)


def is_folder(base: str) -> bool:
    return Path(base).is_dir()


def settle_base(adapter: Path) -> str:
    """Write the absolute path of the start weights into an adapter's config; a hub name stays."""
    base, config = _base_of(adapter), read_object(adapter / ADAPTER_CONFIG)
    if config.get(_BASE) != base:
        atomic_write_json(adapter / ADAPTER_CONFIG, {**config, _BASE: base})
    return base


def licence_of(base: str) -> str:
    """What the start weights' own card or config says their licence is, or that nobody knows."""
    if is_folder(base) and Path(base).samefile(student_folder()):
        return "apache-2.0"  # a part of this package
    for path in _cards_of(base):
        if not path.is_file() or path.stat().st_size > _MAX_CARD:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix == ".json":
            card = read_object(path)
            licence = card.get("license") or card.get("licence")
            if isinstance(licence, str) and licence.strip():
                return _one_line(licence)
        elif text.startswith("---") and (match := _LICENCE_LINE.search(text.split("\n---", 1)[0])):
            return _one_line(match[1])
    return UNKNOWN_LICENCE


def _cards_of(base: str) -> list[Path]:
    names = ("README.md", "config.json", "card.json")
    if is_folder(base):
        return [Path(base) / name for name in names]
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = [try_to_load_from_cache(base, name) for name in names]
    except HFValidationError:  # no name of a repository
        return []
    return [Path(path) for path in cached if isinstance(path, str)]


def _one_line(text: str) -> str:
    return "".join(character for character in " ".join(text.split())[:80] if character.isprintable())
