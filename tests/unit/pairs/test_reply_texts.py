"""Replies of text alone: what counts as the same words, and what does not."""

from __future__ import annotations

import unicodedata

import pytest
from action_forms import bash, call, calls, key, said
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.sites.actions.equality import action_kind, same_action
from composer_replication.types import Action


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Done.", " done"),
        ("The tests pass!", "The tests\n pass."),
        ("**All** tests *pass*", "All tests pass"),
        ("caf\u00e9", "cafe\u0301"),
        ("Use `ls -la` now.", "use  `ls -la` now"),
        ("Straße", "STRASSE"),
    ],
)
def test_texts_that_say_the_same(first, second):
    assert key(said(first)) == key(said(second))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Done.", "Done?"),
        ("Delete *.py", "Delete .py"),
        ("2 * 3", "2 3"),
        ("Use `LS`", "Use `ls`"),
        ("x_1", "x1"),
        ("It is not done", "It is done"),
        ("```\nA = 1\n```", "```\na = 1\n```"),
        ("a-b", "a b"),
        ("1,000", "1000"),
    ],
)
def test_texts_that_do_not(first, second):
    assert key(said(first)) != key(said(second))


@given(st.text())
def test_case_blanks_and_normal_form_leave_no_trace(text):
    plain = key(said(text))
    assert key(said(f"\n {text}  ")) == plain
    assert key(said(unicodedata.normalize("NFD", text))) == plain


@given(st.text(st.characters(categories=["Ll", "Nd"], codec="ascii"), min_size=1), st.integers(min_value=0))
def test_a_changed_letter_changes_the_key(text, place):
    place %= len(text)
    assert key(said(text)) != key(said(text[:place] + ("b" if text[place] == "a" else "a") + text[place + 1 :]))


def test_an_action_with_calls_is_its_calls():
    plain = bash("ls")
    assert same_action(plain, Action(text="Let me look.", calls=plain.calls))
    assert not same_action(plain, said("ls"))


LOOKS = [("Read", {"file_path": "a"}), ("Grep", {"pattern": "x"}), ("Bash", {"command": "git log | head -3"})]
ACTS = [("Bash", {"command": "make"}), ("Bash", {"command": "ls > f"}), ("Bash", {"command": "cd x"})]


def test_calls_that_only_look_may_come_in_any_order_but_not_be_fewer():
    assert key(calls(*LOOKS)) == key(calls(*reversed(LOOKS)))
    assert key(calls(LOOKS[0], *LOOKS)) != key(calls(*LOOKS))
    assert key(calls(LOOKS[0])) != key(calls(LOOKS[0], LOOKS[0]))


@pytest.mark.parametrize("act", ACTS)
def test_where_one_of_them_acts_the_order_matters(act):
    assert key(calls(act, LOOKS[0])) != key(calls(LOOKS[0], act))


def test_kinds_of_actions():
    assert action_kind(said("x")) == "text"
    assert action_kind(bash("x")) == "Bash"
    assert action_kind(calls(*LOOKS, LOOKS[0])) == "Bash+Grep+Read"


actions = st.sampled_from(
    [
        *[bash(each) for each in ("ls -la", "ls -al", "ls", "cd /repo && ls", "ls # x", "case x in", "", "'")],
        *[said(each) for each in ("", "Done", "done.", "Done?")],
        call("Read", file_path="a"),
        call("Read", file_path="/repo/a", limit=2000),
        call("Read", file_path="b"),
        calls(*LOOKS),
        calls(*reversed(LOOKS)),
    ]
)


@given(actions, actions, actions)
def test_sameness_is_an_equivalence(first, second, third):
    assert same_action(first, first)
    assert same_action(first, second) == same_action(second, first)
    if same_action(first, second) and same_action(second, third):
        assert same_action(first, third)
