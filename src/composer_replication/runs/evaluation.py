"""The reader and writer of evaluation.json, and the rows beside it: scored decisions, sampled actions, token gaps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from composer_replication.atomic import atomic_write_json
from composer_replication.canonical_json import decode_object, encode
from composer_replication.errors import ArtefactCorruptError, explain
from composer_replication.runs.artefacts import find_artefact
from composer_replication.runs.directory import RunDir
from composer_replication.runs.records import not_found
from composer_replication.runs.sidecar import sha256_of_file

SCHEMA, VERSION = ".".join(("composer_replication", "evaluation")), 1  # which is no module that is loaded here
ROWS_VERSION = 1
"""Of the three files of rows, whose schemas have the artefacts' own names."""
Rows = Literal["evaluated", "sampled", "token_gaps"]
WORSE_BESIDES = "Worse besides"
"""How the verdict's remark on what training may cost begins; a report with the figures themselves leaves it out."""
ADAPTER_SETTINGS = "adapter_config.json"
_OF_A_PLACE = ("base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "peft_version")
_CONTROL = "control"
_KEYS = ("models", "split", "primary", "verdict", "power", "figures", "sampled", "damage", "drops", "not_run")


def control_name(shuffle: int = 1) -> str:
    """What a control is called among the weights that are compared: `control`, `control-2` and so on."""
    return _CONTROL if shuffle == 1 else f"{_CONTROL}-{shuffle}"


def shuffle_of(name: str) -> int:
    """The number of the shuffle in a control's name."""
    return int(name.partition("-")[2] or 1)


def controls_among(names: Iterable[str]) -> list[str]:
    """Those of these names that are a control's, in the order of their shuffles."""
    return sorted((name for name in names if name.partition("-")[0] == _CONTROL), key=shuffle_of)


def read_evaluation(run: RunDir) -> dict[str, Any]:
    """What `crf evaluate` found, once its schema and version are known to be ours."""
    path = run.path("evaluation")
    if not path.exists():
        raise not_found(find_artefact("evaluation"), run.root)
    fix = "Run `crf evaluate` again."
    try:
        record = decode_object(path.read_bytes())
    except ValueError as error:
        raise ArtefactCorruptError(explain(str(path), got=error, expected="a JSON object", fix=fix)) from error
    got = f"schema {record.get('schema')!r} version {record.get('version')!r}"
    if record.get("schema") != SCHEMA or record.get("version") != VERSION:
        raise ArtefactCorruptError(
            explain(str(path), got=got, expected=f"schema {SCHEMA!r} version {VERSION}", fix=fix)
        )
    missing = [key for key in _KEYS if key not in record]
    if missing:
        got = f"no {', no '.join(missing)}"
        raise ArtefactCorruptError(explain(str(path), got=got, expected=f"{', '.join(_KEYS)}", fix=fix))
    return record


def write_evaluation(run: RunDir, record: Mapping[str, Any]) -> None:
    """Whole or not at all; schema and version go first."""
    atomic_write_json(run.path("evaluation"), {"schema": SCHEMA, "version": VERSION, **record})


def weight_files_digest(folder: Path) -> str | None:
    """Of a folder's files of weights, by name and bytes; None of one without any, and of a name that is no folder.

    `models` of an evaluation has it as `files`, so that whoever shows its figures can tell whose they are. An adapter's
    settings belong to it: with another scale the same bytes are other weights.
    """
    files = sorted(folder.glob("*.safetensors"))
    listed = "".join(f"{path.name} {sha256_of_file(path)}\n" for path in files)
    if files and (folder / ADAPTER_SETTINGS).is_file():
        listed += f"{ADAPTER_SETTINGS} {hashlib.sha256(adapter_settings(folder)).hexdigest()}\n"
    return hashlib.sha256(listed.encode()).hexdigest() if files else None


def adapter_settings(folder: Path) -> bytes:
    """What an adapter's settings say of its weights, without where it lies and who wrote them down."""
    raw = (folder / ADAPTER_SETTINGS).read_bytes()
    try:
        settings = decode_object(raw)
    except ValueError:  # whoever loads it says what is wrong
        return raw
    return encode({key: value for key, value in settings.items() if key not in _OF_A_PLACE}, where=ADAPTER_SETTINGS)


def read_rows(run: RunDir, name: Rows) -> Iterator[dict[str, Any]]:
    """The rows of one of the three files; none where it was not written."""
    if not run.path(name).exists():
        return iter(())
    return run.read_jsonl(name, schema=name, version=ROWS_VERSION)
