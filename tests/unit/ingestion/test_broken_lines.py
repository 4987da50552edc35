"""Damage every reader of lines survives in the same way: one line is lost, counted with its place, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest
from format_records import CODEX_META, GEMINI_META, codex_message, gemini_answer, gemini_user
from session_bytes import BROKEN_LINES, HOPELESS, ingest, jsonl, texts

from composer_replication.ingestion.formats import codex, gemini, openai_messages, opencode

LINES = {
    codex: [jsonl(CODEX_META), jsonl(codex_message("user", "q")), jsonl(codex_message("assistant", "a"))],
    gemini: [jsonl(GEMINI_META), jsonl(gemini_user("q")), jsonl(gemini_answer("a"))],
    openai_messages: [jsonl({"role": role, "content": words}) for role, words in (("user", "q"), ("assistant", "a"))],
}
line_formats = pytest.mark.parametrize("module", LINES, ids=lambda module: module.FORMAT)


@line_formats
@pytest.mark.parametrize("broken", BROKEN_LINES)
@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_broken_line_is_counted_with_its_place_and_costs_no_neighbour(tmp_path, module, broken, place):
    place %= len(LINES[module]) + 1
    lines = [*LINES[module][:place], broken, *LINES[module][place:]]
    [conversation], report = ingest(module, tmp_path, b"".join(lines))
    assert texts(conversation) == ["q", "a"]
    assert [(skip.reason, skip.line) for skip in report.skips] == [(BROKEN_LINES[broken], place + 1)]


@line_formats
def test_a_truncated_last_line_costs_only_itself(tmp_path, module):
    [conversation], report = ingest(module, tmp_path, b"".join(LINES[module])[:-9])
    assert texts(conversation) == ["q"]
    assert dict(report.skipped) == {"truncated last line": 1}


@pytest.mark.parametrize("module", [codex, gemini, openai_messages, opencode], ids=lambda module: module.FORMAT)
@pytest.mark.parametrize("data", HOPELESS)
def test_files_that_hold_nothing_give_nothing(tmp_path, module, data):
    assert ingest(module, tmp_path, data)[0] == []
    assert not module.sniff(data, Path("session.jsonl"))
