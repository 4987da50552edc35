"""Planted states: the same but for names, a word or a line; and others that share their task, or their end, alone."""

from __future__ import annotations

import random

import pytest

from composer_replication.sites.actions.equality import (
    MIN_SIMILARITY_OF_STATES,
    StateIndex,
    _sketch_similarity,
    _text_sketch,
    conversation_states,
)
from session_pieces import Session

TASK = "Please round the totals of the invoice to cents and run the tests of the importer in {} afterwards"
LISTING = "invoice.py importer.py ledger.py\nthe folder holds old and new modules, most of them are not tested yet"
OTHER_END = "Traceback: division by zero in the worker pool, restart it and look at the queue of jobs before that"


def session(task, shown, *, name="one"):
    made = Session(name).user(task)
    made.call("Bash", shown, command="ls -la src")
    made.says("Now the totals.")
    return made.conversation()


def last_state(conversation):
    return list(conversation_states(conversation))[-1][1]


LEARNT = session(TASK.format("/repo/a"), LISTING)


@pytest.mark.parametrize(
    ("task", "shown", "is_near"),
    [
        (TASK.format("/repo/a"), LISTING, True),
        (TASK.format("/elsewhere/other/b"), LISTING.replace("invoice.py", "src/2024/bill.py"), True),
        (TASK.format("/repo/b").replace("afterwards", "then"), LISTING, True),
        (TASK.format("/repo/b"), f"{LISTING}\ndone", True),
        (f"{TASK.format('/repo/b')}, thanks", LISTING, True),
        ("Write a poem about the sea and its ships", LISTING, False),
        (TASK.format("/repo/b"), OTHER_END, False),
        (TASK.format("/repo/b"), f"{LISTING}\n{OTHER_END}\n{OTHER_END[::-1]}", False),
        (" ".join(reversed(TASK.format("x").split())), LISTING, False),
        ("", LISTING, False),
    ],
)
def test_planted_states(task, shown, is_near):
    index = StateIndex()
    for _, state in conversation_states(LEARNT):
        index.add(state)
    assert index.has(last_state(session(task, shown))) is is_near


def test_the_last_messages_count_and_not_what_was_long_before():
    """A session goes its own way at first, and ends in the state of another."""
    long = Session("long").user(TASK.format("/repo/c"))
    for at in range(6):
        long.call("Bash", f"{OTHER_END} {at}", command=f"make part-{at}")
    for made in (long, short := Session("short").user(TASK.format("/repo/d"))):
        made.call("Bash", LISTING, command="ls -la src")
        made.call("Read", "def total(lines): return sum(line.amount for line in lines)", file_path="src/invoice.py")
        made.says("Now the totals.")
    index = StateIndex()
    for _, state in conversation_states(short.conversation()):
        index.add(state)
    near = [index.has(state) for _, state in conversation_states(long.conversation())]
    assert near[-1] is True
    assert not any(near[1:7])


def texts_that_share(share, size, seed):
    """Two texts whose sets of word pairs have about this Jaccard similarity; and what it is exactly."""
    drawn = random.Random(seed)
    words = [f"w{chr(97 + each % 26)}{chr(97 + each // 26 % 26)}{chr(97 + each // 676)}" for each in range(2000)]
    first = drawn.choices(words, k=size)
    kept = round(size * 2 * share / (1 + share))
    second = first[:kept] + drawn.choices(words, k=size - kept)
    pairs = [set(zip(["", *each], [*each, ""], strict=True)) for each in (first, second)]
    return " ".join(first), " ".join(second), len(pairs[0] & pairs[1]) / len(pairs[0] | pairs[1])


@pytest.mark.parametrize("size", [60, 600])
@pytest.mark.parametrize("share", [0.3, 0.7, 0.9])
def test_the_likeness_is_jaccard_s_and_of_long_texts_an_estimate_of_it(size, share):
    errors = []
    for seed in range(20):
        first, second, exact = texts_that_share(share, size, seed)
        errors.append(_sketch_similarity(_text_sketch([first]), _text_sketch([second])) - exact)
    assert max(map(abs, errors)) <= (0.02 if size == 60 else 0.13)
    assert abs(sum(errors) / len(errors)) <= 0.03


def test_every_state_that_is_alike_is_found_among_many():
    index, found, wrong = StateIndex(), 0, 0
    pairs = [texts_that_share(share, 300, seed) for seed in range(30) for share in (0.4, 0.92)]
    asked = _text_sketch(["do it"])
    for first, _, _ in pairs:
        index.add((asked, _text_sketch([first])))
    for _, second, exact in pairs:
        is_near = index.has((asked, _text_sketch([second])))
        found += is_near and exact > MIN_SIMILARITY_OF_STATES
        wrong += is_near and exact < MIN_SIMILARITY_OF_STATES - 0.15
    assert (found, wrong) == (30, 0)


def test_a_listing_of_paths_is_as_long_as_it_is():
    """All its words are `#`: were a pair counted once, a listing of three would be that of thirty."""
    few, many = (_text_sketch([" ".join(f"src/{at}.py" for at in range(number))]) for number in (3, 30))
    assert _sketch_similarity(few, many) < 0.2
    assert _sketch_similarity(few, few) == 1.0


def states_of_one_kind(number, seed):
    """Sessions that say the same around a few words of their own."""
    drawn = random.Random(seed)
    names = [f"{chr(97 + one)}{chr(97 + other)}" for one in range(26) for other in range(26)]
    for at in range(number):
        own = [drawn.choice(names) for _ in range(drawn.randint(4, 9))]
        task = f"please fix {' '.join(own[:-2])} now"
        yield last_state(session(task, f"the file holds return {' '.join(own[1:])}", name=f"s-{at}"))


def test_the_index_finds_exactly_what_comparing_every_pair_finds():
    learnt = list(states_of_one_kind(60, 1))
    asked = [*states_of_one_kind(30, 2), *states_of_one_kind(20, 1), ((), ())]
    index = StateIndex()
    for state in learnt:
        index.add(state)
    expected = [
        any(
            min(_sketch_similarity(one, other) for one, other in zip(state, each, strict=True))
            >= MIN_SIMILARITY_OF_STATES
            for each in learnt
        )
        for state in asked
    ]
    assert [index.has(state) for state in asked] == expected
    assert sum(expected) >= 20


def test_sessions_of_one_kind_are_not_all_compared_with_each_other(monkeypatch):
    """5,000 of them would take hours: the words that they share find nobody."""
    compared = []
    module = "composer_replication.sites.actions.equality._sketch_similarity"
    monkeypatch.setattr(module, lambda *both: compared.append(both) or _sketch_similarity(*both))
    index = StateIndex()
    for state in states_of_one_kind(300, 3):
        index.add(state)
    for state in states_of_one_kind(100, 4):
        index.has(state)
    assert len(compared) < 0.05 * 300 * 100
