"""Replace secrets in text and records with placeholders, before anything is written or sent.

`Scrubber` holds the rules. `Scope` numbers the placeholders in one session with its subagents, so that parallel and
serial runs give the same output. Neither shows a value in its repr, and a placeholder reveals only the kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import compress
from types import MappingProxyType
from typing import Any

from composer_replication.privacy.fields import (
    NEVER_PLAIN,
    OPAQUE,
    PAIR_VALUES,
    SCALARS,
    TARGETS,
    field_strength,
    holds_secret,
    is_blob,
    is_command_line,
    is_named_pair,
    is_secret_number,
    is_whole_secret,
    opaque_field,
    pair_strength,
    typed_secret_field,
)
from composer_replication.privacy.personal_data import Identity
from composer_replication.privacy.public_values import is_hash_name
from composer_replication.privacy.rules import Rule, Span, is_strong
from composer_replication.privacy.scan import Scanner
from composer_replication.privacy.secret_names import Strength, is_searchable, name_strength

_MIN_SECRET_CHARS = 6
_MIN_ANSWER_CHARS = 8  # a shorter answer may be part of a word
_MAX_ANSWERS = 64  # per scope: a dump of secrets is not an answer
# A replacement can join two pieces that match together; more than a few rounds would be a bug.
_MAX_ROUNDS = 4
# Separates strings that are scanned together: no pattern crosses a NUL or treats it as a blank.
_BORDER = "\n\0\n"


class Scrubber:
    """The rules for redacting the text of a run. One scrubber serves any number of scopes."""

    def __init__(
        self,
        *,
        env_values: Mapping[str, str] | None = None,
        home_dirs: Sequence[str] = (),
        user_names: Sequence[str] = (),
        extra_rules: Sequence[Rule] = (),
        entropy: bool = True,
        people: bool = False,
    ) -> None:
        # Callers may pass a whole environment, so values that occur in every text are excluded from the search.
        values = {name: value for name, value in (env_values or {}).items() if is_searchable(name, value)}
        self._scanner = Scanner(values, extra_rules, use_entropy=entropy)
        self._scanner_without_entropy = Scanner(values, extra_rules, use_entropy=False) if entropy else self._scanner
        self._identity = Identity(home_dirs, user_names, people=people)
        known_texts = [*values.values(), *home_dirs, *user_names]
        self._clean_strings = _CleanStringCache(
            min([_MIN_SECRET_CHARS, *(len(word) for word in known_texts if len(word) > 1)])
        )

    def scope(self) -> Scope:
        """Return a new scope, which numbers the placeholders of one session and its subagents."""
        return Scope(self._scanner, self._scanner_without_entropy, self._identity, self._clean_strings)

    def __repr__(self) -> str:
        return "Scrubber()"


class Scope:
    """The placeholders in one session with its subagents, numbered by first appearance."""

    def __init__(self, scanner: Scanner, unblurred: Scanner, identity: Identity, seen: _CleanStringCache) -> None:
        self._scanner = scanner
        self._scanner_without_entropy = unblurred  # for fields that are random by design
        self._identity = identity
        self._clean_strings = seen
        self._paragraphs = _ParagraphCache()
        self._numbering = _Numbering()
        self._texts_with_people: dict[CacheKey, tuple[str, int]] = {}
        self._answers: dict[str, str] = {}  # secret -> kind
        self._any_answer: re.Pattern[str] | None = None

    def __repr__(self) -> str:
        return f"Scope({self.report})"

    @property
    def report(self) -> ScrubReport:
        """The replacements so far, by kind."""
        return ScrubReport(self._numbering.counts)

    def reserve(self, value: Any) -> None:
        """Reserve the numbers of all placeholders in a text or JSON-like value, such as `<KIND_3>` or `USER_1`.

        A text reserves its own numbers when it is scrubbed, which is too late for the texts before it. Therefore a
        caller that keeps previously scrubbed rows, or reads logs that may contain placeholders, must pass all of them
        here first.
        """
        self._numbering.reserve_all(value)

    def text(self, text: str) -> str:
        """Replace every secret in the text with a placeholder. Returns the same object if the text has no secret."""
        return self._text(text, "")

    def answer(self, text: str, spans: Callable[[str], Iterable[Span]]) -> str:
        """Scrub the text of a message or result in which `spans` finds the answer to an earlier question.

        The answer is also replaced in all later messages, results and values in this scope, where nothing else
        identifies it as a secret.
        """
        text = self.text(self._without_answers(text))
        answers = sorted(spans(text))
        for start, end, kind in answers:
            self._remember(text[start:end], kind)
        return self.text(self._replaced(text, answers)) if answers else text

    def value(self, value: Any) -> Any:
        """Scrub every string in a JSON-like value. Returns the same object if nothing was found.

        Most strings in a record are short and clean, so new strings are scanned together, as one text. They are scanned
        one by one only if that scan finds something.
        """
        value = self._without_answers(value)
        gathered = _StringCollector(self._clean_strings, self._scanner.holds_env_value)
        gathered.add(value)
        clean = not gathered.unseen or self._are_all_clean(gathered.unseen)
        return value if clean and not gathered.special else self._scrub_value(value, "", Strength.NONE)

    def _remember(self, answer: str, kind: str) -> None:
        """Record an answer, to be replaced in all later texts, unless it may occur there by chance, as dates and
        codes may.
        """
        is_rare = len(answer) >= _MIN_ANSWER_CHARS and is_strong(answer) and not answer.replace("-", "").isdigit()
        if is_rare and answer not in self._answers and len(self._answers) < _MAX_ANSWERS:
            self._answers[answer] = kind
            # The first matching alternative wins, so longer answers come first.
            longest_first = sorted(map(re.escape, self._answers), key=len, reverse=True)
            # With "otter-4821" stored, the pattern matches in `is otter-4821.` but not in `otter-4821x`.
            self._any_answer = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(longest_first)})(?![-_.+]?[A-Za-z0-9])")

    def _without_answers(self, value: Any) -> Any:
        """Replace answers to earlier questions in every string of a value. Returns the same object if none occur."""
        # Most sessions never ask for a secret.
        if self._any_answer is None:
            return value
        if isinstance(value, str):
            if self._any_answer.search(value) is None:
                return value
            self._numbering.reserve(value)
            return self._any_answer.sub(
                lambda match: self._numbering.placeholder(self._answers[match[0]], match[0]), value
            )
        if isinstance(value, dict):
            items = {key: self._without_answers(item) for key, item in value.items()}
            names = {key: name for key in value if (name := self._without_answers(key)) is not key}
            if not names and all(items[key] is item for key, item in value.items()):
                return value
            names = _unique_names(names, value)
            return {names.get(key, key): item for key, item in items.items()}
        if isinstance(value, list | tuple):
            new = [self._without_answers(item) for item in value]
            if all(item is old for item, old in zip(new, value, strict=True)):
                return value
            return new if isinstance(value, list) else tuple(new)
        return value

    def _are_all_clean(self, unseen: Collection[str]) -> bool:
        """Scan strings together and cache the clean ones. Returns False if the strings of the record have to be
        scrubbed one by one.
        """
        # Custom rules may match across the border between two strings.
        if self._scanner.scans_one_by_one:
            return False
        words: set[bytes] = set()
        rest = self._paragraphs.unrepeated(unseen, _BORDER, words)
        spans = self._scanner.spans(_BORDER.join(rest), words=words)
        joined = _BORDER.join(unseen)
        people, numbered = self._identity.touches(joined, words), _holds_number(joined)
        if spans:
            self._paragraphs.forget()
        else:
            self._paragraphs.remember(words)
        if not people and not spans and not numbered:
            self._clean_strings.add_all(unseen, people=False)
            return True
        offset, index = 0, 0
        for text, read in zip(unseen, rest, strict=True):
            end = offset + len(read)
            while index < len(spans) and spans[index].end <= offset:
                index += 1
            clean = not spans or (read is text and (index == len(spans) or spans[index].start >= end))
            if clean and not (numbered and _holds_number(text)):
                self._clean_strings.add(text, people=people and self._identity.touches(text))
            offset = end + len(_BORDER)
        return False

    def _text(self, text: str, key: str) -> str:
        if (
            len(text) < self._clean_strings.shortest
            or (text_key := _cache_key(text)) in self._clean_strings.clean
            or _is_trivial(text)
        ):
            return text
        if text_key in self._clean_strings.people:
            return self._with_pseudonyms(text, text_key)
        numbered = self._numbering.reserve(text)
        result = self._secrets(text, key)
        if result is not text:
            return self._identity.replace(result, self._numbering.pseudonym)
        result = self._identity.replace(text, self._numbering.pseudonym)
        if not key and not numbered:  # another scope has to reserve the numbers again
            self._clean_strings.add(text, people=result is not text)
        return result

    def _with_pseudonyms(self, text: str, text_key: CacheKey) -> str:
        """Replace people in a text without secrets.

        Every record contains the working directory, so results for short texts are cached with their counts.
        """
        if (cached := self._texts_with_people.get(text_key)) is not None:
            if cached[1]:
                self._numbering.count("USER", cached[1])
            return cached[0]
        counts = self._numbering.counts
        before = counts.get("USER", 0)
        result = self._identity.replace(text, self._numbering.pseudonym)
        if len(text) <= CACHED_LENGTH:
            self._texts_with_people[text_key] = (result, counts.get("USER", 0) - before)
        return result

    def _secrets(self, text: str, key: str, scanner: Scanner | None = None) -> str:
        scanner = scanner or self._scanner
        for _ in range(_MAX_ROUNDS):
            words: set[bytes] = set()
            spans = scanner.spans(text, key, words=words)
            if not spans:
                break
            paragraphs = _ParagraphCache()
            paragraphs.unrepeated((text,), _BORDER, words)
            text = self._replaced(text, spans)
            (rest,) = paragraphs.unrepeated((text,), _BORDER, words)
            if not scanner.spans(rest, key, words=words):  # no new match at the replacements
                break
        return text

    def _replaced(self, text: str, spans: Sequence[Span]) -> str:
        pieces, cursor = [], 0
        for start, end, kind in spans:
            pieces += [text[cursor:start], self._numbering.placeholder(kind, text[start:end])]
            cursor = end
        return "".join([*pieces, text[cursor:]])

    def _scrub_value(self, value: Any, key: str, strength: Strength) -> Any:
        if isinstance(value, str):
            return self._field(value, key, strength)
        if isinstance(value, dict):
            return self._scrub_dict(value, strength)
        if isinstance(value, list | tuple):
            return self._scrub_list(value, key, strength)
        if is_secret_number(value, key, strength):
            return self._numbering.placeholder("PASSWORD", str(value))
        return value

    def _scrub_list(self, value: list[Any] | tuple[Any, ...], key: str, strength: Strength) -> Any:
        items: list[Any] = list(value)
        if is_command_line(items):
            items = self._command_line(items)
        elif is_named_pair(items):
            items[1] = self._field(items[1], items[0], Strength.TOKEN)
        items = [self._scrub_value(item, key, strength) for item in items]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return items if isinstance(value, list) else tuple(items)

    def _command_line(self, items: list[str]) -> list[str]:
        """Scan the arguments of a command as one line, and redact each argument separately."""
        self.reserve(items)
        spans, result, offset = self._scanner.spans(" ".join(items)), [], 0
        for item in items:
            end = offset + len(item)
            inside = [
                Span(max(start, offset) - offset, min(stop, end) - offset, kind)
                for start, stop, kind in spans
                if start < end and offset < stop
            ]
            result.append(self._replaced(item, inside) if inside else item)
            offset = end + 1
        return result

    def _scrub_dict(self, value: dict[Any, Any], strength: Strength) -> dict[Any, Any]:
        # With a home directory, almost every record is walked, so clean strings are skipped here.
        clean, plain_keys = self._clean_strings.clean, self._clean_strings.plain_keys
        items: dict[Any, Any] = {}
        names: dict[Any, str] = {}
        typed = typed_secret_field(value)
        for key, item in value.items():
            kind = item.__class__
            if key == typed and typed:
                new = self._numbering.placeholder("PASSWORD", item)
            elif key not in plain_keys:
                # Keys are names and stay, unless they are paths or secrets (as in a map of files by path).
                if isinstance(key, str) and (name := self._text(key, "")) != key:
                    names[key] = name
                new = self._named_field(value, key, item, strength)
            elif kind in SCALARS or (kind is str and (item in clean or _is_trivial(item))):
                continue
            else:
                new = self._scrub_value(item, key, Strength.NONE)
            if new is not item:
                items[key] = new
        if not items and not names:
            return value
        names = _unique_names(names, value)
        return {names.get(key, key): items.get(key, item) for key, item in value.items()}

    def _named_field(self, value: dict[Any, Any], key: Any, item: Any, strength: Strength) -> Any:
        """Scrub a field whose name may say something about its content."""
        if key in OPAQUE and key == opaque_field(value) and isinstance(item, str):
            return item if is_blob(item) and not self._scanner.holds_env_value(item) else self._opaque(item)
        name = key if isinstance(key, str) else str(key)
        return self._scrub_value(item, name, field_strength(name, strength, pair_strength(value)))

    def _opaque(self, text: str) -> str:
        """Scrub the text of a field that should hold random data, without the test for random strings."""
        self._numbering.reserve(text)
        return self._identity.replace(self._secrets(text, "", self._scanner_without_entropy), self._numbering.pseudonym)

    def _field(self, text: str, key: str, strength: Strength) -> str:
        if not strength or not is_whole_secret(text, strength, key):
            return self._text(text, key if is_hash_name(key) else "")
        # A rule that covers the whole text knows the kind better than the field name does.
        spans = self._scanner.spans(text)
        if len(spans) == 1 and (spans[0].start, spans[0].end) == (0, len(text)):
            return self._numbering.placeholder(spans[0].kind, text)
        kind = {Strength.PASSWORD: "PASSWORD", Strength.TOKEN: "SECRET"}.get(strength, "KEY_VALUE")
        return self._numbering.placeholder(kind, text)


# Looked up once, since `_StringCollector` runs on every field in every record.
_NO_STRENGTH = Strength.NONE
_LISTS = (list, tuple)


class _StringCollector:
    """Collects the strings to scan in a record.

    `unseen` has the strings not known to be clean; `special` says whether some field requires more than a scan of its
    text.
    """

    def __init__(self, clean_strings: _CleanStringCache, holds_env_value: Callable[[str], bool]) -> None:
        self._clean_strings, self._holds_env_value = clean_strings, holds_env_value
        self._nodes: list[tuple[Any, Strength]] = []
        self.unseen: dict[str, None] = {}  # an ordered set, since records contain results twice
        self.special = False

    def add(self, value: Any) -> None:
        """Collect the strings in a value and all nested values."""
        nodes = self._nodes
        nodes.append((value, _NO_STRENGTH))
        for node, strength in nodes:  # the loop appends to the list
            if isinstance(node, dict):
                self._dict(node, strength)
            elif isinstance(node, str):
                self._text(node)
            elif isinstance(node, _LISTS):
                self.special = self.special or is_command_line(node) or is_named_pair(node)
                nodes += [(item, strength) for item in node if item.__class__ not in SCALARS]

    def _dict(self, node: dict[Any, Any], strength: Strength) -> None:
        # The innermost loop of scrubbing: for most fields, with plain names and clean strings, no method is called.
        clean_strings = self._clean_strings
        clean, plain_keys, shortest = clean_strings.clean, clean_strings.plain_keys, clean_strings.shortest
        for key, item in node.items():
            if key in plain_keys:
                kind = item.__class__
                if kind is str:
                    if (
                        item not in clean
                        and (length := len(item)) >= shortest
                        and not (19 < length < 37 and is_id(item))
                    ):
                        self._unknown(item)
                elif kind not in SCALARS:
                    self._nodes.append((item, _NO_STRENGTH))
            elif key.__class__ is str and not (key in OPAQUE and key == opaque_field(node) and self._is_blob(item)):
                pair = pair_strength(node) if key in PAIR_VALUES else _NO_STRENGTH
                self.special = self.special or (key in TARGETS and typed_secret_field(node) is not None)
                self._named_field(key, item, field_strength(key, strength, pair))

    def _is_blob(self, item: Any) -> bool:
        return is_blob(item) and not self._holds_env_value(item)

    def _named_field(self, key: str, item: Any, strength: Strength) -> None:
        """Collect the strings of a field whose name is new or may say something about its content."""
        self._text(key)
        clean_strings = self._clean_strings
        if (
            not name_strength(key)
            and key not in NEVER_PLAIN
            and (len(key) < clean_strings.shortest or key in clean_strings.clean)
        ):
            clean_strings.plain_keys.add(key)
        if strength and holds_secret(item, key, strength):
            self.special = True
        elif item.__class__ not in SCALARS:
            self._nodes.append((item, strength))

    def _text(self, text: str) -> None:
        if len(text) >= self._clean_strings.shortest and not _is_trivial(text):
            self._unknown(text)

    def _unknown(self, text: str) -> None:
        clean_strings = self._clean_strings
        text_key = _cache_key(text)
        if text_key in clean_strings.people:
            self.special = True
        elif text_key not in clean_strings.clean:
            self.unseen[text] = None


# Caches for strings without secrets. They are bounded and never hold a secret.

CacheKey = str | tuple[int, int]
_CACHE_SIZE = 1 << 16
CACHED_LENGTH = 256
_PARAGRAPHS_IN_A_ROW = 3  # the paragraph and its two neighbors
_MIN_PAGE_CHARS = 600
# The line number in files as agents show them: `\n  12→def` -> `\n  12→`.
_LINE_NUMBER = re.compile(r"\n *\d+→")
# Neighboring repeated paragraphs, each represented by a byte 1: `\x01\x01`.
_REPEATED = re.compile(b"\x01+")
_NO_WORDS: frozenset[bytes] = frozenset()
# Public ids and times: they are different in every record, so caching them would be useless.
# `123e4567-e89b-12d3-a456-426614174000`, `toolu_01AbCdEfGhIjKlMnOpQrStUv`, `2026-11-19T21:09:08.123Z`; not `hunter2`.
_TRIVIAL = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|(?:toolu|msg|req|call)_[A-Za-z0-9]{20,30}"
    r"|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z?"
)
is_id = _TRIVIAL.fullmatch  # looked up once, since it runs on every id in every record


def _cache_key(text: str) -> CacheKey:
    """Return the cache key for a text. Long texts are hashed: logs repeat whole files, and caches must stay small."""
    return text if len(text) <= CACHED_LENGTH else (hash(text), len(text))


def _is_trivial(text: str) -> bool:
    """Return whether a text is only an id or a time."""
    return 19 < len(text) < 37 and is_id(text) is not None


class _CleanStringCache:
    """A bounded cache of strings known to contain no secret."""

    def __init__(self, shortest: int) -> None:
        self.shortest = shortest  # shorter strings cannot contain a secret or a name
        self.clean: set[CacheKey] = set()  # neither a secret nor a name
        self.people: set[CacheKey] = set()  # no secret, but a home directory or a user name
        self.plain_keys: set[str] = set()  # clean field names that do not affect the interpretation of their values

    def add(self, text: str, *, people: bool) -> None:
        """Cache a text without secrets."""
        self.add_all((text,), people=people)

    def add_all(self, texts: Iterable[str], *, people: bool) -> None:
        """Cache texts without secrets."""
        chosen = self.people if people else self.clean
        if len(chosen) >= _CACHE_SIZE:
            chosen.clear()
            self.plain_keys.clear()
        chosen.update(map(_cache_key, texts))


class _ParagraphCache:
    """The paragraphs that a session repeats, for example when a file is shown again after an edit to one line.

    A paragraph counts as repeated if it and its two neighbors occurred together in a text without secrets. That text is
    written unchanged, so scanning the paragraph again would not protect anything. Paragraphs are stored as hashes, for
    one session, and their number is bounded.
    """

    def __init__(self) -> None:
        self._words_by_paragraph: dict[int, frozenset[bytes]] = {}  # by the hash of the paragraph with its neighbors
        self._latest: list[int] = []

    def unrepeated(self, texts: Iterable[str], border: str, words: set[bytes]) -> list[str]:
        """Return the texts without line numbers, and with `border` in place of repeated paragraphs.

        The trigger words in the omitted paragraphs are added to `words`. The first copy of a repetition within the
        texts is kept.
        """
        if len(self._words_by_paragraph) >= _CACHE_SIZE:
            self._words_by_paragraph.clear()
        self._latest = []
        return [self._unrepeated_rest(text, border, words) if len(text) >= _MIN_PAGE_CHARS else text for text in texts]

    def remember(self, words: Set[bytes]) -> None:
        """Record that the texts last passed to `unrepeated` were clean and contained these trigger words."""
        self._words_by_paragraph.update(dict.fromkeys(self._latest, frozenset(words)))

    def forget(self) -> None:
        """Record that the texts last passed to `unrepeated` were not clean."""
        for row in self._latest:
            del self._words_by_paragraph[row]

    def _unrepeated_rest(self, text: str, border: str, words: set[bytes]) -> str:
        if _LINE_NUMBER.match(f"\n{text[:20]}"):
            text = _LINE_NUMBER.sub("\n", f"\n{text}")[1:]
        known_rows, paragraphs = self._words_by_paragraph, text.split("\n\n")
        rows = list(map(hash, zip(*[paragraphs[first:] for first in range(_PARAGRAPHS_IN_A_ROW)], strict=False)))
        repeated = bytes(map(known_rows.__contains__, rows))
        if 1 in repeated:
            words.update(*{known_rows[row] for row in compress(rows, repeated)})
        new = [row for row in dict.fromkeys(rows) if row not in known_rows]
        self._latest += new
        known_rows.update(dict.fromkeys(new, _NO_WORDS))
        if 1 not in repeated:
            return text
        begin, parts = 0, []
        for match in _REPEATED.finditer(repeated):
            parts.append("\n\n".join(paragraphs[begin : match.start() + _PARAGRAPHS_IN_A_ROW // 2]))
            begin = match.end() + _PARAGRAPHS_IN_A_ROW // 2
        return border.join([*parts, "\n\n".join(paragraphs[begin:])])


# A longer number is never reached, so it cannot collide: `<PASSWORD_3>` -> `3`; not `<PASSWORD_1234567>`.
_PLACEHOLDER_IN_TEXT = re.compile(r"<([A-Z][A-Z0-9_]*)_(\d{1,6})>")
# `/home/USER_12/src` -> `12`; not `USER_1234567`.
_PSEUDONYM_IN_TEXT = re.compile(r"USER_(\d{1,6})(?!\d)")
NAME_KIND = "USER"  # the kind of pseudonyms; all other kinds are secrets


class _Numbering:
    """Numbers placeholders by first appearance, with numbers above those that the texts already contain."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}  # replacements by kind
        self._placeholders: dict[str, str] = {}
        self._users: dict[str, str] = {}
        self._highest: dict[str, int] = {}

    def placeholder(self, kind: str, value: str) -> str:
        """Return the placeholder for a secret, and count one replacement."""
        self.count(kind)
        placeholder = self._placeholders.get(value)
        if placeholder is None:
            placeholder = self._placeholders[value] = f"<{kind}_{self._next(kind)}>"
        return placeholder

    def pseudonym(self, name: str) -> str:
        """Return the pseudonym for a person, and count one replacement."""
        self.count(NAME_KIND)
        if name not in self._users:
            self._users[name] = f"{NAME_KIND}_{self._next(NAME_KIND)}"
        return self._users[name]

    def count(self, kind: str, times: int = 1) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + times

    def _next(self, kind: str) -> int:
        self._highest[kind] = number = self._highest.get(kind, 0) + 1
        return number

    def reserve(self, text: str) -> bool:
        """Reserve the numbers of placeholders in a text, such as `<KIND_3>`. Returns False if it has none."""
        pseudonyms = list(_numbers_in_use(text))
        for kind, number in pseudonyms:
            if number > self._highest.get(kind, 0):
                self._highest[kind] = number
        return bool(pseudonyms)

    def reserve_all(self, value: Any) -> None:
        """Reserve the numbers of placeholders in every string of a JSON-like value, including keys."""
        nodes = [value]
        for node in nodes:  # the loop appends to the list
            if isinstance(node, str):
                self.reserve(node)
            elif isinstance(node, dict):
                nodes += [*node, *node.values()]
            elif isinstance(node, list | tuple):
                nodes += node


