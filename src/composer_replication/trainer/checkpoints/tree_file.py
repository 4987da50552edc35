"""A tree of plain values and tensors as two files, safetensors and JSON, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from composer_replication.atomic import commit_together, staged
from composer_replication.canonical_json import decode_object, encode
from composer_replication.errors import ArtefactCorruptError, ArtefactNotFoundError, explain
from composer_replication.trainer.checkpoints.tensor_file import raw_dtypes, read_tensors, write_tensors
from composer_replication.trainer.checkpoints.tree_codec import TreeDecoder, TreeEncoder

_SCHEMA = "composer_replication.tree"
_VERSION = 1


def save_tree(folder: Path, name: str, tree: Any) -> None:
    """Write `<name>.safetensors` and `<name>.json`: dicts, lists, tuples, None, bool, int, float, str and tensors.

    Every bit is kept; that two tensors were one is not, nor is the device. What cannot be kept is an InputError that
    names its place in the tree.
    """
    folder = Path(folder)
    encoder = TreeEncoder(f"tree {name!r}")
    structure = encoder.encode(tree)
    with staged(folder / f"{name}.safetensors") as tensor_stage, staged(folder / f"{name}.json") as json_stage:
        digest = write_tensors(tensor_stage.file, encoder.tensors)
        about = {
            "schema": _SCHEMA,
            "version": _VERSION,
            "data_sha256": digest,
            "raw": raw_dtypes(encoder.tensors),
            "tree": structure,
        }
        json_stage.file.write(encode(about, where=str(folder / f"{name}.json")) + b"\n")
        commit_together(tensor_stage, json_stage)


def load_tree(folder: Path, name: str, *, device: str = "cpu") -> Any:
    """The tree that `save_tree` wrote, its tensors on `device`."""
    path = Path(folder) / f"{name}.json"
    try:
        about: dict[str, Any] = decode_object(path.read_bytes())
    except FileNotFoundError as error:
        raise ArtefactNotFoundError(explain(f"tree {name!r}", got="no such file", expected=str(path))) from error
    except ValueError as error:
        raise ArtefactCorruptError(explain(str(path), got=str(error), expected="what save_tree writes")) from error
    if (about.get("schema"), about.get("version")) != (_SCHEMA, _VERSION):
        got = f"schema {about.get('schema')} version {about.get('version')}"
        raise ArtefactCorruptError(explain(str(path), got=got, expected=f"{_SCHEMA} version {_VERSION}"))
    tensor_path = path.with_name(f"{name}.safetensors")
    if not tensor_path.is_file():
        raise ArtefactNotFoundError(explain(f"tree {name!r}", got="no such file", expected=str(tensor_path)))
    tensors = read_tensors(tensor_path, about["raw"], data_sha256=about["data_sha256"], device=device)
    return TreeDecoder(str(path), tensors).decode(about["tree"])


def has_tree(folder: Path, name: str) -> bool:
    """Whether `save_tree` wrote a tree of this name here."""
    return (Path(folder) / f"{name}.json").is_file()
