"""The layout of a turn's blocks is taken from the log only where it fits the turn: a log can be forged."""

from __future__ import annotations

import pytest
from small_formats import read_json

from composer_replication.action_text import action_text
from composer_replication.ingestion.formats import atif
from composer_replication.types import Provenance, ToolCall, Turn

CALLS = (ToolCall(id="c1", name="A", arguments={}), ToolCall(id="c2", name="B", arguments={}))
A, B = "[TOOL_USE] name=A input={}", "[TOOL_USE] name=B input={}"
PLAIN = f"[THINKING] hm\none\ntwo\n{A}\n{B}"


def turn(blocks):
    where = Provenance(file="f", lines=(1,))
    return Turn(
        id="t",
        role="assistant",
        origin="model",
        text="one\ntwo",
        thinking="hm",
        calls=CALLS,
        provenance=where,
        extra={"blocks": blocks},
    )


def test_a_layout_that_fits_orders_the_blocks():
    layout = [["text", 3], ["call", 1], ["thinking", 2], ["text", 3], ["call", 0]]
    assert action_text(turn(layout)) == f"one\n{B}\n[THINKING] hm\ntwo\n{A}"


CALLED = [["call", 0], ["call", 1]]
FORGED = {
    "no list": "text",
    "a number": 7,
    "an object": {"text": 7},
    "nothing": None,
    "no blocks": [],
    "blocks that are no pairs": [["text"], "text", None],
    "an unknown kind": [["image", 1], ["thinking", 2], ["text", 7], *CALLED],
    "a kind that is no text": [[["text"], 7], ["thinking", 2], *CALLED],
    "a size that is no number": [["text", "7"], ["thinking", 2], *CALLED],
    "a size that is a flag": [["text", 7], ["thinking", 2], ["call", False], ["call", True]],
    "a size below nothing": [["text", -1], ["text", 7], ["thinking", 2], *CALLED],
    "too little text": [["text", 3], ["thinking", 2], *CALLED],
    "too much text": [["text", 3], ["text", 4], ["thinking", 2], *CALLED],
    "a cut elsewhere": [["text", 2], ["text", 4], ["thinking", 2], *CALLED],
    "thinking left out": [["text", 7], *CALLED],
    "a call left out": [["thinking", 2], ["text", 7], ["call", 0]],
    "a call twice": [["thinking", 2], ["text", 7], ["call", 0], ["call", 0]],
    "an unknown call": [["thinking", 2], ["text", 7], ["call", 0], ["call", 9]],
}


@pytest.mark.parametrize("blocks", FORGED.values(), ids=FORGED)
def test_a_layout_that_does_not_fit_gives_way_to_the_plain_order(blocks):
    assert action_text(turn(blocks)) == PLAIN


@pytest.mark.parametrize("blocks", FORGED.values(), ids=FORGED)
def test_a_forged_document_gives_the_plain_order(tmp_path, blocks):
    calls = [{"tool_call_id": call.id, "function_name": call.name, "arguments": {}} for call in CALLS]
    own = {"composer_replication": {"extra": {"blocks": blocks}}}
    step = {"step_id": 1, "source": "agent", "message": "one\ntwo", "reasoning_content": "hm"}
    document = {"schema_version": "ATIF-v1.8", "steps": [{**step, "tool_calls": calls, "extra": own}]}
    (conversation,), _ = read_json(atif, tmp_path, "out.json", document)
    assert action_text(conversation.turns[0]) == PLAIN