def _numbers_in_use(text: str) -> Iterable[tuple[str, int]]:
    if "<" in text:
        yield from ((match[1], int(match[2])) for match in _PLACEHOLDER_IN_TEXT.finditer(text))
    if "USER_" in text:
        yield from ((NAME_KIND, int(match[1])) for match in _PSEUDONYM_IN_TEXT.finditer(text))


def _holds_number(text: str) -> bool:
    """Return whether a text already has placeholders or pseudonyms."""
    return next(iter(_numbers_in_use(text)), None) is not None


def _unique_names(names: dict[Any, str], keys: Iterable[Any]) -> dict[Any, str]:
    """Return new names for keys. All names differ from each other and from the unchanged keys, so that no value is
    lost.
    """
    used_names = {key for key in keys if key not in names}
    result: dict[Any, str] = {}
    for key, name in names.items():
        chosen, number = name, 2
        while chosen in used_names:
            chosen, number = f"{name}#{number}", number + 1
        used_names.add(chosen)
        result[key] = chosen
    return result


@dataclass(frozen=True)
class ScrubReport:
    """Replacements by kind, without any values. Kinds are sorted, so that equal input gives equal reports."""

    counts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", MappingProxyType(dict(sorted(self.counts.items()))))

    def to_dict(self) -> dict[str, int]:
        """Return a plain dict for JSON."""
        return dict(self.counts)

    def __reduce__(self) -> tuple[type[ScrubReport], tuple[dict[str, int]]]:
        # A mapping proxy cannot be pickled, but worker processes return reports.
        return (ScrubReport, (dict(self.counts),))
