"""Which trigger words stand in a text, without searching it once for each of them.

A text is cut into words; a session repeats its words, so almost all are known already. Only new words are searched, and
only the triggers that occur are handed on. One pass instead of sixty.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain

_CACHE_SIZE = 1 << 17
# Lower-case letters stay, everything else parts words; triggers are letters only, or letters and the end of a word.
_TABLE = bytes(code if 97 <= code <= 122 else code + 32 if 65 <= code <= 90 else 32 for code in range(256))
_ESCAPED = frozenset((b"n", b"r", b"t"))  # the end of a line that JSON has written before a word
_LONGEST = 64  # longer ones are no words; they would only fill the cache


def any_of(words: Iterable[str]) -> str:
    """A pattern for any of many words that looks at each character once: an alternation would try them one by one."""
    by_first: dict[str, list[str]] = {}
    for word in words:
        by_first.setdefault(word[:1], []).append(word[1:])
    if not by_first or "" in by_first:  # a word ends here: what longer ones go on with does not matter
        return ""
    branches = [re.escape(first) + any_of(rest) for first, rest in sorted(by_first.items())]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


class WordFilter:
    """Finds triggers by way of words. Remembers words, which are letters only: never a whole secret with digits."""

    def __init__(self, triggers: Iterable[bytes], whole: Iterable[bytes] = ()) -> None:
        """`triggers` may stand anywhere in a word; `whole` are words of their own, of which there may be many."""
        self._triggers = tuple(dict.fromkeys(triggers))
        self._any = re.compile(any_of(trigger.decode() for trigger in self._triggers).encode() or b"(?!)")
        self._whole = frozenset(whole)
        self._plain: set[bytes] = set()
        self._loaded: dict[bytes, tuple[bytes, ...]] = {}

    def active(self, flat: bytes) -> set[bytes]:
        """The triggers that occur in a text given as one byte a character."""
        loaded = self._loaded
        words = set(flat.translate(_TABLE).split()) - self._plain
        cached_words = loaded.keys() & words  # set operations instead of a loop: texts have millions of such words
        triggers: set[bytes] = set().union(*map(loaded.__getitem__, cached_words))
        return triggers | self._learn(list(words - cached_words)) if len(cached_words) < len(words) else triggers

    def _learn(self, words: list[bytes]) -> set[bytes]:
        """Search new words all at once, and one by one only the words with a trigger in them."""
        joined = b" " + b" ".join(words) + b" "
        loaded: dict[bytes, tuple[bytes, ...]] = {}
        end = 0
        while match := self._any.search(joined, end):
            start, end = joined.rfind(b" ", 0, match.start() + 1) + 1, joined.find(b" ", match.start() + 1)
            word = joined[start:end]
            loaded[word] = tuple([trigger for trigger in self._triggers if trigger in word + b" "])
        escaped = {word: word[1:] for word in words if word[:1] in _ESCAPED and word[1:] in self._whole}
        for word, whole in (escaped | {word: word for word in self._whole.intersection(words)}).items():
            loaded[word] = (*loaded.get(word, ()), whole)
        if len(self._plain) + len(self._loaded) >= _CACHE_SIZE:
            self._plain.clear()
            self._loaded.clear()
        self._loaded.update((word, hits) for word, hits in loaded.items() if len(word) <= _LONGEST)
        self._plain.update([word for word in words if len(word) <= _LONGEST and word not in loaded])
        return set(chain.from_iterable(loaded.values()))
