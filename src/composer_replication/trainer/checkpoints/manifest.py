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
from pathlib import Path, PureWindowsPath
from typing import Any, cast

from composer_replication.atomic import atomic_write_json, is_temporary
from composer_replication.canonical_json import decode_object
from composer_replication.errors import (
    ArtefactCorruptError,
    ArtefactNotFoundError,
    RunError,
    explain,
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
    _check_fields(fields, f"checkpoint {folder}, as it would be saved")
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
    _check_fields(fields, str(path))
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
            _check_stray_file(name, folder)
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
        _delete_checkpoint(_aside(folder))


def _delete_checkpoint(folder: Path) -> None:
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
        _delete_checkpoint(folder)


def _looks_complete(folder: Path) -> bool:
    try:
        check_manifest(folder, hashes=False)  # hashing every kept checkpoint at every save would cost more than saving
    except RunError:
        return False
    return True


def _aside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.replaced")


# What a checkpoint holds, and nothing else is read from one: plain files inside its folder that its manifest lists.
#
# The manifest is checked before anything is made of it, so that an odd one is passed over like a damaged one.

WEIGHTS = "model.safetensors"
_INDEX = f"{WEIGHTS}.index.json"
_ADAPTER = "adapter_model.safetensors"
_SHARED_TREES = ("optimizer", "scheduler")
_TREES_OF_A_PROCESS = ("rng", "cursor", "extra")
_ABOUT = {"model": dict, "data": dict, "weights_only": bool}
_MODEL = {"class": str, "config": dict, "adapters": dict, "parameters": dict, "base_weights": str | None}
_SHA256 = re.compile(r"[0-9a-f]{64}")
# What torch.save writes. Nothing here is ever unpickled, and a checkpoint of ours has no such file.
_PICKLES = {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt"}
_READ_BY_GRPO = "entropy_ctrl_state.json"


def _check_fields(fields: Mapping[str, Any], where: str) -> None:
    """Raise ArtefactCorruptError for fields of another type than a manifest's, or one that lists too little."""
    problem = next(_odd_fields(fields), None) or next(_not_listed(fields), None)
    if problem is not None:
        raise ArtefactCorruptError(explain(where, got=problem, expected="the manifest of a whole checkpoint"))


def _check_stray_file(name: str, folder: Path) -> None:
    """Raise ArtefactCorruptError for a file in no manifest that something would read, or that is a pickle."""
    is_pickle = Path(name).suffix in _PICKLES
    if is_pickle or name.endswith((".safetensors", ".index.json")) or name == _READ_BY_GRPO:
        reason = "Nothing is unpickled" if is_pickle else "It was not saved with the others"
        fix = f"{reason}: take the file out if you know what it is."
        got = f"{name}, which the manifest does not list"
        raise ArtefactCorruptError(explain(f"checkpoint {folder}", got=got, expected="no such file", fix=fix))


def plain_file(folder: Path, name: str) -> Path:
    """The file of this name; a link on the way to it is an error, since what it points to is not the checkpoint's."""
    path = folder
    for part in name.split("/"):
        path = path / part
        if path.is_symlink():
            raise ArtefactCorruptError(explain(f"{path}, in a checkpoint", got="a link", expected="the file itself"))
    if not path.is_file():
        raise ArtefactNotFoundError(explain(f"checkpoint {folder}", got="no such file", expected=name))
    return path


def weight_files(folder: Path, listed: Mapping[str, Any]) -> list[str]:
    """The files of a whole model's weights, by the index where there is one; none that the manifest does not list."""
    if _INDEX not in listed:
        if WEIGHTS not in listed:
            raise ArtefactNotFoundError(explain(f"checkpoint {folder}", got="no weights", expected=WEIGHTS))
        return [WEIGHTS]
    index = plain_file(folder, _INDEX)
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
    """Where `save_pretrained` puts the weights of an adapter."""
    return _ADAPTER if adapter == "default" else f"{adapter}/{_ADAPTER}"


def _odd_fields(fields: Mapping[str, Any]) -> Iterator[str]:
    if not _is_count(fields.get("step")):
        yield f"step {fields.get('step')!r:.60}"
    files: Any = fields.get("files")
    if isinstance(files, dict):
        yield from _odd_files(cast("dict[str, Any]", files))
    else:
        yield f"files {files!r:.60}"
    about: Any = fields.get("about")
    if not isinstance(about, dict):
        yield f"about {about!r:.60}"
        return
    yield from _of_other_types(cast("dict[str, Any]", about), _ABOUT, "about")
    yield from _of_other_types(about["model"], _MODEL, "about.model")
    if not _is_count(cast("dict[str, Any]", about).get("process", 0)):
        yield f"about.process {about['process']!r:.60}"


def _odd_files(files: Mapping[str, Any]) -> Iterator[str]:
    for name, entry in files.items():
        if not _is_inside(name):
            yield f"a file named {name!r:.80}"
        if not isinstance(entry, dict) or not _is_count(cast("dict[str, Any]", entry).get("num_bytes")):
            yield f"no files[{name!r:.80}].num_bytes"
        elif not _SHA256.fullmatch(str(cast("dict[str, Any]", entry).get("sha256"))):
            yield f"no files[{name!r:.80}].sha256"


def _of_other_types(fields: Mapping[str, Any], types: Mapping[str, Any], where: str) -> Iterator[str]:
    for name, kind in types.items():
        if name not in fields:
            yield f"no {where}.{name}"
        elif not isinstance(fields[name], kind):
            yield f"{where}.{name} {fields[name]!r:.60}"


def _not_listed(fields: Mapping[str, Any]) -> Iterator[str]:
    """Files without which a run cannot go on; of several processes, those of the one that wrote the manifest."""
    files, about = fields["files"], fields["about"]
    adapters: Mapping[str, Any] = about["model"]["adapters"]
    needed = [adapter_file(adapter) for adapter in adapters] or [_INDEX if _INDEX in files else WEIGHTS]
    if not about["weights_only"]:
        trees = [*_SHARED_TREES, *(f"{tree}-{about.get('process', 0)}" for tree in _TREES_OF_A_PROCESS)]
        needed += ["trainer_state.json", *(f"{tree}.{kind}" for tree in trees for kind in ("json", "safetensors"))]
    return (f"no {name} among its files" for name in needed if name not in files)


def _is_inside(name: str) -> bool:
    """Whether the name is one that `write_manifest` gives: from the folder, by single slashes, to something in it."""
    plain = "\\" not in name and "\0" not in name and not PureWindowsPath(name).drive
    return plain and not {"", ".", ".."} & set(name.split("/"))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
