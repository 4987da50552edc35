"""Replies of text alone, in one spelling: case, blanks, sentence punctuation and the marks of Markdown are nothing.

What may be code keeps its letters: words in backticks, and words with a sign, a digit or a capital inside. Fenced code
stays as it is. Signs that carry meaning (a minus, a comparison, a point inside a number) are kept, and so is a question
mark: a question is another act than a statement.
"""

from __future__ import annotations

import re
import unicodedata

_FENCE = re.compile(r"(```.*?(?:```|\Z))", re.DOTALL)
_CODE = re.compile(r"(``[^\n]*?``|`[^`\n]*`)")
_STARS = re.compile(r"\*+")
_MAY_OPEN = "\"'“(["  # besides letters and digits: what an emphasis may begin with, so that `*.py` never does
_TYPOGRAPHY = str.maketrans({"\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "\u2026": ".", "\u00a0": " "})
# Not before a number: - 5 is another thing.
_BULLET = re.compile(r"^[ \t]*[-*+•‣◦][ \t]+(?=[A-Za-z`*_])", re.MULTILINE)
# At the end of a word, before a blank or the end: inside numbers, names and operators a point is more than a pause.
_PAUSES = re.compile(r"(?<=[^\s.,;:!])[.,;:!]+(?=\s|$)")
_BEFORE_QUESTION = re.compile(r"\s+(?=\?)")
_LOOKS_LIKE_CODE = re.compile(r".*[\d_./\\()\[\]{}<>=$@#%&|+*~^].*|.*[a-z][A-Z].*|-.*", re.DOTALL)
_QUOTE = "\0"  # stands for backticks: no text holds it after cleaning


def text_key(text: str) -> list[str]:
    """Prose and fenced code by turns, beginning with prose; equal lists say the same thing."""
    parts = _FENCE.split(unicodedata.normalize("NFC", text.replace(_QUOTE, "\ufffd")))
    return [_prose(part) if number % 2 == 0 else part for number, part in enumerate(parts)]


def _prose(text: str) -> str:
    pieces = _CODE.split(text)
    marked = [_code(piece) if number % 2 else _plain(piece) for number, piece in enumerate(pieces)]
    sentence = _BEFORE_QUESTION.sub("", _PAUSES.sub("", "".join(marked)))
    return unicodedata.normalize("NFC", " ".join(map(_word, sentence.split())))


def _plain(text: str) -> str:
    return _without_emphasis(_BULLET.sub("", text.translate(_TYPOGRAPHY)))


def _code(text: str) -> str:
    """One word of code is a word; several, or anything with blanks in it, keep every character."""
    inner = text.strip("`")
    return _QUOTE + (inner if inner and not re.search(r"\s", inner) else inner.encode().hex()) + _QUOTE


def _word(word: str) -> str:
    """Letters of what may be code count as they are."""
    is_code = _QUOTE in word or _LOOKS_LIKE_CODE.fullmatch(word.rstrip("?"))
    return word.replace(_QUOTE, "") if is_code else word.casefold()


def _without_emphasis(text: str) -> str:
    """Without the asterisks that open and close an emphasis; a lone one, as in `*.py` or `2 * 3`, stays."""
    pieces = list[str]()
    open_at: dict[str, int] = {}  # stars of a run -> where in `pieces` the run that may open an emphasis stands
    cursor = 0
    for run in _STARS.finditer(text):
        pieces.append(text[cursor : run.start()])
        cursor, stars = run.end(), run.group()
        before, after = text[run.start() - 1 : run.start()], text[cursor : cursor + 1]
        closes = bool(before) and not before.isspace() and not after.isalnum()
        if closes and stars in open_at and len(stars) <= 3:
            pieces[open_at[stars]] = ""
            open_at.clear()  # emphasis does not cross another one
            continue
        if (after.isalnum() or (after and after in _MAY_OPEN)) and not before.isalnum():
            open_at[stars] = len(pieces)
        pieces.append(stars)
    return "".join([*pieces, text[cursor:]])
