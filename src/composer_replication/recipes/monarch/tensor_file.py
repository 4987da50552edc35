"""Tensors and a JSON record as one safetensors file that is there whole or not at all, whoever is killed when."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from composer_replication.errors import ArtefactCorruptError, ArtefactNotFoundError, explain

_RECORD = "record"
_UNFINISHED = ".unfinished"


def write_tensor_file(path: Path, tensors: Mapping[str, Tensor], record: Mapping[str, Any], *, lasting: bool) -> None:
    """`lasting` waits until the disk has it; in shared memory there is no disk to wait for."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    # Not `atomic.staged`: safetensors writes to a name, several times as fast as through bytes in between.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{_UNFINISHED}")
    try:
        plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        save_file(plain, unfinished, metadata={_RECORD: json.dumps(record, allow_nan=False)})
        if lasting:
            _sync(unfinished)
        unfinished.replace(path)
        if lasting:
            _sync(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def read_tensor_file(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Copies of the tensors, and the record, whose `kind` must be this one."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ArtefactNotFoundError(explain(str(path), got="no such file", expected=f"a {kind}"))
    try:
        with safe_open(str(path), framework="pt") as file:
            record: dict[str, Any] = json.loads((file.metadata() or {}).get(_RECORD, "{}"))
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise ArtefactCorruptError(explain(str(path), got=str(error), expected=f"a {kind}")) from error
    if record.get("kind") != kind:
        got = f"a record of kind {record.get('kind')!r}"
        raise ArtefactCorruptError(explain(str(path), got=got, expected=f"a {kind}"))
    return tensors, record


def numbered_files(folder: Path, stem: str) -> dict[int, Path]:
    """`STEM-000007.safetensors` by number."""
    paths = {path.stem.removeprefix(f"{stem}-"): path for path in folder.glob(f"{stem}-*.safetensors")}
    return {int(number): path for number, path in sorted(paths.items()) if number.isdigit()}


def numbered_path(folder: Path, stem: str, number: int) -> Path:
    return folder / f"{stem}-{number:06d}.safetensors"


def remove_unfinished(folder: Path) -> None:
    """What a killed writer left; call it where nobody else writes."""
    for path in folder.glob(f".*{_UNFINISHED}"):
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
