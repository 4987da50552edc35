"""What makes a checkpoint complete: a manifest of its files and their hashes, renamed in after everything else."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from composer_replication.atomic import atomic_write_json, is_temporary
from composer_replication.canonical_json import decode_object
from composer_replication.errors import ArtefactCorruptError, ArtefactNotFoundError, RunError, explain

MANIFEST = "manifest.json"
_SCHEMA = "composer_replication.checkpoint"
_VERSION = 1
# What torch.save writes. Nothing here is ever unpickled, and a checkpoint of ours has no such file.
_PICKLES = {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt"}
_FOLDER = re.compile(r"checkpoint-(\d+)(\.replaced)?")

_log = logging.getLogger(__name__)


def write_manifest(folder: Path, *, step: int, about: Mapping[str, Any] | None = None) -> None:
    """List every file of `folder` with size and SHA-256, after bringing each to the disk; `about` is stored with it."""
    folder = Path(folder)
    files = {name: _entry(folder / name, sync=True) for name in _files(folder)}
    fields: dict[str, object] = {"schema": _SCHEMA, "version": _VERSION, "step": step, "files": files}
    atomic_write_json(folder / MANIFEST, fields | {"about": dict(about or {})})


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest as it was written; the files it lists are not looked at."""
    path = Path(folder) / MANIFEST
    try:
        fields: dict[str, Any] = decode_object(path.read_bytes())
    except FileNotFoundError as error:
        fix = "It was not written to its end, or by something else. Take an earlier checkpoint."
        message = explain(f"checkpoint {folder}", got="no manifest", expected=MANIFEST, fix=fix)
        raise ArtefactNotFoundError(message) from error
    except ValueError as error:
        raise ArtefactCorruptError(explain(str(path), got=str(error), expected="a JSON object")) from error
    if (fields.get("schema"), fields.get("version")) != (_SCHEMA, _VERSION):
        got = f"schema {fields.get('schema')} version {fields.get('version')}"
        raise ArtefactCorruptError(explain(str(path), got=got, expected=f"{_SCHEMA} version {_VERSION}"))
    return fields


def check_manifest(folder: Path, *, hashes: bool = True) -> dict[str, Any]:
    """The manifest, if every file it lists is there and as it was; else an error that names the first that is not.

    Without `hashes` only sizes are compared.
    """
    folder = Path(folder)
    fields = read_manifest(folder)
    for name, expected in fields["files"].items():
        path = folder / name
        if not path.is_file():
            raise ArtefactNotFoundError(explain(f"checkpoint {folder}", got="no such file", expected=name))
        size = path.stat().st_size
        if size != expected["num_bytes"]:
            wanted = f"{expected['num_bytes']} bytes"
            raise ArtefactCorruptError(explain(f"{path}, a file of a checkpoint", got=f"{size} bytes", expected=wanted))
        if hashes and _entry(path)["sha256"] != expected["sha256"]:
            got = "other bytes than those it was saved with"
            raise ArtefactCorruptError(explain(f"{path}, a file of a checkpoint", got=got, expected="the same SHA-256"))
    for name in _files(folder):
        if Path(name).suffix in _PICKLES:
            fix = "Nothing is unpickled: take the file out if you know what it is."
            raise ArtefactCorruptError(explain(f"checkpoint {folder}", got=name, expected="no such file", fix=fix))
    return fields


def newest_complete(output_dir: Path) -> Path | None:
    """The checkpoint of the most steps whose files are all as its manifest says; newer ones that are not are named."""
    for _, folder in sorted(checkpoints_in(output_dir), reverse=True):
        try:
            check_manifest(folder)
        except RunError as error:
            _log.warning("passing over checkpoint %s, which is not complete: %s", folder.name, error)
        else:
            return folder
    return None


def checkpoints_in(output_dir: Path) -> Iterator[tuple[tuple[int, bool], Path]]:
    """Folders named like checkpoints, with their step and whether they are in their own place (not set aside)."""
    if not Path(output_dir).is_dir():
        return
    for folder in Path(output_dir).iterdir():
        match = _FOLDER.fullmatch(folder.name)
        if match and folder.is_dir():
            yield (int(match[1]), match[2] is None), folder


def _files(folder: Path) -> list[str]:
    """Names, from the folder, of what a manifest lists: every file but itself and what a crash left half written."""
    found = (path for path in folder.rglob("*") if path.is_file() and not is_temporary(path))
    return sorted(path.relative_to(folder).as_posix() for path in found if path != folder / MANIFEST)


def _entry(path: Path, *, sync: bool = False) -> dict[str, Any]:
    with path.open("rb") as file:
        if sync and os.name == "posix":  # the manifest must not reach the disk before what it vouches for
            os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"num_bytes": file.tell(), "sha256": digest}
