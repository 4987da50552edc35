"""Sessions out of what later steps made of them: rows that name a conversation go alone, other artefacts go whole."""

from __future__ import annotations

import shutil
from collections.abc import Sequence, Set

from composer_replication.runs.artefacts import ARTEFACTS
from composer_replication.runs.directory import RunDir
from composer_replication.runs.sidecar import ArtefactMeta
from composer_replication.runs.source_paths import find_source


def filtered_of(run: RunDir, derived: Sequence[str]) -> tuple[str, ...]:
    """Of these artefacts those of which single rows can go; what was made of one that goes whole goes with it."""
    filtered = [name for name in derived if _can_be_filtered(run, name)]
    size = -1
    while size != len(filtered):
        size = len(filtered)
        whole = set(derived) - set(filtered)
        filtered = [name for name in filtered if not whole & {source.name for source in run.meta(name).sources}]
    return tuple(filtered)


def forget_rows(run: RunDir, name: str, gone: Set[str], meta: ArtefactMeta) -> None:
    """Write an artefact anew without the rows of these conversations; `meta` is its sidecar as it was before.

    Counts and drops are left out: they were made for rows that are gone, by a step that is not here to say.
    """
    rows = run.read_jsonl(name, schema=meta.schema, version=meta.version)
    kept = [row for row in rows if row["conversation_id"] not in gone]
    sources = [each.name if each.kind == "artefact" else find_source(each.name, run.root) for each in meta.sources]
    run.write_jsonl(
        name,
        kept,
        schema=meta.schema,
        version=meta.version,
        sources=[each for each in sources if isinstance(each, str) or each.is_file()],
        config_hash=meta.config_hash,
        settings={**meta.settings, "rows_forgotten": meta.rows - len(kept)},
    )


def delete_artefact(run: RunDir, name: str) -> None:
    """The artefact and its sidecar."""
    path = run.path(name)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    (run.root / ARTEFACTS[name].sidecar_name).unlink(missing_ok=True)


def _can_be_filtered(run: RunDir, name: str) -> bool:
    """Whether single rows can go: they say which conversation they are from, and the artefact is not out of date."""
    if ARTEFACTS[name].kind != "records":
        return False
    return "conversation_id" in run.meta(name).keys and name not in run.lineage(name).stale
