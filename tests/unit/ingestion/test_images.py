"""Images, which no text model sees: each leaves a mark in the text and a count in its turn, in every format."""

from __future__ import annotations

import json

import pytest
from claude_records import call
from small_formats import read_bytes
from test_claude_beside import Session
from test_claude_code import read

from composer_replication.ingestion.formats import (
    atif,
    codex,
    gemini,
    mini_sweagent,
    openai_messages,
    opencode,
    openhands,
    sweagent,
)
from composer_replication.ingestion.source_files import _count_unplaced

PIXEL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
WORDS = {"type": "text", "text": "look"}


def lines_of(*records):
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def codex_items(*payloads):
    return lines_of(*({"timestamp": "t", "type": "response_item", "payload": each} for each in payloads))


def chat(*messages):
    return lines_of({"messages": list(messages)})


ASKED = {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "function": {"name": "see", "arguments": {}}}]}
# Each with an image from the user, and one more in a result where the format can hold it there.
WITH_IMAGES = {
    "openai_messages": (
        openai_messages,
        "a.jsonl",
        chat(
            {"role": "user", "content": [WORDS, PIXEL]},
            ASKED,
            {"role": "tool", "tool_call_id": "c1", "content": [PIXEL]},
        ),
    ),
    "mini_sweagent": (
        mini_sweagent,
        "a.traj.json",
        json.dumps(
            [{"role": "user", "content": [WORDS, PIXEL]}, ASKED, {**ASKED, "role": "user", "content": [PIXEL]}]
        ).encode(),
    ),
    "sweagent": (
        sweagent,
        "a.traj",
        json.dumps(
            {
                "history": [
                    {"role": "user", "content": [WORDS, PIXEL], "agent": "main"},
                    {"role": "assistant", "content": "x", "thought": "x", "action": "ls"},
                    {"role": "user", "content": [PIXEL]},
                ]
            }
        ).encode(),
    ),
    "codex": (
        codex,
        "a.jsonl",
        codex_items(
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "look"}, {"type": "input_image", "image_url": "data:"}],
            },
            {"type": "function_call", "name": "see", "arguments": "{}", "call_id": "c1"},
            {
                "type": "function_call_output",
                "call_id": "c1",
                "output": [{"type": "input_image", "image_url": "data:"}],
            },
        ),
    ),
    "gemini": (
        gemini,
        "session-1.json",
        json.dumps(
            {
                "sessionId": "s",
                "messages": [
                    {
                        "type": "user",
                        "id": "1",
                        "content": [{"text": "look"}, {"inlineData": {"mimeType": "image/png"}}],
                    },
                    {
                        "type": "gemini",
                        "id": "2",
                        "content": "",
                        "toolCalls": [
                            {
                                "id": "c",
                                "name": "see",
                                "args": {},
                                "result": [{"inlineData": {"mimeType": "image/png"}}],
                            }
                        ],
                    },
                ],
            }
        ).encode(),
    ),
    "opencode": (
        opencode,
        "a.json",
        json.dumps(
            {
                "info": {"id": "ses"},
                "messages": [
                    {
                        "info": {"id": "m", "role": "user"},
                        "parts": [
                            {"type": "text", "text": "look"},
                            {"type": "file", "mime": "image/png", "filename": "a.png"},
                        ],
                    },
                    {
                        "info": {"id": "n", "role": "assistant"},
                        "parts": [
                            {
                                "type": "tool",
                                "callID": "c",
                                "tool": "see",
                                "state": {
                                    "status": "completed",
                                    "input": {},
                                    "output": "[image]",
                                    "attachments": [{"type": "file", "mime": "image/png"}],
                                },
                            }
                        ],
                    },
                ],
            }
        ).encode(),
    ),
    "openhands": (
        openhands,
        "output.jsonl",
        lines_of(
            {
                "instance_id": "i",
                "history": [
                    {"id": 1, "source": "user", "action": "message", "args": {"content": "look", "image_urls": ["u"]}},
                    {"id": 2, "source": "agent", "action": "browse", "args": {"url": "x"}},
                    {"id": 3, "cause": 2, "observation": "browse", "content": "", "extras": {"image_urls": ["u"]}},
                ],
            }
        ),
    ),
    "atif": (
        atif,
        "a.json",
        json.dumps(
            {
                "schema_version": "ATIF-v1.8",
                "agent": {"name": "a"},
                "steps": [
                    {
                        "step_id": 1,
                        "source": "user",
                        "message": [WORDS, {"type": "image", "source": {"path": "a.png"}}],
                    },
                    {
                        "step_id": 2,
                        "source": "agent",
                        "message": "",
                        "tool_calls": [{"tool_call_id": "c", "function_name": "see", "arguments": {}}],
                        "observation": {
                            "results": [
                                {"source_call_id": "c", "content": [{"type": "image", "source": {"path": "b"}}]}
                            ]
                        },
                    },
                ],
            }
        ).encode(),
    ),
}


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_an_image_leaves_its_mark_in_the_text_and_in_the_turn(tmp_path, name):
    module, file, data = WITH_IMAGES[name]
    (conversation,), _ = read_bytes(module, tmp_path, file, data)
    user, last = conversation.turns[0], conversation.turns[-1]
    assert "look" in user.text
    assert "[image]" in user.text
    assert user.extra["images"] == 1
    assert "[image]" in "".join([last.text, *(result.text for result in last.results)])
    assert last.extra["images"] == 1
    assert _count_unplaced(conversation)["images"] == 2


def test_claude_code_images_too(tmp_path):
    log = Session()
    log.add("user", message={"role": "user", "content": [WORDS, {"type": "image", "source": {}}]})
    log.assistant("m1", call("c1"), call("c2"))
    log.result("c1", [{"type": "image", "source": {}}])
    log.result("c2", [{"type": "image", "source": {}}, {"type": "image", "source": {}}])
    [conversation], _ = read(tmp_path, log.lines())
    assert [turn.extra.get("images") for turn in conversation.turns] == [1, None, 3]
