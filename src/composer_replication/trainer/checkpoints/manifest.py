"""What makes a checkpoint complete: a manifest of its files and their hashes, renamed in after everything else.

Old ones make room for new ones, and the newest complete one never before there is a newer one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from composer_replication.atomic import atomic_write_json, is_temporary
from composer_replication.canonical_json import decode_object
from composer_replication.errors import ArtefactCorruptError, ArtefactNotFoundError, RunError, explain
from composer_replication.trainer.checkpoints.contents import (
    check_fields,
    check_stray_file,
    plain_file,
    weight_files,
)

MANIFEST = "manifest.json"
_SCHEMA = "composer_replication.checkpoint"
_VERSION = 2
SAMPLED = 1
"""The version whose `base_weights` is a digest of some values, which nothing can be compared with any more."""
_FOLDER = re.compile(r"checkpoint-(0|[1-9][0-9]*)(\.replaced)?")

_log = logging.getLogger(__name__)


def write_manifest(folder: Path, *, step: int, about: Mapping[str, Any]) -> None:
    """List every file of `folder` with size and SHA-256, after bringing each to the disk; `about` is stored with it.

    `about` says which `model` (as `model_identity` does), which `data`, whether it is `weights_only`, and which
    `process` writes it. What could not be resumed from is an error here already, and gets no manifest.
    """
    folder = Path(folder)
    files = {name: _entry(plain_file(folder, name), sync=True) for name in _files(folder)}
    fields: dict[str, Any] = {"schema": _SCHEMA, "version": _VERSION, "step": step, "files": files}
    fields["about"] = dict(about)
    check_fields(fields, f"checkpoint {folder}, as it would be saved")
    atomic_write_json(folder / MANIFEST, fields)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, if it is one; the files it lists are not looked at."""
    path = Path(folder) / MANIFEST
    try:
        fields: dict[str, Any] = decode_object(path.read_bytes())
    except FileNotFoundError as error:
        fix = "It was not written to its end, or by something else. Take an earlier checkpoint."
        message = explain(f"checkpoint {folder}", got="no manifest", expected=MANIFEST, fix=fix)
        raise ArtefactNotFoundError(message) from error
    except (ValueError, OSError) as error:
        raise ArtefactCorruptError(explain(str(path), got=str(error), expected="a JSON object")) from error
    if fields.get("schema") != _SCHEMA or fields.get("version") not in (SAMPLED, _VERSION):
        got = f"schema {fields.get('schema')} version {fields.get('version')}"
        raise ArtefactCorruptError(explain(str(path), got=got, expected=f"{_SCHEMA} version {_VERSION}"))
    check_fields(fields, str(path))
    return fields


def check_manifest(folder: Path, *, hashes: bool = True) -> dict[str, Any]:
    """The manifest, if every file it lists is there and as it was; else an error that names the first that is not.

    A file that could be read on resume and is not listed is an error too. Without `hashes` only sizes are compared.
    """
    folder = Path(folder)
    fields = read_manifest(folder)
    for name, expected in fields["files"].items():
        _check_file(folder, name, expected, hashes=hashes)
    for name in _files(folder):
        if name not in fields["files"]:
            check_stray_file(name, folder)
    if hashes and not fields["about"]["model"]["adapters"]:  # an index is parsed only once its hash is right
        weight_files(folder, fields["files"])
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


def _check_file(folder: Path, name: str, expected: Mapping[str, Any], *, hashes: bool) -> None:
    what = f"{folder / name}, a file of a checkpoint"
    try:
        path = plain_file(folder, name)
        size = path.stat().st_size
        is_same = size == expected["num_bytes"] and (not hashes or _entry(path)["sha256"] == expected["sha256"])
    except RunError:
        raise
    except OSError as error:  # a name that no file can have, a file that may not be read, a disk that fails
        raise ArtefactCorruptError(explain(what, got=str(error), expected="a file that can be read")) from error
    if size != expected["num_bytes"]:
        raise ArtefactCorruptError(explain(what, got=f"{size} bytes", expected=f"{expected['num_bytes']} bytes"))
    if not is_same:
        got = "other bytes than those it was saved with"
        raise ArtefactCorruptError(explain(what, got=got, expected="the same SHA-256"))


def _files(folder: Path) -> list[str]:
    """Names, from the folder, of what a manifest lists: every file but itself and what a crash left half written."""
    paths = (path for path in folder.rglob("*") if path.is_file() and not is_temporary(path))
    return sorted(path.relative_to(folder).as_posix() for path in paths if path != folder / MANIFEST)


def _entry(path: Path, *, sync: bool = False) -> dict[str, Any]:
    with path.open("rb") as file:
        if sync and os.name == "posix":  # the manifest must not reach the disk before what it vouches for
            os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"num_bytes": file.tell(), "sha256": digest}


def make_room(folder: Path) -> None:
    """Take what stands where a checkpoint will be written out of the way.

    A half-written one is deleted. A complete one is set aside, under a name that resume still finds, until
    `drop_replaced` is told that its successor is complete.
    """
    if (folder / MANIFEST).exists():
        drop_replaced(folder)
        folder.rename(_aside(folder))
    elif folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def drop_replaced(folder: Path) -> None:
    """Delete the checkpoint that was set aside for `folder`, if there is one."""
    if _aside(folder).exists() or _aside(folder).is_symlink():
        delete_checkpoint(_aside(folder))


def delete_checkpoint(folder: Path) -> None:
    """Delete it so that at no moment it looks complete and is not: the manifest goes first.

    Of a link only the link goes: what it points to was put there by someone else, for another use.
    """
    if folder.is_symlink():
        folder.unlink()
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def rotate(output_dir: Path, limit: int | None, *, keep: Iterable[Path] = ()) -> None:
    """Delete the oldest complete checkpoints beyond `limit`, and half-written ones older than the newest complete.

    A link is neither counted nor touched: somebody made it to keep what it points to.
    """
    if limit is None or limit <= 0:
        return
    folders = [folder for _, folder in sorted(checkpoints_in(output_dir)) if not folder.is_symlink()]
    complete = [folder for folder in folders if _looks_complete(folder)]
    if not complete:
        return
    protected = {folder.resolve() for folder in (complete[-1], *keep)} & {folder.resolve() for folder in complete}
    spare = len(complete) - max(limit, len(protected))
    surplus = [folder for folder in complete if folder.resolve() not in protected][: max(spare, 0)]
    half_written = [folder for folder in folders[: folders.index(complete[-1])] if folder not in complete]
    for folder in (*half_written, *surplus):
        delete_checkpoint(folder)


def _looks_complete(folder: Path) -> bool:
    try:
        check_manifest(folder, hashes=False)  # hashing every kept checkpoint at every save would cost more than saving
    except RunError:
        return False
    return True


def _aside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.replaced")
