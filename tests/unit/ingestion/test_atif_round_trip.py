"""ATIF round trips: samples of every format, and conversations that hypothesis makes up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from atif_checks import assert_same, validate, written
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_formats import SHARED

from composer_replication.action_text import action_text
from composer_replication.ingestion import registry
from composer_replication.ingestion.formats.atif_write import to_atif
from composer_replication.ingestion.source_files import IngestReport, SourceFile
from composer_replication.types import Conversation, Provenance, ToolCall, ToolResult, Turn, Usage

# Files beside the samples that hold no session: the list of sources, and recorded answers of a service.
NO_SESSIONS = {"SOURCES.md", "gemini_cli_sdk_resume.json"}
FILES = sorted(path for path in SHARED.parent.rglob("*.*") if path.is_file()) if SHARED.exists() else []


def test_every_sample_is_known_but_for_those_that_are_none():
    if not FILES:
        pytest.skip("the shared samples are not here")
    detected = {path.name: registry.detect(path) for path in FILES}
    assert {name for name, module in detected.items() if module is None} == NO_SESSIONS
    formats = {module.FORMAT for module in detected.values() if module is not None}
    assert formats == set(registry.FORMATS) - {"atif", "opencode"}  # no sample with a free licence was found


@pytest.mark.parametrize("path", [path for path in FILES if path.name not in NO_SESSIONS], ids=lambda path: path.name)
def test_every_sample_comes_back_as_it_was(path, tmp_path):
    module = registry.detect(path)
    options = {"with_branches": True} if module.FORMAT == "claude_code" else {}
    conversations = list(module.read(SourceFile(path, path.name), IngestReport(), **options))
    assert bool(conversations) == (path.name != "taubench_airline_few_shot.jsonl")  # display text only
    for conversation in conversations:
        validate(to_atif(conversation))
        (read,), report = written(conversation, tmp_path)
        assert_same(read, conversation)
        assert content(read) == content(conversation)
        assert set(report.skipped) <= {"tool result without its call"}


def test_sub_agents_come_back_in_one_document_with_their_links(tmp_path):
    if not FILES:
        pytest.skip("the shared samples are not here")
    path = max(FILES, key=lambda path: path.stat().st_size)
    main, *others = registry.detect(path).read(SourceFile(path, path.name), IngestReport(), with_branches=True)
    others = [each for each in others if each.parent.conversation_id == main.id]
    read, _ = written(main, tmp_path, subagents=others)
    assert [content(each) for each in read] == [content(each) for each in (main, *others)]
    assert [each.parent for each in read] == [each.parent for each in (main, *others)]


def content(conversation):
    """Turns, calls, results, errors and ids, said out loud: what a round trip must never change."""
    return [
        (
            *(turn.id, turn.parent_id, turn.role, turn.origin, turn.text, turn.thinking, action_text(turn)),
            [(call.id, call.name, call.arguments, call.raw_arguments) for call in turn.calls],
            [(result.call_id, result.text, result.is_error) for result in turn.results],
        )
        for turn in conversation.turns
    ]


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
_logprobs = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False)
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
    document = to_atif(conversation)
    validate(document)
    (read,), _ = written(conversation, tmp_path)
    assert_same(read, conversation)
    assert to_atif(read) == document
