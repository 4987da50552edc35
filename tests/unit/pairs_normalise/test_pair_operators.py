"""The four native operators: numbers worked by hand, properties, hostile texts, time in step with length."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.errors import InputError
from composer_replication.pairs.normalise import (
    _count_words,
    _DocumentDeduplicator,
    _RangeFilter,
    _special_character_ratio,
    _SpecialCharactersFilter,
    _TextLengthFilter,
    _WordsNumFilter,
)
from cpu_time import least_cpu_seconds

ANY = st.text(st.characters(), max_size=60)
TEXTS = st.one_of(ANY, st.text("aZ9 .\n\t\r\x1c\u00a0🙂é", max_size=60))


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [2, 3, 4]),
        ({"min_closed_interval": False}, [3, 4]),
        ({"max_closed_interval": False}, [2, 3]),
        ({"reversed_range": True}, [1, 2, 4, 5]),
        ({"reversed_range": True, "min_closed_interval": False, "max_closed_interval": False}, [1, 5]),
    ],
)
def test_a_range_keeps_its_ends_unless_told_otherwise(settings, kept):
    assert [value for value in range(1, 6) if _RangeFilter(**settings).is_kept(value, 2, 4)] == kept


def test_a_missing_limit_is_no_limit():
    assert _RangeFilter().is_kept(10**9, None, None)
    assert not _RangeFilter().is_kept(3, 4, None)
    assert not _RangeFilter().is_kept(5, None, 4)


def test_length_is_counted_in_characters_and_both_ends_are_kept():
    judge = _TextLengthFilter(min_len=8, max_len=10).judge()
    assert [judge(text) for text in ("sevench", "eight ch", "ten chars!", "eleven char")] == [False, True, True, False]
    assert judge("éééééééé")  # 16 bytes
    assert not _TextLengthFilter().judge()("nine char")  # data-juicer's default is 10


WORDS_BY_HAND = {
    "": 0,
    "  \n\t ": 0,
    "one": 1,
    "one two": 2,
    "one\ntwo\tthree  four": 4,
    "a,b c": 2,
    "= + - 12 %%": 0,  # nothing but signs and digits
    "x = 12": 1,
    "...hello... (world)": 2,
    "one\u00a0two": 1,  # a no-break space divides nothing
    "one\r\ntwo": 2,
    "one\rtwo": 1,
    "🙂 ok": 1,
    "é ø": 1,  # é is a letter; ø is on the list of signs
    "数据": 1,
    '[TOOL_USE] name=Bash input={"command":"ls -la"}': 4,
}


@pytest.mark.parametrize("text", WORDS_BY_HAND)
def test_words_counted_by_hand(text):
    assert _count_words(text) == WORDS_BY_HAND[text]


def test_both_ends_of_the_number_of_words_are_kept():
    judge = _WordsNumFilter(min_num=2, max_num=3).judge()
    assert [judge(text) for text in ("a", "a b", "a b c", "a b c d")] == [False, True, True, False]
    assert not _WordsNumFilter().judge()("one two three four five six seven eight nine")  # default 10


def test_words_by_a_model_are_not_native():
    with pytest.raises(InputError, match='backend="data_juicer"'):
        _WordsNumFilter(tokenization=True)


RATIOS_BY_HAND = {
    "": 0.0,
    "abcd": 0.0,
    "abc1": 1 / 4,
    "a b!": 2 / 4,
    "3 + 4 = 7": 1.0,
    "x = 12": 5 / 6,
    "\t\n\x0b\x0c\r ": 1.0,
    "é🙂": 1 / 2,
    "👩‍🔧": 2 / 3,  # woman and wrench are emoji, the joiner between them is no sign
    "ø→½π": 1.0,
    "abcdefgh\u200b": 1 / 9,
}


@pytest.mark.parametrize("text", RATIOS_BY_HAND)
def test_the_share_of_special_characters_by_hand(text):
    assert _special_character_ratio(text) == RATIOS_BY_HAND[text]


def test_every_ascii_sign_digit_and_blank_is_special_and_no_ascii_letter_is():
    assert _special_character_ratio(string.punctuation + string.digits + string.whitespace) == 1.0
    assert _special_character_ratio(string.ascii_letters) == 0.0


def test_the_limit_itself_is_kept():
    judge = _SpecialCharactersFilter(max_ratio=0.5).judge()
    assert [judge(text) for text in ("ab1", "ab12", "ab123", "")] == [True, True, False, True]
    assert not _SpecialCharactersFilter().judge()("abc12")  # default 0.25


def kept(texts: list[str], **settings: bool) -> list[str]:
    judge = _DocumentDeduplicator(**settings).judge()
    return [text for text in texts if judge(text)]


def test_the_first_of_equal_texts_is_kept():
    texts = ["Run it.", "run it", "Run  it", " Run it.\n", "Run it. 2", "\x1cRun it."]
    assert kept(texts) == ["Run it.", "run it", "Run  it", "Run it. 2"]  # blanks at the ends never count
    assert kept(texts, lowercase=True) == ["Run it.", "run it", "Run  it", "Run it. 2"]
    assert kept(texts, ignore_non_character=True) == ["Run it.", "run it"]
    assert kept(texts, lowercase=True, ignore_non_character=True) == ["Run it."]


def test_what_counts_as_no_character():
    same = _DocumentDeduplicator(ignore_non_character=True)
    for sign in ("\u00a0", "\u2003", "٣", "\uff17", "\U0001e5f1", "_", "~"):
        assert same.key(f"a{sign}b") == same.key("ab"), hex(ord(sign))
    for sign in ("\x1c", "\u200b", "²", "½", "…", "é", "🙂", "\ue000"):
        assert same.key(f"a{sign}b") != same.key("ab"), hex(ord(sign))


def test_each_pass_forgets_the_one_before():
    operator = _DocumentDeduplicator()
    assert operator.judge()("a")
    assert operator.judge()("a")


@given(TEXTS)
def test_words_are_pieces_with_at_least_one_ordinary_character(text):
    pieces = [piece for piece in re.split("[ \n\t]", text) if piece]
    assert _count_words(text) == sum(any(_special_character_ratio(each) == 0.0 for each in piece) for piece in pieces)


@given(TEXTS, TEXTS)
def test_special_characters_are_counted_one_by_one(text, other):
    count = sum(_special_character_ratio(each) for each in text)
    assert _special_character_ratio(text) * len(text) == pytest.approx(count)
    assert _special_character_ratio(text + other) == pytest.approx(_special_character_ratio(other + text))


@given(st.lists(TEXTS, max_size=12), st.booleans(), st.booleans())
def test_a_second_pass_drops_nothing_and_the_order_stays(texts, lowercase, ignore):
    once = kept(texts, lowercase=lowercase, ignore_non_character=ignore)
    assert kept(once, lowercase=lowercase, ignore_non_character=ignore) == once
    remaining = iter(texts)
    assert all(text in remaining for text in once)


HOSTILE = [
    "=" * 400_000,
    " ." * 200_000,
    "a" * 400_000,
    "\u2003" * 400_000,
    "🙂" * 400_000,
    "٣a" * 200_000,
    "\ud800" * 400_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:2]))
def test_hostile_texts_take_time_in_step_with_their_length(text):
    def work() -> None:
        for operator in (_TextLengthFilter(), _WordsNumFilter(), _SpecialCharactersFilter()):
            operator.judge()(text)
        _DocumentDeduplicator(lowercase=True, ignore_non_character=True).judge()(text)

    assert least_cpu_seconds(work, enough=0.5) < 0.5
