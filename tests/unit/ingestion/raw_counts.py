"""What Claude Code logs hold, counted straight from their lines, beside what an ingest of them keeps.

It imports nothing of the package but the reader under test, and knows no turns: texts, calls, results, images, queued
messages and attachments are looked up one by one in what came out.

    python tests/unit/ingestion/raw_counts.py FOLDER
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

_NAMES = {"call": "calls", "result": "results", "image": "images", "queued": "queued messages"}
BLOCKS = {"tool_use": "calls", "server_tool_use": "calls", "tool_result": "results", "text": "texts"}


def records_of(path):
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def raw(path):
    """Everything a log holds, as (kind, what it is known by) -> how often; queued messages by what became of them."""
    found, queue, users, left = Counter(), [], [], []
    prompts, has_attachments = Counter(), False
    for record in records_of(path):
        kind, message = record.get("type"), record.get("message")
        if kind in ("user", "assistant") and isinstance(message, dict):
            found.update(_of_message(kind, message))
            users += [_words(message)] if kind == "user" else []
        elif kind == "queue-operation":
            left += _queue_step(queue, record)
        elif kind == "attachment":
            has_attachments = True
            found["attachment", record["attachment"].get("type")] += 1
            prompts.update([record["attachment"]["prompt"]] if "prompt" in record["attachment"] else [])
    found.update({("queued", text): number for text, number in prompts.items()})
    for operation, reason, text in left:
        if prompts[text] > 0:
            prompts[text] -= 1
            continue
        taken_back = operation == "popAll" or (operation == "remove" and reason is None and has_attachments)
        is_there = operation == "dequeue" and any(text in said for said in users)
        found["taken back" if taken_back else "said as a message" if is_there else "queued", text] += 1
    return found


def _of_message(role, message):
    content = message.get("content")
    for block in [{"type": "text", "text": content}] if isinstance(content, str) else content or []:
        block = {"type": "text", "text": block} if isinstance(block, str) else block
        kind = BLOCKS.get(block.get("type"))
        if kind == "texts" and block.get("text"):
            yield "text", (role, block["text"])
        elif kind == "calls":
            yield "call", (block["id"], json.dumps(block["input"]))
        elif kind == "results":
            yield "result", block["tool_use_id"]
            inner = block.get("content")
            yield from (("image", "") for part in inner if _is_image(part)) if isinstance(inner, list) else ()
        elif _is_image(block):
            yield "image", ""


def _is_image(block):
    return isinstance(block, dict) and block.get("type") == "image"


def _words(message):
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "\n".join(str(each.get("text", "")) for each in content or [] if isinstance(each, dict))


def _queue_step(queue, record):
    """What leaves the queue with a record: (operation, reason, text)."""
    operation, content = record["operation"], record.get("content")
    if operation == "enqueue":
        queue.append(content)
        return []
    gone = queue[:] if operation == "popAll" else [content if content in queue else queue[0]] if queue else []
    for text in gone:
        queue.remove(text)
    return [(operation, record.get("reason"), text) for text in gone]


def kept(conversations):
    """The same, looked up in conversations."""
    found = Counter()
    for turn in (turn for conversation in conversations for turn in conversation.turns):
        found.update(("call", (call.id, json.dumps(call.arguments))) for call in turn.calls)
        found.update(("result", result.call_id) for result in turn.results)
        found["image", ""] += turn.extra.get("images", 0)
        if turn.extra.get("attachment") == "queued_command":
            found["queued", turn.text] += 1
        elif "attachment" in turn.extra:
            found["attachment", turn.extra["attachment"]] += 1
    return found


def lost(path, conversations):
    """Kind -> how many pieces of the log are in no conversation; texts are searched for, the rest is counted."""
    conversations = list(conversations)
    here, there, missing = kept(conversations), raw(path), Counter()
    said = {role: [] for role in ("user", "assistant")}
    for turn in (turn for conversation in conversations for turn in conversation.turns):
        said.get(turn.role, []).append(turn.text)
    whole = {role: "\n".join(texts) for role, texts in said.items()}
    for (kind, name), number in there.items():
        if kind == "text":
            missing["texts"] += name[1] not in whole[name[0]]
        elif kind in _NAMES:
            missing[_NAMES[kind]] += max(number - here[kind, name], 0)
    missing["queued twice or not in the log"] = sum(
        max(here[key] - there[key], 0) for key in here if key[0] == "queued"
    )
    return missing


def main(folder):
    from composer_replication.ingestion import IngestReport, SourceFile
    from composer_replication.ingestion.formats import claude_code

    total, missing = Counter(), Counter()
    for path in sorted(Path(folder).rglob("*.jsonl")):
        if not claude_code.sniff(path.read_bytes()[: 64 * 1024], path):
            continue
        found = list(claude_code.read(SourceFile(path, path.name), IngestReport(), with_branches=True))
        total.update(_by_kind(raw(path)))
        missing.update(lost(path, found))
    print("in the logs:", dict(total))
    print("lost:", {kind: number for kind, number in missing.items() if number} or "nothing")


def _by_kind(found):
    total = Counter()
    for (kind, _), number in found.items():
        total[kind] += number
    return total


if __name__ == "__main__":
    main(sys.argv[1])
