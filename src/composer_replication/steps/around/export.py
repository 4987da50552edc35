"""`crf export`: the conversations of a run as ATIF documents, one file per session."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from composer_replication.atomic import atomic_write_json
from composer_replication.errors import InputError, explain
from composer_replication.ingestion.cache.session_sources import read_accounts
from composer_replication.ingestion.formats.atif_write import to_atif
from composer_replication.ingestion.last_gate import Find, LastGate, gate_of, refusal
from composer_replication.runs import RunDir
from composer_replication.runs import conversations as rows
from composer_replication.runs.elsewhere import note_elsewhere
from composer_replication.types import Conversation

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_NAME = 120
_LISTS = ("steps", "subagent_trajectories")


def export_atif(
    run: RunDir, folder: Path, *, gate: LastGate | None = None, no_scrub: bool = False, allowed: Iterable[str] = ()
) -> list[Path]:
    """Write a document per session, sub-agents inside it, and one per part after a compaction.

    Files that are there already are an error, so that no export is mixed with another. So is a document in which the
    gate finds something, before any is written; the default gate refuses a run that was made with `--no-scrub`.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(explain(str(folder), got="a file or a folder with files in it", expected="a new folder"))
    if gate is None:
        gate = gate_of(run, os.environ, no_scrub=no_scrub, allowed=allowed)
    _refuse_secrets(run, gate)
    folder.mkdir(parents=True, exist_ok=True)
    note_elsewhere(run, "ATIF documents", folder)  # before the first: a process that dies here leaves no unknown copy
    written: dict[str, Path] = {}
    for identity, document in _documents(run):
        path = folder / f"{_file_name(identity, written)}.json"
        atomic_write_json(path, document)
        written[path.stem.lower()] = path
    return list(written.values())


def _documents(run: RunDir) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every document of a run, with the id of its conversation."""
    for family in _families(run):
        ids = {each.id for each in family}
        embedded = [each for each in family if _is_embedded(each, ids)]
        for conversation in family:
            if not _is_embedded(conversation, ids):
                yield conversation.id, to_atif(conversation, subagents=embedded)


def _refuse_secrets(run: RunDir, gate: LastGate) -> None:
    """Look at all documents as they will be written; a part that stands in several is named once."""
    finds: dict[bytes, Find] = {}
    for identity, document in [] if gate.is_open else _documents(run):
        for place, part in _parts(document, f"document {identity}"):
            if (find := gate.look(part, place)) is not None:
                finds.setdefault(find.digest, find)
    if finds:
        raise refusal("ATIF documents", list(finds.values()))


def _parts(document: dict[str, Any], place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield f"{place}, head", {key: each for key, each in document.items() if key not in _LISTS}
    for step in document["steps"]:
        yield f"{place}, step {step['step_id']}", step
    for inner in document.get("subagent_trajectories", ()):
        yield from _parts(inner, f"document {inner['trajectory_id']}")


def _families(run: RunDir) -> Iterator[list[Conversation]]:
    stored = run.read_jsonl("conversations", schema=rows.SCHEMA, version=rows.VERSION)
    for account in read_accounts(run):
        yield [rows.from_row(row) for row in islice(stored, len(account.conversations))]


def _is_embedded(conversation: Conversation, family: set[str]) -> bool:
    """Whether it is shown inside the document of another: the parts of one thread stand side by side."""
    link = conversation.parent
    return link is not None and link.kind != "compaction" and link.conversation_id in family


def _file_name(identity: str, taken: dict[str, Path]) -> str:
    """A name for any file system: ids are text from logs, and may hold slashes, dots or anything else."""
    plain = _NOT_IN_A_NAME.sub("_", identity).strip(".")[:_MAX_NAME] or "session"
    name, number = plain, 2
    while name.lower() in taken:
        name, number = f"{plain}-{number}", number + 1
    return name
