"""The sidecar `<name>.meta.json`: what a data file is, what it came from, and the checksum it must still have."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from composer_replication.canonical_json import decode_object, encode
from composer_replication.errors import ArtefactCorruptError, RunError, explain

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
    """What an artefact was made from: another artefact (by its name) or a file.

    The name of a file is its path as `source_paths.portable_name` writes it: absolute, from the run, or from `~`.
    """

    kind: str
    name: str
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ArtefactMeta:
    """The contents of a sidecar; those from `keys` on are known once the rows are written.

    `settings` says how the artefact was made where that matters to whoever reads it: that secrets were left in, say.
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
        """The sidecar's text; only `created`, and a salt in `settings`, differ between two writes of the same rows."""
        fields: dict[str, object] = {name: getattr(self, name) for name in self.__slots__}
        fields["sources"] = [
            {"kind": source.kind, "name": source.name, "sha256": source.sha256} for source in self.sources
        ]
        fields["sidecar_version"] = SIDECAR_VERSION
        return encode(fields, where=f"sidecar of {self.artefact}", indent=True) + b"\n"


def read_sidecar(path: Path) -> ArtefactMeta:
    """The sidecar at `path`, which must exist; ArtefactCorruptError when it is not one."""
    try:
        fields = decode_object(path.read_bytes())
        if fields["sidecar_version"] != SIDECAR_VERSION:
            raise RunError(
                explain(
                    f"{path.name}, sidecar_version",
                    got=fields["sidecar_version"],
                    expected=SIDECAR_VERSION,
                    fix="A newer composer-replication wrote it: upgrade this one",
                )
            )
        return _meta_from(fields)
    except (ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ArtefactCorruptError(
            explain(path.name, got=problem, expected="a sidecar with every field", fix="Write the artefact again")
        ) from error


def check_schema(meta: ArtefactMeta, *, schema: str, version: int) -> None:
    """Refuse an artefact of another schema, or of a version that this code does not know yet."""
    if meta.schema != schema:
        raise ArtefactCorruptError(explain(f"artefact {meta.artefact}, schema", got=meta.schema, expected=schema))
    if meta.version > version:
        raise RunError(
            explain(
                f"artefact {meta.artefact}, version of schema {schema}",
                got=meta.version,
                expected=f"{version} or older",
                fix=f"composer-replication {meta.tool_version} wrote it: upgrade this one",
            )
        )


def now() -> str:
    """The time as sidecars write it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def sha256_of_file(path: Path) -> str:
    """The hex SHA-256 of a file's bytes."""
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
        raise TypeError(f"keys holds {odd[0]!r}, expected str")
    values["keys"] = tuple(values["keys"])
    values["config_hash"] = None if fields["config_hash"] is None else _typed(fields, "config_hash", str)
    return ArtefactMeta(**values)


def _typed(fields: Mapping[str, object], name: str, kind: type[_T]) -> _T:
    value = fields[name]
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}, expected {kind.__name__}")
    return value
