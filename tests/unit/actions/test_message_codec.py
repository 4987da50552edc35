"""A chat message, read in every shape it comes in: its calls, its text, its thinking."""

from __future__ import annotations

import pytest

from composer_replication.errors import InputError
from composer_replication.messages import (
    MAX_DEPTH,
    call_entry,
    content_text,
    message_calls,
    required_text,
    thinking_text,
    tool_call,
    written_calls,
)
from refusals import refusal

ARGUMENTS = {"b": 1, "a": [2, {"c": None}]}
TEXT = '{"b":1,"a":[2,{"c":null}]}'


@pytest.mark.parametrize(
    "message",
    [
        {"tool_calls": [call_entry("i", "Bash", TEXT)]},
        {"tool_calls": (call_entry("i", "Bash", ARGUMENTS),)},
        {"tool_calls": call_entry("i", "Bash", ARGUMENTS), "tool_call": {}},
        {"tool_calls": [{"id": "i", "name": "Bash", "arguments": TEXT}]},
        {"tool_calls": [{"id": "i", "function": "Bash", "arguments": ARGUMENTS}]},
        {"tool_calls": [{"id": "i", "type": "custom", "custom": {"name": "Bash", "input": ARGUMENTS}}]},
        {"tool_call": {"id": "i", "name": "Bash", "input": ARGUMENTS}, "tool_calls": [{"id": None, "name": None}]},
        {"function_call": {"id": "i", "name": "Bash", "arguments": TEXT}, "tool_calls": None},
        {"content": ["Look.", {"type": "tool_use", "id": "i", "name": "Bash", "input": ARGUMENTS}]},
    ],
)
def test_one_call_in_every_shape(message):
    (call,) = message_calls(message, "m")
    arguments = ARGUMENTS if "custom" not in str(message) else {"input": ARGUMENTS}
    assert (call.id, call.name, dict(call.arguments), call.raw_arguments) == ("i", "Bash", arguments, None)
    assert list(call.arguments) == list(arguments)


def test_calls_without_an_id_are_named_by_their_number():
    entries = [call_entry("i", "a", "{}"), call_entry("", "b", "{}"), {"function": {"name": "c"}}]
    assert [call.id for call in message_calls({"tool_calls": entries}, "m")] == ["i", "call_1", "call_2"]
    named = message_calls({"tool_calls": entries}, "m", "t-{}".format)
    assert [call.id for call in named] == ["i", "t-1", "t-2"]


@pytest.mark.parametrize(
    ("message", "what", "got"),
    [
        ({"tool_calls": 3}, "tool_calls", "int"),
        ({"tool_calls": {}}, "tool_calls", "[]"),
        ({"tool_calls": [call_entry("i", "a", "{}"), "x"]}, "call 1", "str"),
        ({"tool_calls": [{"function": {"arguments": "{}"}}]}, "call 0", "['function']"),
        ({"function_call": {"name": 3}}, "function_call", "['name']"),
        ({"content": [{"type": "tool_use"}]}, "block 0", "['type']"),
    ],
)
def test_an_entry_that_is_no_call_is_refused_with_its_place_or_left_to_the_reader(message, what, got):
    with refusal(InputError, what=what, got=got) as caught:
        message_calls(message, "message 17")
    assert "message 17" in caught.value.what
    assert not isinstance(written_calls(message)[-1].name, str)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": 18446744073709551616}',
        '{"a": "\\ud800"}',
        '{"a": ',
        "[1]",
        '{"a": ' + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1) + "}",
    ],
    ids=lambda text: text[:30],
)
def test_arguments_that_no_artefact_can_hold_stay_the_text_they_were(text):
    call = tool_call("i", "Bash", text)
    assert (dict(call.arguments), call.raw_arguments) == ({}, text)


def test_arguments_keep_their_order_the_last_of_a_key_and_numbers_of_64_bits():
    call = tool_call("i", "Bash", '{"b": 1, "a": 18446744073709551615, "b": "1234567890123456789012345"}')
    assert list(call.arguments.items()) == [("b", "1234567890123456789012345"), ("a", 2**64 - 1)]
    deepest = '{"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}"
    assert tool_call("i", "Bash", deepest).raw_arguments is None


def test_the_text_of_content_leaves_thinking_out_and_asks_about_the_rest():
    image, thought = {"type": "image"}, {"type": "thinking", "text": "secret"}
    content = [{"type": "text", "text": "One."}, thought, "two", image, {"type": "refusal", "refusal": "No."}]
    assert content_text(content) == "One.\ntwo\nNo."
    assert content_text(content, separator="", fallback=lambda _: "[image]") == "One.two[image]No."
    assert content_text("as it is") == "as it is"
    assert content_text(None) == content_text(3) == content_text(image) == ""
    with refusal(InputError, what="content", got="'image'") as caught:
        required_text(content, "message 17")
    assert "message 17" in caught.value.what
    with refusal(InputError, what="content", got="int"):
        required_text(3, "message 17")


def test_thinking_stands_under_the_first_of_its_keys_that_says_something():
    message = {"reasoning_content": "", "reasoning": None, "thinking": [{"text": "hm"}], "content": "x"}
    assert thinking_text(message, "m") == "hm"
    assert thinking_text({"content": "x"}, "m") == ""
