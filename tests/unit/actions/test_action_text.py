"""The text of an action, read back: what `ingestion.action_text` wrote comes out as it went in."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from render_checks import HERE, call, fixture_conversations

from composer_replication.action_text import action_text, answer_turn, parse_action_text
from composer_replication.types import ToolCall, Turn

# Two of the fixtures' turns think in a list and then call without a word between: the text cannot say where it ended.
AMBIGUOUS_TURNS = 2


def turn_of(*, text="", thinking="", calls=(), **extra):
    return Turn(
        id="t",
        role="assistant",
        origin="model",
        text=text,
        thinking=thinking,
        calls=calls,
        provenance=HERE,
        extra=extra,
    )


def deed(action, thinking):
    """Everything but the calls' ids, which the text does not hold."""
    return action.text, thinking, [(each.name, dict(each.arguments), each.raw_arguments) for each in action.calls]


def test_actions_of_the_fixture_sessions_come_back_as_they_were(shared_dir, note):
    sessions = shared_dir / "fixtures" / "sessions"
    if not sessions.is_dir():
        pytest.skip("no fixture sessions in shared/")
    turns = [turn for each in fixture_conversations(sessions) for turn in each.turns if turn.role == "assistant"]
    assert len(turns) > 500
    num_other = 0
    for turn in turns:
        text = action_text(turn)
        parsed = parse_action_text(text)
        assert action_text(answer_turn(text, turn_id="again")) == text
        is_same = deed(parsed.action, parsed.thinking) == deed(turn.action, turn.thinking)
        assert is_same or turn.thinking
        num_other += not is_same
    assert num_other <= AMBIGUOUS_TURNS
    note(f"action text: {len(turns) - num_other} of {len(turns)} fixture turns read back exactly, all as text")


# No line of these can be taken for a block of its own, and no newline stands alone in thinking.
line = st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), max_size=20).filter(
    lambda text: not text.startswith(("[THINKING]", "[TOOL_USE]"))
)
texts = st.lists(line, min_size=1, max_size=3).map("\n".join)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | line,
    lambda each: st.lists(each, max_size=2) | st.dictionaries(line, each, max_size=2),
    max_leaves=5,
)
names = line.filter(lambda text: " input=" not in f"{text} ")
made_calls = st.builds(
    lambda name, arguments: ToolCall(id="c", name=name, arguments=arguments),
    names,
    st.dictionaries(line, values, max_size=3),
)
broken_calls = st.builds(
    lambda name, rest: ToolCall(id="c", name=name, arguments={}, raw_arguments='{"' + rest),
    names,
    st.text("abc:, ", max_size=8),
)


@given(text=texts, thinking=line.filter(bool), calls=st.lists(made_calls | broken_calls, max_size=3))
@example(text="", thinking="hm", calls=[])
def test_an_action_without_ambiguity_comes_back_exactly(text, thinking, calls):
    for turn in (turn_of(text=text, calls=tuple(calls)), turn_of(thinking=thinking, calls=tuple(calls))):
        parsed = parse_action_text(action_text(turn))
        assert deed(parsed.action, parsed.thinking) == deed(turn.action, turn.thinking)
    both = turn_of(text=text, thinking=thinking, calls=tuple(calls))
    assert action_text(answer_turn(action_text(both), turn_id="t")) == action_text(both)


pieces = st.sampled_from(
    ["[THINKING] ", "[THINKING]", "[TOOL_USE] ", "[TOOL_USE] name=", " input=", '{"a":1}', "{}", "{", '"', "\n", "\n\n"]
) | st.text("ab []=", max_size=3)


@given(text=st.lists(pieces, max_size=12).map("".join))
def test_any_text_whatever_is_kept_character_by_character(text):
    parsed = parse_action_text(text)
    assert action_text(answer_turn(text, turn_id="t")) == text
    assert parsed.action.calls or parsed.thinking or "[THINKING] " in text or parsed.action.text == text


def test_blocks_of_every_kind_in_any_order():
    text = '\n\n\n[THINKING] one\n\ntwo\nI look.\n[TOOL_USE] name=Read input={"path":"ü\\n"}'
    text += "\nDone.\n[TOOL_USE] name=B input={}"
    action, thinking, blocks = parse_action_text(text)
    assert thinking == "one\n\ntwo"
    assert action.text == "\n\n\nI look.\nDone."
    assert [(each.name, dict(each.arguments)) for each in action.calls] == [("Read", {"path": "ü\n"}), ("B", {})]
    assert len({each.id for each in action.calls}) == 2
    assert [kind for kind, _ in blocks] == ["text", "thinking", "text", "call", "text", "call"]


def test_thinking_before_a_call_ends_at_the_last_line_that_stands_alone():
    action, thinking, _ = parse_action_text("[THINKING] I should:\n1. look\n\nSo.\nI look.\n[TOOL_USE] name=a input={}")
    assert (thinking, action.text) == ("I should:\n1. look\n\nSo.", "I look.")


def test_thinking_before_a_final_answer_ends_at_the_first_line_that_follows_it():
    action, thinking, _ = parse_action_text("[THINKING] Easy.\nSteps:\n- a\n- b")
    assert (thinking, action.text) == ("Easy.", "Steps:\n- a\n- b")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Just text.",
        "I would write [TOOL_USE] name=Read input={} here",
        " [TOOL_USE] name=Read input={}",
        "[TOOL_USE] Read {}",
        "[TOOL_USE] name=Read",
        "[TOOL_USE] name=Read input=",
        "[TOOL_USE] name=Read input=oops",
        "[tool_use] name=Read input={}",
        "[THINKING]",
    ],
)
def test_what_is_not_exactly_the_format_stays_text(text):
    action, thinking, _ = parse_action_text(text)
    assert (action.text, action.calls, thinking) == (text, (), "")


@pytest.mark.parametrize(
    ("given", "arguments", "raw"),
    [
        ('{"a": [1, 2.5, null]}', {"a": [1, 2.5, None]}, None),
        ('{"command": "ls', {}, '{"command": "ls'),
        ('{"a":\nNaN}', {}, '{"a":\nNaN}'),
        ('{"a":NaN}', {}, '{"a":NaN}'),
        ('["a"]', {}, '["a"]'),
        ('"text"', {}, '"text"'),
        ('{"a":' * 300 + "1" + "}" * 300, {}, '{"a":' * 300 + "1" + "}" * 300),
        ('{"a":' * 20_000, {}, '{"a":' * 20_000),
    ],
    ids=lambda value: str(value)[:20],
)
def test_arguments_that_are_no_json_object_are_raw_and_never_an_exception(given, arguments, raw):
    (made,) = parse_action_text(f"[TOOL_USE] name=bash input={given}").action.calls
    assert (dict(made.arguments), made.raw_arguments) == (arguments, raw)


def test_broken_arguments_end_where_the_next_call_begins():
    text = '[TOOL_USE] name=a input={"x": \n[TOOL_USE] name=b input={"y":1}'
    first, second = parse_action_text(text).action.calls
    assert (first.raw_arguments, dict(second.arguments)) == ('{"x": ', {"y": 1})


def test_the_json_of_a_call_is_what_the_writer_wrote():
    arguments = {"text": "a\nb", "number": 1e21, "nested": [{"ü": None}]}
    (made,) = parse_action_text(action_text(turn_of(calls=(call("t", **arguments),)))).action.calls
    assert orjson.dumps(dict(made.arguments)) == orjson.dumps(arguments)
