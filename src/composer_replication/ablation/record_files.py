"""JSON files of an experiment, read so that a damaged one is named, with what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from composer_replication.canonical_json import decode_object
from composer_replication.errors import ArtefactCorruptError, explain

Record = TypeVar("Record")


def read_record(path: Path, make: Callable[[Mapping[str, Any]], Record], *, expected: str, fix: str) -> Record:
    """What `make` makes of a file's object; ArtefactCorruptError where it is none, or has not what it should have."""
    try:
        return make(decode_object(path.read_bytes()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # cut off, no object, a key less, another type
        got = f"a file that cannot be read ({type(error).__name__}: {error})"
        raise ArtefactCorruptError(explain(str(path), got=got, expected=expected, fix=fix)) from error


def check_schema(value: Mapping[str, Any], schema: str, version: int) -> None:
    """ValueError, for `read_record`, where an object is of another schema or of none."""
    known = value.get("schema"), value.get("version")
    if known != (schema, version):
        got = "an object without a schema" if known == (None, None) else f"{known[0]} {known[1]}"
        raise ValueError(f"got {got}, expected {schema} {version}")
