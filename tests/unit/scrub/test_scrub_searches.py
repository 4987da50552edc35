"""What is searched for less often is found as before: narrower beginnings of patterns, and strings that stand twice."""

from __future__ import annotations

import itertools
import random
import re
from re import _constants, _parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

import pytest

from composer_replication.privacy import Scrubber, assignments
from composer_replication.privacy import plausible as human
from composer_replication.privacy import tables as places
from composer_replication.privacy.personal_data import Identity
from composer_replication.privacy.scrubber import _CleanStringCache, _StringCollector

_TEXTS = 20_000


def test_a_shape_is_found_without_characters_given_back() -> None:
    giving = re.compile(rb"U(?<= U)l+(?=[U0-])(?=[Ul0]*-)(?=[Ul-]*0)(?:-?(?:0{1,4}(?!0)l{0,2}|U{0,3}l*))++(?![Ul0-])")
    rng, matches = random.Random(0), 0
    for _ in range(_TEXTS):
        text = b" " + "".join(rng.choices("  UUlllll00--", k=30)).encode()
        spans = [(match.start() + 1, match.end()) for match in human._UNKNOWN_WORD.finditer(text)]
        assert spans == [match.span() for match in giving.finditer(text)], text
        matches += len(spans)
    assert matches > _TEXTS / 100


def test_a_place_begins_with_the_head_that_is_looked_for_first() -> None:
    every = {slot for row in places._SLOTS_BY_WORD.values() for slot in row}
    for place in every:
        leading = itertools.takewhile(lambda node: node[0] is _constants.LITERAL, _parser.parse(place.pattern.pattern))
        assert "".join(chr(code) for _, code in leading).startswith(place.head)
    assert sum(bool(place.head) for place in every) > len(every) * 0.9


def test_a_string_that_stands_twice_in_a_record_is_scanned_once() -> None:
    gathered = _StringCollector(_CleanStringCache(6), lambda _: False)
    gathered.add({"content": "the same result", "extra": {"stdout": "the same result", "stderr": "another result"}})
    texts = [text for text in gathered.unseen if "result" in text]
    assert texts == ["the same result", "another result"]


def test_a_secret_that_stands_twice_in_a_record_goes_twice() -> None:
    text = "password: hQ7!vR2#kLp9 and nothing else"
    scope = Scrubber().scope()
    record: dict[str, Any] = scope.value({"content": text, "extra": {"stdout": text, "stderr": "clean as it is"}})
    assert record["content"] == record["extra"]["stdout"] == "password: <PASSWORD_1> and nothing else"
    assert scope.report.counts == {"PASSWORD": 2}


def test_whether_a_text_shows_people_is_what_replacing_them_says() -> None:
    pieces = [
        "/home/",
        "home/",
        "-home-",
        "Users/",
        "/Users/",
        "C:\\\\Users\\\\",
        "-Users-",
        "USER",
        "USER_1",
        "ada",
        "root",
    ]
    pieces += ["src", "/", "-", " ", "\n", "\0", "x", "ada.", "components/"]
    rng, identity, people = random.Random(0), Identity((), ()), 0
    for _ in range(_TEXTS // 4):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 12)))
        shown = identity.touches(text)
        assert shown == (identity.replace(text, lambda _: "") != text), text
        people += shown
    assert people > _TEXTS / 20


def test_a_hit_without_a_value_is_looked_at_once_and_one_with_a_value_always(monkeypatch: pytest.MonkeyPatch) -> None:
    at_hit, hits = assignments._span_at, []
    monkeypatch.setattr(assignments, "_HITS_WITHOUT_VALUE", set())
    monkeypatch.setattr(assignments, "_span_at", lambda *hit: hits.append(hit[1]) or at_hit(*hit))
    line = "the secret of a good test is that it fails\n"
    found = f'secret = "{"zonne" + "bloem42"}"\n'
    text = "x " * 200 + line + "x " * 200
    for _ in range(2):
        assert not list(assignments.keyword_spans(text, text.encode(), {b"secret"}, []))
        assert len(list(assignments.keyword_spans(found, found.encode(), {b"secret"}, []))) == 1
    assert len(hits) == 3
    nearer = text[100:]
    assert not list(assignments.keyword_spans(nearer, nearer.encode(), {b"secret"}, []))
    assert len(hits) == 4  # the text begins nearer to it: something else stands around
