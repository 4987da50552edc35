"""Files of a run into the bucket and out of it: those that a training reads, and the folder that it writes.

conversations.jsonl              a file of PART_BYTES at most: one object
model.safetensors.parts/000000   a larger one: an object for every PART_BYTES of it, as no more is held in memory
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from composer_replication.atomic import staged
from composer_replication.canonical_json import decode_object
from composer_replication.diloco.store import ObjectStore
from composer_replication.errors import ArtefactCorruptError, explain
from composer_replication.ingestion.last_gate import Find, gate_of, refusal
from composer_replication.runs import ARTEFACTS, RunDir

MARKER, CONFIG = "run.json", "config.toml"
_READ = ("conversations", "tools", "split", "sites", "pairs")
PART_BYTES = 256 << 20
_MOST_FILE_BYTES, _MOST_FILES = 64 << 30, 1000
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
# What a training leaves besides; weights are safetensors, and nothing that would have to be unpickled is taken.
_SUFFIXES = {".safetensors", ".json", ".md", ".jinja", ".txt", ".model", ".toml"}
_ROWS, _PARTS = ".jsonl", ".parts/"


def run_files(run: RunDir) -> dict[str, Path]:
    """What a training on this run reads."""
    names = [name for artefact in _READ for name in (ARTEFACTS[artefact].file_name, ARTEFACTS[artefact].sidecar_name)]
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
                row = decode_object(line)
                # `session` and a long id behind it read like a key and its value: values alone, as the names are ours.
                part = list(row.values()) if name == ARTEFACTS["split"].file_name else row
                if (find := gate.look(part, f"{name}, line {number}")) is not None:
                    finds.setdefault(find.digest, find)
    if finds:
        raise refusal("files for the replicas", list(finds.values()))


def digests_of(files: Mapping[str, Path | bytes]) -> dict[str, str]:
    """The sha256 of each file, by its name."""
    digests = {}
    for name, file in files.items():
        digest = hashlib.sha256()
        for chunk in _chunks(file):
            digest.update(chunk)
        digests[name] = digest.hexdigest()
    return digests


def upload(store: ObjectStore, prefix: str, files: Mapping[str, Path | bytes]) -> None:
    """Put files below `prefix`; of what an earlier upload left under their names nothing stays."""
    written = set[str]()
    for name, file in files.items():
        key = f"{prefix}/{name}"
        is_parted = (len(file) if isinstance(file, bytes) else file.stat().st_size) > PART_BYTES
        for number, chunk in enumerate(_chunks(file)):
            part = _part(key, number) if is_parted else key
            store.put(part, chunk)
            written.add(part)
    if files:
        whole = {f"{prefix}/{name}" for name in files}
        there = [key for key in store.keys(prefix) if key in whole or key.rpartition(_PARTS)[0] in whole]
        store.delete([key for key in there if key not in written])


def _chunks(source: Path | bytes) -> Iterator[bytes]:
    """A file's bytes, a part at a time; of an empty one the one part that it has."""
    if isinstance(source, bytes):
        yield from (source[start : start + PART_BYTES] for start in range(0, len(source) or 1, PART_BYTES))
        return
    with source.open("rb") as file:
        yield file.read(PART_BYTES)
        while chunk := file.read(PART_BYTES):
            yield chunk


def _part(key: str, number: int) -> str:
    return f"{key}{_PARTS}{number:06d}"


def _objects(store: ObjectStore, key: str) -> dict[str, int]:
    """The objects that a file is made of, in order, and how large each is."""
    if (size := store.size(key)) is not None:
        return {key: size}
    listed = len(store.keys(f"{key}{_PARTS}"))
    # The names that there should be, not those that are: whoever wrote others among them spoilt the file.
    names = [_part(key, number) for number in range(listed)]
    sizes = {part: store.size(part) for part in names} if listed <= _MOST_FILE_BYTES // PART_BYTES else {}
    if not sizes or None in sizes.values():
        got = f"{listed} parts" if listed else "nothing"
        raise ArtefactCorruptError(explain(f"{key} at {store.uri}", got=got, expected="a whole file"))
    return {part: size or 0 for part, size in sizes.items()}


def download(store: ObjectStore, prefix: str, digests: Mapping[str, str], folder: Path) -> None:
    """Get the files that were put there, and no others; one with other bytes is an error."""
    refuse_odd_names(store, prefix, digests)
    folder.mkdir(parents=True, exist_ok=True)
    objects = {name: _objects(store, f"{prefix}/{name}") for name in digests}
    num_bytes = sum(size for sizes in objects.values() for size in sizes.values())
    if num_bytes > (room := shutil.disk_usage(folder).free):
        expected = f"at most {room:,}, which are free"
        raise ArtefactCorruptError(explain(f"{prefix} at {store.uri}", got=f"{num_bytes:,} bytes", expected=expected))
    for name, expected in digests.items():
        with staged(folder / name) as stage:
            digest = hashlib.sha256()
            for key, size in objects[name].items():
                data = store.get(key, most_bytes=min(size, PART_BYTES))  # and no more than there was room for
                digest.update(data)
                stage.file.write(data)
            if digest.hexdigest() != expected:
                fix = "Somebody wrote to the bucket: look at who may."
                where = f"{prefix}/{name} at {store.uri}"
                raise ArtefactCorruptError(
                    explain(where, got="other bytes", expected=f"sha256 {expected[:12]}", fix=fix)
                )
            stage.commit()


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
