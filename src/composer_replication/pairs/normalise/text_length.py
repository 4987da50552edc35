"""text_length_filter: how many characters a text has."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from composer_replication.pairs.normalise.ranges import Judge, RangeFilter


@dataclass(frozen=True, kw_only=True)
class TextLengthFilter(RangeFilter):
    """Keeps a text of `min_len` to `max_len` characters (code points)."""

    min_len: float | None = 10
    max_len: float | None = sys.maxsize

    def judge(self) -> Judge:
        return lambda text: self.is_kept(len(text), self.min_len, self.max_len)
