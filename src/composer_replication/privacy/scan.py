"""All layers over one text: where the secrets are. Knows nothing of placeholders or conversations."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import lru_cache
from urllib.parse import quote, quote_plus

from composer_replication.privacy import command_lines as commands
from composer_replication.privacy import command_lines as options
from composer_replication.privacy import encodings as views
from composer_replication.privacy import (
    entropy,
    identity,
    rules,
    speech,
    tables,
)
from composer_replication.privacy import speech as lists
from composer_replication.privacy import tables as places
from composer_replication.privacy.assignments import KEYWORDS, keyword_spans, searched_words
from composer_replication.privacy.assignments import WHOLE_WORDS as KEYWORDS_ALONE
from composer_replication.privacy.command_lines import command_spans
from composer_replication.privacy.encodings import (
    Decoded,
    decoded_in_run,
    percent_encoded,
    streams,
    wrapped_base64,
)
from composer_replication.privacy.entropy import RUN_RULES, VENDOR_RULES
from composer_replication.privacy.plausible import human_spans, is_shaped, is_unfamiliar
from composer_replication.privacy.rules import (
    PLACEHOLDER,
    Rule,
    Span,
    WordFilter,
    any_of,
    has_digit,
    is_strong,
    structure_spans,
)
from composer_replication.privacy.speech import WHOLE_WORDS as NEARBY_WORDS
from composer_replication.privacy.speech import nearby_spans
from composer_replication.privacy.surroundings import Surroundings
from composer_replication.privacy.tables import table_spans
from composer_replication.privacy.wraps import (
    SCHEMES,
    SHORT_KEYS,
    broken,
    crossing,
)

_Triggers = list[tuple[str, Rule]]
_MAX_DEPTH = 3
_REMEMBERED = 1 << 12
_TRIGGERS = tuple((trigger, rule) for rule in VENDOR_RULES for trigger in rule.triggers)
_ANY_TRIGGER = re.compile(any_of(trigger for trigger, _ in _TRIGGERS))
_RUN_TRIGGERS = tuple((trigger, rule) for rule in RUN_RULES for trigger in rule.triggers)
_PLAIN_WORD = re.compile(r"[!-~]{8,40}")
_USER_PASSWORD = re.compile(r"[\w.@+-]{1,64}:([^\0\s:]{6,100})")


class Scanner:
    """Finds secrets. Remembers clean runs, so that what a session repeats is looked at once."""

    def __init__(self, values: Mapping[str, str], extra_rules: Sequence[Rule], *, use_entropy: bool) -> None:
        self._exact = _ExactValues(values.values())
        self._extra = tuple(extra_rules)
        self._entropy = use_entropy
        self.clean_runs = _CleanRuns()
        # A session repeats its ids and hashes: what is a question of the run alone is answered once.
        self._is_words = lru_cache(maxsize=_REMEMBERED)(_is_words)
        self._is_suspect = lru_cache(maxsize=_REMEMBERED)(_is_suspect)
        self._random_in = lru_cache(maxsize=_REMEMBERED)(entropy.run_spans)
        self._decoded_in = lru_cache(maxsize=_REMEMBERED)(decoded_in_run)
        keywords = [word for word in KEYWORDS if word not in KEYWORDS_ALONE]
        layers = (*rules.TRIGGERS, *commands.TRIGGERS, *keywords, tables.INSERT, tables.COPY, *lists.TRIGGERS)
        triggers = (*layers, *SHORT_KEYS, *identity.WORDS, *self._exact.triggers)
        whole = (
            KEYWORDS_ALONE
            | options.OPTION_WHOLE_WORDS
            | commands.COMMAND_WHOLE_WORDS
            | places.WHOLE_WORDS
            | places.ALSO
            | speech.SPEECH_WHOLE_WORDS
            | SCHEMES
            | NEARBY_WORDS
        )
        self.words = WordFilter(triggers, whole)

    def knows(self, run: str) -> bool:
        """Whether a value from the environment stands in a run of key characters."""
        return self._exact.in_run(run)

    @property
    def reads_alone(self) -> bool:
        """Whether rules of the caller take part: nobody knows whether they keep to one string of many."""
        return bool(self._extra)

    def spans(self, text: str, key: str = "", depth: int = 0, words: set[bytes] | None = None) -> list[Span]:
        """Non-overlapping spans in order. `key` is the field the text stands in: it may say that hex is a hash.

        `words`: trigger words around the text; those that occur in it are added, for those who look for more there.
        """
        flat = text.encode("latin-1", "replace")
        runs = self.clean_runs.others(text, flat)
        odd = [(start, run) for start, run in runs if not self._is_words(run)] if runs else runs
        suspects = [(start, run) for start, run in odd if self._is_suspect(run)] if odd else odd
        active = self.words.active(flat)
        if words is not None:
            words |= active
            active = words
        spans = self._exact.spans(text, active) if self._exact else []
        triggers = _vendor_triggers(odd) if odd else []
        for rule in dict.fromkeys([rule for _, rule in triggers]):
            spans += rule.spans(text)
        spans += structure_spans(text, active)
        spans += command_spans(text, active)
        lower = flat.lower() if active else flat
        unfinished: tuple[list[int], list[int]] = ([], [])  # where names and programs end that a line end cuts off
        if active:
            spans += _named(text, lower, active, unfinished)
        if active or not text.isascii():
            spans += speech.speech_spans(text, lower, active)
        spans += human_spans(text, flat)
        for rule in self._extra:
            if rule.triggered(text):
                spans += rule.spans(text)
        if suspects:
            spans += self._in_suspects(text, suspects, key, depth, spans)
        if depth == 0:
            if runs:
                # A suspect is clean or not by what surrounds it, and may be one half of a secret that a line end
                # breaks. Remembering it made the result depend on which texts a worker had read before.
                self.clean_runs.remember(runs, spans, triggers, {run for _, run in suspects})
            spans += self._over_lines(text, active, suspects, unfinished, key)
            for stream in streams(text, flat):
                spans += stream.led_back(self.spans(stream.text, key, 1))
        if depth < _MAX_DEPTH:
            spans += self._encoded(text, key, depth, suspects, spans)
        return _settled(text, spans) if spans else []

    def _over_lines(
        self,
        text: str,
        active: Set[bytes],
        suspects: Runs,
        unfinished: tuple[list[int], list[int]],
        key: str,
    ) -> list[Span]:
        """Values that line ends break."""
        spans: list[Span] = []
        if "\n" not in text and "\\n" not in text:
            return spans
        if (joined := broken(text, active, suspects, *unfinished)) is not None:
            view, is_named = joined
            spans += crossing(text, view.led_back(self.spans(view.text, key, 1)), is_named)
        return spans

    def _in_suspects(self, text: str, suspects: Runs, key: str, depth: int, known_spans: list[Span]) -> list[Span]:
        """Return the secrets inside runs that are no words; `known_spans` cover what is redacted already."""
        around, spans = Surroundings(text, key), list[Span]()
        earlier = known_spans[:64]
        for start, run in suspects:
            end = start + len(run)
            if not any(span.start <= start and end <= span.end for span in earlier):
                spans += self._in_run(around, start, run, depth)
        return spans

    def _encoded(self, text: str, key: str, depth: int, suspects: Runs, known_spans: list[Span]) -> list[Span]:
        behind: list[Span] = []
        if "%" in text:
            behind += self._percent(without(text, known_spans), key, depth)
        starts = [start for start, run in suspects if 60 <= len(run) <= 82]
        if len(starts) > 1 or (starts and "\n" in text):
            for piece in wrapped_base64(text, starts):
                if self._says_secret(piece, depth):
                    behind.append(Span(piece.start, piece.end, "ENCODED_SECRET"))
        if ("\\" in text or "&#" in text) and (view := views.unescaped(text)) is not None:
            behind += view.led_back(self.spans(view.text, key, depth + 1))
        return behind

    def _in_run(self, around: Surroundings, start: int, run: str, depth: int) -> list[Span]:
        """Return the secrets inside one run."""
        spans, readable = [], []
        if has_digit(run):
            rules_here = dict.fromkeys([rule for trigger, rule in _RUN_TRIGGERS if trigger in run])
            spans = [moved(span, start) for rule in rules_here for span in rule.spans(run)]
        for piece in self._decoded_in(run) if depth < _MAX_DEPTH else ():
            if self._says_secret(piece, depth):
                spans.append(Span(start + piece.start, start + piece.end, "ENCODED_SECRET"))
            elif piece.is_plain():  # it looks random, but it says what it is
                readable.append(piece)
        for span in self._random_in(run) if self._entropy else ():
            here = moved(span, start)
            if not around.is_public(here, start) and not any(
                piece.start <= span.start and span.end <= piece.end for piece in readable
            ):
                spans.append(here)
        return spans

    def _says_secret(self, piece: Decoded, depth: int) -> bool:
        if self.spans(piece.text, depth=depth + 1):
            return True
        if _PLAIN_WORD.fullmatch(piece.text) and (is_shaped(piece.text) or is_unfamiliar(piece.text)):
            return True
        login = _USER_PASSWORD.fullmatch(piece.text.strip())
        return login is not None and piece.text.isascii() and is_strong(login[1])

    def _percent(self, text: str, key: str, depth: int) -> Iterator[Span]:
        for piece in percent_encoded(text):
            if piece.text == text[piece.start : piece.end]:
                continue
            for span in self.spans(piece.text, key, depth + 1):
                value = piece.text[span.start : span.end]
                at = text.find(value, piece.start, piece.end)
                if at >= 0:  # the secret itself needed no encoding: only its name did
                    yield Span(at, at + len(value), span.kind)
                else:
                    yield Span(piece.start, piece.end, "ENCODED_SECRET")


def _named(text: str, lower: bytes, active: Set[bytes], unfinished: tuple[list[int], list[int]]) -> Iterator[Span]:
    """What names, options, headings and lists say. `active`: the trigger words that occur."""
    yield from keyword_spans(text, lower, active, unfinished[0])
    yield from options.option_spans(text, lower, active, unfinished[1])
    yield from places.place_spans(text, active)
    yield from table_spans(text, lower, active)
    if views.has_colours(text):
        yield from _between_colours(text, lower, active)
    yield from nearby_spans(text, lower, active)
    yield from lists.list_spans(text, lower, active)


def _settled(text: str, candidates: list[Span]) -> list[Span]:
    """What goes in the end: nothing that is encrypted, no overlaps, and the copies of what was found."""
    if blocks := views.encrypted_blocks(text):
        candidates = [span for span in candidates if not any(begin <= span.start < end for begin, end in blocks)]
    spans = merge(text, candidates)
    return spread(text, spans)


def _vendor_triggers(runs: Runs) -> _Triggers:
    joined = "\n" + "\n".join([run for _, run in runs])
    if _ANY_TRIGGER.search(joined) is None:
        return []
    return [(trigger, rule) for trigger, rule in _TRIGGERS if trigger in joined]


# Spans that overlap, and values that stand in a text more than once.
def without(text: str, found: list[Span]) -> str:
    """The text with blanks for what is already found."""
    for span in found if len(found) <= 64 else ():
        text = text[: span.start] + " " * (span.end - span.start) + text[span.end :]
    return text


def moved(span: Span, by: int) -> Span:
    return Span(span.start + by, span.end + by, span.kind)


def merge(text: str, found: list[Span]) -> list[Span]:
    """Overlaps become one span that covers all of them; the kind is that of the earliest layer. Placeholders stay."""
    order = {id(span): index for index, span in enumerate(found)}
    merged: list[Span] = []
    ranks: list[int] = []
    for span in sorted(found, key=lambda span: (span.start, -span.end)):
        rank = order[id(span)]
        if merged and span.start < merged[-1].end:
            last = merged[-1]
            same = (last.start, last.end) == (span.start, span.end)
            kind = span.kind if same and rank < ranks[-1] else last.kind
            merged[-1] = Span(last.start, max(last.end, span.end), kind)
            ranks[-1] = min(rank, ranks[-1]) if same else ranks[-1]
        else:
            merged.append(span)
            ranks.append(rank)
    return [span for span in merged if not PLACEHOLDER.fullmatch(text[span.start : span.end])]


def spread(text: str, spans: list[Span]) -> list[Span]:
    """The same value elsewhere in the same text is the same secret, whatever stands beside it."""
    if len(spans) > 64:  # a dump: every line has its own name, and the search would cost lines times length
        return spans
    extra: list[Span] = []
    for value, kind in {text[span.start : span.end]: span.kind for span in spans}.items():
        if len(value) >= 8 and is_strong(value):
            at = text.find(value)
            while at >= 0:
                extra.append(Span(at, at + len(value), kind))
                at = text.find(value, at + len(value))
    return merge(text, spans + extra) if len(extra) > len(spans) else spans


# Runs of key characters: a key by itself stands in one. Most are words, and a session repeats the rest.
Runs = list[tuple[int, str]]
"""With where each of them starts."""
_MIN_RUN = 16
_FEWEST = 5  # different characters: a rule under a heading has fewer, and no key and no encoding does
_CACHE_SIZE = 1 << 16
_CACHED_LENGTH = 160
# One byte a character: key characters become `a`, everything else a space, so a run is found without a regex on text.
_RUN_TABLE = bytes(97 if chr(code) in "+/=_-.~$" or (code < 128 and chr(code).isalnum()) else 32 for code in range(256))
_RUN = re.compile(b"a" * _MIN_RUN + b"a*")
_ESCAPE_HEAD = re.compile(r"u[0-9a-fA-F]{4}|[nrt]")
# Words and small numbers between separators: most paths and names. A random key has no such cut.
_WORDY = re.compile(
    r"(?:[./_=~$+-]*+(?:[A-Z]?[a-z]{2,20}+(?:[A-Z][a-z]{2,20}+)*+|[a-z]|[A-Z]{1,10}+|[0-9]{1,6}+)(?=[./_=~$+-]|$))++[./_=~$+-]*+"
)
_NUMBERS = re.compile(r"(?:\d{6}-){7}\d{6}")  # a key that a disk is unlocked with


def _is_words(run: str) -> bool:
    """Whether a run is words and small numbers alone."""
    return _WORDY.fullmatch(run) is not None and not _NUMBERS.fullmatch(run)


def _is_suspect(run: str) -> bool:
    """Whether a run may be a key, or encode one: it is neither wordy nor a public id."""
    return len(set(run)) >= _FEWEST and not entropy.is_wordy(run) and not entropy.is_public_id(run)


class _CleanRuns:
    """Those without a secret, so that what a session repeats is looked at once. Bounded."""

    def __init__(self) -> None:
        self._clean: set[str] = set()

    def others(self, text: str, flat: bytes) -> Runs:
        """Runs of key characters that are not known to be clean, with where they start."""
        clean, runs = self._clean, []
        for match in _RUN.finditer(flat.translate(_RUN_TABLE)):
            start, end = match.span()
            run = text[start:end]
            if run in clean:
                continue
            if text[start - 1 : start] == "\\" and (head := _ESCAPE_HEAD.match(run)):
                start, run = start + head.end(), run[head.end() :]
            runs.append((start, run))
        return runs

    def remember(self, runs: Runs, found: list[Span], triggers: Sequence[tuple[str, Rule]], depends: set[str]) -> None:
        """Keep the runs that are clean whatever stands around them."""
        if len(found) > 64:  # a dump full of secrets: not worth the comparisons
            return
        if len(self._clean) >= _CACHE_SIZE:
            self._clean.clear()
        for start, run in runs:
            if len(run) > _CACHED_LENGTH or run in depends or any(trigger in f"\n{run}" for trigger, _ in triggers):
                continue
            if not found or not any(span.start < start + len(run) and start < span.end for span in found):
                self._clean.add(run)


def _between_colours(text: str, lower: bytes, active: Set[bytes]) -> Iterable[Span]:
    view = views.uncoloured(text, lower, searched_words(active))
    if view is None:
        return ()
    return view.led_back(keyword_spans(view.text, view.text.encode("latin-1", "replace").lower(), active))


# Values known beforehand (from the environment), in the spellings a log can hold them.

KIND = "ENV_SECRET"
_LETTERS = re.compile(r"[A-Za-z]{2,}")
_LEVELS = 3  # of JSON in JSON
_SHORTEST_LINE = 16
# What may stand between two characters of a value that goes over several lines.
_LINE_END = r"(?:[\\`]{0,2}(?:\r?\n|\\n)[ \t]{0,60}(?:[+>|-][ \t]{0,60})?)?"
_EXACT_RUN = re.compile(r"[A-Za-z0-9+/_=-]+")


class _ExactValues:
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
        self._runs = tuple(form for form in longest_first if _EXACT_RUN.fullmatch(form))
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
