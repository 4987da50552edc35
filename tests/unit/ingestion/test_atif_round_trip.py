"""ATIF round trips: samples of every format, and conversations that hypothesis makes up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from atif_checks import assert_same, validate, written
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_formats import SHARED, sample

from composer_replication.ingestion import atif, inspect_eval, mini_sweagent, openhands, registry, sweagent
from composer_replication.ingestion.source import IngestReport, SourceFile
from composer_replication.types import Conversation, Provenance, ToolCall, ToolResult, Turn, Usage


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (openhands, "openhands_multi_swe_bench_output.jsonl"),
        (sweagent, "sweagent_function_calling_simple.traj"),
        (mini_sweagent, "minisweagent_github_issue.traj.json"),
        (inspect_eval, "inspect_message_dedup.eval"),
    ],
)
def test_samples_come_back_as_they_were(module, name, tmp_path):
    for conversation in module.read(SourceFile(sample(name), name), IngestReport()):
        validate(atif.to_atif(conversation))
        (read,), _ = written(conversation, tmp_path)
        assert_same(read, conversation)


def test_sessions_of_every_other_format_come_back_as_they_were(tmp_path):
    if not SHARED.exists():
        pytest.skip("the shared samples are not here")
    formats = set()
    for path in sorted(SHARED.parent.rglob("*.json*")):
        module = registry.detect(path)
        for conversation in module.read(SourceFile(path, path.name), IngestReport()) if module else ():
            formats.add(conversation.format)
            validate(atif.to_atif(conversation))
            (read,), _ = written(conversation, tmp_path)
            assert_same(read, conversation)
    assert {"claude_code", "openhands"} <= formats


_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_id = st.text("abcdef0123456789-_:", min_size=1, max_size=6)
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=6,
)
_arguments = st.dictionaries(_text, _json, max_size=3)
_calls = st.builds(ToolCall, id=_id, name=_text, arguments=_arguments, raw_arguments=st.none() | _text)
_results = st.builds(ToolResult, call_id=_id | st.just(""), text=_text, is_error=st.none() | st.booleans())
_count = st.integers(0, 10**6)
_usage = st.builds(
    Usage, input_tokens=_count, output_tokens=_count, cache_read_tokens=_count, cache_creation_tokens=_count
)
_logprobs = st.floats(max_value=0.0, allow_nan=False)
_timestamps = st.none() | st.sampled_from(["2026-01-01T00:00:00Z", "2026-01-01 00:00", "noon"]) | _id
_origins = st.sampled_from(["human", "model", "tool", "meta", "summary", "copied"])


@st.composite
def _turns(draw, index):
    role = draw(st.sampled_from(["system", "user", "assistant", "assistant", "tool", "tool"]))
    fields = {
        "text": draw(_text) if role != "tool" else "",
        "timestamp": draw(_timestamps),
        "parent_id": draw(st.none() | _id),
        "extra": draw(st.dictionaries(_id, _json, max_size=2)),
    }
    if role == "assistant":
        fields |= {
            "thinking": draw(_text),
            "calls": tuple(draw(st.lists(_calls, max_size=3))),
            "usage": draw(st.none() | _usage),
            "model": draw(st.none() | _id),
            "token_ids": draw(st.none() | st.lists(_count, max_size=4).map(tuple)),
            "logprobs": draw(st.none() | st.lists(_logprobs, max_size=4).map(tuple)),
        }
    if role == "tool":
        fields["results"] = tuple(draw(st.lists(_results, min_size=1, max_size=3)))
    where = Provenance(file="f", lines=(index + 1,))
    return Turn(id=f"t{index}", role=role, origin=draw(_origins), provenance=where, **fields)


@st.composite
def _conversations(draw):
    turns = []
    for index in range(draw(st.integers(1, 7))):
        turn = draw(_turns(index))
        last = turns[-1] if turns else None
        if last and last.calls and turn.results and draw(st.booleans()):  # results that belong
            ids = st.sampled_from([call.id for call in last.calls])
            turn = replace(turn, results=tuple(replace(result, call_id=draw(ids)) for result in turn.results))
        turns.append(turn)
    return Conversation(
        id=draw(_id),
        format=draw(st.sampled_from(["codex", "claude_code", "atif"])),
        turns=tuple(turns),
        session_id=draw(st.none() | _id),
        title=draw(st.none() | _id),
        cwd=draw(st.none() | _id),
        agent_version=draw(st.none() | _id),
        extra=draw(st.dictionaries(_id, _json, max_size=2)),
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(conversation=_conversations())
def test_any_conversation_comes_back_as_it_was(conversation, tmp_path):
    document = atif.to_atif(conversation)
    validate(document)
    (read,), _ = written(conversation, tmp_path)
    assert_same(read, conversation)
    assert atif.to_atif(read) == document
