"""Mark checkpoints as complete with a manifest of their files and hashes, which is written after all other files.

Only regular files that are inside the folder and listed in the manifest are ever read from a checkpoint. The manifest
is validated before it is used, so a checkpoint with a malformed manifest is ignored like a damaged one. Old checkpoints
are deleted, but the newest complete checkpoint is never deleted before a newer one is complete.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PureWindowsPath
from typing import Any, cast

from composer_replication.atomic import atomic_write_json, is_temporary
from composer_replication.canonical_json import decode_object
from composer_replication.errors import ArtefactCorruptError, ArtefactNotFoundError, RunError, explain

MANIFEST = "manifest.json"
_SCHEMA = "composer_replication.checkpoint"
_VERSION = 2
SAMPLED = 1
"""The schema version in which `base_weights` is a digest of only some values, which can no longer be compared."""
# "checkpoint-40", "checkpoint-40.replaced"; not "checkpoint-040" or "checkpoint-40.tmp"
_FOLDER = re.compile(r"checkpoint-(0|[1-9][0-9]*)(\.replaced)?")
_log = logging.getLogger(__name__)


def write_manifest(folder: Path, *, step: int, about: Mapping[str, Any]) -> None:
    """Write a manifest of every file in `folder` with size and SHA-256, after flushing each file to disk.

    `about` is stored in the manifest: the `model` (from `model_identity`), the `data`, whether the checkpoint is
    `weights_only`, and which `process` writes it. Raises ArtefactCorruptError, and writes no manifest, if no run could
    resume from the checkpoint.
    """
    folder = Path(folder)
    files = {name: _manifest_entry(regular_file(folder, name), sync=True) for name in _file_names(folder)}
    fields: dict[str, Any] = {"schema": _SCHEMA, "version": _VERSION, "step": step, "files": files}
    fields["about"] = dict(about)
    _check_fields(fields, f"checkpoint {folder} to save")
    atomic_write_json(folder / MANIFEST, fields)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and validate a checkpoint's manifest. The files that it lists are not checked."""
    path = Path(folder) / MANIFEST
    try:
        fields: dict[str, Any] = decode_object(path.read_bytes())
    except FileNotFoundError as error:
        fix = "The checkpoint is incomplete, or another program wrote it. Use an earlier checkpoint."
        message = explain(f"checkpoint {folder}", got="no manifest", expected=MANIFEST, fix=fix)
        raise ArtefactNotFoundError(message) from error
    except (ValueError, OSError) as error:
        raise ArtefactCorruptError(explain(str(path), got=str(error), expected="a JSON object")) from error
    if fields.get("schema") != _SCHEMA or fields.get("version") not in (SAMPLED, _VERSION):
        got = f"schema {fields.get('schema')} version {fields.get('version')}"
        raise ArtefactCorruptError(explain(str(path), got=got, expected=f"{_SCHEMA} version {_VERSION}"))
    _check_fields(fields, str(path))
    return fields


def check_manifest(folder: Path, *, hashes: bool = True) -> dict[str, Any]:
    """Return the manifest if all its files exist unchanged. Otherwise raise an error that names the first wrong file.

    An unlisted file that could be read on resume is also an error. If `hashes` is false, only sizes are compared.
    """
    folder = Path(folder)
    fields = read_manifest(folder)
    for name, expected in fields["files"].items():
        _check_file(folder, name, expected, hashes=hashes)
    for name in _file_names(folder):
        if name not in fields["files"]:
            _check_stray_file(name, folder)
    # The index of split weights is parsed only after its hash has been checked.
    if hashes and not fields["about"]["model"]["adapters"]:
        weight_files(folder, fields["files"])
    return fields


def newest_complete(output_dir: Path) -> Path | None:
    """Return the latest checkpoint whose files all match its manifest. Later, damaged checkpoints are logged."""
    for _, folder in sorted(checkpoints_in(output_dir), reverse=True):
        try:
            check_manifest(folder)
        except RunError as error:
            _log.warning("ignoring checkpoint %s, which is not complete: %s", folder.name, error)
        else:
            return folder
    return None


def checkpoints_in(output_dir: Path) -> Iterator[tuple[tuple[int, bool], Path]]:
    """Yield ((step, whether the name lacks the suffix `.replaced`), folder) for each folder named like a checkpoint."""
    if not Path(output_dir).is_dir():
        return
    for folder in Path(output_dir).iterdir():
        match = _FOLDER.fullmatch(folder.name)
        if match and folder.is_dir():
            yield (int(match[1]), match[2] is None), folder


def _check_file(folder: Path, name: str, expected: Mapping[str, Any], *, hashes: bool) -> None:
    what = f"{folder / name}, in a checkpoint"
    try:
        path = regular_file(folder, name)
        size = path.stat().st_size
        is_same = size == expected["num_bytes"] and (
            not hashes or _manifest_entry(path)["sha256"] == expected["sha256"]
        )
    except RunError:
        raise
    except OSError as error:  # an impossible file name, missing permissions, a disk failure
        raise ArtefactCorruptError(explain(what, got=str(error), expected="a readable file")) from error
    if size != expected["num_bytes"]:
        raise ArtefactCorruptError(explain(what, got=f"{size} bytes", expected=f"{expected['num_bytes']} bytes"))
    if not is_same:
        got = "a different SHA-256"
        raise ArtefactCorruptError(explain(what, got=got, expected="the SHA-256 in the manifest"))


