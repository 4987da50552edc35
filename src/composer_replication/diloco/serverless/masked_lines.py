"""A replica's log without its secrets: lines as they are passed on, with the values of named variables masked.

The keeper of a replica loads this before it forks, so it needs the standard library alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MOST_LINE_BYTES, MOST_LINE_CHARACTERS = 65_536, 8_000
_SHORTEST_SECRET = 4


class MaskedLines:
    """Bytes in, whole lines out: secrets masked, endless lines cut, what is no UTF-8 replaced."""

    def __init__(self, masks: Mapping[str, str]) -> None:
        self._masks, self._waiting, self._is_cut = masks, b"", False

    def take(self, data: bytes) -> str:
        *whole, self._waiting = re.split(rb"[\r\n]", self._waiting + data)
        text = "".join(self._shown(line) for line in whole)
        if len(self._waiting) > MOST_LINE_BYTES:
            text += self._shown(self._waiting)
            self._waiting, self._is_cut = b"", True
        return text

    def rest(self) -> str:
        return self.take(b"\n") if self._waiting else ""

    def _shown(self, line: bytes) -> str:
        if self._is_cut:  # the rest of a line whose beginning was shown
            self._is_cut = False
            return ""
        text = masked(line.decode("utf-8", "replace"), self._masks)
        if len(text) > MOST_LINE_CHARACTERS:
            text = f"{text[:MOST_LINE_CHARACTERS]} [cut: a line of {MOST_LINE_CHARACTERS:,} characters or more]"
        return text + "\n"


def masked(text: str, masks: Mapping[str, str]) -> str:
    """The text with `[NAME]` where the value of a secret stood."""
    for value, name in masks.items():
        text = text.replace(value, f"[{name}]")
    return text


def secret_masks(names: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Names by value, long values first: one may stand in another. A value of a few letters would mask half a log.

    Logs are masked a line at a time, so a key of several lines is masked by its lines.
    """
    values = {line: name for name in names for line in environment.get(name, "").splitlines()}
    return {value: values[value] for value in sorted(values, key=len, reverse=True) if len(value) >= _SHORTEST_SECRET}
