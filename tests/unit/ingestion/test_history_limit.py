"""A limited history: the task and the last turn stay, what is left out is said, no result without its call."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.ingestion.states import states
from composer_replication.types import Conversation, Provenance, ToolCall, ToolResult, Turn

WHERE = Provenance(file="f", lines=(1,))
ORIGINS = {"user": "human", "assistant": "model", "tool": "tool", "system": "meta"}


def turn(number, role, text="", *, calls=(), results=(), origin=None):
    return Turn(
        id=f"t{number}",
        role=role,
        origin=origin or ORIGINS[role],
        text=text,
        calls=tuple(ToolCall(id=call, name="Read", arguments={"file_path": call}) for call in calls),
        results=tuple(ToolResult(call_id=call, text="y" * 100, is_error=False) for call in results),
        provenance=WHERE,
    )


def conversation(*turns):
    return Conversation(id="c", format="openai", turns=tuple(turn(at, *a, **k) for at, (a, k) in enumerate(turns)))


def said(role, text="", **more):
    return (role, text), more


def work(first, last):
    """Turns of an agent that reads file after file."""
    for number in range(first, last):
        yield said("assistant", f"look {number}", calls=[f"c{number}"])
        yield said("tool", results=[f"c{number}"])


def last_state(session, limit):
    return list(states(session, system_prompt="S", max_history_tokens=limit))[-1][0]


LONG = conversation(said("user", "fix the tests"), *work(0, 20), said("assistant", "done"))


@pytest.mark.parametrize("limit", [0, 1, 100, 300, 1000])
def test_the_system_prompt_the_task_and_the_last_turn_always_stay(limit):
    messages = last_state(LONG, limit)
    assert messages[0] == {"role": "system", "content": "S"}
    assert messages[1] == {"role": "user", "content": "fix the tests"}
    assert [message["role"] for message in messages[-2:]] == ["assistant", "tool"]
    assert messages[-1]["tool_call_id"] == "c19"


def test_what_is_left_out_is_said_where_it_was():
    messages = last_state(LONG, 0)
    assert len(messages) == 5
    assert messages[2] == {"role": "user", "content": "[38 turns of this session are left out here]"}
    whole = last_state(LONG, None)
    assert len(whole) == 42
    assert last_state(LONG, 10**6) == whole


def test_the_newest_turns_that_fit_are_kept():
    messages = last_state(LONG, 300)
    kept = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
    assert 2 <= len(kept) < 20
    assert kept == [f"c{number}" for number in range(20 - len(kept), 20)]
    assert messages[2]["content"] == f"[{40 - 2 * len(kept)} turns of this session are left out here]"


def test_what_is_asked_for_now_stays_as_well_as_what_was_asked_for_first():
    session = conversation(
        said("user", "fix the tests"), *work(0, 9), said("user", "now the docs"), *work(9, 20), said("assistant", "ok")
    )
    texts = [message["content"] for message in last_state(session, 0) if message["role"] == "user"]
    assert texts == [
        "fix the tests",
        "[18 turns of this session are left out here]",
        "now the docs",
        "[20 turns of this session are left out here]",
    ]


def test_the_log_s_own_system_prompt_and_all_that_was_said_before_the_first_answer_stay():
    session = conversation(
        said("system", "be good"),
        said("user", "a caveat", origin="meta"),
        said("user", "a long note", origin="meta"),
        said("user", "/ide"),
        said("user", "fix the tests"),
        *work(0, 5),
        said("assistant", "ok"),
    )
    texts = [message["content"] for message in last_state(session, 0)][:-2]
    assert texts[:4] == ["S", "be good", "a caveat", "[1 turn of this session is left out here]"]
    assert texts[4:6] == ["/ide", "fix the tests"]


def test_a_message_between_a_call_and_its_result_tears_nothing():
    session = conversation(
        said("user", "go"),
        *work(0, 3),
        said("assistant", calls=["late"]),
        said("user", "a word in between", origin="meta"),
        said("tool", results=["late"]),
        said("assistant", "done"),
    )
    messages = last_state(session, 0)
    assert [message["role"] for message in messages] == ["system", "user", "user", "assistant", "user", "tool"]


def test_calls_that_all_have_one_id_are_answered_where_they_were_made():
    turns = [said("assistant", "look", calls=["c"]), said("tool", results=["c"])] * 6
    session = conversation(said("user", "go"), *turns, said("assistant", "done"))
    assert last_state(session, 0)[2]["content"] == "[10 turns of this session are left out here]"


KINDS = st.sampled_from(["user", "meta", "call", "text", "late"])


@given(st.lists(KINDS, max_size=14), st.integers(0, 400))
def test_no_limit_takes_a_task_or_tears_a_pair_apart(kinds, limit):
    turns = [said("user", "the task")]
    for number, kind in enumerate(kinds):
        if kind in ("user", "meta"):
            turns.append(said("user", f"{kind} {number}", origin="human" if kind == "user" else "meta"))
        elif kind == "text":
            turns.append(said("assistant", f"text {number}"))
        else:
            turns.append(said("assistant", "", calls=[f"c{number}"]))
            turns += [said("user", "between")] if kind == "late" else []
            turns.append(said("tool", results=[f"c{number}"]))
    session = conversation(*turns, said("assistant", "done"))
    for messages, _ in states(session, system_prompt="S", max_history_tokens=limit):
        assert [message["content"] for message in messages[:2]] == ["S", "the task"]
        made = {call["id"] for message in messages for call in message.get("tool_calls", ())}
        answered = {message["tool_call_id"] for message in messages if message["role"] == "tool"}
        assert answered == made
    whole, short = last_state(session, None), last_state(session, limit)
    marks = [message["content"] for message in short if str(message["content"]).startswith("[")]
    num_left_out = sum(int(mark[1:].partition(" ")[0]) for mark in marks)
    assert len(whole) == len(short) - len(marks) + num_left_out
