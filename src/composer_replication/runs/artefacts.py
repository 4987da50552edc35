"""Which files a run directory may contain, which command writes each, and how records are stored and checked.

Records are JSONL with a sidecar `<name>.meta.json`, which has their schema, sources and checksum. Both files are
written atomically, and no row is returned before the file has been compared with its sidecar.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Literal, NamedTuple, TypeVar, cast

from composer_replication.atomic import commit_together, directory_lock, staged
from composer_replication.canonical_json import decode_object, encode, encode_as_written
from composer_replication.errors import ArtefactCorruptError, ArtefactNotFoundError, InputError, RunError, explain
from composer_replication.runs.shared_reads import shared_read

NOT_WRITTEN_YET = "is not there yet"  # the reason to run a step that has never run
Kind = Literal["records", "journal", "file", "folder"]


@dataclass(frozen=True, slots=True)
class Artefact:
    """A file or folder in a run directory, and the command that writes it.

    `records` are JSONL with a sidecar, replaced as a whole; a `journal` is JSONL with a checksum in each line, appended
    to during a run; the format of a `file` or `folder` is up to the step that writes it.
    """

    name: str
    file_name: str
    command: str
    kind: Kind

    @property
    def sidecar_name(self) -> str:
        return f"{self.name}.meta.json"

    def command_for(self, run: Path) -> str:
        """Return the command that rebuilds this artefact of a run."""
        return f"{self.command} PATH... -o {run}" if self.command == "crf ingest" else f"{self.command} {run}"

    def not_found(self, run: Path) -> ArtefactNotFoundError:
        """Return the error for a run in which this artefact does not exist yet."""
        return ArtefactNotFoundError(f"{run / self.file_name} does not exist. Run `{self.command}` first")


_TABLE: tuple[tuple[str, str, str, Kind], ...] = (
    ("config", "config.resolved.toml", "crf run", "file"),
    ("conversations", "conversations.jsonl", "crf ingest", "records"),
    ("session_sources", "session_sources.jsonl", "crf ingest", "records"),
    ("forgotten", "forgotten.jsonl", "crf forget", "records"),
    ("tools", "tools.jsonl", "crf ingest", "records"),
    ("elsewhere", "elsewhere.jsonl", "crf export", "journal"),
    ("split", "split.jsonl", "crf split", "records"),
    ("sites", "sites.jsonl", "crf sites", "records"),
    ("conventions", "conventions.md", "crf sites", "file"),
    ("struck_hints", "struck_hints.jsonl", "crf hints", "journal"),
    ("teacher_calls", "teacher_calls.jsonl", "crf replay", "records"),
    ("teacher_cache", "teacher_cache.sqlite", "crf replay", "file"),
    ("asked_tools", "asked_tools.jsonl", "crf replay", "journal"),
    ("pairs", "pairs.jsonl", "crf pairs", "records"),
    ("ref_logprobs", "ref_logprobs.safetensors", "crf train", "file"),
    ("hint_proof", "hint_proof.jsonl", "crf train", "records"),
    ("metrics", "metrics.jsonl", "crf train", "journal"),
    ("checkpoints", "checkpoints", "crf train", "folder"),
    ("adapter", "adapter", "crf train", "folder"),
    ("model", "model", "crf train", "folder"),
    ("control", "control", "crf train", "folder"),
    ("earlier", "earlier", "crf run", "folder"),
    ("evaluation", "evaluation.json", "crf evaluate", "file"),
    ("evaluated", "evaluated.jsonl", "crf evaluate", "records"),
    ("sampled", "sampled.jsonl", "crf evaluate", "records"),
    ("token_gaps", "token_gaps.jsonl", "crf evaluate", "records"),
    ("report_html", "report.html", "crf report", "file"),
    ("report_md", "report.md", "crf report", "file"),
    ("report_sessions", "report_sessions", "crf report", "folder"),
)
# Older versions of these schemas are refused: version 1 sorted the keys of calls and tools, so the order in which
# arguments were written is lost.
OLDEST_READABLE: Mapping[str, int] = MappingProxyType({"conversation": 2, "tool": 3, "teacher_call": 2, "dpo_pair": 2})
_WHY_REFUSED: Mapping[str, str] = MappingProxyType({"tool": "older rows do not say whose tool it is"})
"""Reasons for refusing older rows of a schema, if it is not the lost order of arguments."""
ARTEFACTS: Mapping[str, Artefact] = MappingProxyType({row[0]: Artefact(*row) for row in _TABLE})


def control_folder(root: Path, shuffle: int = 1) -> Path:
    """Return the folder of a control: `control` for the first shuffle, `control/2` for the second, and so on."""
    first = root / ARTEFACTS["control"].file_name
    return first if shuffle == 1 else first / str(shuffle)


def control_folders(root: Path) -> list[Path]:
    """Return the existing folders of controls, ordered by shuffle."""
    first = control_folder(root)
    numbers = sorted(int(folder.name) for folder in first.glob("[2-9]*") if folder.name.isdecimal())
    return [first, *(control_folder(root, number) for number in numbers)] if first.is_dir() else []


def find_artefact(name: str, *, kind: Kind | None = None) -> Artefact:
    """Return the artefact with this name. Raises InputError for an unknown name, and suggests the nearest one."""
    artefact = ARTEFACTS.get(name)
    if artefact is None:
        near = difflib.get_close_matches(name, ARTEFACTS, n=1)
        fix = f"Did you mean {near[0]!r}?" if near else ""
        raise InputError(explain("artefact name", got=repr(name), expected=f"one of {', '.join(ARTEFACTS)}", fix=fix))
    if kind is not None and artefact.kind != kind:
        names = ", ".join(candidate.name for candidate in ARTEFACTS.values() if candidate.kind == kind)
        raise InputError(
            explain(f"artefact {name!r}", got=f"an artefact of kind {artefact.kind!r}", expected=f"one of {names}")
        )
    return artefact


SIDECAR_VERSION = 1
Setting = str | bool | int | float | list[str] | None
_T = TypeVar("_T")
_KINDS: Mapping[str, type] = {
    **dict.fromkeys(("artefact", "schema", "tool_version", "sha256", "created"), str),
    **dict.fromkeys(("version", "rows", "num_bytes"), int),
    **dict.fromkeys(("sources", "keys"), list),
    **dict.fromkeys(("counts", "drops", "settings"), dict),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """An input of an artefact: another artefact (by its name) or a file.

    The name of a file is its path as returned by `portable_name`: absolute, relative to the run, or below `~`.
    """

    kind: str
    name: str
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ArtefactMeta:
    """The contents of a sidecar. The fields from `keys` on are known only after the rows are written.

    `settings` records options that readers need to know, such as that secrets were not redacted.
    """

    artefact: str
    schema: str
    version: int
    tool_version: str
    sources: tuple[Source, ...]
    config_hash: str | None
    counts: Mapping[str, int]
    drops: Mapping[str, int]
    settings: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    keys: tuple[str, ...] = ()
    rows: int = 0
    num_bytes: int = 0
    sha256: str = ""
    created: str = ""

    def to_bytes(self) -> bytes:
        """Return the sidecar as JSON. For equal rows it differs only in `created` and in a salt in `settings`."""
        fields: dict[str, object] = {name: getattr(self, name) for name in self.__slots__}
        fields["sources"] = [
            {"kind": source.kind, "name": source.name, "sha256": source.sha256} for source in self.sources
        ]
        fields["sidecar_version"] = SIDECAR_VERSION
        return encode(fields, where=f"sidecar of {self.artefact}", indent=True) + b"\n"


def _read_sidecar(path: Path) -> ArtefactMeta:
    """Read the sidecar at `path`, which must exist. Raises ArtefactCorruptError if it is not a valid sidecar."""
    try:
        fields = decode_object(path.read_bytes())
        if fields["sidecar_version"] != SIDECAR_VERSION:
            raise RunError(
                explain(
                    f"{path.name}, sidecar_version",
                    got=fields["sidecar_version"],
                    expected=SIDECAR_VERSION,
                    fix="Upgrade composer-replication: a newer version wrote it",
                )
            )
        return _meta_from(fields)
    except (ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ArtefactCorruptError(
            explain(path.name, got=problem, expected="a sidecar with all fields", fix="Write the artefact again")
        ) from error


def now() -> str:
    """Return the current time in the format of sidecars."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def sha256_of_file(path: Path) -> str:
    """Return the hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _meta_from(fields: Mapping[str, object]) -> ArtefactMeta:
    values: dict[str, Any] = {name: _typed({"settings": {}, **fields}, name, kind) for name, kind in _KINDS.items()}
    values["sources"] = tuple(
        Source(**{name: _typed(source, name, str) for name in ("kind", "name", "sha256")})
        for source in values["sources"]
    )
    odd = [key for key in values["keys"] if not isinstance(key, str)]
    if odd:
        raise TypeError(f"keys contains {odd[0]!r}, expected str")
    values["keys"] = tuple(values["keys"])
    values["config_hash"] = None if fields["config_hash"] is None else _typed(fields, "config_hash", str)
    return ArtefactMeta(**values)


def _typed(fields: Mapping[str, object], name: str, kind: type[_T]) -> _T:
    value = fields[name]
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}, expected {kind.__name__}")
    return value


Row = Mapping[str, object]
READ_COUNTS: Counter[str] = Counter()
"""How often this process has decoded the rows (`decoded NAME`) or hashed the bytes (`hashed NAME`) of an artefact."""


class EncodedRow(NamedTuple):
    """A row that is already encoded by `encode_as_written`, with its keys."""

    text: bytes
    keys: frozenset[str]


def write_records(
    directory: Path, artefact: Artefact, rows: Iterable[Row | EncodedRow], draft: ArtefactMeta
) -> ArtefactMeta:
    """Write `rows` to the file of an artefact, and return `draft` completed with their number, keys and checksum.

    Both files are on disk before either is renamed. Only an error or a crash between the two renames can leave a new
    file with an old sidecar, which `check_sidecar` detects by the checksum.
    """
    with staged(directory / artefact.file_name) as data, staged(directory / artefact.sidecar_name) as sidecar:
        meta = _stream(rows, data.file, draft, artefact.file_name)
        sidecar.file.write(meta.to_bytes())
        data.seal()  # syncing to disk is slow, so it is done before the lock is taken
        sidecar.seal()
        with directory_lock(directory, exclusive=True):
            commit_together(data, sidecar)
    return meta


def read_records(
    directory: Path, artefact: Artefact, *, schema: str, version: int, verify: bool
) -> Iterator[dict[str, object]]:
    """Return an iterator over the rows of an artefact. It raises before the first row if they do not match the sidecar.

    A schema or version that this code cannot read raises immediately.
    """
    meta = read_meta(directory, artefact)
    _check_readable(meta, artefact, directory, schema=schema, version=version)
    return _read_rows(directory, artefact, schema=schema, version=version, verify=verify)


def _read_rows(
    directory: Path, artefact: Artefact, *, schema: str, version: int, verify: bool
) -> Iterator[dict[str, object]]:
    meta, file = open_records(directory, artefact)
    with file:
        _check_readable(meta, artefact, directory, schema=schema, version=version)
        check_sidecar(file, meta, artefact, verify=verify)
        READ_COUNTS[f"decoded {artefact.name}"] += 1
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
    """Return the sidecar and the open data file. A lock keeps writers from replacing only one of them."""
    with _locked_meta(directory, artefact) as meta:
        return meta, (directory / artefact.file_name).open("rb")


def read_meta(directory: Path, artefact: Artefact) -> ArtefactMeta:
    """Return the sidecar of an existing artefact."""
    with _locked_meta(directory, artefact) as meta:
        return meta


@contextlib.contextmanager
def _locked_meta(directory: Path, artefact: Artefact) -> Generator[ArtefactMeta]:
    if not (directory / artefact.file_name).exists():
        raise artefact.not_found(directory)
    with directory_lock(directory, exclusive=False):
        sidecar = directory / artefact.sidecar_name
        if not sidecar.exists():
            raise _corrupt(artefact, got="no sidecar", expected=f"{artefact.sidecar_name} next to it")
        yield _read_sidecar(sidecar)


def verified_meta(directory: Path, artefact: Artefact) -> ArtefactMeta:
    """Return the sidecar of an artefact after comparing it with the data file."""

    def verify() -> ArtefactMeta:
        meta, file = open_records(directory, artefact)
        with file:
            check_sidecar(file, meta, artefact, verify=True)
        return meta

    return shared_read("verified", [directory / artefact.file_name, directory / artefact.sidecar_name], verify)


def check_sidecar(file: BufferedReader, meta: ArtefactMeta, artefact: Artefact, *, verify: bool) -> None:
    """Raise ArtefactCorruptError unless the sidecar describes the open file. The file is left at its start.

    Without `verify` only the length is compared, which costs nothing and detects truncation.
    """
    num_bytes = file.seek(0, 2)
    file.seek(0)
    if num_bytes != meta.num_bytes:
        got = f"{num_bytes} bytes ({_first_bad_line(file, meta)})"
        raise _corrupt(artefact, got=got, expected=f"{meta.num_bytes} bytes in {meta.rows} lines")
    if verify:
        READ_COUNTS[f"hashed {artefact.name}"] += 1
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
        if digest != meta.sha256:
            got = f"sha256 {digest} ({_first_bad_line(file, meta)})"
            raise _corrupt(artefact, got=got, expected=f"sha256 {meta.sha256} of {meta.rows} lines")


def _check_readable(meta: ArtefactMeta, artefact: Artefact, directory: Path, *, schema: str, version: int) -> None:
    """Raise if the rows have another schema, or a version newer or older than this code can read."""
    if meta.schema != schema:
        raise ArtefactCorruptError(explain(f"artefact {meta.artefact}, schema", got=meta.schema, expected=schema))
    if meta.version > version:
        raise RunError(
            explain(
                f"artefact {meta.artefact}, version of schema {schema}",
                got=meta.version,
                expected=f"{version} or older",
                fix=f"Upgrade composer-replication: version {meta.tool_version} wrote it",
            )
        )
    oldest = OLDEST_READABLE.get(schema, 1)
    if meta.version < oldest:
        why = _WHY_REFUSED.get(schema, "older rows do not preserve the order of arguments and schemas")
        raise RunError(
            explain(
                f"{directory / artefact.file_name}, version of schema {schema}",
                got=f"{meta.version} (composer-replication {meta.tool_version})",
                expected=f"{oldest} or newer: {why}",
                fix=f"Rebuild it: `{artefact.command_for(directory)}`",
            )
        )


def _stream(rows: Iterable[Row | EncodedRow], file: BinaryIO, draft: ArtefactMeta, file_name: str) -> ArtefactMeta:
    digest, num_bytes, num_rows = hashlib.sha256(), 0, 0
    keys: frozenset[str] | None = None
    for num_rows, row in enumerate(rows, start=1):
        where = f"{file_name} line {num_rows}"
        keys = _same_keys(row, keys, where)
        if isinstance(row, EncodedRow):
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
    if not isinstance(row, Mapping | EncodedRow):
        raise InputError(explain(where, got=f"a row of type {type(row).__name__}", expected="a mapping"))
    row_keys = row.keys if isinstance(row, EncodedRow) else frozenset(cast("Mapping[str, object]", row))
    if keys is None:
        return row_keys
    if row_keys != keys:
        raise InputError(explain(where, got=_difference(row_keys, keys), expected="exactly the keys of line 1"))
    return keys


def _decode_record(line: bytes, keys: frozenset[str]) -> dict[str, object]:
    """Return the record in a line. Raises ValueError if the line is incomplete or has other keys."""
    if not line.endswith(b"\n"):
        raise ValueError(f"truncated after {len(line)} bytes")
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
    """Describe the first invalid line of a corrupt file, for the error message."""
    number, keys = 0, frozenset(meta.keys)
    for number, line in enumerate(file, start=1):
        try:
            _decode_record(line, keys)
        except ValueError as error:
            return f"line {number}: {error}"
    return f"{number} lines, all valid"


def _corrupt(artefact: Artefact, *, got: str, expected: str) -> ArtefactCorruptError:
    fix = (
        "The file and its sidecar do not match: one was edited, or writing was interrupted. "
        f"Run `{artefact.command}` again"
    )
    return ArtefactCorruptError(explain(artefact.file_name, got=got, expected=expected, fix=fix))
