"""Write a conversation as an ATIF document (schema ATIF-v1.8).

Data without a field in the schema goes into `extra` fields: `is_error` into the `extra` of a result, `raw_arguments`
into the `extra` of a call, and other data about turns or conversations into the `extra` of the step or document, under
the key `composer_replication`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from composer_replication.ingestion.source_files import as_text
from composer_replication.ingestion.turn_list import as_list, as_record
from composer_replication.types import Conversation, Origin, ToolCall, Turn

# Keys and values in the file format, which `atif` reads.
SCHEMA_VERSION = "ATIF-v1.8"
OURS = "composer_replication"
ERROR_KEY = "is_error"
RAW_KEY = "raw_arguments"
CACHE_KEY = "cache_creation_tokens"
UNKNOWN_VERSION = "unknown"
USUAL_ORIGIN: dict[str, Origin] = {"system": "meta", "user": "human", "assistant": "model", "tool": "tool"}
# Fields in the schema that `Conversation` and `Turn` do not have. `extra["atif"]` keeps the values that were read.
UNMAPPED_DOCUMENT_KEYS = ("notes", "final_metrics", "continued_trajectory_ref")
UNMAPPED_STEP_KEYS = ("reasoning_effort", "llm_call_count")
UNMAPPED_METRICS_KEYS = ("cost_usd", "prompt_token_ids")
_SOURCES = {"system": "system", "user": "user", "assistant": "agent", "tool": "system"}


def to_atif(conversation: Conversation, *, subagents: Iterable[Conversation] = ()) -> dict[str, Any]:
    """Return a conversation's ATIF document as plain JSON data, with `subagents` embedded in their parents."""
    children: dict[str, list[Conversation]] = {}
    for subagent in subagents:
        if subagent.parent is not None:
            children.setdefault(subagent.parent.conversation_id, []).append(subagent)
    return _document(conversation, children, {conversation.id})


def _is_iso(timestamp: str) -> bool:
    """Return whether the timestamp has a form that the schema accepts."""
    try:
        datetime.fromisoformat(timestamp.replace("Z", "+00:00"))
    except ValueError:
        return False
    return True


def _document(
    conversation: Conversation, children: Mapping[str, list[Conversation]], seen_ids: set[str]
) -> dict[str, Any]:
    """Return the document for a conversation and its subagents; `seen_ids` guards against cycles."""
    unmapped_fields = as_record(conversation.extra.get("atif"))
    agent = as_record(unmapped_fields.get("agent"))
    source_format = as_text(conversation.extra.get("source_format", conversation.format))
    # Parent links may form a cycle; a conversation is written once.
    below = [child for child in children.get(conversation.id, []) if child.id not in seen_ids]
    seen_ids |= {child.id for child in below}
    parent = conversation.parent
    our_fields = {
        "format": source_format,
        "title": conversation.title,
        "cwd": conversation.cwd,
        "parent": None if parent is None else asdict(parent),
        "extra": {key: value for key, value in conversation.extra.items() if key not in ("atif", "source_format")}
        or None,
    }
    document = {
        "schema_version": SCHEMA_VERSION,
        "session_id": conversation.session_id,
        "trajectory_id": conversation.id,
        "agent": {"name": source_format, **agent, "version": conversation.agent_version or UNKNOWN_VERSION},
        "steps": _steps(conversation.turns, _references(below)),
        **{key: unmapped_fields.get(key) for key in UNMAPPED_DOCUMENT_KEYS},
        "extra": {**as_record(unmapped_fields.get("extra")), OURS: _without_none(our_fields)},
        "subagent_trajectories": [_document(child, children, seen_ids) for child in below] or None,
    }
    return _without_none(document)


def _references(children: list[Conversation]) -> dict[str, list[dict[str, Any]]]:
    """Return a dict that maps each call id to references to the subagents started by the call."""
    references: dict[str, list[dict[str, Any]]] = {}
    for child in children:
        if child.parent is not None and child.parent.call_id is not None:
            references.setdefault(child.parent.call_id, []).append({"trajectory_id": child.id})
    return references


