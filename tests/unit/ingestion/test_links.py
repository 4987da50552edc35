"""Fields that tie sub-agents to their calls, forged in a log of any format: the others rely on their shape."""

from __future__ import annotations

import json

import pytest
from format_records import CODEX_META, GEMINI_META, OPENCODE_INFO, codex_line, codex_message, gemini_answer, gemini_user
from format_records import opencode_message as message
from format_records import opencode_text as text
from session_bytes import jsonl

from composer_replication.ingestion import IngestReport, ingest

SUMMARY = {"$set": {"messages": [gemini_user("Sum.", "s1")]}}


def _codex(agent):
    meta = {**CODEX_META, "payload": {**CODEX_META["payload"], "agent_id": agent}}
    return jsonl(
        meta, codex_message("user", "q"), codex_line("compacted", {"message": "s"}), codex_message("user", "r")
    )


def _gemini(agent):
    return jsonl({**GEMINI_META, "agent_id": agent}, gemini_user("q"), gemini_answer("a"), SUMMARY)


def _opencode(agent):
    info = {**OPENCODE_INFO, "parentID": "ses_0", "agent_id": agent}
    return json.dumps({"info": info, "messages": [message("user", text("q"))]}).encode()


def _atif(agent):
    own = {"parent": {"kind": "subagent", "conversation_id": "x"}, "extra": {"agent_id": agent}}
    step = {
        "step_id": 1,
        "source": "user",
        "message": "q",
        "extra": {"composer_replication": {"extra": {"agents": agent}}},
    }
    return json.dumps({"schema_version": "ATIF-v1.8", "steps": [step], "extra": {"composer_replication": own}}).encode()


@pytest.mark.parametrize("write", [_codex, _gemini, _opencode, _atif])
@pytest.mark.parametrize("agent", [["abc"], {"id": ["abc"]}, 7, True])
def test_a_forged_link_is_left_out_and_the_session_is_read(tmp_path, write, agent):
    path = tmp_path / "session.json"
    path.write_bytes(write(agent))
    report = IngestReport()
    conversations = list(ingest([path], report, scrubber=None))
    assert conversations[0].turns[0].text == "q"
    assert all("agents" not in turn.extra for each in conversations for turn in each.turns)
    is_forged = isinstance(agent, dict | list)  # nothing can be looked up by these
    assert all(("agent_id" in each.extra) is not is_forged for each in conversations)
    assert report.skipped["broken agent_id"] == is_forged
    assert report.skipped["broken agents"] == (write is _atif)
