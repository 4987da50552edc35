"""What was made from a run outside of it: exports, checkpoints, trained weights. Nobody else knows that they are there.

`crf forget` cannot clean them; it names them, for whoever has to.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from composer_replication.runs.directory import RunDir
from composer_replication.runs.sidecar import now
from composer_replication.runs.source_paths import find_source, portable_name

Made = Literal[
    "preference data set", "ATIF documents", "data set", "checkpoints", "trained weights", "exported weights", "report"
]
_NAME = "elsewhere"


@dataclass(frozen=True, slots=True)
class MadeElsewhere:
    """A file or folder that holds, or has learnt, text of the run's sessions; `path` as the run names it."""

    what: str
    path: str
    created: str


def note_elsewhere(run: RunDir, what: Made, path: Path) -> None:
    """Write down that something is made at `path`, which lies outside of the run; what lies in it is an artefact."""
    if run.root.resolve() in path.resolve().parents:
        return
    name = portable_name(path, run.root)
    if (what, name) not in {(entry.what, entry.path) for entry in _noted(run)}:
        with run.append_jsonl(_NAME) as journal:
            journal.append({"what": what, "path": name, "created": now()})


def made_elsewhere(run: RunDir) -> tuple[MadeElsewhere, ...]:
    """What was made and is still there, in order."""
    return tuple(entry for entry in _noted(run) if find_source(entry.path, run.root).exists())


def _noted(run: RunDir) -> list[MadeElsewhere]:
    if not run.path(_NAME).exists():
        return []
    rows = run.read_journal(_NAME).rows
    return [MadeElsewhere(str(row["what"]), str(row["path"]), str(row["created"])) for row in rows]
