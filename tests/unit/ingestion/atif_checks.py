"""ATIF written and read back: what must be the same, and what the schema asks of a document."""

from __future__ import annotations

from dataclasses import replace

import orjson
from small_formats import read_bytes

from composer_replication.ingestion import atif
from composer_replication.types import Provenance


def written(conversation, tmp_path, subagents=()):
    data = orjson.dumps(atif.to_atif(conversation, subagents=subagents))
    return read_bytes(atif, tmp_path, "out.json", data)


def _as_read(conversation):
    """The conversation as it comes back: the place it is read from is new, and the old one is in `extra`."""
    turns = [
        replace(
            turn,
            provenance=Provenance(file="out.json", lines=(1,)),
            extra={
                **turn.extra,
                "read_from": turn.extra.get(
                    "read_from", {"file": turn.provenance.file, "lines": list(turn.provenance.lines)}
                ),
            },
        )
        for turn in conversation.turns
    ]
    extra = dict(conversation.extra)
    if conversation.format != "atif":
        extra["source_format"] = conversation.format
    return replace(conversation, format="atif", turns=tuple(turns), extra=extra)


def assert_same(read, conversation):
    turns = tuple(replace(turn, provenance=Provenance(file="out.json", lines=(1,))) for turn in read.turns)
    assert replace(read, turns=turns) == _as_read(conversation)


def validate(document):
    """By the published models where they are installed, else by the rules of the schema written down here."""
    try:
        from atif import Trajectory
    except ImportError:
        _check(document)
    else:
        assert Trajectory.model_validate(document).schema_version == "ATIF-v1.8"


_AGENT_ONLY = {"model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics"}
_STEP = {"step_id", "source", "message", "timestamp", "observation", "extra", "llm_call_count", "is_copied_context"}
_ROOT = {"schema_version", "session_id", "trajectory_id", "agent", "steps", "notes", "final_metrics", "extra"}
_METRICS = {"prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd", "prompt_token_ids", "extra"}


def _check(document):
    assert document["schema_version"] == "ATIF-v1.8"
    assert document.keys() <= _ROOT | {"continued_trajectory_ref", "subagent_trajectories"}
    assert isinstance(document["agent"]["name"], str)
    assert isinstance(document["agent"]["version"], str)
    for number, step in enumerate(document["steps"], start=1):
        assert step["step_id"] == number
        assert step["source"] in ("system", "user", "agent")
        assert step.keys() <= (_STEP | _AGENT_ONLY if step["source"] == "agent" else _STEP)
        assert step.get("metrics", {}).keys() <= _METRICS | {"completion_token_ids", "logprobs"}
        calls = [call["tool_call_id"] for call in step.get("tool_calls", [])]
        for call in step.get("tool_calls", []):
            assert call.keys() <= {"tool_call_id", "function_name", "arguments", "extra"}
        for result in step.get("observation", {}).get("results", []):
            assert result.keys() <= {"source_call_id", "content", "subagent_trajectory_ref", "extra"}
            assert not calls or result.get("source_call_id") in [None, *calls]
    below = document.get("subagent_trajectories", [])
    assert len({each["trajectory_id"] for each in below}) == len(below)
    for each in below:
        _check(each)
