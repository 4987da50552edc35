"""Where an artefact came from, and whether what it came from has changed since; of weights, `training.json` says it."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_replication.canonical_json import decode_object
from composer_replication.errors import ArtefactNotFoundError, InputError, explain
from composer_replication.runs.artefacts import ARTEFACTS, find_artefact
from composer_replication.runs.records import check_pair, not_found, open_records
from composer_replication.runs.sidecar import ArtefactMeta, Source, sha256_of_file
from composer_replication.runs.source_paths import find_source, portable_name

RECORD = "training.json"
_ARTEFACT, _FILE = "artefact", "file"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """The ancestors of one artefact.

    `artefacts` names them and the artefact itself, each after its sources; `inputs` are the files outside the run that
    the chain starts from. `stale` names those of `artefacts` whose sources changed after they were written, or are
    stale themselves. `missing` lists sources that are gone, so that nobody can tell whether they changed.
    """

    artefacts: tuple[str, ...]
    inputs: tuple[Source, ...]
    stale: tuple[str, ...]
    missing: tuple[str, ...]


def trace_lineage(directory: Path, name: str) -> Lineage:
    """Walk the sources of artefact `name` back to the files outside the run."""
    walk = _Walk(directory)
    walk.visit(name)
    return Lineage(
        artefacts=tuple(walk.visited),
        inputs=tuple(walk.inputs),
        stale=tuple(each for each in walk.visited if each in walk.stale),
        missing=tuple(walk.missing),
    )


def changed_sources(directory: Path, name: str) -> list[str]:
    """Of what artefact `name` was made of: what is another now, or is old itself."""
    meta, _ = _load(directory, name)
    return [source.name for source in (meta.sources if meta else ()) if _Walk(directory).has_changed(source)]


def hash_source(directory: Path, source: str | Path) -> Source:
    """The source as it is now; a string that names an artefact means that artefact, anything else is a path."""
    if isinstance(source, str) and source in ARTEFACTS:
        return Source(kind=_ARTEFACT, name=source, sha256=_load(directory, source)[1])
    path = Path(source)
    if not path.is_file():
        raise InputError(f"source {str(source)!r} is neither a file nor an artefact ({', '.join(ARTEFACTS)})")
    return Source(kind=_FILE, name=portable_name(path, directory), sha256=sha256_of_file(path))


class _Walk:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sha256: dict[str, str] = {}
        self.visited: list[str] = []
        self.inputs: dict[Source, None] = {}
        self.missing: dict[str, None] = {}
        self.stale: set[str] = set()

    def visit(self, name: str) -> str:
        """The current hash of artefact `name`, with all its ancestors walked."""
        if name not in self._sha256:
            meta, self._sha256[name] = _load(self._directory, name)  # recorded before its sources: ends a cycle
            changed = [self.has_changed(source) for source in (meta.sources if meta else ())]
            if any(changed):
                self.stale.add(name)
            self.visited.append(name)
        return self._sha256[name]

    def has_changed(self, source: Source) -> bool:
        if source.kind == _ARTEFACT:
            try:
                return self.visit(source.name) != source.sha256 or source.name in self.stale
            except ArtefactNotFoundError:
                self.missing[source.name] = None
                return False
        self.inputs[source] = None
        path = find_source(source.name, self._directory)
        if not path.is_file():
            self.missing[source.name] = None
            return False
        return sha256_of_file(path) != source.sha256


def _load(directory: Path, name: str) -> tuple[ArtefactMeta | None, str]:
    """The sidecar (records have one) and the hash of an artefact as it is on disk now."""
    artefact = find_artefact(name)
    if artefact.kind == "records":
        meta, file = open_records(directory, artefact)
        with file:
            check_pair(file, meta, artefact, verify=True)
        return meta, meta.sha256
    if artefact.kind == "folder":
        raise InputError(f"artefact {name!r} is a folder and has no hash: name the files in it as sources")
    path = directory / artefact.file_name
    if not path.exists():
        raise not_found(artefact, directory)
    return None, sha256_of_file(path)


# ---- trained weights


def read_training(folder: Path) -> dict[str, Any]:
    """What `training.json` says of the weights beside it; empty where another tool made them."""
    return read_object(folder / RECORD) if (folder / RECORD).is_file() else {}


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file beside weights, such as an adapter's config."""
    try:
        return decode_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(explain(str(path), got=error, expected="a JSON object")) from error


def half_trained(root: Path) -> str:
    """How far a training in this folder has come that has left no weights yet; empty where none has begun."""
    places = {name: root / ARTEFACTS[name].file_name for name in ("checkpoints", "adapter", "model", "config")}
    if not places["checkpoints"].is_dir() or places["adapter"].is_dir() or places["model"].is_dir():
        return ""
    found = (_CHECKPOINT.fullmatch(each.name) for each in places["checkpoints"].iterdir())
    steps = max((int(each[1]) for each in found if each), default=0)
    try:
        told: Any = tomllib.loads(places["config"].read_text(encoding="utf-8"))
        wanted = f" of {told['train']['optimiser']['steps']}"
    except (OSError, ValueError, LookupError, TypeError):  # it had not come that far, or somebody edited it
        wanted = ""
    return f"a training that stands at step {steps}{wanted}; `crf run {root}` goes on with it"
