"""Pairs as rows for preference training: messages, calls, tools, order of keys, errors. TRL itself: tests/replaysim."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.errors import InputError
from composer_replication.pairs.export import SCHEMA, build_preference_row, export_preferences
from composer_replication.pairs.normalise import DJNormalizer
from refusals import refusal

TOOL = {"type": "function", "function": {"name": "Bash", "parameters": {"type": "object", "properties": {}}}}


def pair(**changes: Any) -> Any:
    return {
        "state_id": "s",
        "state_messages": [{"role": "user", "content": "Repair it."}],
        "chosen": 'First look.\n[TOOL_USE] name=Bash input={"command":"ls","a":1}',
        "rejected": "Done, I think.",
        "n_teachers_agreeing": 2,
        **changes,
    }


def call(arguments: object, identity: str = "call_0", name: str = "Bash") -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_an_action_with_calls_becomes_a_message_with_structured_calls():
    row = build_preference_row(pair(), tools=[TOOL])
    assert row == {
        "state_id": "s",
        "prompt": [{"role": "user", "content": "Repair it."}],
        "chosen": [{"role": "assistant", "content": "First look.", "tool_calls": [call({"command": "ls", "a": 1})]}],
        "rejected": [{"role": "assistant", "content": "Done, I think."}],
        "tools": json.dumps([TOOL], separators=(",", ":")),
    }


def test_arguments_as_text_for_templates_that_take_text():
    (message,) = build_preference_row(pair(), arguments="text")["chosen"]
    assert message["tool_calls"] == [call('{"command": "ls", "a": 1}')]


@pytest.mark.parametrize(
    ("written", "stands"),
    [
        ('{"a":0.6,"b":[1e300,-2.5]}', {"a": 0.6, "b": [1e300, -2.5]}),
        ('{"a":18446744073709551615}', {"a": 2**64 - 1}),
        ('{"a":[{"b":1e-12}]}', '{"a": [{"b": 1e-12}]}'),  # would come back as 0
        ('{"a":18446744073709551616}', '{"a":18446744073709551616}'),  # as the model wrote it
        ("{broken", "{broken"),
    ],
)
def test_arguments_that_would_not_come_back_stand_as_text(written, stands):
    (message,) = build_preference_row(pair(chosen=f"[TOOL_USE] name=Bash input={written}"))["chosen"]
    assert message["tool_calls"][0]["function"]["arguments"] == stands


def test_a_state_keeps_its_calls_results_and_thinking():
    state = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call('{"b":1,"a":2}', "t1")]},
        {"role": "tool", "tool_call_id": "t1", "content": "out"},
        {"role": "tool", "tool_call_id": "t9", "content": "out"},
    ]
    assert build_preference_row(pair(state_messages=state))["prompt"] == [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call({"b": 1, "a": 2}, "t1")]},
        {"role": "tool", "content": "out", "tool_call_id": "t1", "name": "Bash"},
        {"role": "tool", "content": "out", "tool_call_id": "t9", "name": ""},
    ]


def test_the_file_has_a_row_a_line_in_order_and_only_its_first_messages_are_marked(tmp_path):
    path = tmp_path / "deep" / "p.jsonl"
    assert export_preferences([pair(state_id=str(n)) for n in range(3)], path) == 3
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [row["state_id"] for row in rows] == ["0", "1", "2"]
    for column in ("prompt", "chosen", "rejected"):
        assert [row[column][0].get("schema") for row in rows] == [SCHEMA, None, None]
    function = rows[1]["chosen"][0]["tool_calls"][0]["function"]
    assert list(function["arguments"]) == ["command", "a"]  # as the model wrote them, not sorted


def test_normalized_pairs_make_the_same_rows():
    given_pair = pair(tools=[TOOL])
    (normalized,) = DJNormalizer().normalize([given_pair])
    assert build_preference_row(normalized) == build_preference_row(given_pair)
    assert json.loads(build_preference_row(normalized)["tools"]) == [TOOL]


BAD = [
    (pair(state_messages=[]), ["pair 0", "'s'", "state"], "message"),
    (pair(state_messages=[{"role": "robot", "content": ""}]), ["pair 0", "'s'", "message 0", "role"], "'robot'"),
    (pair(state_messages=["x"]), ["pair 0", "'s'", "message 0", "role"], "str"),
    (pair(state_messages=[{"role": "user", "content": [{"type": "image"}]}]), ["message 0", "content"], "'image'"),
    (pair(state_messages=[{"role": "assistant", "tool_calls": "x"}]), ["message 0", "tool_calls"], "str"),
    (pair(state_messages=[{"role": "assistant", "tool_calls": [{"id": "x"}]}]), ["message 0", "call 0"], "['id']"),
    (pair(chosen=None), ["pair 0", "'chosen'"], "NoneType"),
    (pair(chosen="\ud800"), ["'s'", "'chosen[0].content'"], ""),
    (3, ["pair 0", "'state_id'"], ""),
]


@pytest.mark.parametrize(("bad", "named", "got"), BAD)
def test_what_cannot_be_a_row_is_named_and_nothing_is_written(bad, named, got, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("before", encoding="utf-8")
    with refusal(InputError, got=got) as caught:
        export_preferences([bad], path)
    assert [name for name in named if name not in caught.value.what] == []
    assert path.read_text(encoding="utf-8") == "before"
    assert len(list(tmp_path.iterdir())) == 1


def test_no_pairs_and_unknown_forms_are_errors(tmp_path):
    with refusal(InputError, what=str(tmp_path / "p.jsonl"), got="none"):
        export_preferences([], tmp_path / "p.jsonl")
    with refusal(InputError, what="arguments", got="'xml'") as caught:
        export_preferences([pair()], tmp_path / "p.jsonl", arguments="xml")  # pyright: ignore[reportArgumentType]
    assert re.findall(r'"\w+"', caught.value.expected) == ['"object"', '"text"']
    assert list(tmp_path.iterdir()) == []


@given(st.text(), st.text())
def test_any_two_texts_make_a_row_with_one_message_on_each_side(chosen, rejected):
    row = build_preference_row(pair(chosen=chosen, rejected=rejected))
    for side in ("chosen", "rejected"):
        (message,) = row[side]
        assert message["role"] == "assistant"
        assert isinstance(message["content"], str)
