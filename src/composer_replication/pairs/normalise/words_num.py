"""words_num_filter: how many words a text has.

Words are divided by blanks, newlines and tabs, and by nothing else: a no-break space or a carriage return is inside a
word. What is made of special characters alone is no word.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from composer_replication.errors import InputError, explain
from composer_replication.pairs.normalise.ranges import Judge, RangeFilter
from composer_replication.pairs.normalise.special_characters import ORDINARY

# From the first ordinary character of a word to its end: one match a word, and no place is looked at twice.
_WORD = re.compile(rf"{ORDINARY}[^ \n\t]*")


@dataclass(frozen=True, kw_only=True)
class WordsNumFilter(RangeFilter):
    """Keeps a text of `min_num` to `max_num` words; `lang` names a model that only `tokenization` would use."""

    lang: str = "en"
    tokenization: bool = False
    min_num: float | None = 10
    max_num: float | None = sys.maxsize

    def __post_init__(self) -> None:
        if self.tokenization:
            fix = 'Words by a SentencePiece model are data-juicer\'s own: DJNormalizer(..., backend="data_juicer").'
            raise InputError(explain("words_num_filter, tokenization", got="true", expected="false", fix=fix))

    def judge(self) -> Judge:
        return lambda text: self.is_kept(count_words(text), self.min_num, self.max_num)


def count_words(text: str) -> int:
    """Words of a text, those of special characters alone left out."""
    return sum(1 for _ in _WORD.finditer(text))