def _steps(turns: tuple[Turn, ...], references: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the steps: one per turn, except that results are stored in the step of their calls."""
    steps: list[dict[str, Any]] = []
    caller: Turn | None = None  # the assistant turn in the last step
    for turn in turns:
        results = _results(turn, references)
        # A step holds the results of its own calls, so the tool turn becomes part of the step.
        if caller is not None and _answers(turn, caller):
            steps[-1].setdefault("observation", {"results": []})["results"] += results
            steps[-1]["extra"][OURS].setdefault("tool_turns", []).append({**_our_fields(turn), "n": len(results)})
            continue
        step = _step(turn, len(steps) + 1)
        if results:
            step["observation"] = {"results": results}
        steps.append(step)
        caller = turn if turn.role == "assistant" else None
    return steps


def _answers(turn: Turn, caller: Turn) -> bool:
    """Return whether a turn contains only results of the preceding calls, so that it can be part of the calls' step."""
    ids = {call.id for call in caller.calls}
    return (
        turn.role == "tool"
        and bool(turn.results)
        and all(result.call_id in ids for result in turn.results)
        and (turn.origin == "copied") == (caller.origin == "copied")
        and not (turn.text or turn.thinking or turn.model or _metrics(turn, {}))
    )


def _step(turn: Turn, number: int) -> dict[str, Any]:
    unmapped_fields = as_record(turn.extra.get("atif"))
    our_fields, metrics = _our_fields(turn), _metrics(turn, unmapped_fields)
    step: dict[str, Any] = {
        "step_id": number,
        "source": _SOURCES[turn.role],
        "message": _message(turn, unmapped_fields),
    }
    # Any other timestamp stays in our own fields.
    if turn.timestamp is not None and _is_iso(turn.timestamp):
        step["timestamp"] = turn.timestamp
        del our_fields["timestamp"]
    if turn.role == "assistant":
        step |= _without_none(
            {
                "model_name": turn.model,
                "reasoning_content": turn.thinking or None,
                "tool_calls": [_call(call) for call in turn.calls] or None,
                "metrics": metrics or None,
                **{key: unmapped_fields.get(key) for key in UNMAPPED_STEP_KEYS},
            }
        )
    else:  # the schema allows these fields only in steps of an agent
        our_fields |= _without_none(
            {"model": turn.model, "thinking": turn.thinking or None, "metrics": metrics or None}
        )
    if turn.role == "tool":
        our_fields["role"] = "tool"
    if turn.origin == "copied":
        step["is_copied_context"] = True
    step["extra"] = {**as_record(unmapped_fields.get("extra")), OURS: our_fields}
    return step


def _our_fields(turn: Turn) -> dict[str, Any]:
    """Return the fields of a turn for which the schema has no place."""
    read_from = turn.extra.get("read_from", {"file": turn.provenance.file, "lines": list(turn.provenance.lines)})
    extra = {key: value for key, value in turn.extra.items() if key not in ("atif", "read_from")}
    return _without_none(
        {
            "id": turn.id,
            "origin": None if turn.origin in (USUAL_ORIGIN[turn.role], "copied") else turn.origin,
            "parent_id": turn.parent_id,
            "timestamp": turn.timestamp,
            "read_from": read_from,
            "extra": extra or None,
        }
    )


def _message(turn: Turn, unmapped_fields: Mapping[str, Any]) -> Any:
    """Return the original parts of a multimodal message, unless its text has changed since it was read."""
    parts = unmapped_fields.get("message")
    return parts if isinstance(parts, list) and as_text(parts) == turn.text else turn.text


def _call(call: ToolCall) -> dict[str, Any]:
    extra = None if call.raw_arguments is None else {RAW_KEY: call.raw_arguments}
    arguments = dict(call.arguments)
    return _without_none({"tool_call_id": call.id, "function_name": call.name, "arguments": arguments, "extra": extra})


def _results(turn: Turn, references: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    outside = as_record(as_record(turn.extra.get("atif")).get("references"))
    return [
        _without_none(
            {
                "source_call_id": result.call_id or None,
                "content": result.text,
                # `pop`: a subagent is referenced by one result, even if several results have its call id.
                "subagent_trajectory_ref": references.pop(result.call_id, []) + as_list(outside.get(result.call_id))
                or None,
                "extra": None if result.is_error is None else {ERROR_KEY: result.is_error},
            }
        )
        for result in turn.results
    ]


def _metrics(turn: Turn, unmapped_fields: Mapping[str, Any]) -> dict[str, Any]:
    usage, metrics, extra = turn.usage, {}, dict(as_record(unmapped_fields.get("metrics_extra")))
    if usage is not None:
        # The schema includes cached tokens in the prompt tokens; `Usage` counts them separately.
        metrics["prompt_tokens"] = usage.input_tokens + usage.cache_read_tokens + usage.cache_creation_tokens
        metrics["completion_tokens"] = usage.output_tokens
        metrics["cached_tokens"] = usage.cache_read_tokens or None
        if usage.cache_creation_tokens:
            extra[CACHE_KEY] = usage.cache_creation_tokens
    if turn.token_ids is not None:
        metrics["completion_token_ids"] = list(turn.token_ids)
    if turn.logprobs is not None and all(map(math.isfinite, turn.logprobs)):
        metrics["logprobs"] = list(turn.logprobs)
    elif turn.logprobs is not None:  # JSON has no infinity
        extra["logprobs"] = [repr(logprob) for logprob in turn.logprobs]
    metrics |= {key: unmapped_fields.get(key) for key in UNMAPPED_METRICS_KEYS}
    return _without_none({**metrics, "extra": extra or None})


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}
