"""JSONL of one kind of record beside its sidecar: written whole, and checked before the first row is handed out."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from composer_replication.atomic import commit_together, directory_lock, staged
from composer_replication.canonical_json import decode_object, encode_as_written
from composer_replication.errors import ArtefactCorruptError, ArtefactNotFoundError, InputError, RunError, explain
from composer_replication.runs.artefacts import OLDEST_READ, WHY_REFUSED, Artefact, command_for
from composer_replication.runs.sidecar import ArtefactMeta, check_schema, now, read_sidecar

Row = Mapping[str, object]
PASSES: Counter[str] = Counter()
"""How often this process went through the rows of an artefact (`decoded conversations`), or its bytes (`hashed …`)."""


class Line(NamedTuple):
    """A row that `encode_as_written` has made text of already, and its keys."""

    text: bytes
    keys: frozenset[str]


def write_records(directory: Path, artefact: Artefact, rows: Iterable[Row | Line], draft: ArtefactMeta) -> ArtefactMeta:
    """Stream `rows` to the artefact's file, complete `draft` with what was written and make it the sidecar.

    Both files are complete on disk before either is renamed, so nothing but an error or a crash between the two
    renames can leave a new file beside an old sidecar. `check_pair` finds that by the checksum.
    """
    with staged(directory / artefact.file_name) as data, staged(directory / artefact.sidecar_name) as sidecar:
        meta = _stream(rows, data.file, draft, artefact.file_name)
        sidecar.file.write(meta.to_bytes())
        data.seal()  # the slow part, before the lock
        sidecar.seal()
        with directory_lock(directory, exclusive=True):
            commit_together(data, sidecar)
    return meta


def read_records(
    directory: Path, artefact: Artefact, *, schema: str, version: int, verify: bool
) -> Iterator[dict[str, object]]:
    """Yield the rows of an artefact that agrees with its sidecar; no row of one that does not."""
    meta, file = open_records(directory, artefact)
    with file:
        check_schema(meta, schema=schema, version=version)
        refuse_old(meta, artefact, directory)
        check_pair(file, meta, artefact, verify=verify)
        PASSES[f"decoded {artefact.name}"] += 1
        num_rows, keys = 0, frozenset(meta.keys)
        for num_rows, line in enumerate(file, start=1):
            try:
                row = _decode_record(line, keys)
            except ValueError as error:
                raise _corrupt(artefact, got=f"line {num_rows}: {error}", expected="a complete record") from error
            yield row
        if num_rows != meta.rows:
            raise _corrupt(artefact, got=f"{num_rows} rows", expected=f"{meta.rows} rows")


def open_records(directory: Path, artefact: Artefact) -> tuple[ArtefactMeta, BufferedReader]:
    """The sidecar and the open data file, taken together so that no writer replaces one of them in between."""
    data, sidecar = directory / artefact.file_name, directory / artefact.sidecar_name
    if not data.exists():
        raise not_found(artefact, directory)
    with directory_lock(directory, exclusive=False):
        if not sidecar.exists():
            raise _corrupt(artefact, got="no sidecar", expected=f"{artefact.sidecar_name} beside it")
        meta = read_sidecar(sidecar)
        return meta, data.open("rb")


def check_pair(file: BufferedReader, meta: ArtefactMeta, artefact: Artefact, *, verify: bool) -> None:
    """Raise ArtefactCorruptError unless the open file is the one the sidecar describes; leaves the file at its start.

    Without `verify` only the length is compared, which costs nothing and finds truncation.
    """
    num_bytes = file.seek(0, 2)
    file.seek(0)
    if num_bytes != meta.num_bytes:
        got = f"{num_bytes} bytes ({_first_bad_line(file, meta)})"
        raise _corrupt(artefact, got=got, expected=f"{meta.num_bytes} bytes in {meta.rows} lines")
    if verify:
        PASSES[f"hashed {artefact.name}"] += 1
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
        if digest != meta.sha256:
            got = f"sha256 {digest} ({_first_bad_line(file, meta)})"
            raise _corrupt(artefact, got=got, expected=f"sha256 {meta.sha256} of {meta.rows} lines")


def refuse_old(meta: ArtefactMeta, artefact: Artefact, directory: Path) -> None:
    """Raise a RunError for rows of a version that can only be made anew, with the command that does it."""
    oldest = OLDEST_READ.get(meta.schema, 1)
    if meta.version < oldest:
        why = WHY_REFUSED.get(meta.schema, "older rows lost the order in which arguments and schemas were written")
        raise RunError(
            explain(
                f"{directory / artefact.file_name}, version of schema {meta.schema}",
                got=f"{meta.version} (composer-replication {meta.tool_version})",
                expected=f"{oldest} or newer: {why}",
                fix=f"Make it anew: `{command_for(artefact, directory)}`",
            )
        )


def not_found(artefact: Artefact, directory: Path) -> ArtefactNotFoundError:
    """The error for an artefact that no step has written yet."""
    return ArtefactNotFoundError(
        f"{directory / artefact.file_name} does not exist. `{artefact.command}` writes it: run that first"
    )


def _stream(rows: Iterable[Row | Line], file: BinaryIO, draft: ArtefactMeta, file_name: str) -> ArtefactMeta:
    digest, num_bytes, num_rows = hashlib.sha256(), 0, 0
    keys: frozenset[str] | None = None
    for num_rows, row in enumerate(rows, start=1):
        where = f"{file_name} line {num_rows}"
        keys = _same_keys(row, keys, where)
        if isinstance(row, Line):
            line = row.text + b"\n"
        else:
            line = encode_as_written(row if isinstance(row, dict) else dict(row), where=where) + b"\n"
        file.write(line)
        digest.update(line)
        num_bytes += len(line)
    return replace(
        draft,
        keys=tuple(sorted(keys or ())),
        rows=num_rows,
        num_bytes=num_bytes,
        sha256=digest.hexdigest(),
        created=now(),
        counts=dict(draft.counts),
        drops=dict(draft.drops),
    )


def _same_keys(row: object, keys: frozenset[str] | None, where: str) -> frozenset[str]:
    if not isinstance(row, Mapping | Line):
        raise InputError(explain(where, got=f"a row of type {type(row).__name__}", expected="a mapping"))
    row_keys = row.keys if isinstance(row, Line) else frozenset(cast("Mapping[str, object]", row))
    if keys is None:
        return row_keys
    if row_keys != keys:
        raise InputError(explain(where, got=_difference(row_keys, keys), expected="the keys of line 1, all and only"))
    return keys


def _decode_record(line: bytes, keys: frozenset[str]) -> dict[str, object]:
    """The record in one line; a ValueError says what is wrong with it."""
    if not line.endswith(b"\n"):
        raise ValueError(f"cut off after {len(line)} bytes")
    row = decode_object(line)
    if row.keys() != keys:
        raise ValueError(_difference(row.keys(), keys))
    return row


def _difference(row_keys: Iterable[str], expected: Iterable[str]) -> str:
    extra, missing = set(row_keys) - set(expected), set(expected) - set(row_keys)
    parts = [
        f"{word} keys {', '.join(map(repr, sorted(map(str, some))))}"
        for word, some in (("extra", extra), ("missing", missing))
        if some
    ]
    return " and ".join(parts)


def _first_bad_line(file: BufferedReader, meta: ArtefactMeta) -> str:
    """Where a file that is known to be wrong shows it, for the message."""
    number, keys = 0, frozenset(meta.keys)
    for number, line in enumerate(file, start=1):
        try:
            _decode_record(line, keys)
        except ValueError as error:
            return f"line {number}: {error}"
    return f"{number} lines, each of them a record"


def _corrupt(artefact: Artefact, *, got: str, expected: str) -> ArtefactCorruptError:
    fix = (
        "The file and its sidecar do not belong together: one was edited, or the write was cut short. "
        f"Run `{artefact.command}` again"
    )
    return ArtefactCorruptError(explain(artefact.file_name, got=got, expected=expected, fix=fix))
