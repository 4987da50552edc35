"""Which words code and messages have: what stands beside a secret's name and is made of them is no secret.

Beside such a name the default is the other way round: a value is one unless it is known to be harmless. The words that
are known were counted in packages and in message catalogs of many languages (`scripts/harmless_words.py`).
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from pathlib import Path

_LETTERS = re.compile(r"[^\W\d_]+")
_SEAM = re.compile(r"(?<=[a-zß-öø-ÿ])(?=[A-ZÀ-ÖØ-Þ])|(?<=[A-ZÀ-ÖØ-Þ])(?=[A-ZÀ-ÖØ-Þ][a-zß-öø-ÿ])")
_NO_LATIN = re.compile(r"[^\W\d_a-zA-ZªºÀ-ɏḀ-ỹ]")
_ENDINGS = ("s", "es", "ed", "ing", "ly", "en", "er", "n")
_SHORTEST_WORD, _SHORTEST = 4, 5
_SHORTEST_CUT = 6
_SHORTEST_JUMBLE, _FEWEST_SEAMS = 11, 3


def stem(word: str) -> str:
    """A word without the letter that most of its forms differ by."""
    return word[:-1] if len(word) >= _SHORTEST_CUT else word


@cache
def _stems() -> frozenset[str]:
    text = Path(__file__).with_name("harmless_words.txt").read_text(encoding="utf-8")
    return frozenset(text.partition("\n")[2].split())


def is_word(word: str) -> bool:
    """Whether packages or catalogs have a word or another form of it."""
    stems, lower = _stems(), word.lower()
    return stem(lower) in stems or any(lower.endswith(end) and stem(lower[: -len(end)]) in stems for end in _ENDINGS)


@lru_cache(maxsize=1 << 12)
def is_uncommon(value: str) -> bool:
    """Whether a value has a word in it that neither code nor messages have; in Latin letters only."""
    if len(value) < _SHORTEST or _NO_LATIN.search(value):
        return False
    cut = [_SEAM.split(letters) for letters in _LETTERS.findall(value)]
    parts = [part for word in cut for part in word]
    if any(len(part) >= _SHORTEST_WORD and not is_word(part) for part in parts):
        return True
    # Capitals all over it: no name of code changes so often and has so few letters between.
    length = sum(map(len, parts))
    return length >= _SHORTEST_JUMBLE and len(parts) - len(cut) >= _FEWEST_SEAMS and length < 3 * len(parts) + 2
