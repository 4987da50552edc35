"""Whether a turn speaks after it has called, and that scrubbing does not forget it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from render_checks import call
from test_action_text import turn_of

from composer_replication.action_text import action_text, has_text_after_call, recut_blocks

CALL = (call(command="ls"),)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text": "a", "calls": CALL}, False),
        ({"text": "a", "calls": CALL, "blocks": [["text", 1], ["call", 0]]}, False),
        ({"text": "a", "calls": CALL, "blocks": [["call", 0], ["text", 1]]}, True),
        ({"text": "a\nb", "calls": CALL, "blocks": [["text", 1], ["call", 0], ["text", 1]]}, True),
        ({"text": "a\n\n\n", "calls": CALL, "blocks": [["text", 1], ["call", 0], ["text", 2]]}, False),
        ({"text": "a", "calls": CALL, "blocks": [["call", 0], ["text", 9]]}, False),  # forged: it does not fit
        ({"text": "a", "blocks": [["text", 1]]}, False),
        ({"text": "a", "calls": CALL, "text_after_call": True}, True),
    ],
)
def test_text_follows_call(fields, expected):
    assert has_text_after_call(turn_of(**fields)) is expected


lines = st.lists(st.text("ab ", max_size=4), min_size=1, max_size=3).map("\n".join)


@given(st.lists(lines, min_size=1, max_size=4), st.lists(lines, max_size=3), st.randoms())
def test_new_words_within_the_lines_leave_the_order_of_the_blocks(texts, thoughts, random):
    kinds = ["text"] * len(texts) + ["thinking"] * len(thoughts) + ["call"]
    random.shuffle(kinds)
    sizes = {"text": iter(map(len, texts)), "thinking": iter(map(len, thoughts)), "call": iter([0])}
    turn = turn_of(
        text="\n".join(texts),
        thinking="\n".join(thoughts),
        calls=CALL,
        blocks=[[kind, next(sizes[kind])] for kind in kinds],
    )

    longer = {"text": turn.text.replace("a", "<SECRET_1>"), "thinking": turn.thinking.replace("a", "<SECRET_1>")}
    again = turn_of(**longer, calls=CALL, **recut_blocks(turn, **longer))
    pieces = {"text": iter(texts), "thinking": iter(thoughts)}
    expected = [
        '[TOOL_USE] name=bash input={"command":"ls"}'
        if kind == "call"
        else ("[THINKING] " if kind == "thinking" else "") + next(pieces[kind]).replace("a", "<SECRET_1>")
        for kind in kinds
    ]
    assert action_text(again) == "\n".join(expected)


def test_where_lines_are_gone_it_is_still_known_that_text_followed():
    turn = turn_of(text="key\nof\nlines\nand more", calls=CALL, blocks=[["text", 12], ["call", 0], ["text", 8]])
    extra = recut_blocks(turn, "<KEY_1>\nand more", "")
    assert extra == {"text_after_call": True}
    assert has_text_after_call(turn_of(text="<KEY_1>\nand more", calls=CALL, **extra))
