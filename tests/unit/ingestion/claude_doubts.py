"""Damage that says what a sound record could say in its place: nobody could tell, but for token counts."""

from __future__ import annotations

import json

from claude_mutations import message_id


def cannot_be_told(log, damage):
    """Whether the damaged record says what a sound one could say in its place."""
    tests = (looks_like_a_rewind, looks_like_one_message, looks_like_another_agent)
    return any(test(log, damage) for test in tests)


def looks_like_a_rewind(log, damage):
    """Whether a wrong parent makes a user's message follow, or stand in the place of, another one: a rewind's link."""
    if damage.what != "wrong parent":
        return False
    changed = next(json.loads(line) for line, was in damage.lines if was is None)
    if not _is_prompt(changed):
        return False
    records = {record["uuid"]: record for record in map(json.loads, log) if record.get("uuid")}
    above = {name: _message_above(records, record.get("parentUuid")) for name, record in records.items()}
    named = _message_above(records, changed["parentUuid"])
    children = [records[name] for name, each in above.items() if each == named and name != changed["uuid"]]
    return _is_prompt(records.get(named)) or any(map(_is_prompt, children))


def looks_like_one_message(log, damage):
    """Whether a wrong message id is that of a record with no prompt between them, and no request id tells them apart:
    so look the records of one message."""
    if damage.what != "wrong message id":
        return False
    changed, at = next((json.loads(line), at) for at, (line, was) in enumerate(damage.lines) if was is None)
    for step in (1, -1):
        for line in log[at + step :: step] if 0 <= at + step < len(log) else ():
            record = json.loads(line)
            if record.get("isSidechain") != changed.get("isSidechain"):
                continue
            if _is_prompt(record) or record.get("subtype") == "compact_boundary":
                break
            if message_id(record) == message_id(changed):
                return None in (record.get("requestId"), changed.get("requestId"))
    return False


def looks_like_another_agent(log, damage):
    """Whether a record of a sidechain names one of another that waits for its next one, and bears no agent's name."""
    if damage.what != "wrong parent":
        return False
    changed = next(json.loads(line) for line, was in damage.lines if was is None)
    if not changed.get("isSidechain") or changed.get("agentId") or _is_result(changed):
        return False
    records = {record["uuid"]: record for record in map(json.loads, log) if record.get("uuid")}
    named = records.get(changed["parentUuid"], {})
    return bool(named.get("isSidechain")) and _root(records, named["uuid"]) != _root(records, changed["uuid"])


def _root(records, name):
    while (above := records[name].get("parentUuid")) in records:
        name = above
    return name


def _message_above(records, name):
    while name in records and records[name].get("type") not in ("user", "assistant"):
        name = records[name].get("parentUuid")
    return name


def _is_prompt(record):
    return _is_message_of_user(record) and not _is_result(record)


def _is_message_of_user(record):
    return isinstance((record or {}).get("message"), dict) and record.get("type") == "user"


def _is_result(record):
    content = record["message"].get("content") if _is_message_of_user(record) else None
    blocks = content if isinstance(content, list) else []
    return any(isinstance(each, dict) and each.get("type") == "tool_result" for each in blocks)
