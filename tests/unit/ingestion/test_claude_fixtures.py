"""Real Claude Code logs: counts equal an independent one-pass count that imports nothing from the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from composer_replication.ingestion.formats import claude_code
from composer_replication.ingestion.source_files import IngestReport, SourceFile

FOLDER = Path(__file__).parents[4] / "shared" / "fixtures" / "sessions" / "claude_code"
FILES = sorted(FOLDER.rglob("*.json*")) if FOLDER.is_dir() else []

pytestmark = pytest.mark.skipif(not FILES, reason="the session fixtures are not beside this checkout (../shared)")


def count_independently(path):
    if path.suffix == ".json":
        records = json.loads(path.read_text())["loglines"]
    else:
        records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    messages, counts = set(), {"calls": 0, "results": 0, "errors": 0}
    for number, record in enumerate(records):
        message = record.get("message") if isinstance(record, dict) else None
        if not isinstance(message, dict):
            continue
        if record.get("type") == "assistant":
            messages.add(message.get("id") or record.get("uuid") or number)
        content = message.get("content")
        for block in content if isinstance(content, list) else []:
            kind = block.get("type") if isinstance(block, dict) else None
            counts["calls"] += kind == "tool_use"
            counts["results"] += kind == "tool_result"
            counts["errors"] += kind == "tool_result" and block.get("is_error") is True
    return {"assistant turns": len(messages), **counts}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_messages_calls_results_and_errors_are_all_there(path):
    report = IngestReport()
    conversations = list(claude_code.read(SourceFile(path, path.name), report, with_branches=True))
    turns = [turn for conversation in conversations for turn in conversation.turns]
    got = {
        "assistant turns": sum(turn.role == "assistant" for turn in turns),
        "calls": sum(len(turn.calls) for turn in turns),
        "results": sum(len(turn.results) for turn in turns),
        "errors": sum(result.is_error is True for turn in turns for result in turn.results),
    }
    assert got == count_independently(path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_log_is_recognised_by_its_content(path):
    assert claude_code.sniff(path.read_bytes()[: 64 * 1024], path)