def _file_names(folder: Path) -> list[str]:
    """Return the names of the files to list in a manifest: all except the manifest itself and temporary files."""
    paths = (path for path in folder.rglob("*") if path.is_file() and not is_temporary(path))
    return sorted(path.relative_to(folder).as_posix() for path in paths if path != folder / MANIFEST)


def _manifest_entry(path: Path, *, sync: bool = False) -> dict[str, Any]:
    with path.open("rb") as file:
        # The files must be on disk before the manifest that lists them.
        if sync and os.name == "posix":
            os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"num_bytes": file.tell(), "sha256": digest}


def clear_path(folder: Path) -> None:
    """Make the path of a new checkpoint available.

    An incomplete checkpoint at that path is deleted. A complete one is renamed, and a run can still resume from it
    under the new name. Call `delete_replaced` once the new checkpoint is complete.
    """
    if (folder / MANIFEST).exists():
        delete_replaced(folder)
        folder.rename(_replaced_path(folder))
    elif folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def delete_replaced(folder: Path) -> None:
    """Delete the earlier checkpoint that `folder` has replaced, if any."""
    if _replaced_path(folder).exists() or _replaced_path(folder).is_symlink():
        _delete_checkpoint(_replaced_path(folder))


def _delete_checkpoint(folder: Path) -> None:
    """Delete a checkpoint, beginning with its manifest, so that a partly deleted checkpoint never looks complete.

    If the checkpoint is a symbolic link, only the link is deleted, because its target may be in use.
    """
    if folder.is_symlink():
        folder.unlink()
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def delete_old_checkpoints(output_dir: Path, limit: int | None, *, keep: Iterable[Path] = ()) -> None:
    """Delete the oldest complete checkpoints beyond `limit`, and incomplete ones older than the newest complete one.

    Symbolic links are neither counted nor deleted, because they were created to keep their targets.
    """
    if limit is None or limit <= 0:
        return
    folders = [folder for _, folder in sorted(checkpoints_in(output_dir)) if not folder.is_symlink()]
    complete = [folder for folder in folders if _looks_complete(folder)]
    if not complete:
        return
    # Never delete the newest complete checkpoint, nor complete checkpoints in `keep`.
    protected = {folder.resolve() for folder in (complete[-1], *keep)} & {folder.resolve() for folder in complete}
    num_surplus = len(complete) - max(limit, len(protected))
    surplus = [folder for folder in complete if folder.resolve() not in protected][: max(num_surplus, 0)]
    # An incomplete checkpoint newer than the newest complete one may still be being written.
    half_written = [folder for folder in folders[: folders.index(complete[-1])] if folder not in complete]
    for folder in (*half_written, *surplus):
        _delete_checkpoint(folder)


def _looks_complete(folder: Path) -> bool:
    try:
        # Hashing every old checkpoint on each save would take longer than saving.
        check_manifest(folder, hashes=False)
    except RunError:
        return False
    return True


def _replaced_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.replaced")


