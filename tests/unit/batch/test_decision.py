"""The tokens that decide a call: what they say, whatever the template, and where a right call parts from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from composer_replication.batch.render.decision import (
    MAX_ARGUMENT_TOKENS,
    CallWords,
    Decision,
    find_decision,
    find_decision_against,
    find_matching_decision,
)
from composer_replication.batch.render.renderer import Renderer
from composer_replication.types import ToolCall
from session_pieces import Session
from tokenizer_assets import FAMILIES, load

TWO = [
    ("list_files", {"path": "src list_files"}, "ok", None, None),
    ("run_shell", {"command": "pytset -q"}, "no", 1, None),
]


def rendering(family, calls, **fields):
    session = Session().user("Go on.")
    session.calls(calls)
    conversation = session.says("Done.").conversation()
    renderer = Renderer(load(family))
    turn = replace(conversation.turns[1], **fields)
    return (
        renderer,
        renderer.render(replace(conversation, turns=(conversation.turns[0], turn, *conversation.turns[2:]))),
        turn,
    )


def said(renderer, rendered, stretch):
    return renderer.tokenizer.decode(rendered.ids[slice(*stretch)])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decision_is_the_tools_name_and_the_first_tokens_of_its_first_argument(family):
    renderer, (rendered, *_), turn = rendering(family, TWO[1:])
    span = rendered.spans[0]
    found = find_decision(renderer, rendered, span, CallWords.from_call(turn.calls[0]))
    assert found.basis == "first_argument"
    name, argument = found.stretches
    assert span.call_start <= name[0] < name[1] <= argument[0] < argument[1] <= span.call_end
    assert "run_shell" in said(renderer, rendered, name)
    assert said(renderer, rendered, (name[0] + 1, name[1])) != said(renderer, rendered, name)
    assert "p" in said(renderer, rendered, argument)
    assert argument[1] - argument[0] <= MAX_ARGUMENT_TOKENS
    assert found.num_tokens == sum(end - first for first, end in found.stretches)
    assert find_decision_against(renderer, rendered, span, turn, 0, format_name="claude_code") == found


@pytest.mark.parametrize("family", FAMILIES)
def test_of_several_calls_the_one_that_erred_is_looked_at(family):
    """Also where its name stands before it, as another call's name and in what that one was told."""
    calls = [("run_shell", {"command": "run_shell x"}, "ok", None, None), TWO[1]]
    renderer, sequences, turn = rendering(family, calls)
    rendered = next(each for each in sequences if each.spans[0].turn_id == turn.id)
    span = rendered.spans[0]
    first, second = (
        find_decision_against(renderer, rendered, span, turn, at, format_name="claude_code") for at in (0, 1)
    )
    assert "pytset"[:1] in said(renderer, rendered, second.stretches[1])
    text_before = said(renderer, rendered, (span.call_start, second.stretches[0][0]))
    assert text_before.count("run_shell") == 2
    assert first.stretches[0][1] <= second.stretches[0][0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("name", "arguments", "differs"),
    [("run_shell", {"command": "pytest -q"}, "argument"), ("list_files", {"command": "pytset -q"}, "name")],
)
def test_a_right_call_says_which_token_is_the_wrong_one(family, name, arguments, differs):
    renderer, (rendered, *_), turn = rendering(family, TWO[1:])
    span, right = rendered.spans[0], ToolCall(id="r", name=name, arguments=arguments)
    found = find_decision_against(renderer, rendered, span, turn, 0, format_name="claude_code", right=right)
    assert found.basis == "correction"
    plain = find_decision(renderer, rendered, span, CallWords.from_call(turn.calls[0]))
    assert found.stretches[0] == plain.stretches[0]
    if differs == "name":
        assert len(found.stretches) == 1
        return
    (first, end) = found.stretches[1]
    assert end == first + 1
    before = said(renderer, rendered, (span.call_start, first))
    assert "pytset" not in before
    assert "pytest" not in said(renderer, rendered, (span.call_start, span.call_end))


