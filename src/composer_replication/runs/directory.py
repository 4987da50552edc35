"""Define `RunDir`, the folder through which the steps of a run exchange results, with locks for concurrent use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from composer_replication.atomic import atomic_create_json, is_temporary, remove, try_lock
from composer_replication.canonical_json import decode_object
from composer_replication.errors import InputError, RunError, explain
from composer_replication.runs.artefacts import (
    ArtefactMeta,
    EncodedRow,
    Row,
    Setting,
    Source,
    find_artefact,
    now,
    read_meta,
    read_records,
    write_records,
)
from composer_replication.runs.journal import Journal, JournalContents, read_journal
from composer_replication.runs.lineage import (
    Lineage,
    changed_sources,
    hash_source,
    portable_name,
    source_path,
    trace_lineage,
)

MARKER = "run.json"
_LOCK = ".lock"
Use = Literal["replay", "training", "run"]
"""Long uses during which the run must not change, since answers refer to its states, and weights to its sessions."""
_LAYOUT_VERSION = 1


class RunDir:
    """A run directory. `create` makes a new one, and `open` opens an existing one."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> RunDir:
        """Create a run directory at `path`, a new or empty folder. Of several concurrent callers, one succeeds."""
        root = Path(path)
        if root.exists() and not root.is_dir():
            raise RunError(explain(str(root), got="a file", expected="a path for a new folder"))
        root.mkdir(parents=True, exist_ok=True)
        names = sorted(entry.name for entry in root.iterdir() if not is_temporary(entry))
        if names and MARKER not in names:
            raise RunError(explain(str(root), got=f"a folder that contains {names[0]!r}", expected="an empty folder"))
        marker = {"layout_version": _LAYOUT_VERSION, "created": now(), "tool_version": _tool_version()}
        try:
            atomic_create_json(root / MARKER, marker)
        except FileExistsError:
            got, fix = f"a run directory with {MARKER}", "Open it, or choose another path"
            raise RunError(explain(str(root), got=got, expected="a path for a new run directory", fix=fix)) from None
        return cls(root)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunDir:
        """Open the run directory at `path`. Raises RunError if it is not a run directory."""
        root = Path(path)
        marker = root / MARKER
        if not marker.is_file():
            got = "no such folder" if not root.exists() else f"a folder without {MARKER}"
            fix = "Name a run that `crf ingest` created, or create one with `crf ingest PATH... -o RUN`."
            raise RunError(
                explain(f"{root} is not a run directory", got=got, expected=f"a folder with {MARKER}", fix=fix)
            )
        try:
            layout = decode_object(marker.read_bytes()).get("layout_version")
        except ValueError as error:
            raise RunError(explain(str(marker), got=error, expected="a JSON object")) from error
        if layout != _LAYOUT_VERSION:
            fix = "Another version of composer-replication created this run: use that version, or upgrade"
            raise RunError(explain(f"{marker}, layout_version", got=layout, expected=_LAYOUT_VERSION, fix=fix))
        return cls(root)

    @contextlib.contextmanager
    def exclusive(self, what: str, *, against: Sequence[Use] = ("replay",)) -> Generator[None, None, None]:
        """Lock the run for a command that reads and then replaces artefacts. Raises RunError if the run is locked.

        `against` lists the uses of the run, such as a replay, during which the command may not run either.
        """
        with contextlib.ExitStack() as locks:
            locks.enter_context(self._locked(_LOCK, what, "another process that is changing it"))
            for use in against:
                locks.enter_context(self._locked(_lock_of(use), what, f"a {use} in progress"))
            yield

    @contextlib.contextmanager
    def used_for(self, use: Use) -> Generator[None, None, None]:
        """Prevent commands from changing the run while the context is active."""
        locks = contextlib.ExitStack()
        with contextlib.suppress(OSError):  # a folder without write permission needs no lock
            locks.enter_context(
                self._locked(_lock_of(use), use, "another process that is changing it", exclusive=False)
            )
        with locks:
            yield

    def used_alone(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Lock the run for a process that runs several steps, each of which may take its own lock."""
        return self._locked(_lock_of("run"), what, "another process that is running its steps")

    @contextlib.contextmanager
    def _locked(self, name: str, what: str, got: str, *, exclusive: bool = True) -> Generator[None, None, None]:
        descriptor = os.open(self.root / name, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not try_lock(descriptor, exclusive=exclusive):
                fix = "Wait until it has finished, or choose another run"
                raise RunError(
                    explain(f"{what} on {self.root}", got=got, expected="exclusive access to the run", fix=fix)
                )
            yield
        finally:
            os.close(descriptor)  # releases the lock; removing the file would let two processes lock two files

    def remove_leftovers(self, *names: str) -> None:
        """Delete the temporary files of these artefacts that a killed process left behind. The caller must have
        locked the run.
        """
        prefixes = tuple(f".{file_name}." for name in names for file_name in _files_of(name))
        for path in self.root.iterdir():
            if is_temporary(path) and path.name.startswith(prefixes):
                remove(path)

    def path(self, name: str) -> Path:
        """Return the path of artefact `name`, which need not exist."""
        return self.root / find_artefact(name).file_name

    def meta(self, name: str) -> ArtefactMeta:
        """Return the sidecar (the metadata) of a JSONL artefact."""
        return read_meta(self.root, find_artefact(name, kind="records"))

    def write_jsonl(
        self,
        name: str,
        rows: Iterable[Row | EncodedRow],
        *,
        schema: str,
        version: int,
        sources: Iterable[str | Path | Source] = (),
        config_hash: str | None = None,
        counts: Mapping[str, int] | None = None,
        drops: Mapping[str, int] | None = None,
        settings: Mapping[str, Setting] | None = None,
    ) -> ArtefactMeta:
        """Replace artefact `name` with `rows`, which must all have the same keys, and return its sidecar.

        The order of keys is preserved. A source is the name of an artefact, the path of a file, or a `Source` that the
        caller recorded when reading it. `counts` and `drops` are read after the last row, so a generator may fill them.
        An exception before the first rename, including one raised by `rows`, leaves the old artefact unchanged. An
        OSError in the second rename leaves a pair that cannot be read; one in the final sync leaves the new artefact,
        which a power cut may still undo. Writing again repairs both cases.
        """
        artefact = find_artefact(name, kind="records")
        # Hashed before the first row is read: a source that changes meanwhile must appear changed, not current.
        hashed = tuple(_hashed(self.root, source, name) for source in sources)

        draft = ArtefactMeta(
            artefact=name,
            schema=schema,
            version=version,
            tool_version=_tool_version(),
            sources=hashed,
            config_hash=config_hash,
            counts={} if counts is None else counts,
            drops={} if drops is None else drops,
            settings={} if settings is None else settings,
        )
        return write_records(self.root, artefact, rows, draft)

    def read_jsonl(
        self, name: str, *, schema: str, version: int = 1, verify: bool = True
    ) -> Iterator[dict[str, object]]:
        """Return an iterator over the rows of artefact `name`; `version` is the newest that the caller can read.

        The checksum is compared before the first row, so that no row of a damaged artefact is used. `verify=False`
        skips this pass over the file, but still checks length, number of rows, and keys.
        """
        artefact = find_artefact(name, kind="records")
        return read_records(self.root, artefact, schema=schema, version=version, verify=verify)

    def source(self, name: str) -> Source:
        """Return artefact `name` as a source with its current hash, which is read from the sidecar if the artefact
        has records.
        """
        if find_artefact(name).kind != "records":
            return hash_source(self.root, name)
        return Source(kind="artefact", name=name, sha256=self.meta(name).sha256)

    def is_current(self, name: str) -> bool:
        """Return whether artefact `name` exists and, according to the sidecars, its source artefacts are unchanged."""
        if not self.path(name).exists():
            return False
        sources = self.meta(name).sources if find_artefact(name).kind == "records" else ()
        return all(
            self.is_current(source.name) and self.source(source.name) == source
            for source in sources
            if source.kind == "artefact"
        )

    def changed_sources(self, name: str) -> list[str]:
        """Return the names of those sources of artefact `name` that have changed or are stale. Source files are
        hashed to find out.
        """
        return changed_sources(self.root, name)

    def append_jsonl(self, name: str) -> Journal:
        """Open journal `name` for appending, as a context manager."""
        return Journal(self.root / find_artefact(name, kind="journal").file_name)

    def read_journal(self, name: str) -> JournalContents:
        """Return the rows of journal `name`, and the incomplete last line if a crash left one."""
        artefact = find_artefact(name, kind="journal")
        path = self.root / artefact.file_name
        if not path.exists():
            raise artefact.not_found(self.root)
        return read_journal(path)

    def lineage(self, name: str) -> Lineage:
        """Return the artefacts and files from which artefact `name` was made, and which artefacts among them are
        stale.
        """
        return trace_lineage(self.root, name)


def _hashed(root: Path, source: str | Path | Source, name: str) -> Source:
    if source == name:
        raise InputError(f"artefact {name!r} cannot be its own source: it would be stale immediately")
    return source if isinstance(source, Source) else hash_source(root, source)


def _files_of(name: str) -> tuple[str, str]:
    artefact = find_artefact(name)
    return artefact.file_name, artefact.sidecar_name


def _tool_version() -> str:
    from composer_replication.version import __version__

    return __version__


def _lock_of(use: Use) -> str:
    return f".{use}.lock"


# Copies outside the run.

# `crf forget` cannot clean exports, checkpoints and trained weights outside the run, but lists those recorded here.
CopyKind = Literal[
    "preference data set", "ATIF documents", "data set", "checkpoints", "trained weights", "exported weights", "report"
]
_NAME = "elsewhere"


@dataclass(frozen=True, slots=True)
class OutsideCopy:
    """A file or folder outside the run that contains its sessions or was trained on them; `path` is a portable name."""

    what: str
    path: str
    created: str


def record_outside_copy(run: RunDir, what: CopyKind, path: Path) -> None:
    """Record that a copy of the run's sessions is made at `path`. Does nothing for a path inside the run."""
    if run.root.resolve() in path.resolve().parents:
        return
    name = portable_name(path, run.root)
    if (what, name) not in {(entry.what, entry.path) for entry in _noted(run)}:
        with run.append_jsonl(_NAME) as journal:
            journal.append({"what": what, "path": name, "created": now()})


def outside_copies(run: RunDir) -> tuple[OutsideCopy, ...]:
    """Return the recorded copies outside the run that still exist, in the order in which they were made."""
    return tuple(entry for entry in _noted(run) if source_path(entry.path, run.root).exists())


def _noted(run: RunDir) -> list[OutsideCopy]:
    if not run.path(_NAME).exists():
        return []
    rows = run.read_journal(_NAME).rows
    return [OutsideCopy(str(row["what"]), str(row["path"]), str(row["created"])) for row in rows]


def require_empty_folder(folder: Path) -> None:
    """Raise InputError if `folder` exists and is not empty, because exports are never mixed with other files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        fix = "Choose another folder."
        got = "a file or a folder that contains files"
        raise InputError(explain(str(folder), got=got, expected="a new or empty folder", fix=fix))
