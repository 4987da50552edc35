"""Who is held out: whole sessions with all their parts, the newest first; or whole projects."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from composer_replication.errors import InputError
from composer_replication.runs.split import split_conversations
from composer_replication.types import Conversation, Link, Provenance, Turn
from refusals import refusal


def conversation(identity, *, day=None, session=None, parent=None, project=None):
    written = None if day is None else f"2026-03-{day:02}T10:00:00.000Z"
    where = Provenance(file="a.jsonl", lines=(1,))
    turn = Turn(id="t", role="user", origin="human", text="go", timestamp=written, provenance=where)
    link = None if parent is None else Link(kind="subagent", conversation_id=parent)
    return Conversation(id=identity, format="f", turns=(turn,), parent=link, session_id=session, cwd=project)


def test_the_newest_session_is_the_test_and_the_one_before_it_the_validation():
    days = [conversation(f"c{day}", day=day) for day in (7, 3, 9, 1, 5, 8, 2, 6, 4, 10)]
    split = split_conversations(days, validation=0.1, test=0.2)
    assert split.test == {"c9", "c10"}
    assert split.validation == {"c8"}
    assert split.train == {f"c{day}" for day in range(1, 8)}


def test_a_session_goes_with_its_parts_and_the_agents_it_called_however_they_are_ordered():
    rows = [
        conversation("agent of an agent", day=1, parent="agent"),
        conversation("after the compaction", day=9, session="s"),
        conversation("agent", day=9, parent="before it"),
        conversation("before it", day=8, session="s"),
        *(conversation(f"c{day}", day=day) for day in (2, 3, 4)),
    ]
    family = {"agent of an agent", "after the compaction", "agent", "before it"}
    for order in (rows, rows[::-1]):
        split = split_conversations(order, test=0.2)
        assert split.test == {"c4"}  # the family began on day 1, with what it called
        assert family <= split.train


def test_two_agents_of_a_session_that_is_not_there_are_still_one():
    rows = [conversation("a", day=9, parent="gone"), conversation("b", day=8, parent="gone"), conversation("c", day=1)]
    assert split_conversations(rows, test=0.1).test == {"a", "b"}


def test_whole_projects_are_held_out_on_request():
    rows = [conversation(f"{name}{number}", day=number, project=name) for name in "xyz" for number in range(1, 5)]
    split = split_conversations(rows, validation=0.1, test=0.1, by="project")
    for side in split:
        assert len(side) == 4
        assert len({identity[0] for identity in side}) == 1


def test_without_times_the_choice_is_the_same_in_any_order_and_undated_sessions_are_not_the_newest():
    rows = [conversation(f"c{number}") for number in range(20)]
    assert split_conversations(rows, test=0.1) == split_conversations(rows[::-1], test=0.1)
    assert split_conversations([*rows, conversation("dated", day=1)], test=0.01).test == {"dated"}


def test_times_are_compared_as_times():
    early = conversation("early", day=1)
    turn = Turn(**{name: getattr(early.turns[0], name) for name in ("id", "role", "origin", "provenance")})
    late = Conversation(id="late", format="f", turns=(turn, conversation("x", day=2).turns[0]))
    assert split_conversations([late, early], test=0.1).test == {"late"}


def test_a_split_that_leaves_nothing_to_learn_from_is_refused():
    with refusal(InputError, what="split", got="1 session", expected="10%", fix="split.test=0"):
        split_conversations([conversation("only", day=1)], test=0.1)
    assert split_conversations([conversation("only", day=1)]).train == {"only"}
    assert split_conversations([]).train == set()


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30), st.integers(1, 28)), min_size=4, max_size=30),
    st.floats(0, 0.4),
    st.floats(0, 0.4),
)
def test_every_conversation_is_on_one_side_and_no_session_on_two(drawn, validation, test):
    rows = [
        conversation(f"c{number}", day=day, session=f"s{session}", parent=f"c{parent}" if parent < number else None)
        for number, (session, parent, day) in enumerate(drawn)
    ]
    try:
        split = split_conversations(rows, validation=validation, test=test)
    except InputError:
        return
    sides = {identity: name for name, side in split._asdict().items() for identity in side}
    assert sum(len(side) for side in split) == len(sides) == len(rows)
    for row in rows:
        others = [each.id for each in rows if each.session_id == row.session_id]
        others += [row.parent.conversation_id] if row.parent else []
        assert {sides[other] for other in others} == {sides[row.id]}
