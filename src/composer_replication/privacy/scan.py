"""Find the secrets in a text by applying all layers. This module knows nothing about placeholders or conversations.

Layers are tried from cheap to expensive. Trigger words decide which rules run; random strings and decoded text are
scanned once, and runs of key characters without a secret are cached.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import lru_cache
from urllib.parse import quote, quote_plus

from composer_replication.privacy import command_lines, encodings, entropy, personal_data, rules, speech, tables
from composer_replication.privacy.assignments import KEYWORDS, active_keywords, keyword_spans
from composer_replication.privacy.assignments import WHOLE_WORDS as KEYWORDS_ALONE
from composer_replication.privacy.command_lines import command_spans
from composer_replication.privacy.encodings import (
    DecodedText,
    decode_percent_encoding,
    decode_run,
    decode_wrapped_base64,
    find_streams,
)
from composer_replication.privacy.entropy import RUN_RULES, VENDOR_RULES
from composer_replication.privacy.plausible import is_shaped, is_unfamiliar, unknown_word_spans
from composer_replication.privacy.public_values import Surroundings
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
from composer_replication.privacy.speech import nearby_spans
from composer_replication.privacy.tables import table_spans
from composer_replication.privacy.wrapped_lines import SCHEMES, SHORT_KEYS, join_broken_lines, spans_across_lines

_Triggers = list[tuple[str, Rule]]
_MAX_DEPTH = 3
_CACHED_RUNS = 1 << 12
_TRIGGERS = tuple((trigger, rule) for rule in VENDOR_RULES for trigger in rule.triggers)
# Any vendor prefix, such as `ghp_` or `AKIA`.
_ANY_TRIGGER = re.compile(any_of(trigger for trigger, _ in _TRIGGERS))
_RUN_TRIGGERS = tuple((trigger, rule) for rule in RUN_RULES for trigger in rule.triggers)
# `Zamek.232`; not `two words`.
_DECODED_WORD = re.compile(r"[!-~]{8,40}")
# `ada:hunter2` -> `hunter2`.
_DECODED_LOGIN = re.compile(r"[\w.@+-]{1,64}:([^\0\s:]{6,100})")


class Scanner:
    """Finds the spans of secrets in a text. Clean runs of key characters are cached, since sessions repeat them."""

    def __init__(self, values: Mapping[str, str], extra_rules: Sequence[Rule], *, use_entropy: bool) -> None:
        self._exact = _ExactValues(values.values())
        self._extra = tuple(extra_rules)
        self._entropy = use_entropy
        self.clean_runs = _CleanRunCache()
        # A session repeats its ids and hashes, so results that depend only on the run are cached.
        self._is_wordy_run = lru_cache(maxsize=_CACHED_RUNS)(_is_wordy_run)
        self._is_suspect = lru_cache(maxsize=_CACHED_RUNS)(_is_suspect)
        self._random_in = lru_cache(maxsize=_CACHED_RUNS)(entropy.random_spans)
        self._decoded_in = lru_cache(maxsize=_CACHED_RUNS)(decode_run)
        keywords = [word for word in KEYWORDS if word not in KEYWORDS_ALONE]
        layers = (*rules.TRIGGERS, *command_lines.TRIGGERS, *keywords, tables.INSERT, tables.COPY, *speech.TRIGGERS)
        triggers = (*layers, *SHORT_KEYS, *personal_data.WORDS, *self._exact.triggers)
        whole = (
            KEYWORDS_ALONE
            | command_lines.OPTION_WHOLE_WORDS
            | command_lines.COMMAND_WHOLE_WORDS
            | tables.WHOLE_WORDS
            | tables.GATE_WORDS
            | speech.SPEECH_WHOLE_WORDS
            | SCHEMES
            | speech.NEARBY_WHOLE_WORDS
        )
        self.words = WordFilter(triggers, whole)

    def holds_env_value(self, run: str) -> bool:
        """Return whether a value from the environment occurs in a run of key characters."""
        return self._exact.in_run(run)

    @property
    def scans_one_by_one(self) -> bool:
        """Whether strings must be scanned individually, because custom rules might match across the border between
        joined strings.
        """
        return bool(self._extra)

    def spans(self, text: str, key: str = "", depth: int = 0, words: set[bytes] | None = None) -> list[Span]:
        """Return the spans of secrets in order, without overlaps.

        `key` is the field that holds the text; its name may indicate that hex is a hash. `depth` counts nested
        encodings. `words` has trigger words from the surrounding text; the words that occur in this text are added to
        it.
        """
        # One byte per character, so that positions in `flat` and `text` are equal.
        flat = text.encode("latin-1", "replace")
        runs = self.clean_runs.unknown_runs(text, flat)
        odd = [(start, run) for start, run in runs if not self._is_wordy_run(run)] if runs else runs
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
        unfinished: tuple[list[int], list[int]] = ([], [])  # ends of names and programs whose value is on the next line
        if active:
            spans += _spans_by_name(text, lower, active, unfinished)
        if active or not text.isascii():
            spans += speech.speech_spans(text, lower, active)
        spans += unknown_word_spans(text, flat)
        for rule in self._extra:
            if rule.triggered(text):
                spans += rule.spans(text)
        if suspects:
            spans += self._spans_in_suspects(text, suspects, key, depth, spans)
        # Decoded text is transient: it is neither cached nor joined over lines.
        if depth == 0:
            if runs:
                # Whether a suspect is clean depends on the text around it, and it may be half of a secret that is
                # interrupted by a line end. If it were cached, the result would depend on the texts that a worker has
                # scanned before.
                self.clean_runs.remember(runs, spans, triggers, {run for _, run in suspects})
            spans += self._spans_over_lines(text, active, suspects, unfinished, key)
            for stream in find_streams(text, flat):
                spans += stream.to_source_spans(self.spans(stream.text, key, 1))
        if depth < _MAX_DEPTH:
            spans += self._spans_in_encodings(text, key, depth, suspects, spans)
        return _resolve_overlaps(text, spans) if spans else []

    def _spans_over_lines(
        self,
        text: str,
        active: Set[bytes],
        suspects: Runs,
        unfinished: tuple[list[int], list[int]],
        key: str,
    ) -> list[Span]:
        """Return the secrets that are interrupted by line ends."""
        spans: list[Span] = []
        if "\n" not in text and "\\n" not in text:
            return spans
        if (joined := join_broken_lines(text, active, suspects, *unfinished)) is not None:
            view, is_named = joined
            spans += spans_across_lines(text, view.to_source_spans(self.spans(view.text, key, 1)), is_named)
        return spans

    def _spans_in_suspects(
        self, text: str, suspects: Runs, key: str, depth: int, known_spans: list[Span]
    ) -> list[Span]:
        """Return the secrets inside suspicious runs of characters; runs within `known_spans` are skipped."""
        around, spans = Surroundings(text, key), list[Span]()
        earlier = known_spans[:64]
        for start, run in suspects:
            end = start + len(run)
            if not any(span.start <= start and end <= span.end for span in earlier):
                spans += self._spans_in_run(around, start, run, depth)
        return spans

    def _spans_in_encodings(
        self, text: str, key: str, depth: int, suspects: Runs, known_spans: list[Span]
    ) -> list[Span]:
        spans: list[Span] = []
        if "%" in text:
            spans += self._spans_in_percent_encoding(_mask_spans(text, known_spans), key, depth)
        # Lines of wrapped base64 have 64 or 76 characters (PEM, MIME); a path before them may add some.
        starts = [start for start, run in suspects if 60 <= len(run) <= 82]
        if len(starts) > 1 or (starts and "\n" in text):
            for piece in decode_wrapped_base64(text, starts):
                if self._decodes_to_secret(piece, depth):
                    spans.append(Span(piece.start, piece.end, "ENCODED_SECRET"))
        if ("\\" in text or "&#" in text) and (view := encodings.unescape(text)) is not None:
            spans += view.to_source_spans(self.spans(view.text, key, depth + 1))
        return spans

    def _spans_in_run(self, around: Surroundings, start: int, run: str, depth: int) -> list[Span]:
        """Return the secrets inside a single run."""
        spans, readable = [], []
        if has_digit(run):
            rules_here = dict.fromkeys([rule for trigger, rule in _RUN_TRIGGERS if trigger in run])
            spans = [_shift_span(span, start) for rule in rules_here for span in rule.spans(run)]
        for piece in self._decoded_in(run) if depth < _MAX_DEPTH else ():
            if self._decodes_to_secret(piece, depth):
                spans.append(Span(start + piece.start, start + piece.end, "ENCODED_SECRET"))
            elif piece.is_plain():  # it looks random, but decodes to plain text
                readable.append(piece)
        for span in self._random_in(run) if self._entropy else ():
            here = _shift_span(span, start)
            if not around.is_public(here, start) and not any(
                piece.start <= span.start and span.end <= piece.end for piece in readable
            ):
                spans.append(here)
        return spans

    def _decodes_to_secret(self, piece: DecodedText, depth: int) -> bool:
        if self.spans(piece.text, depth=depth + 1):
            return True
        if _DECODED_WORD.fullmatch(piece.text) and (is_shaped(piece.text) or is_unfamiliar(piece.text)):
            return True
        login = _DECODED_LOGIN.fullmatch(piece.text.strip())
        return login is not None and piece.text.isascii() and is_strong(login[1])

    def _spans_in_percent_encoding(self, text: str, key: str, depth: int) -> Iterator[Span]:
        for piece in decode_percent_encoding(text):
            if piece.text == text[piece.start : piece.end]:
                continue
            for span in self.spans(piece.text, key, depth + 1):
                value = piece.text[span.start : span.end]
                at = text.find(value, piece.start, piece.end)
                if at >= 0:  # only the name of the secret required encoding
                    yield Span(at, at + len(value), span.kind)
                else:
                    yield Span(piece.start, piece.end, "ENCODED_SECRET")


def _spans_by_name(
    text: str, lower: bytes, active: Set[bytes], unfinished: tuple[list[int], list[int]]
) -> Iterator[Span]:
    """Yield the secrets identified by names, options, headings and lists. `active` has the trigger words that occur."""
    yield from keyword_spans(text, lower, active, unfinished[0])
    yield from command_lines.option_spans(text, lower, active, unfinished[1])
    yield from tables.slot_spans(text, active)
    yield from table_spans(text, lower, active)
    if encodings.has_colors(text):
        yield from _keyword_spans_without_colors(text, lower, active)
    yield from nearby_spans(text, lower, active)
    yield from speech.list_spans(text, lower, active)


def _resolve_overlaps(text: str, candidates: list[Span]) -> list[Span]:
    """Return the final spans: without overlaps, none inside encrypted blocks, and with all other occurrences of the
    same values.
    """
    if blocks := encodings.encrypted_blocks(text):
        candidates = [span for span in candidates if not any(begin <= span.start < end for begin, end in blocks)]
    spans = _merge_overlaps(text, candidates)
    return _add_repeats(text, spans)


def _vendor_triggers(runs: Runs) -> _Triggers:
    joined = "\n" + "\n".join([run for _, run in runs])
    if _ANY_TRIGGER.search(joined) is None:
        return []
    return [(trigger, rule) for trigger, rule in _TRIGGERS if trigger in joined]


def _mask_spans(text: str, spans: list[Span]) -> str:
    """Return the text with these spans replaced by spaces."""
    for span in spans if len(spans) <= 64 else ():
        text = text[: span.start] + " " * (span.end - span.start) + text[span.end :]
    return text


def _shift_span(span: Span, by: int) -> Span:
    return Span(span.start + by, span.end + by, span.kind)


def _merge_overlaps(text: str, spans: list[Span]) -> list[Span]:
    """Merge overlapping spans and drop existing placeholders.

    A merged span has the kind of its first part; if two layers found the same text, it has the kind from the earlier
    layer.
    """
    order = {id(span): index for index, span in enumerate(spans)}
    merged: list[Span] = []
    ranks: list[int] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
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


def _add_repeats(text: str, spans: list[Span]) -> list[Span]:
    """Add the spans of all other places in the text where the same values occur."""
    if len(spans) > 64:  # a dump of secrets: one search per value would be quadratic
        return spans
    extra: list[Span] = []
    for value, kind in {text[span.start : span.end]: span.kind for span in spans}.items():
        if len(value) >= 8 and is_strong(value):
            at = text.find(value)
            while at >= 0:
                extra.append(Span(at, at + len(value), kind))
                at = text.find(value, at + len(value))
    return _merge_overlaps(text, spans + extra) if len(extra) > len(spans) else spans


# Runs of key characters, which contain every key without a name. Most are words, and sessions repeat the others.
Runs = list[tuple[int, str]]
"""Start and text of each run."""
_MIN_RUN = 16
_MIN_DISTINCT = 5  # different characters: an underline has fewer, a key or an encoding never
_CACHE_SIZE = 1 << 16
_MAX_CACHED_CHARS = 160
# One byte per character: key characters become `a`, all others a space. Searching these bytes is faster than searching
# the text.
_RUN_TABLE = bytes(97 if chr(code) in "+/=_-.~$" or (code < 128 and chr(code).isalnum()) else 32 for code in range(256))
# `aaaaaaaaaaaaaaaa`: 16 key characters or more, after the translation above.
_RUN = re.compile(b"a" * _MIN_RUN + b"a*")
# Characters that a JSON escape adds to the front of a run: `u003dzk39` -> `u003d`, `nzk39` -> `n`.
_ESCAPE_HEAD = re.compile(r"u[0-9a-fA-F]{4}|[nrt]")
# Words and small numbers between separators, as in most paths and names; random keys do not match:
# `src/auth/tokenStore-2`, `release-2024-05`; not `zk39Qx81LmPq04Tn`.
_WORDY = re.compile(
    r"(?:[./_=~$+-]*+(?:[A-Z]?[a-z]{2,20}+(?:[A-Z][a-z]{2,20}+)*+|[a-z]|[A-Z]{1,10}+|[0-9]{1,6}+)(?=[./_=~$+-]|$))++[./_=~$+-]*+"
)
# A BitLocker recovery key: `123456-234567-345678-456789-567890-678901-789012-890123`.
_BITLOCKER_KEY = re.compile(r"(?:\d{6}-){7}\d{6}")


def _is_wordy_run(run: str) -> bool:
    """Return whether a run consists of words and small numbers."""
    return _WORDY.fullmatch(run) is not None and not _BITLOCKER_KEY.fullmatch(run)


def _is_suspect(run: str) -> bool:
    """Return whether a run may be a key or encode one, because it is neither made of words nor a public id."""
    return len(set(run)) >= _MIN_DISTINCT and not entropy.is_wordy(run) and not entropy.is_public_id(run)


class _CleanRunCache:
    """A bounded cache of runs without a secret, so that repeated runs are scanned once."""

    def __init__(self) -> None:
        self._clean: set[str] = set()

    def unknown_runs(self, text: str, flat: bytes) -> Runs:
        """Return the runs of key characters that are not known to be clean, each with its start position."""
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

    def remember(self, runs: Runs, spans: list[Span], triggers: Sequence[tuple[str, Rule]], depends: set[str]) -> None:
        """Cache those runs that contain no secret, whatever the surrounding text."""
        if len(spans) > 64:  # a dump of secrets: too many comparisons
            return
        if len(self._clean) >= _CACHE_SIZE:
            self._clean.clear()
        for start, run in runs:
            if len(run) > _MAX_CACHED_CHARS or run in depends or any(trigger in f"\n{run}" for trigger, _ in triggers):
                continue
            if not spans or not any(span.start < start + len(run) and start < span.end for span in spans):
                self._clean.add(run)


def _keyword_spans_without_colors(text: str, lower: bytes, active: Set[bytes]) -> Iterable[Span]:
    view = encodings.remove_colors(text, lower, active_keywords(active))
    if view is None:
        return ()
    return view.to_source_spans(keyword_spans(view.text, view.text.encode("latin-1", "replace").lower(), active))


KIND = "ENV_SECRET"
# `zk39otter` -> `otter`.
_LETTERS = re.compile(r"[A-Za-z]{2,}")
_MAX_JSON_LEVELS = 3  # JSON may contain JSON as text
_MIN_LINE_CHARS = 16
# What may come between two characters of a value printed over several lines.
_LINE_END = r"(?:[\\`]{0,2}(?:\r?\n|\\n)[ \t]{0,60}(?:[+>|-][ \t]{0,60})?)?"
# `zk39/Qx81+Lm==`; not `two words`.
_KEY_RUN = re.compile(r"[A-Za-z0-9+/_=-]+")


class _ExactValues:
    """Known values from the environment, in plain form and with the escapes of JSON, URLs, shells and HTML.

    The trigger for each of these spellings is its longest sequence of letters. The trigger is looked up among the words
    of a text, like all triggers, so that a text without it is never searched for the value.
    """

    def __init__(self, values: Iterable[str]) -> None:
        plain = list(values)
        self._forms: dict[bytes, tuple[str, ...]] = {}
        for value in dict.fromkeys(part for whole in plain for part in _value_and_lines(whole.strip())):
            trigger = max(_LETTERS.findall(value), key=len, default="").lower().encode()
            self._forms[trigger] = (*self._forms.get(trigger, ()), *_spellings(value))
        longest_first = sorted({form for forms in self._forms.values() for form in forms}, key=len, reverse=True)
        # Longest first: for `a&b`, the spelling `a&amp;b` must have priority over shorter spellings that are its
        # prefix.
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._line_end_patterns = tuple(
            (_halves(value), _across_line_ends(value)) for value in dict.fromkeys(map(str.strip, plain))
        )
        self._runs = tuple(form for form in longest_first if _KEY_RUN.fullmatch(form))
        halves = [half for triggers, _ in self._line_end_patterns for half in triggers]
        self.triggers = tuple(filter(None, [*self._forms, *halves]))

    def __bool__(self) -> bool:
        return self._pattern is not None

    def spans(self, text: str, active: Set[bytes]) -> list[Span]:
        """Return the spans of known values, including values interrupted by line ends.

        `active` has the triggers that occur. A value without letters has no trigger and is always searched for.
        """
        patterns = [pattern for halves, pattern in self._line_end_patterns if not active.isdisjoint(halves)]
        likely = [forms for trigger, forms in self._forms.items() if not trigger or trigger in active]
        if self._pattern is not None and any(form in text for forms in likely for form in forms):
            patterns.insert(0, self._pattern)
        return [Span(*match.span(), KIND) for pattern in patterns for match in pattern.finditer(text)]

    def in_run(self, run: str) -> bool:
        """Return whether a known value occurs in a base64 run."""
        return any(form in run for form in self._runs)


def _value_and_lines(value: str) -> Iterator[str]:
    """Yield a value and, if it has several lines, its long lines, because diffs and listings add a prefix to each
    line.
    """
    if value:
        yield value
    lines = [line.strip() for line in value.splitlines()] if "\n" in value else []
    yield from (line for line in lines if len(line) >= _MIN_LINE_CHARS and " " not in line and is_strong(line))


def _halves(value: str) -> tuple[bytes, ...]:
    """Return the longest sequence of letters in each half of a value: a line end that interrupts the value leaves
    one half intact.
    """
    middle = len(value) // 2
    pieces = [max(_LETTERS.findall(half), key=len, default="") for half in (value[:middle], value[middle:])]
    return tuple(piece.lower().encode() for piece in pieces if piece)


def _across_line_ends(value: str) -> re.Pattern[str]:
    # `hunter2` matches `hun\n  ter2`, too.
    return re.compile(_LINE_END.join(map(re.escape, value)))


def _spellings(value: str) -> tuple[str, ...]:
    plain = [value, value.replace("\r\n", "\n").replace("\n", "\r\n")] if "\n" in value else [value]
    forms = [*plain, quote(value, safe=""), quote_plus(value), quote(value)]
    for form in plain:
        for ascii_only in (True, False):
            escaped = form
            for _ in range(_MAX_JSON_LEVELS):
                escaped = json.dumps(escaped, ensure_ascii=ascii_only)[1:-1]
                forms += [escaped, escaped.replace("/", "\\/")]
    if "'" in value:  # the spelling of a quote inside quotes in a shell
        forms += [value.replace("'", "'\\''"), value.replace("'", "'\"'\"'")]
    html_form = html.escape(value, quote=False)
    forms += [
        html_form,
        html.escape(value),
        html.escape(value).replace("&#x27;", "&#39;"),
        html_form.replace('"', "&quot;"),
    ]
    return tuple(dict.fromkeys(forms))
