"""Replies of text alone, in one spelling: case, blanks, punctuation at the ends and asterisks of emphasis are nothing.

What stands in backticks is code and stays as it is, to the letter. A question mark is kept: a question is another act
than a statement.
"""

from __future__ import annotations

import re
import unicodedata

_CODE = re.compile(r"(```.*?(?:```|\Z)|``[^\n]*?``|`[^`\n]*`)", re.DOTALL)
_STARS = re.compile(r"\*+")
_ENDS = " \t\n\r.,;:!…"
_MAY_OPEN = "\"'“(["  # besides letters and digits: what an emphasis may begin with, so that `*.py` never does


def text_key(text: str) -> list[str]:
    """Prose and code by turns, beginning with prose; equal lists say the same thing."""
    parts = _CODE.split(unicodedata.normalize("NFC", text))
    keyed = [_prose(part) if number % 2 == 0 else part for number, part in enumerate(parts)]
    keyed[0] = keyed[0].lstrip(_ENDS)
    keyed[-1] = keyed[-1].rstrip(_ENDS)
    return keyed


def _prose(text: str) -> str:
    return unicodedata.normalize("NFC", " ".join(_without_emphasis(text).split()).casefold())


def _without_emphasis(text: str) -> str:
    """Without the asterisks that open and close an emphasis; a lone one, as in `*.py` or `2 * 3`, stays."""
    kept = list[str]()
    open_at: dict[str, int] = {}  # stars of a run -> where in `kept` the run that may open an emphasis stands
    cursor = 0
    for run in _STARS.finditer(text):
        kept.append(text[cursor : run.start()])
        cursor, stars = run.end(), run.group()
        before, after = text[run.start() - 1 : run.start()], text[cursor : cursor + 1]
        closes = bool(before) and not before.isspace() and not after.isalnum()
        if closes and stars in open_at and len(stars) <= 3:
            kept[open_at[stars]] = ""
            open_at.clear()  # emphasis does not cross another one
            continue
        if (after.isalnum() or (after and after in _MAY_OPEN)) and not before.isalnum():
            open_at[stars] = len(kept)
        kept.append(stars)
    return "".join([*kept, text[cursor:]])
