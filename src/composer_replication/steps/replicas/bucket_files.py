"""Files of a run into the bucket and out of it: those that a training reads, and the folder that it writes."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from composer_replication.canonical_json import decode_object
from composer_replication.diloco.store import ObjectStore
from composer_replication.errors import ArtefactCorruptError, explain
from composer_replication.ingestion.last_gate import Find, gate_of, refusal
from composer_replication.runs import ARTEFACTS, RunDir

MARKER, CONFIG = "run.json", "config.toml"
_READ = ("conversations", "tools", "split", "sites", "pairs")
_MOST_FILE_BYTES, _MOST_FILES = 64 << 30, 1000
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
# What a training leaves besides; weights are safetensors, and nothing that would have to be unpickled is taken.
_SUFFIXES = {".safetensors", ".json", ".md", ".jinja", ".txt", ".model", ".toml"}
_ROWS = ".jsonl"


def run_files(run: RunDir) -> dict[str, Path]:
    """What a training on this run reads."""
    names = [name for each in _READ for name in (ARTEFACTS[each].file_name, ARTEFACTS[each].sidecar_name)]
    return {name: run.root / name for name in (MARKER, *dict.fromkeys(names)) if (run.root / name).is_file()}


def refuse_secrets(run: RunDir, files: Mapping[str, Path], *, no_scrub: bool, allowed: Iterable[str]) -> None:
    """The last look at what leaves this machine, row by row."""
    gate = gate_of(run, os.environ, no_scrub=no_scrub, allowed=allowed)
    finds: dict[bytes, Find] = {}
    for name, path in files.items():
        if gate.is_open or path.suffix != _ROWS:
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
    refuse_odd_names(store, prefix, digests)
    folder.mkdir(parents=True, exist_ok=True)
    sizes = [store.size(f"{prefix}/{name}") or 0 for name in digests]
    if sum(sizes) > (room := shutil.disk_usage(folder).free):
        raise ArtefactCorruptError(
            explain(
                f"{prefix} at {store.uri}", got=f"{sum(sizes):,} bytes", expected=f"at most {room:,}, which are free"
            )
        )
    for name, digest in digests.items():
        data = store.get(f"{prefix}/{name}", most_bytes=_MOST_FILE_BYTES)
        if hashlib.sha256(data).hexdigest() != digest:
            fix = "Somebody wrote to the bucket: look at who may."
            where = f"{prefix}/{name} at {store.uri}"
            raise ArtefactCorruptError(explain(where, got="other bytes", expected=f"sha256 {digest[:12]}", fix=fix))
        (folder / name).write_bytes(data)


def refuse_odd_names(store: ObjectStore, prefix: str, names: Iterable[str]) -> None:
    """Names of files in a folder, of the kinds that travel; nothing else is written here."""
    listed = list(names)
    odd = [name for name in listed if not _NAME.fullmatch(name) or Path(name).suffix not in _SUFFIXES | {_ROWS}]
    if odd or len(listed) > _MOST_FILES:
        got = repr(odd[0][:80]) if odd else f"{len(listed)} files"
        expected = f"a file's name with {', '.join(sorted(_SUFFIXES))}; {_MOST_FILES} at most"
        raise ArtefactCorruptError(explain(f"{prefix} at {store.uri}", got=got, expected=expected))


def trained_files(folder: Path) -> dict[str, Path]:
    """The files of trained weights that may travel."""
    return {path.name: path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix in _SUFFIXES}
