"""Arguments of a rollout's calls are read as everywhere else: what no artefact can hold stays text."""

from __future__ import annotations

import pytest

from composer_replication.trainer.rollouts.sites import (
    _MALFORMED,
    Rollout,
    _parse_error_text,
    conversation_of,
    sampled_runs,
)

DEEP = "[" * 60 + "]" * 60
NESTED = []
for _ in range(60):
    NESTED = [NESTED]


def call_of(arguments):
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}
    rollout = Rollout(
        rollout_id="r", prompt_ids=[1], completion_ids=[2, 3], sampled=None, prompt=[], messages=[message]
    )
    (turn,) = conversation_of(rollout, sampled_runs(rollout)).turns
    (call,) = turn.calls
    return call


@pytest.mark.parametrize("text", ['{"first": NaN}', '{"first": 1e999}', f'{{"first": {DEEP}}}', '{"first": ', "[1]"])
def test_text_that_is_no_object_an_artefact_holds_stays_text(text):
    assert (call_of(text).arguments, call_of(text).raw_arguments) == ({}, text)


def test_a_parsed_value_that_is_nested_too_deeply_stays_text_and_stops_no_run():
    call = call_of({"first": NESTED})
    assert call.arguments == {}
    assert call.raw_arguments == f'{{"first": {"[" * 61 + "]" * 61}}}'


def test_plain_arguments_are_read_whether_text_or_parsed():
    assert call_of('{"first": 1}').arguments == call_of({"first": 1}).arguments == {"first": 1}


@pytest.mark.parametrize("text", ["[" * 100_000, '{"name": "add", "arguments": NaN}'])
def test_what_is_wrong_with_a_broken_call_can_be_said_of_any_text(text):
    assert _parse_error_text(text).startswith(f"{_MALFORMED}: ")