WEIGHTS = "model.safetensors"
_INDEX = f"{WEIGHTS}.index.json"
_ADAPTER = "adapter_model.safetensors"
_SHARED_TREES = ("optimizer", "scheduler")
_TREES_PER_PROCESS = ("rng", "cursor", "extra")
_ABOUT_TYPES = {"model": dict, "data": dict, "weights_only": bool}
_MODEL_TYPES = {"class": str, "config": dict, "adapters": dict, "parameters": dict, "base_weights": str | None}
# 64 lower-case hex digits, such as the output of `sha256sum`; not with upper-case letters
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Suffixes of pickles, as torch.save writes them. Our checkpoints contain no pickles, and none is ever loaded.
_PICKLES = {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt"}
# TRL's GRPOTrainer loads this file on resume if it exists.
_TRL_ENTROPY_STATE = "entropy_ctrl_state.json"


def _check_fields(fields: Mapping[str, Any], where: str) -> None:
    """Raise ArtefactCorruptError if fields of a manifest have wrong types, or if required files are missing from it."""
    problem = next(_malformed_fields(fields), None) or next(_missing_files(fields), None)
    if problem is not None:
        raise ArtefactCorruptError(explain(where, got=problem, expected="the manifest of a complete checkpoint"))


def _check_stray_file(name: str, folder: Path) -> None:
    """Raise ArtefactCorruptError for an unlisted file that is a pickle, or that a library might read."""
    is_pickle = Path(name).suffix in _PICKLES
    if is_pickle or name.endswith((".safetensors", ".index.json")) or name == _TRL_ENTROPY_STATE:
        reason = "Pickles are never loaded" if is_pickle else "It was not saved with the other files"
        fix = f"{reason}: remove the file if you know what it is."
        got = f"{name}, which the manifest does not list"
        raise ArtefactCorruptError(explain(f"checkpoint {folder}", got=got, expected="only listed files", fix=fix))


def regular_file(folder: Path, name: str) -> Path:
    """Return the path of a regular file in a checkpoint.

    Raises ArtefactCorruptError if any part of the path is a link, since its target is not part of the checkpoint.
    """
    path = folder
    # Check every folder in the path, since a link to a folder leads out of the checkpoint as well.
    for part in name.split("/"):
        path = path / part
        if path.is_symlink():
            raise ArtefactCorruptError(explain(f"{path}, in a checkpoint", got="a link", expected="a regular file"))
    if not path.is_file():
        raise ArtefactNotFoundError(explain(f"checkpoint {folder}", got="a missing file", expected=name))
    return path


def weight_files(folder: Path, listed: Mapping[str, Any]) -> list[str]:
    """Return the files with a full model's weights, from the index if there is one.

    Raises ArtefactCorruptError if the index names a file that the manifest does not list.
    """
    if _INDEX not in listed:
        if WEIGHTS not in listed:
            raise ArtefactNotFoundError(explain(f"checkpoint {folder}", got="no weights", expected=WEIGHTS))
        return [WEIGHTS]
    index = regular_file(folder, _INDEX)
    try:
        weight_map = decode_object(index.read_bytes()).get("weight_map")
    except ValueError as error:
        raise ArtefactCorruptError(explain(str(index), got=str(error), expected="a JSON object")) from error
    names = list(cast("dict[str, object]", weight_map).values()) if isinstance(weight_map, dict) else []
    for name in names or [weight_map]:
        if not isinstance(name, str) or "/" in name or name not in listed or not name.endswith(".safetensors"):
            got = f"weights in {name!r:.80}"
            raise ArtefactCorruptError(explain(str(index), got=got, expected="files that the manifest lists"))
    return sorted(set(cast("list[str]", names)))


def adapter_file(adapter: str) -> str:
    """Return the name of the file to which `save_pretrained` writes an adapter's weights."""
    return _ADAPTER if adapter == "default" else f"{adapter}/{_ADAPTER}"


def _malformed_fields(fields: Mapping[str, Any]) -> Iterator[str]:
    if not _is_count(fields.get("step")):
        yield f"step {fields.get('step')!r:.60}"
    files: Any = fields.get("files")
    if isinstance(files, dict):
        yield from _malformed_files(cast("dict[str, Any]", files))
    else:
        yield f"files {files!r:.60}"
    about: Any = fields.get("about")
    if not isinstance(about, dict):
        yield f"about {about!r:.60}"
        return
    yield from _fields_of_wrong_type(cast("dict[str, Any]", about), _ABOUT_TYPES, "about")
    yield from _fields_of_wrong_type(about["model"], _MODEL_TYPES, "about.model")
    if not _is_count(cast("dict[str, Any]", about).get("process", 0)):
        yield f"about.process {about['process']!r:.60}"


def _malformed_files(files: Mapping[str, Any]) -> Iterator[str]:
    for name, entry in files.items():
        if not _is_safe_name(name):
            yield f"a file named {name!r:.80}"
        if not isinstance(entry, dict) or not _is_count(cast("dict[str, Any]", entry).get("num_bytes")):
            yield f"no files[{name!r:.80}].num_bytes"
        elif not _SHA256.fullmatch(str(cast("dict[str, Any]", entry).get("sha256"))):
            yield f"no files[{name!r:.80}].sha256"


def _fields_of_wrong_type(fields: Mapping[str, Any], types: Mapping[str, Any], where: str) -> Iterator[str]:
    for name, kind in types.items():
        if name not in fields:
            yield f"no {where}.{name}"
        elif not isinstance(fields[name], kind):
            yield f"{where}.{name} {fields[name]!r:.60}"


def _missing_files(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each file that resuming needs but the manifest lacks.

    Of the files that every process has, only those of the process that wrote the manifest are needed.
    """
    files, about = fields["files"], fields["about"]
    adapters: Mapping[str, Any] = about["model"]["adapters"]
    needed = [adapter_file(adapter) for adapter in adapters] or [_INDEX if _INDEX in files else WEIGHTS]
    if not about["weights_only"]:
        trees = [*_SHARED_TREES, *(f"{tree}-{about.get('process', 0)}" for tree in _TREES_PER_PROCESS)]
        needed += ["trainer_state.json", *(f"{tree}.{kind}" for tree in trees for kind in ("json", "safetensors"))]
    return (f"no {name} among its files" for name in needed if name not in files)


def _is_safe_name(name: str) -> bool:
    """Return whether a name is as `write_manifest` writes it: relative, with single slashes, and in the folder."""
    # A third party may have written the manifest, so no name may lead out of the folder on any operating system.
    plain = "\\" not in name and "\0" not in name and not PureWindowsPath(name).drive
    return plain and not {"", ".", ".."} & set(name.split("/"))


def _is_count(value: object) -> bool:
    # In Python, True is an int.
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
