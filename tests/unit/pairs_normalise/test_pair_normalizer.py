"""Pairs in, pairs out: order, provenance, counts, and the key that tells pairs apart."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.errors import InputError
from composer_replication.pairs.normalise import DJNormalizer, NormalizedDPOPair, _DocumentDeduplicator, _pair_text
from refusals import refusal


def pair(number: int = 0, **changes: Any) -> Any:
    return {
        "state_id": f"s{number}",
        "state_messages": [{"role": "user", "content": f"Task {number}"}],
        "chosen": "Run the tests first.",
        "rejected": "Delete the tests instead.",
        "n_teachers_agreeing": 2,
        **changes,
    }


def test_a_pair_becomes_messages_and_keeps_what_it_carried():
    given_pair = pair(provenance={"file": "a.jsonl", "lines": [3]}, teachers=["x", "y"])
    (found,) = DJNormalizer().normalize([given_pair])
    assert found.state_id == "s0"
    assert found.state_messages == given_pair["state_messages"]
    assert found.chosen_messages == [{"role": "assistant", "content": "Run the tests first."}]
    assert found.rejected_messages == [{"role": "assistant", "content": "Delete the tests instead."}]
    assert found.n_teachers_agreeing == 2
    assert found.metadata["provenance"] == {"file": "a.jsonl", "lines": [3]}
    assert found.metadata["teachers"] == ["x", "y"]
    assert found.metadata["normalizer"]["backend"] == "native"
    assert len(found.metadata["normalizer"]["recipe_sha256"]) == 64


def test_skip_passes_everything_through_and_says_so():
    pairs = [pair(chosen="", rejected="!"), pair(chosen="", rejected="!"), pair(origin="a")]
    normalizer = DJNormalizer("not/read.yaml", skip_dj=True)
    found = normalizer.normalize(pairs)
    assert [each.metadata for each in found] == [{"skipped": True}, {"skipped": True}, {"origin": "a", "skipped": True}]
    assert found[0] == NormalizedDPOPair(
        "s0", pair()["state_messages"], [{"role": "assistant", "content": ""}], [{"role": "assistant", "content": "!"}],
        2, {"skipped": True},
    )  # fmt: skip
    assert normalizer.counts == {"kept": 3}


def test_drops_are_counted_under_the_operator_that_made_them_and_the_order_stays():
    pairs = [
        pair(0),
        pair(1, chosen="short"),
        pair(2, rejected="x" * 32_001),
        pair(3, chosen="oneverylongword"),
        pair(4, rejected="a b " + "." * 50),
        pair(0, state_id="again", chosen="RUN THE TESTS FIRST."),
        pair(5),
    ]
    normalizer = DJNormalizer()
    assert [each.state_id for each in normalizer.normalize(pairs)] == ["s0", "s5"]
    assert {reason: count for reason, count in normalizer.counts.items() if count} == {
        "kept": 2,
        "text_length_filter(chosen)": 1,
        "text_length_filter(rejected)": 1,
        "words_num_filter(chosen)": 1,
        "special_characters_filter(rejected)": 1,
        "document_deduplicator(state_chosen_rejected)": 1,
    }
    assert len(normalizer.counts) == 8  # what dropped nothing is there with 0


def test_each_call_counts_and_remembers_for_itself():
    normalizer = DJNormalizer()
    assert normalizer.counts == {}
    assert len(normalizer.normalize(iter([pair(), pair()]))) == 1
    assert len(normalizer.normalize([pair()])) == 1
    assert normalizer.counts["kept"] == 1


@pytest.mark.parametrize(
    "change",
    [
        {"state_messages": [{"role": "user", "content": "Task 1"}]},
        {"state_messages": [{"role": "system", "content": "Task 0"}]},
        {"chosen": "Run the tests second."},
        {"rejected": "Delete the tests anyway."},
    ],
)
def test_the_same_answer_in_another_state_is_another_pair(change):
    assert len(DJNormalizer().normalize([pair(), pair(**change)])) == 2


def test_maths_that_differs_in_numbers_only_is_kept():
    sums = [
        pair(0, state_messages=[{"role": "user", "content": f"What is {n} + {n}?"}], chosen=f"The sum is {2 * n}.")
        for n in range(10, 30)
    ]
    assert len(DJNormalizer().normalize(sums)) == 20


def test_the_parts_of_a_pair_cannot_run_into_each_other():
    same = _DocumentDeduplicator(lowercase=True, ignore_non_character=True)
    first = _pair_text(pair(chosen="ab", rejected="c"), "state_chosen_rejected")
    assert same.key(first) != same.key(_pair_text(pair(chosen="a", rejected="bc"), "state_chosen_rejected"))


PARTS = st.text("ab\ue000\ue001\ue002", max_size=4)


@given(PARTS, PARTS, PARTS, PARTS)
def test_two_pairs_have_one_text_only_if_they_are_equal(chosen, rejected, other_chosen, other_rejected):
    texts = [
        _pair_text(pair(chosen=one, rejected=two), "state_chosen_rejected")
        for one, two in ((chosen, rejected), (other_chosen, other_rejected))
    ]
    assert (texts[0] == texts[1]) == ((chosen, rejected) == (other_chosen, other_rejected))


def test_the_text_of_a_state_holds_calls_and_does_not_depend_on_the_order_of_keys():
    call = {"id": "t", "function": {"name": "Bash", "arguments": '{"command": "ls"}'}}
    one = pair(state_messages=[{"role": "assistant", "content": None, "tool_calls": [call]}])
    two = pair(state_messages=[{"tool_calls": [call], "content": None, "role": "assistant"}])
    assert _pair_text(one, "state") == _pair_text(two, "state")
    assert '{"command": "ls"}' in _pair_text(one, "state")


BAD = [
    (None, {"what": "pair 0", "got": "NoneType", "expected": "DPOPair"}),
    (pair(chosen=None), {"what": "pair 0 ('s0'), 'chosen'", "got": "NoneType", "expected": "str"}),
    (pair(rejected=["x"]), {"what": "'rejected'", "got": "list", "expected": "str"}),
    (pair(state_messages="x"), {"what": "'state_messages'", "got": "str", "expected": "list"}),
    (pair(state_id=3), {"what": "pair 0 (3), 'state_id'", "got": "int"}),
    (pair(n_teachers_agreeing="2"), {"what": "'n_teachers_agreeing'", "got": "'2'"}),
]


@pytest.mark.parametrize(("bad", "parts"), BAD)
def test_what_is_no_pair_is_named(bad, parts):
    with refusal(InputError, **parts):
        DJNormalizer().normalize([bad])


def test_an_unknown_backend_is_refused():
    with refusal(InputError, what="backend", got="'spark'") as caught:
        DJNormalizer(backend="spark")  # pyright: ignore[reportArgumentType]
    assert re.findall(r"'\w+'", caught.value.expected) == ["'native'", "'data_juicer'"]


def test_hostile_pairs_are_judged_like_any_other():
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    hostile = [
        pair(0, state_messages=[{"role": "user", "content": deep}]),
        pair(1, chosen="a lone \ud800 surrogate", state_messages=[{"role": "user", "content": "\udfff"}]),
        pair(2, chosen="nul \x00 inside", state_messages=[]),
    ]
    assert len(DJNormalizer().normalize(hostile)) == 3


@given(st.lists(st.tuples(st.text(max_size=40), st.text(max_size=40), st.integers(0, 2)), max_size=8))
def test_every_pair_is_kept_or_counted_and_a_second_pass_drops_nothing(given_pairs):
    pairs = [pair(n, chosen=chosen, rejected=rejected) for chosen, rejected, n in given_pairs]
    normalizer = DJNormalizer()
    found = normalizer.normalize(pairs)
    assert sum(normalizer.counts.values()) == len(pairs)
    again = [
        pair(
            int(each.state_id[1:]),
            chosen=each.chosen_messages[0]["content"],
            rejected=each.rejected_messages[0]["content"],
        )
        for each in found
    ]
    assert [each.state_id for each in normalizer.normalize(again)] == [each.state_id for each in found]


def test_long_pairs_take_time_in_step_with_their_length():
    def seconds(size: int) -> float:
        given_pairs = [pair(n, state_messages=[{"role": "user", "content": "ab 1." * size}]) for n in range(4)]
        normalizer = DJNormalizer()
        least = float("inf")
        for _ in range(3):
            begin = time.process_time()
            normalizer.normalize(given_pairs)
            least = min(least, time.process_time() - begin)
        return least

    assert seconds(160_000) < 16 * max(seconds(20_000), 0.005)
