"""Values known beforehand (from the environment), in the spellings a log can hold them."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator, Set
from urllib.parse import quote, quote_plus

from composer_replication.privacy.rules import Span, is_strong

KIND = "ENV_SECRET"
_LETTERS = re.compile(r"[A-Za-z]{2,}")
_LEVELS = 3  # of JSON in JSON
_SHORTEST_LINE = 16
# What may stand between two characters of a value that goes over several lines.
_LINE_END = r"(?:[\\`]{0,2}(?:\r?\n|\\n)[ \t]{0,60}(?:[+>|-][ \t]{0,60})?)?"
_RUN = re.compile(r"[A-Za-z0-9+/_=-]+")


class ExactValues:
    """Known values, plain, JSON-escaped, percent-encoded, quoted for a shell, and as HTML writes them.

    Every spelling of a value keeps its longest piece of letters. That piece is looked for among the words of a text,
    like any other trigger, so that a text without it is never searched for the value.
    """

    def __init__(self, values: Iterable[str]) -> None:
        plain = list(values)
        self._forms: dict[bytes, tuple[str, ...]] = {}
        for value in dict.fromkeys(part for whole in plain for part in _parts(whole.strip())):
            trigger = max(_LETTERS.findall(value), key=len, default="").lower().encode()
            self._forms[trigger] = (*self._forms.get(trigger, ()), *_spellings(value))
        longest_first = sorted({form for forms in self._forms.values() for form in forms}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._broken = tuple((_halves(value), _in_pieces(value)) for value in dict.fromkeys(map(str.strip, plain)))
        self._runs = tuple(form for form in longest_first if _RUN.fullmatch(form))
        halves = [half for triggers, _ in self._broken for half in triggers]
        self.triggers = tuple(filter(None, [*self._forms, *halves]))

    def __bool__(self) -> bool:
        return self._pattern is not None

    def spans(self, text: str, active: Set[bytes]) -> list[Span]:
        """Where known values stand, also with line ends in them: one half of a value is whole then.

        `active`: the triggers that occur; a value without letters is always looked for.
        """
        patterns = [pattern for halves, pattern in self._broken if not active.isdisjoint(halves)]
        likely = [forms for trigger, forms in self._forms.items() if not trigger or trigger in active]
        if self._pattern is not None and any(form in text for forms in likely for form in forms):
            patterns.insert(0, self._pattern)
        return [Span(*match.span(), KIND) for pattern in patterns for match in pattern.finditer(text)]

    def in_run(self, run: str) -> bool:
        """Whether a known value stands in a run of base64."""
        return any(form in run for form in self._runs)


def _parts(value: str) -> Iterator[str]:
    """A value, and the long lines of one that has several: a diff or a numbered listing shows each with a mark."""
    if value:
        yield value
    lines = [line.strip() for line in value.splitlines()] if "\n" in value else []
    yield from (line for line in lines if len(line) >= _SHORTEST_LINE and " " not in line and is_strong(line))


def _halves(value: str) -> tuple[bytes, ...]:
    """The longest piece of letters in each half of a value."""
    middle = len(value) // 2
    pieces = [max(_LETTERS.findall(half), key=len, default="") for half in (value[:middle], value[middle:])]
    return tuple(piece.lower().encode() for piece in pieces if piece)


def _in_pieces(value: str) -> re.Pattern[str]:
    return re.compile(_LINE_END.join(map(re.escape, value)))


def _spellings(value: str) -> tuple[str, ...]:
    plain = [value, value.replace("\r\n", "\n").replace("\n", "\r\n")] if "\n" in value else [value]
    forms = [*plain, quote(value, safe=""), quote_plus(value), quote(value)]
    for form in plain:
        for ascii_only in (True, False):
            escaped = form
            for _ in range(_LEVELS):
                escaped = json.dumps(escaped, ensure_ascii=ascii_only)[1:-1]
                forms += [escaped, escaped.replace("/", "\\/")]
    if "'" in value:  # how a shell gets a quote into quotes
        forms += [value.replace("'", "'\\''"), value.replace("'", "'\"'\"'")]
    html_form = html.escape(value, quote=False)
    forms += [
        html_form,
        html.escape(value),
        html.escape(value).replace("&#x27;", "&#39;"),
        html_form.replace('"', "&quot;"),
    ]
    return tuple(dict.fromkeys(forms))
