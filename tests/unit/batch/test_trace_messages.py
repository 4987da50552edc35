"""Messages as turns: every shape of a call, results linked to calls, and errors that say which message."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from render_checks import check_exact, coding_session, fixture_conversations, renderer_of

from composer_replication.batch.trace_messages import to_conversation
from composer_replication.errors import InputError
from composer_replication.ingestion.states import states
from composer_replication.trainer.data_collator import _find_calling_turn
from refusals import refusal


def turns_of(*messages):
    return to_conversation(messages, conversation_id="c").turns


def said(**fields):
    return {"role": "assistant", **fields}


def came_back(text, **fields):
    return {"role": "tool", "content": text, **fields}


ARGUMENTS = {"command": "ls", "depth": [1, None]}
SHAPES = {
    "flat": {"name": "bash", "arguments": ARGUMENTS},
    "flat with input": {"name": "bash", "input": ARGUMENTS},
    "flat with text": {"name": "bash", "arguments": json.dumps(ARGUMENTS)},
    "a row of a table": {"name": "bash", "arguments": None, "input": ARGUMENTS, "id": None, "function": None},
    "OpenAI": {"id": "", "type": "function", "function": {"name": "bash", "arguments": json.dumps(ARGUMENTS)}},
    "OpenAI with a dict": {"function": {"name": "bash", "arguments": ARGUMENTS}},
}


@pytest.mark.parametrize("key", ["tool_call", "tool_calls", "function_call"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_call_in_any_shape_is_the_same_call(shape, key):
    for given_as in (shape, [shape]):
        (turn,) = turns_of(said(**{key: given_as}))
        (made,) = turn.calls
        assert (made.name, dict(made.arguments), made.raw_arguments) == ("bash", ARGUMENTS, None)
        assert made.id
        assert turn.text == ""


@pytest.mark.parametrize(
    ("arguments", "expected", "raw"),
    [
        ('{"command": "ls', {}, '{"command": "ls'),
        ("[1]", {}, "[1]"),
        ("NaN", {}, "NaN"),
        ('{"a": Infinity}', {}, '{"a": Infinity}'),
        ("[" * 50_000, {}, "[" * 50_000),
        ("  ", {}, None),
        (None, {}, None),
        ([1, 2], {}, "[1, 2]"),
        (7, {}, "7"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_arguments_that_are_no_object_are_kept_as_text(arguments, expected, raw):
    (turn,) = turns_of(said(tool_call={"name": "bash", "arguments": arguments}))
    assert (dict(turn.calls[0].arguments), turn.calls[0].raw_arguments) == (expected, raw)


def test_a_turn_with_a_call_and_nothing_else_is_kept_and_rendered():
    messages = [{"role": "user", "content": "Look."}, said(tool_call=SHAPES["flat"]), came_back("a.py")]
    conversation = to_conversation([*messages, said(content="One file.")], conversation_id="c")
    (sequence,) = check_exact(renderer_of("qwen2_5"), conversation)
    assert [span.turn_id for span in sequence.spans] == ["c:1", "c:3"]
    assert '"command": "ls"' in sequence.spans[0].text


def test_results_without_ids_answer_the_calls_in_their_order():
    calls = [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]
    turns = turns_of(said(tool_call=calls), came_back("1"), came_back("2"), came_back("3"))
    assert [turns[1].results[0].call_id, turns[2].results[0].call_id] == [each.id for each in turns[0].calls]
    assert turns[3].results[0].call_id == ""
    assert [_find_calling_turn(turns, index) for index in (1, 2, 3)] == [0, 0, 0]


def test_results_with_names_answer_the_call_of_that_name():
    calls = [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]
    turns = turns_of(said(tool_call=calls), came_back("2", name="b"), came_back("1", name="a"))
    assert [turn.results[0].call_id for turn in turns[1:]] == [turns[0].calls[1].id, turns[0].calls[0].id]


def test_results_with_ids_answer_their_call_however_late_they_come():
    first, second = ({"id": name, "function": {"name": name, "arguments": "{}"}} for name in ("x", "y"))
    turns = turns_of(
        said(tool_calls=[first]),
        said(tool_calls=[second]),
        came_back("y", tool_call_id="y"),
        came_back("x", tool_call_id="x"),
    )
    assert [_find_calling_turn(turns, index) for index in (2, 3)] == [1, 0]


def test_an_id_that_is_used_again_means_the_last_call_of_that_id():
    made = {"id": "c", "function": {"name": "a", "arguments": "{}"}}
    turns = turns_of(
        said(tool_calls=[made]),
        came_back("1", tool_call_id="c"),
        said(tool_calls=[made]),
        came_back("2", tool_call_id="c"),
    )
    assert [_find_calling_turn(turns, index) for index in (1, 3)] == [0, 2]


def test_an_id_of_a_call_that_was_logged_without_one_is_matched_by_order_and_an_unknown_one_is_kept():
    turns = turns_of(said(tool_call={"name": "a"}), came_back("1", tool_call_id="log-7"))
    assert turns[1].results[0].call_id == turns[0].calls[0].id
    known = {"id": "k", "name": "a", "arguments": {}}
    turns = turns_of(said(tool_call=known), came_back("1", tool_call_id="log-7"))
    assert turns[1].results[0].call_id == "log-7"
    assert _find_calling_turn(turns, 1) == 0  # nothing else can have asked for it


def test_a_result_after_a_question_has_no_caller():
    turns = turns_of({"role": "user", "content": "?"}, came_back("1"))
    assert _find_calling_turn(turns, 1) is None


def test_an_unanswered_call_does_not_take_the_result_of_the_next_turn():
    turns = turns_of(said(tool_call={"name": "a"}), said(tool_call={"name": "b"}), came_back("of b"))
    assert turns[2].results[0].call_id == turns[1].calls[0].id


def test_flags_thinking_and_text_parts_come_along():
    turns = turns_of(
        {"role": "developer", "content": "Rules."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
        said(content=None, reasoning_content="Hm.", tool_call={"name": "a"}),
        came_back("no", tool_error=True),
        came_back("yes", tool_error=False),
    )
    assert [turn.role for turn in turns] == ["system", "user", "assistant", "tool", "tool"]
    assert (turns[1].text, turns[2].text, turns[2].thinking) == ("a\nb", "", "Hm.")
    assert [turn.results[0].is_error for turn in turns[3:]] == [True, False]


@pytest.mark.parametrize(
    ("messages", "named", "got", "expected"),
    [
        ("text", ("messages", "c"), "str", "list"),
        ({"role": "user"}, ("messages", "c"), "dict", "list"),
        ([{"role": "user"}, "text"], ("message", "1", "c"), "str", "role"),
        ([{"content": "x"}], ("role", "message", "0", "c"), "None", "developer"),
        ([{"role": "robot"}], ("role", "message", "0", "c"), "'robot'", "developer"),
        ([{"role": ["user"]}], ("role", "message", "0", "c"), "['user']", "developer"),
        ([{"role": "user", "content": 7}], ("content", "message", "0", "c"), "int", "text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], ("content", "message", "0"), "'image_url'", "text"),
        ([{"role": "assistant", "tool_call": "ls"}], ("call", "message", "0", "c"), "str", "arguments"),
        ([{"role": "assistant", "tool_call": {"arguments": {}}}], ("call", "message", "0"), "['arguments']", "{name,"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], ("call", "message", "0"), "['function']", "{name,"),
        ([{"role": "tool", "tool_call_id": 7}], ("tool_call_id", "message", "0", "c"), "int", "text"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_messages_are_named(messages, named, got, expected):
    with refusal(InputError, got=got, expected=expected) as caught:
        to_conversation(messages, conversation_id="c")
    assert set(named) <= set(caught.value.what.split())


def test_arguments_nested_beyond_reason_are_named():
    deep = {}
    for _ in range(5_000):
        deep = {"a": deep}
    with refusal(InputError, what="'bash'", expected="50"):
        turns_of(said(tool_call={"name": "bash", "arguments": deep}))


@pytest.mark.parametrize("family", ["qwen3", "llama3"])
def test_states_written_for_teachers_read_back_to_the_very_same_ids(family, shared_dir):
    sessions = shared_dir / "fixtures" / "sessions"
    if not sessions.is_dir():
        pytest.skip("no fixture sessions in shared/")
    small = [each for each in fixture_conversations(sessions) if 4 < len(each.turns) < 30][:12]
    renderer = renderer_of(family)
    for conversation in (coding_session(), *small):
        messages, last = list(states(conversation, system_prompt="S", strip_thinking=False))[-1]
        again = to_conversation(messages, conversation_id="c")
        rules = replace(conversation.turns[0], role="system", text="S", results=(), calls=(), thinking="")
        before = conversation.turns[: conversation.turns.index(last)]
        expected = renderer.render(replace(conversation, turns=(rules, *before)))
        assert [sequence.ids for sequence in renderer.render(again)] == [sequence.ids for sequence in expected]


messages_of_any_kind = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
        optional={
            "content": st.none() | st.text(max_size=5),
            "tool_call": st.none() | st.sampled_from([*SHAPES.values(), list(SHAPES.values())]),
            "tool_call_id": st.none() | st.sampled_from(["", "a", "call_0_0"]),
            "tool_error": st.none() | st.booleans() | st.text(max_size=3),
        },
    ),
    max_size=6,
)


@given(messages=messages_of_any_kind)
def test_one_turn_for_every_message_whatever_the_order(messages):
    turns = to_conversation(messages, conversation_id="c").turns
    assert [turn.role for turn in turns] == [message["role"] for message in messages]
    assert len({turn.id for turn in turns}) == len(turns)
    for index, turn in enumerate(turns):
        if turn.role == "tool":
            caller = _find_calling_turn(turns, index)
            assert caller is None or (caller < index and turns[caller].role == "assistant")
