"""Sessions written by a test, read by one ingester; and damage that every ingester has to survive."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from composer_replication.ingestion.source_files import IngestReport, SourceFile
from composer_replication.types import Conversation, Turn


def jsonl(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def ingest(
    module: ModuleType, folder: Path, data: bytes, name: str = "session.jsonl"
) -> tuple[list[Conversation], IngestReport]:
    path = folder / name
    path.write_bytes(data)
    return ingest_file(module, path)


def ingest_file(module: ModuleType, path: Path) -> tuple[list[Conversation], IngestReport]:
    report = IngestReport()
    conversations = list(module.read(SourceFile(path, path.name), report))
    for conversation in conversations:
        assert conversation.format == module.FORMAT
        assert conversation.turns
        ids = [turn.id for turn in conversation.turns]
        assert len(set(ids)) == len(ids)
        for turn in conversation.turns:
            assert turn.provenance.file == path.name
            assert all(line > 0 for line in turn.provenance.lines)
    ids = [conversation.id for conversation in conversations]
    assert len(set(ids)) == len(ids)
    return conversations, report


def texts(conversation: Conversation) -> list[str]:
    return [turn.text for turn in conversation.turns]


def counted(conversations: Sequence[Conversation]) -> dict[str, int]:
    turns: list[Turn] = [turn for conversation in conversations for turn in conversation.turns]
    return {
        "user": sum(turn.role == "user" for turn in turns),
        "system": sum(turn.role == "system" for turn in turns),
        "assistant": sum(turn.role == "assistant" for turn in turns),
        "calls": sum(len(turn.calls) for turn in turns),
        "results": sum(len(turn.results) for turn in turns),
        "errors": sum(result.is_error is True for turn in turns for result in turn.results),
    }


def fixture(shared_dir: Path, *parts: str) -> Path:
    return shared_dir.joinpath("fixtures", "sessions", *parts)


def all_fixtures(shared_dir: Path) -> list[Path]:
    return sorted(path for path in (shared_dir / "fixtures" / "sessions").rglob("*.*") if path.is_file())


def head(path: Path) -> bytes:
    return path.read_bytes()[: 64 * 1024]


# Damaged lines, and why each of them is left out.
BROKEN_LINES = {
    b'{"type": "response_item", "payload": {\n': "invalid JSON",
    b"\x00\x00\x00\x00\n": "NUL bytes",
    b'{"type": "\xff\xfe"}\n': "invalid UTF-8",
    b"[1, 2]\n": "not a JSON object",
}

# Whole files nobody can read: nothing comes out, nothing is raised.
HOPELESS = [
    b"",
    b"\n\n",
    b"\x00" * 64,
    b"\xff\xfe\x00",
    b"{",
    b"[",
    b"[]",
    b"null",
    b'"text"',
    b"{}",
    b"[[[[",
    b"}{",
    b"{\n",
]

# JSON values that stand where something else is expected.
ODD_VALUES: list[Any] = [None, True, -1.5, "text", "", {}, [[], None], {"type": [], "role": {}}]


def mutations(value: Any) -> list[Any]:
    """Copies of a JSON value in which one node each is something else."""
    copies = list(ODD_VALUES)
    if isinstance(value, dict):
        for key in value:
            copies += [{**value, key: other} for other in mutations(value[key])]
            copies.append({each: value[each] for each in value if each != key})
    elif isinstance(value, list):
        for index in range(len(value)):
            copies += [[*value[:index], other, *value[index + 1 :]] for other in mutations(value[index])]
    return copies
