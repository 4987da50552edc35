"""Files of a run into the bucket and out of it: those that a training reads, and the folder that it writes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from composer_replication.canonical_json import decode_object
from composer_replication.diloco.store import ObjectStore
from composer_replication.errors import ArtefactCorruptError, explain
from composer_replication.ingestion.last_gate import Find, gate_of, refusal
from composer_replication.runs import ARTEFACTS, RunDir

MARKER, CONFIG = "run.json", "config.toml"
_READ = ("conversations", "tools", "split", "sites", "pairs")
_MOST_FILE_BYTES = 64 << 30
# What a training leaves besides; weights are safetensors, and nothing that would have to be unpickled is taken.
_SUFFIXES = {".safetensors", ".json", ".md", ".jinja", ".txt", ".model", ".toml"}


def run_files(run: RunDir) -> dict[str, Path]:
    """What a training on this run reads."""
    names = [name for each in _READ for name in (ARTEFACTS[each].file_name, ARTEFACTS[each].sidecar_name)]
    return {name: run.root / name for name in (MARKER, *dict.fromkeys(names)) if (run.root / name).is_file()}


def refuse_secrets(run: RunDir, files: Mapping[str, Path], *, no_scrub: bool, allowed: Iterable[str]) -> None:
    """The last look at what leaves this machine, row by row."""
    gate = gate_of(run, os.environ, no_scrub=no_scrub, allowed=allowed)
    finds: dict[bytes, Find] = {}
    for name, path in files.items():
        if gate.is_open or path.suffix != ".jsonl":
            continue
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if (find := gate.look(decode_object(line), f"{name}, line {number}")) is not None:
                    finds.setdefault(find.digest, find)
    if finds:
        raise refusal("files for the replicas", list(finds.values()))


def digests_of(files: Mapping[str, Path | bytes]) -> dict[str, str]:
    """The sha256 of each file, by its name."""
    return {name: hashlib.sha256(_bytes(each)).hexdigest() for name, each in files.items()}


def upload(store: ObjectStore, prefix: str, files: Mapping[str, Path | bytes]) -> None:
    """Put files below `prefix`."""
    for name, each in files.items():
        store.put(f"{prefix}/{name}", _bytes(each))


def _bytes(each: Path | bytes) -> bytes:
    return each if isinstance(each, bytes) else each.read_bytes()


def download(store: ObjectStore, prefix: str, digests: Mapping[str, str], folder: Path) -> None:
    """Get the files that were put there, and no others; one with other bytes is an error."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, digest in digests.items():
        if Path(name).name != name:
            raise ArtefactCorruptError(explain(f"{prefix} at {store.uri}", got=repr(name), expected="a file's name"))
        data = store.get(f"{prefix}/{name}", most_bytes=_MOST_FILE_BYTES)
        if hashlib.sha256(data).hexdigest() != digest:
            fix = "Somebody wrote to the bucket: look at who may."
            where = f"{prefix}/{name} at {store.uri}"
            raise ArtefactCorruptError(explain(where, got="other bytes", expected=f"sha256 {digest[:12]}", fix=fix))
        (folder / name).write_bytes(data)


def trained_files(folder: Path) -> dict[str, Path]:
    """The files of trained weights that may travel."""
    return {path.name: path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix in _SUFFIXES}
