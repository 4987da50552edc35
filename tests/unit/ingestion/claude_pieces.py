"""What a Claude Code log holds, read without the package: the pieces of every line, and whether an output has them."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cache


@cache
def pieces(line):
    """(kind, content) of everything a record's message holds; nothing for records without a message."""
    record = json.loads(line)
    message = record.get("message") if isinstance(record, dict) else None
    if not isinstance(message, dict) or record.get("type") not in ("user", "assistant"):
        return []
    content = message.get("content")
    if isinstance(content, str):
        return [("text", content)]
    return [piece for block in content or [] for piece in _of_block(block)]


def _of_block(block):
    if isinstance(block, str):
        yield "text", block
    elif block.get("type") == "text":
        yield "text", block["text"]
    elif block.get("type") == "thinking":
        yield "thinking", block["thinking"]
    elif block.get("type") == "tool_use":
        yield "call", (block["id"], block["name"], json.dumps(block["input"], sort_keys=True))
    elif block.get("type") == "tool_result":
        content = block.get("content")
        parts = [content] if isinstance(content, str) else [part.get("text") for part in content or []]
        yield from (("result", (block["tool_use_id"], part)) for part in parts if part is not None)


def turns_by_line(conversations):
    found = defaultdict(list)
    for conversation in conversations:
        for turn in conversation.turns:
            for line in turn.provenance.lines:
                found[line].append(turn)
    return found


def holds(turn, kind, content):
    if kind == "call":
        return content in {(c.id, c.name, json.dumps(c.arguments, sort_keys=True)) for c in turn.calls}
    if kind == "result":
        return any(result.call_id == content[0] and content[1] in result.text for result in turn.results)
    return content in (turn.thinking if kind == "thinking" else turn.text)


def lost(conversations, wanted):
    """(line, kind, content) of what should have come from a line (line -> pieces) and did not."""
    turns = turns_by_line(conversations)
    return [
        (line, kind, content)
        for line, expected in wanted.items()
        for kind, content in expected
        if not any(holds(turn, kind, content) for turn in turns[line])
    ]


def lines_of(conversations, known=None):
    """The lines of each conversation as it tells them, with how it hangs from another one, in no order.

    `known` has the names of the lines that count; where a line stands twice its first place counts."""
    found = []
    for conversation in conversations:
        lines = [line for turn in conversation.turns for line in turn.provenance.lines]
        names = lines if known is None else [known[line] for line in lines if line in known]
        kind = conversation.parent.kind if conversation.parent is not None else None
        found.append((str(kind), list(dict.fromkeys(names))))
    return sorted(each for each in found if each[1])
