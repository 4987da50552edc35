"""Every shape a reply comes in gives the same action; what is no call stays text; what is malformed says where."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.action_text import parse_reply
from composer_replication.errors import InputError
from composer_replication.messages import content_text
from refusals import refusal

ARGUMENTS = {"command": "ls -la", "n": [1, {"a": None}]}
TEXT = json.dumps(ARGUMENTS)
OBJECT = {"name": "Bash", "arguments": ARGUMENTS}
FUNCTION = {"name": "Bash", "arguments": TEXT}
SHAPES = [
    f"[TOOL_USE] name=Bash input={TEXT}",
    f"[THINKING] hm\nI look.\n[TOOL_USE] name=Bash input={TEXT}",
    f"<think>\nhm</think>\n[TOOL_USE] name=Bash input={TEXT}",
    f"I look around first.\n\n```json\n{json.dumps(OBJECT, indent=2)}\n```\nThen we see.",
    f"```\n{json.dumps({'tool': 'Bash', 'input': ARGUMENTS})}\n```",
    f"<tool_call>\n{json.dumps(OBJECT)}\n</tool_call>",
    f"hm, so\n</think>\n\nOn it.\n<tool_call>{json.dumps(OBJECT)}</tool_call>",
    json.dumps(OBJECT),
    json.dumps([OBJECT]),
    json.dumps({"type": "function", "function": FUNCTION}),
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": FUNCTION}]},
    {"role": "assistant", "content": "So.", "tool_calls": [{"function": {**FUNCTION, "arguments": ARGUMENTS}}]},
    {"role": "assistant", "content": "", "function_call": FUNCTION},
    {"role": "assistant", "content": f"<tool_call>{json.dumps(OBJECT)}</tool_call>", "tool_calls": []},
    {"content": [{"type": "text", "text": "So."}, {"type": "tool_use", "id": "1", "name": "Bash", "input": ARGUMENTS}]},
    {"content": [{"type": "output_text", "text": f"```json\n{json.dumps(OBJECT)}\n```"}]},
    [{"type": "thinking", "thinking": "hm"}, {"type": "tool_use", "name": "Bash", "input": ARGUMENTS}],
]  # fmt: skip


@pytest.mark.parametrize("reply", SHAPES)
def test_every_shape_gives_the_same_call(reply):
    (call,) = parse_reply(reply).calls
    assert (call.name, dict(call.arguments), call.raw_arguments) == ("Bash", ARGUMENTS, None)


@pytest.mark.parametrize(
    "text",
    [
        "Just words.",
        "",
        'Put this in package.json:\n```json\n{"name": "x", "version": "1"}\n```',
        f"```json\n{json.dumps(OBJECT)}\n```\nand then\n```python\nprint(1)\n```",
        f"```python\n{json.dumps(OBJECT)}\n```",
        f"```json\n{json.dumps(OBJECT)}",
        f"The tool is:\n```json\n{json.dumps({'name': 'x', 'parameters': {'type': 'object', 'properties': {}}})}\n```",
        f"```json\n{json.dumps({**OBJECT, 'result': 3})}\n```",
        "<tool_call>not json</tool_call>",
        "<tool_call>{",
        '{"name": "x"}',
        '{"name": "x", "arguments": 3}',
        "[]",
    ],
)
def test_text_that_is_no_call_stays_text(text):
    action = parse_reply(text)
    assert (action.text, action.calls) == (text, ())


def test_several_calls_come_in_order_and_remarks_are_kept():
    written = [f"<tool_call>{json.dumps({**OBJECT, 'name': name})}</tool_call>" for name in ("Bash", "B")]
    action = parse_reply("\n".join(["One.", *written]))
    assert [call.name for call in action.calls] == ["Bash", "B"]
    assert [call.id for call in action.calls] == ["call_0", "call_1"]
    assert action.text == "One."


@pytest.mark.parametrize("given_arguments", ['{"a": ', "[1]", "nonsense", '{"a": NaN}'])
def test_arguments_that_are_no_object_stay_raw(given_arguments):
    message = {"content": None, "tool_calls": [{"function": {"name": "Bash", "arguments": given_arguments}}]}
    (call,) = parse_reply(message).calls
    assert (dict(call.arguments), call.raw_arguments) == ({}, given_arguments)


def test_thinking_is_left_out_and_text_beside_calls_is_kept():
    blocks = [
        {"type": "thinking", "thinking": "secret"},
        {"type": "redacted_thinking", "data": "xx"},
        {"type": "text", "text": "First."},
        "plain",
        {"type": "image", "source": {}},
        {"type": "text", "text": "Last."},
    ]
    assert parse_reply({"content": blocks, "reasoning_content": "secret"}).text == "First.\nplain\nLast."
    assert parse_reply("<thinking>secret</thinking>Hello").text == "Hello"
    assert parse_reply({"content": None, "refusal": "I will not."}).text == "I will not."


def test_a_custom_call_holds_its_text_as_input():
    call = {"id": "c", "type": "custom", "custom": {"name": "apply_patch", "input": "*** Begin Patch"}}
    (made,) = parse_reply({"content": None, "tool_calls": [call]}).calls
    assert (made.id, made.name, made.arguments) == ("c", "apply_patch", {"input": "*** Begin Patch"})


@pytest.mark.parametrize(
    ("reply", "where"),
    [
        (3, "reply"),
        ({"content": 3}, "content"),
        ({"content": "x", "tool_calls": {}}, "tool_calls"),
        ({"tool_calls": [3]}, "call 0"),
        ({"tool_calls": [{"function": {"name": ""}}]}, "call 0"),
        ({"function_call": {"arguments": "{}"}}, "function_call"),
        ([{"type": "tool_use", "input": {}}], "block 0"),
    ],
)
def test_a_malformed_reply_is_an_error_that_says_where(reply, where):
    with refusal(InputError, what=where):
        parse_reply(reply)


def test_arguments_nested_beyond_reason_stay_raw_as_text_and_are_an_error_as_an_object():
    deep = "[" * 200 + "]" * 200
    (call,) = parse_reply({"tool_calls": [{"function": {"name": "a", "arguments": f'{{"x": {deep}}}'}}]}).calls
    assert call.raw_arguments is not None
    with refusal(InputError, what="'a'", expected="50"):
        parse_reply({"tool_calls": [{"function": {"name": "a", "arguments": {"x": json.loads(deep)}}}]})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)
keys = st.sampled_from(["role", "content", "tool_calls", "function_call", "type", "text", "name", "input", "id"])


@given(st.dictionaries(keys, json_values, max_size=5) | st.text() | st.lists(json_values, max_size=3))
def test_no_reply_raises_anything_but_an_input_error(reply):
    try:
        action = parse_reply(reply)
    except InputError:
        return
    assert isinstance(action.text, str)
    assert content_text(action.text) == action.text
