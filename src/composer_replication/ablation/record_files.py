"""JSON files of an experiment, plain or packed as compressed columns; a damaged one is named, with what to do about it.

A command writes plain JSON. What is published is packed: `results.columns.json.xz` holds the values of `results.json`,
no more and no less, in about a thirtieth of its bytes. `xz -dc` shows that it is JSON, too: a column of the one object.
Columns are

    [1, 2, "x"]                                             a column as it is
    {"shapes": [["a", "b"]], "rows": [0, 0], "columns": {"a": COLUMN, "b": COLUMN}}    a column of objects
    {"lengths": [2, 0], "items": COLUMN}                    a column of lists
    {"float32": [0.1, 0.5]}                                 a column of floats of 32 bits, in the fewest digits

`rows` has the shape of each object, which is its keys in their order; a key's column has the values of the objects that
have it. The 25 files that this repository holds packed are 21.9 MB of JSON and 0.79 MB of xz; without columns 1.3 MB.
"""

from __future__ import annotations

import lzma
from array import array
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from composer_replication.canonical_json import decode_object, encode_as_written
from composer_replication.errors import ArtefactCorruptError, explain

Record = TypeVar("Record")

PACKED = ".columns.json.xz"
_SCHEMA, _VERSION = "composer_replication.columns", 1
_PRESET = 6 | lzma.PRESET_EXTREME
# A few kilobytes of xz can stand for gigabytes of text or ask for as much memory, and anyone may publish results.
_MAX_TEXT_BYTES = 256 << 20
_MAX_READER_BYTES = 128 << 20


def packed_path(path: Path) -> Path:
    """Return where the packed form of a JSON file is stored: beside it."""
    return path.with_name(path.name.removesuffix(".json") + PACKED)


def stored_path(path: Path) -> Path:
    """Return the file that holds a record: the plain JSON, or its packed form where only that is there.

    The plain file wins because commands write it: beside a packed one it is the newer of the two.
    """
    packed = packed_path(path)
    return packed if packed.is_file() and not path.is_file() else path


def read_stored(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file that is named as plain JSON, and may be stored packed."""
    fix = "Put the file back as it was."
    return read_record(stored_path(path), dict, expected="a JSON object, plain or packed", fix=fix)


def read_record(path: Path, make: Callable[[Mapping[str, Any]], Record], *, expected: str, fix: str) -> Record:
    """Return what `make` makes of a file's object, packed if its name says so.

    Raises ArtefactCorruptError where the file holds no object, or one without what `make` needs.
    """
    try:
        data = path.read_bytes()
        return make(unpack(data) if path.name.endswith(PACKED) else decode_object(data))
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # cut off, no object, a key less, another type
        got = f"a file that cannot be read ({type(error).__name__}: {error})"
        raise ArtefactCorruptError(explain(str(path), got=got, expected=expected, fix=fix)) from error


def check_schema(value: Mapping[str, Any], schema: str, version: int) -> None:
    """ValueError, for `read_record`, where an object is of another schema or of none."""
    header = value.get("schema"), value.get("version")
    if header != (schema, version):
        got = "an object without a schema" if header == (None, None) else f"{header[0]} {header[1]}"
        raise ValueError(f"got {got}, expected {schema} {version}")


def pack(record: Mapping[str, Any]) -> bytes:
    """Return a JSON object as compressed columns; equal objects, with keys in the same order, give equal bytes."""
    document = {"schema": _SCHEMA, "version": _VERSION, "column": _as_column([record])}
    text = encode_as_written(document, where="a record to pack")
    return lzma.compress(text, format=lzma.FORMAT_XZ, preset=_PRESET)


def unpack(data: bytes) -> dict[str, Any]:
    """Return the object that `pack` was given. Raises ValueError for damaged or cut-off data."""
    try:
        document = decode_object(_decompressed(data))
        check_schema(document, _SCHEMA, _VERSION)
        [record] = _values(document["column"])
    except (lzma.LZMAError, KeyError, IndexError, TypeError, AttributeError, RecursionError, StopIteration) as error:
        raise ValueError(f"no columns as `pack` writes them ({type(error).__name__}: {error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"got a packed {type(record).__name__}, expected an object")
    return record


def _decompressed(data: bytes) -> bytes:
    reader = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=_MAX_READER_BYTES)
    text = reader.decompress(data, max_length=_MAX_TEXT_BYTES)
    if not reader.eof or reader.unused_data:
        raise ValueError(f"got data that is cut off, has more after its end, or holds over {_MAX_TEXT_BYTES:,} bytes")
    return text


def _as_column(values: list[Any]) -> Any:
    """Return a column of values that `_values` reads."""
    if values and all(type(value) is dict for value in values):
        numbers: dict[tuple[str, ...], int] = {}
        rows = [numbers.setdefault(tuple(value), len(numbers)) for value in values]
        keys = dict.fromkeys(key for shape in numbers for key in shape)
        columns = {key: _as_column([value[key] for value in values if key in value]) for key in keys}
        return {"shapes": [list(shape) for shape in numbers], "rows": rows, "columns": columns}
    if values and all(type(value) is list for value in values):
        items = [item for value in values for item in value]
        return {"lengths": [len(value) for value in values], "items": _as_column(items)}
    if values and all(type(value) is float for value in values) and array("f", values).tolist() == values:
        return {"float32": [_in_few_digits(value) for value in values]}
    return values


def _values(column: Any) -> list[Any]:
    if isinstance(column, list):
        return column
    if "float32" in column:
        return array("f", column["float32"]).tolist()
    if "lengths" in column:
        items, lengths = _values(column["items"]), column["lengths"]
        if len(items) != sum(lengths):
            raise ValueError(f"got lists of {sum(lengths):,} items in all, and {len(items):,} items")
        rest = iter(items)
        return [list(islice(rest, length)) for length in lengths]
    columns = {key: iter(_values(values)) for key, values in column["columns"].items()}
    objects = [{key: next(columns[key]) for key in column["shapes"][shape]} for shape in column["rows"]]
    if any(True for values in columns.values() for _ in values):
        raise ValueError("got columns that are longer than their rows")
    return objects


def _in_few_digits(value: float) -> float:
    """Return the float of fewest digits that 32 bits round to `value`, such as 0.1 for 0.10000000149011612."""
    shortened = (float(f"{value:.{digits}g}") for digits in range(1, 10))  # nine digits tell any two apart
    return next(short for short in shortened if array("f", [short])[0] == value)
