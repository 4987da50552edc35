"""Grep's regular expressions agree with Python's where both have them, and never take long."""

from __future__ import annotations

import os
import random
import re
import time

import pytest

from composer_replication.envs.workspace.regex import BudgetError, PatternError, Regex

NUM_PATTERNS = 30_000 if os.environ.get("CRF_TEST_PROFILE") == "full" else 1500
ATOMS = ("a", "b", "1", ".", r"\w", r"\d", r"\s", r"\W", "[ab]", "[^a]", "[a-c1]", r"[\d_]", r"\b", "^", "$", r"\.")
REPEATS = ("*", "+", "?", "{2}", "{1,3}", "{0,2}", "{1,}", "*?", "+?")


def pattern(draw: random.Random, depth: int = 0) -> str:
    kind = draw.random()
    if depth > 3 or kind < 0.4:
        return draw.choice(ATOMS)
    inner = pattern(draw, depth + 1)
    if kind < 0.6:
        return inner + pattern(draw, depth + 1)
    if kind < 0.75:
        return f"({inner}|{pattern(draw, depth + 1)})"
    return f"(?:{inner})" + (draw.choice(REPEATS) if kind < 0.95 else "")


def test_it_finds_what_pythons_own_finds():
    draw = random.Random(3)
    hits = 0
    for _ in range(NUM_PATTERNS):
        text = pattern(draw)
        text = ("(?i)" if draw.random() < 0.1 else "") + text
        line = "".join(draw.choice("abcA1 ._") for _ in range(draw.randrange(9)))
        expected = re.search(text, line) is not None
        assert Regex(text).matches(line) == expected, (text, line)
        hits += expected
    assert 0.2 < hits / NUM_PATTERNS < 0.95


@pytest.mark.parametrize(
    ("text", "line"),
    [("(a+)+$", "a" * 3000 + "b"), ("(x+x+)+y", "x" * 3000), ("(a|a)*b", "a" * 3000), ("(.*)*z", "q" * 3000)],
)
def test_what_hangs_a_backtracking_search_is_over_at_once(text, line):
    started = time.process_time()
    assert not Regex(text).matches(line)
    assert time.process_time() - started < 2


def test_a_search_that_visits_too_much_is_cut_off_at_the_same_place():
    cut = []
    for _ in range(2):
        fresh, lines = Regex("(x?){900}y"), 0
        try:
            while True:
                fresh.matches("x" * 100)
                lines += 1
        except BudgetError:
            cut.append(lines)
    assert cut[0] == cut[1] > 0
    assert Regex("(x?){900}y").matches("xy")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(a", "unclosed group"),
        ("a)", "unopened group"),
        ("[a", "unclosed character class"),
        ("*a", "repetition operator missing expression"),
        ("(?=a)", "look-around, including look-ahead and look-behind, is not supported"),
        (r"(a)\1", "backreferences are not supported"),
        ("a{3,1}", "invalid repetition count range, the start must be <= the end"),
        ("[z-a]", "invalid character class range, the start must be <= the end"),
        (r"\q", "unrecognized escape sequence"),
        ("a\\", "incomplete escape sequence"),
        ("(a{900}){900}", "compiled regex exceeds size limit"),
        ("(" * 60, "exceeded the maximum number of nested parentheses/brackets"),
        ("a" * 2000, "compiled regex exceeds size limit"),
    ],
)
def test_what_is_wrong_is_said_as_ripgrep_says_it(text, reason):
    with pytest.raises(PatternError) as refusal:
        Regex(text)
    assert str(refusal.value).startswith("regex parse error:\n")
    assert str(refusal.value).endswith(f"error: {reason}")
