"""What a checkpoint holds, and nothing else is read from one: plain files inside its folder that its manifest lists.

The manifest is checked before anything is made of it, so that an odd one is passed over like a damaged one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PureWindowsPath
from typing import Any, cast

from composer_replication.canonical_json import decode_object
from composer_replication.errors import ArtefactCorruptError, ArtefactNotFoundError, explain

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


def check_fields(fields: Mapping[str, Any], where: str) -> None:
    """Raise ArtefactCorruptError for fields of another type than a manifest's, or one that lists too little."""
    problem = next(_odd_fields(fields), None) or next(_not_listed(fields), None)
    if problem is not None:
        raise ArtefactCorruptError(explain(where, got=problem, expected="the manifest of a whole checkpoint"))


def check_stray_file(name: str, folder: Path) -> None:
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
