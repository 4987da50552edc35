"""The conversations of a run as ATIF documents, one file per session."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from composer_replication.atomic import atomic_write_json
from composer_replication.errors import InputError, explain
from composer_replication.ingestion.atif_write import to_atif
from composer_replication.ingestion.session_sources import read_accounts
from composer_replication.runs import RunDir
from composer_replication.runs import conversations as rows
from composer_replication.types import Conversation

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_NAME = 120


def export_atif(run: RunDir, folder: Path) -> list[Path]:
    """Write a document per session, sub-agents inside it, and one per part after a compaction; files that are there
    already are an error, so that no export is mixed with another."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(explain(str(folder), got="a file or a folder with files in it", expected="a new folder"))
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[str, Path] = {}
    for family in _families(run):
        ids = {each.id for each in family}
        embedded = [each for each in family if _is_embedded(each, ids)]
        for conversation in family:
            if _is_embedded(conversation, ids):
                continue
            path = folder / f"{_file_name(conversation.id, written)}.json"
            atomic_write_json(path, to_atif(conversation, subagents=embedded))
            written[path.stem.lower()] = path
    return list(written.values())


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
