"""document_deduplicator: of texts that are the same but for case, blanks, digits and punctuation, the first is kept."""

from __future__ import annotations

import hashlib
import re
import string
from dataclasses import dataclass

from composer_replication.pairs.normalise.ranges import Judge

# data-juicer's pattern runs in the `regex` package, which knows digits that this Python may be too old for, and which
# does not take the four ASCII separators for blanks.
_NEWER_DIGITS = (
    "\U00010d40-\U00010d49\U000116d0-\U000116e3\U00011bf0-\U00011bf9\U00011de0-\U00011de9\U00011f50-\U00011f59"
    "\U00016130-\U00016139\U00016d70-\U00016d79\U0001ccf0-\U0001ccf9\U0001e4f0-\U0001e4f9\U0001e5f1-\U0001e5fa"
)
_NO_CHARACTER = re.compile(rf"[^\S\x1c-\x1f]+|[\d{re.escape(string.punctuation)}{_NEWER_DIGITS}]+")


@dataclass(frozen=True, kw_only=True)
class DocumentDeduplicator:
    """Keeps the first text of each key; `ignore_non_character` leaves out blanks, digits and ASCII punctuation."""

    lowercase: bool = False
    ignore_non_character: bool = False

    def key(self, text: str) -> bytes:
        """Equal for texts that count as the same."""
        if self.lowercase:
            text = text.lower()
        if self.ignore_non_character:
            text = _NO_CHARACTER.sub("", text)
        # data-juicer takes MD5, for which texts can be made that collide. A lone surrogate is no reason to stop.
        return hashlib.blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=16).digest()

    def judge(self) -> Judge:
        seen: set[bytes] = set()

        def is_new(text: str) -> bool:
            before = len(seen)
            seen.add(self.key(text))
            return len(seen) > before

        return is_new