def test_what_cannot_be_told_apart_is_scored_as_a_whole():
    renderer, (rendered, *_), turn = rendering("llama3", TWO[1:])
    span = rendered.spans[0]
    whole = ((span.call_start, span.call_end),)
    assert find_decision(renderer, rendered, span, None) == Decision(whole, "call")
    assert find_decision(renderer, rendered, span, CallWords("no_such_tool", "x")) == Decision(whole, "call")
    assert find_decision(renderer, rendered, span, CallWords("run_shell", "")).basis == "name"
    last = rendered.spans[1]
    assert find_decision(renderer, rendered, last, None) == Decision(((last.start, last.end),), "turn")
    same = find_decision_against(renderer, rendered, span, turn, 0, format_name="claude_code", right=turn.calls[0])
    assert same == find_decision(renderer, rendered, span, CallWords.from_call(turn.calls[0]))


def test_tokens_that_a_rollout_sampled_are_not_compared_with_what_the_template_would_write():
    renderer, (rendered, *_), turn = rendering("llama3", TWO[1:])
    span = rendered.spans[0]
    ids = tuple(rendered.ids[span.start : span.end])
    sampled = (*ids[:-3], ids[-4], *ids[-3:])  # a token more than the template has
    renderer, (rendered, *_), turn = rendering("llama3", TWO[1:], token_ids=sampled)
    right = ToolCall(id="r", name="run_shell", arguments={"command": "pytest -q"})
    found = find_decision_against(
        renderer, rendered, rendered.spans[0], turn, 0, format_name="claude_code", right=right
    )
    assert found.basis != "correction"


@pytest.mark.parametrize(
    ("arguments", "raw", "begins"),
    [
        ({"path": " a/b.py\nc"}, None, "a/b.py"),
        ({"n": 12, "path": "x"}, None, "x"),
        ({"n": 12, "all": True}, None, "12"),
        ({"text": '"quoted"'}, None, ""),
        ({}, "{broken", "{broken"),
        ({}, None, ""),
    ],
)
def test_a_call_is_known_by_its_name_and_how_its_first_argument_begins(arguments, raw, begins):
    call = ToolCall(id="c", name="tool", arguments=arguments, raw_arguments=raw)
    assert CallWords.from_call(call) == ("tool", begins)


LONG = ("run_shell", {"command": "pytest -q tests/unit/cart tests/unit/shop"}, "ok", None, None)


def shape(decision):
    return [end - first for first, end in decision.stretches]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_good_call_is_decided_on_as_many_tokens_as_the_erring_one_and_as_deep_in_its_argument(family):
    renderer, (rendered, *_), turn = rendering(family, [LONG])
    span, words = rendered.spans[0], CallWords.from_call(turn.calls[0])
    plain = find_decision(renderer, rendered, span, words)
    name, argument = plain.stretches
    for right, depth in (("ruff -q", 0), ("pytest -q tests/unit/card", None)):
        corrected = ToolCall(id="r", name="run_shell", arguments={"command": right})
        erring = find_decision_against(renderer, rendered, span, turn, 0, format_name="claude_code", right=corrected)
        like = find_matching_decision(renderer, rendered, span, words, erring)
        assert like == erring  # the same call at the very same tokens
        assert shape(like) == [name[1] - name[0], 1]
        assert like.stretches[1][0] == argument[0] + depth if depth is not None else like.stretches[1][0] > argument[0]
    for number in (1, 2):
        shorter = Decision((name, (argument[0], argument[0] + number)), "first_argument")
        assert find_matching_decision(renderer, rendered, span, words, shorter) == shorter
    alone = Decision((name,), "correction")
    assert find_matching_decision(renderer, rendered, span, words, alone) == alone


def test_a_call_with_fewer_tokens_than_the_erring_one_cannot_be_compared_with_it():
    renderer, (rendered, *_), turn = rendering("llama3", TWO[1:])
    span, words = rendered.spans[0], CallWords.from_call(turn.calls[0])
    name, argument = find_decision(renderer, rendered, span, words).stretches
    for more in (((name[0], name[1] + 3), argument), (name, (argument[0], argument[1] + 3))):
        assert find_matching_decision(renderer, rendered, span, words, Decision(more, "first_argument")) is None
    deeper = Decision((name, (argument[1] + 5, argument[1] + 6)), "correction", argument[1] + 5 - argument[0])
    assert find_matching_decision(renderer, rendered, span, words, deeper).stretches[1] == (
        argument[1] - 1,
        argument[1],
    )
    whole = find_decision(renderer, rendered, span, None)
    assert find_matching_decision(renderer, rendered, span, words, whole) == whole
    (first, end) = whole.stretches[0]
    cut = find_matching_decision(renderer, rendered, span, words, Decision(((first, end - 4),), "call"))
    assert cut == Decision(((first, end - 4),), "call")
