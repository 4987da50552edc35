"""Secrets out of text, before anything is written or sent.

`Scrubber` holds the rules; `Scope` holds the numbering of one conversation family (a session and its sub-agents), so
that parallel and serial runs agree. Neither shows a value in its repr, and a placeholder tells nothing but the kind.
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
    written_secret,
)
from composer_replication.privacy.identity import Identity
from composer_replication.privacy.names import Strength, is_searchable, name_strength
from composer_replication.privacy.rules import Rule, Span, is_strong
from composer_replication.privacy.scan import Scanner
from composer_replication.privacy.surroundings import names_a_hash

_SHORTEST = 6
_SHORTEST_ANSWER = 8  # a shorter one may be part of other words
_MOST_ANSWERS = 64  # of one scope: a dump of secrets is not an answer
# A replacement can bring two pieces together that match as one; more than a few rounds would be a bug.
_MAX_ROUNDS = 4
# Strings scanned together stay apart: no pattern crosses a NUL, and none takes it for a blank.
_APART = "\n\0\n"


class Scrubber:
    """The rules of a run. One scrubber serves any number of scopes."""

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
        # Callers may hand over a whole environment: what stands in every text is not looked for.
        values = {name: value for name, value in (env_values or {}).items() if is_searchable(name, value)}
        self._scanner = Scanner(values, extra_rules, use_entropy=entropy)
        self._unblurred = Scanner(values, extra_rules, use_entropy=False) if entropy else self._scanner
        self._identity = Identity(home_dirs, user_names, others=people)
        known_texts = [*values.values(), *home_dirs, *user_names]
        self._seen = CleanStrings(min([_SHORTEST, *(len(word) for word in known_texts if len(word) > 1)]))

    def scope(self) -> Scope:
        """A numbering of its own, for one conversation and the sub-agents linked to it."""
        return Scope(self._scanner, self._unblurred, self._identity, self._seen)

    def __repr__(self) -> str:
        return "Scrubber()"


class Scope:
    """The placeholders of one conversation family, in order of first appearance."""

    def __init__(self, scanner: Scanner, unblurred: Scanner, identity: Identity, seen: CleanStrings) -> None:
        self._scanner = scanner
        self._unblurred = unblurred  # all layers but randomness, for fields that are random by nature
        self._identity = identity
        self._seen = seen
        self._paragraphs = Paragraphs()
        self._numbering = _Numbering()
        self._renamed: dict[Mark, tuple[str, int]] = {}
        self._answers: dict[str, str] = {}  # secrets that were asked for, with their kinds
        self._any_answer: re.Pattern[str] | None = None

    def __repr__(self) -> str:
        return f"Scope({self.report})"

    @property
    def report(self) -> ScrubReport:
        """What was replaced so far."""
        return ScrubReport(self._numbering.counts)

    def reserve(self, value: Any) -> None:
        """Give no number away that stands in this text or JSON-like value already, as `<KIND_3>` or `USER_1`.

        A text reserves what stands in it when it is scrubbed; that is too late for what came before it. So a caller who
        takes over rows that were scrubbed earlier, or logs that may hold placeholders, shows all of them here first.
        """
        self._numbering.reserve_all(value)

    def text(self, text: str) -> str:
        """The text with every secret as a placeholder; the same object when there was none."""
        return self._text(text, "")

    def answer(self, text: str, spans: Callable[[str], Iterable[Span]]) -> str:
        """Return the scrubbed text of a message or a result, in which `spans` finds what an earlier message asked for.

        Such a value is replaced in all later messages, results and values of this scope, because nothing there says
        what it is.
        """
        text = self.text(self._without_answers(text))
        answers = sorted(spans(text))
        for start, end, kind in answers:
            self._remember(text[start:end], kind)
        return self.text(self._replaced(text, answers)) if answers else text

    def value(self, value: Any) -> Any:
        """A JSON-like value with every string scrubbed; the same object when nothing was found.

        Most strings of a record are short and clean, so those not seen before are scanned together, as one text. Only
        when that finds something are they looked at one by one.
        """
        value = self._without_answers(value)
        gathered = Gatherer(self._seen, self._scanner.knows)
        gathered.add(value)
        clean = not gathered.unseen or self._all_clean(gathered.unseen)
        return value if clean and not gathered.special else self._walk(value, "", Strength.NONE)

    def _remember(self, answer: str, kind: str) -> None:
        """Look for an answer from now on, unless it may stand in other texts by chance, as dates and codes do."""
        is_rare = len(answer) >= _SHORTEST_ANSWER and is_strong(answer) and not answer.replace("-", "").isdigit()
        if is_rare and answer not in self._answers and len(self._answers) < _MOST_ANSWERS:
            self._answers[answer] = kind
            longest_first = sorted(map(re.escape, self._answers), key=len, reverse=True)
            self._any_answer = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(longest_first)})(?![-_.+]?[A-Za-z0-9])")

    def _without_answers(self, value: Any) -> Any:
        """Replace the answers of earlier messages in every string of a JSON-like value; the same object without any."""
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
            names = _one_name_each(names, value)
            return {names.get(key, key): item for key, item in items.items()}
        if isinstance(value, list | tuple):
            new = [self._without_answers(item) for item in value]
            if all(item is old for item, old in zip(new, value, strict=True)):
                return value
            return new if isinstance(value, list) else tuple(new)
        return value

    def _all_clean(self, unseen: Collection[str]) -> bool:
        """Scan strings together and remember the clean ones; False when the record has to be walked."""
        if self._scanner.reads_alone:
            return False
        words: set[bytes] = set()
        rest = self._paragraphs.unrepeated(unseen, _APART, words)
        spans = self._scanner.spans(_APART.join(rest), words=words)
        joined = _APART.join(unseen)
        people, numbered = self._identity.touches(joined, words), _holds_number(joined)
        if spans:
            self._paragraphs.forget()
        else:
            self._paragraphs.remember(words)
        if not people and not spans and not numbered:
            self._seen.add_all(unseen, people=False)
            return True
        offset, index = 0, 0
        for text, read in zip(unseen, rest, strict=True):
            end = offset + len(read)
            while index < len(spans) and spans[index].end <= offset:
                index += 1
            clean = not spans or (read is text and (index == len(spans) or spans[index].start >= end))
            if clean and not (numbered and _holds_number(text)):
                self._seen.add(text, people=people and self._identity.touches(text))
            offset = end + len(_APART)
        return False

    def _text(self, text: str, key: str) -> str:
        if len(text) < self._seen.shortest or (mark := mark_of(text)) in self._seen.clean or _is_trivial(text):
            return text
        if mark in self._seen.people:
            return self._rename(text, mark)
        numbered = self._numbering.reserve(text)
        result = self._secrets(text, key)
        if result is not text:
            return self._identity.replace(result, self._numbering.pseudonym)
        result = self._identity.replace(text, self._numbering.pseudonym)
        if not key and not numbered:  # in another scope its numbers have to be reserved again
            self._seen.add(text, people=result is not text)
        return result

    def _rename(self, text: str, mark: Mark) -> str:
        """People only. The working directory stands on every record, so short results are kept, with their count."""
        if (cached := self._renamed.get(mark)) is not None:
            if cached[1]:
                self._numbering.count("USER", cached[1])
            return cached[0]
        counts = self._numbering.counts
        before = counts.get("USER", 0)
        result = self._identity.replace(text, self._numbering.pseudonym)
        if len(text) <= CACHED_LENGTH:
            self._renamed[mark] = (result, counts.get("USER", 0) - before)
        return result

    def _secrets(self, text: str, key: str, scanner: Scanner | None = None) -> str:
        scanner = scanner or self._scanner
        for _ in range(_MAX_ROUNDS):
            words: set[bytes] = set()
            spans = scanner.spans(text, key, words=words)
            if not spans:
                break
            paragraphs = Paragraphs()
            paragraphs.unrepeated((text,), _APART, words)
            text = self._replaced(text, spans)
            (rest,) = paragraphs.unrepeated((text,), _APART, words)
            if not scanner.spans(rest, key, words=words):  # nothing new around what was replaced
                break
        return text

    def _replaced(self, text: str, spans: Sequence[Span]) -> str:
        pieces, cursor = [], 0
        for start, end, kind in spans:
            pieces += [text[cursor:start], self._numbering.placeholder(kind, text[start:end])]
            cursor = end
        return "".join([*pieces, text[cursor:]])

    def _walk(self, value: Any, key: str, strength: Strength) -> Any:
        if isinstance(value, str):
            return self._field(value, key, strength)
        if isinstance(value, dict):
            return self._walk_dict(value, strength)
        if isinstance(value, list | tuple):
            return self._walk_list(value, key, strength)
        if is_secret_number(value, key, strength):
            return self._numbering.placeholder("PASSWORD", str(value))
        return value

    def _walk_list(self, value: list[Any] | tuple[Any, ...], key: str, strength: Strength) -> Any:
        items: list[Any] = list(value)
        if is_command_line(items):
            items = self._command_line(items)
        elif is_named_pair(items):
            items[1] = self._field(items[1], items[0], Strength.TOKEN)
        items = [self._walk(item, key, strength) for item in items]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return items if isinstance(value, list) else tuple(items)

    def _command_line(self, items: list[str]) -> list[str]:
        """Arguments read as one line: what is secret in it is secret in the list, and nothing crosses a border."""
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

    def _walk_dict(self, value: dict[Any, Any], strength: Strength) -> dict[Any, Any]:
        # With a home directory known, almost every record is walked: what is known to be clean is passed over here.
        clean, plain_keys = self._seen.clean, self._seen.plain_keys
        items: dict[Any, Any] = {}
        names: dict[Any, str] = {}
        typed = written_secret(value)
        for key, item in value.items():
            kind = item.__class__
            if key == typed and typed:
                new = self._numbering.placeholder("PASSWORD", item)
            elif key not in plain_keys:
                # Keys are names and stay; one that is a path or a secret itself (files by path) is text like any other.
                if isinstance(key, str) and (name := self._text(key, "")) != key:
                    names[key] = name
                new = self._named(value, key, item, strength)
            elif kind in SCALARS or (kind is str and (item in clean or _is_trivial(item))):
                continue
            else:
                new = self._walk(item, key, Strength.NONE)
            if new is not item:
                items[key] = new
        if not items and not names:
            return value
        names = _one_name_each(names, value)
        return {names.get(key, key): items.get(key, item) for key, item in value.items()}

    def _named(self, value: dict[Any, Any], key: Any, item: Any, strength: Strength) -> Any:
        """A field whose name may say something about what it holds."""
        if key in OPAQUE and key == opaque_field(value) and isinstance(item, str):
            return item if is_blob(item) and not self._scanner.knows(item) else self._opaque(item)
        name = key if isinstance(key, str) else str(key)
        return self._walk(item, name, field_strength(name, strength, pair_strength(value)))

    def _opaque(self, text: str) -> str:
        """A field for something random that holds something else."""
        self._numbering.reserve(text)
        return self._identity.replace(self._secrets(text, "", self._unblurred), self._numbering.pseudonym)

    def _field(self, text: str, key: str, strength: Strength) -> str:
        if not strength or not is_whole_secret(text, strength, key):
            return self._text(text, key if names_a_hash(key) else "")
        # A rule that covers all of it names the kind better than the field does.
        spans = self._scanner.spans(text)
        if len(spans) == 1 and (spans[0].start, spans[0].end) == (0, len(text)):
            return self._numbering.placeholder(spans[0].kind, text)
        kind = {Strength.PASSWORD: "PASSWORD", Strength.TOKEN: "SECRET"}.get(strength, "KEY_VALUE")
        return self._numbering.placeholder(kind, text)


# The strings of a record that have not been looked at yet, so that they can be scanned together.
_NONE = Strength.NONE  # looked up once, as what follows runs on every field of every record
_LISTS = (list, tuple)


class Gatherer:
    """One pass over a record: `unseen` texts to scan, and whether some field needs more than a scan of its text."""

    def __init__(self, seen: CleanStrings, known: Callable[[str], bool]) -> None:
        self._seen, self._known = seen, known  # known: whether a value from the environment stands in a text
        self._nodes: list[tuple[Any, Strength]] = []
        self.unseen: dict[str, None] = {}  # in order, and each once: a result stands in a record twice
        self.special = False

    def add(self, value: Any) -> None:
        """Everything below a value."""
        nodes = self._nodes
        nodes.append((value, _NONE))
        for node, strength in nodes:  # grows while it is walked
            if isinstance(node, dict):
                self._dict(node, strength)
            elif isinstance(node, str):
                self._text(node)
            elif isinstance(node, _LISTS):
                self.special = self.special or is_command_line(node) or is_named_pair(node)
                nodes += [(item, strength) for item in node if item.__class__ not in SCALARS]

    def _dict(self, node: dict[Any, Any], strength: Strength) -> None:
        # The innermost loop of a scrub: most fields are known names with known strings.
        seen_texts = self._seen
        clean, plain_keys, shortest = seen_texts.clean, seen_texts.plain_keys, seen_texts.shortest
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
                    self._nodes.append((item, _NONE))
            elif key.__class__ is str and not (key in OPAQUE and key == opaque_field(node) and self._is_blob(item)):
                pair = pair_strength(node) if key in PAIR_VALUES else _NONE
                self.special = self.special or (key in TARGETS and written_secret(node) is not None)
                self._named(key, item, field_strength(key, strength, pair))

    def _is_blob(self, item: Any) -> bool:
        return is_blob(item) and not self._known(item)

    def _named(self, key: str, item: Any, strength: Strength) -> None:
        """A field whose name may say something, or has not been seen yet."""
        self._text(key)
        seen_texts = self._seen
        if (
            not name_strength(key)
            and key not in NEVER_PLAIN
            and (len(key) < seen_texts.shortest or key in seen_texts.clean)
        ):
            seen_texts.plain_keys.add(key)
        if strength and holds_secret(item, key, strength):
            self.special = True
        elif item.__class__ not in SCALARS:
            self._nodes.append((item, strength))

    def _text(self, text: str) -> None:
        if len(text) >= self._seen.shortest and not _is_trivial(text):
            self._unknown(text)

    def _unknown(self, text: str) -> None:
        seen_texts = self._seen
        mark = mark_of(text)
        if mark in seen_texts.people:
            self.special = True
        elif mark not in seen_texts.clean:
            self.unseen[text] = None


# Which strings have been looked at and held no secret: a session repeats its texts. Bounded, and no secret in it.

Mark = str | tuple[int, int]
_CACHE_SIZE = 1 << 16
CACHED_LENGTH = 256
_IN_A_ROW = 3  # paragraphs, the one in question in the middle
_SHORTEST_PAGE = 600
_NUMBER = re.compile(r"\n *\d+→")  # before a line of a file, as agents show it
_REPEATED = re.compile(b"\x01+")
_NO_WORDS: frozenset[bytes] = frozenset()
# Ids and times: new on every record, so a cache does not help, and public.
_TRIVIAL = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|(?:toolu|msg|req|call)_[A-Za-z0-9]{20,30}"
    r"|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z?"
)
is_id = _TRIVIAL.fullmatch  # looked up once: it runs on every id of every record


def mark_of(text: str) -> Mark:
    """What stands for a text in a cache. Long ones by hash: a log repeats whole files, and the cache stays small."""
    return text if len(text) <= CACHED_LENGTH else (hash(text), len(text))


def _is_trivial(text: str) -> bool:
    """Whether a text is only an id or a time."""
    return 19 < len(text) < 37 and is_id(text) is not None


class CleanStrings:
    """Strings without secrets. Bounded, and it never holds a secret."""

    def __init__(self, shortest: int) -> None:
        self.shortest = shortest  # nothing below this length can hold anything
        self.clean: set[Mark] = set()  # nothing in it
        self.people: set[Mark] = set()  # no secret, but a home directory or a user name
        self.plain_keys: set[str] = set()  # clean field names that say nothing about their value

    def add(self, text: str, *, people: bool) -> None:
        """Remember a text without secrets."""
        self.add_all((text,), people=people)

    def add_all(self, texts: Iterable[str], *, people: bool) -> None:
        """Remember texts without secrets."""
        chosen = self.people if people else self.clean
        if len(chosen) >= _CACHE_SIZE:
            chosen.clear()
            self.plain_keys.clear()
        chosen.update(map(mark_of, texts))


class Paragraphs:
    """What a session repeats: a file is read, shown again behind an edit, and read once more with a line changed.

    A paragraph is repeated when it and its two neighbours stood so in a text without secrets. That text goes
    out as it is, so to look at the paragraph again could keep nothing back. Kept as hashes, bounded, for one session.
    """

    def __init__(self) -> None:
        self._known: dict[int, frozenset[bytes]] = {}  # a paragraph among its neighbours: the trigger words of its text
        self._latest: list[int] = []

    def unrepeated(self, texts: Iterable[str], border: str, words: set[bytes]) -> list[str]:
        """The texts without the numbers of lines, and with `border` where repeated paragraphs stood.

        The trigger words of what is left out go to `words`. What stands twice in the texts stays once.
        """
        if len(self._known) >= _CACHE_SIZE:
            self._known.clear()
        self._latest = []
        return [self._rest(text, border, words) if len(text) >= _SHORTEST_PAGE else text for text in texts]

    def remember(self, words: Set[bytes]) -> None:
        """The last texts were clean; these trigger words stood in them."""
        self._known.update(dict.fromkeys(self._latest, frozenset(words)))

    def forget(self) -> None:
        """The last texts were not clean."""
        for row in self._latest:
            del self._known[row]

    def _rest(self, text: str, border: str, words: set[bytes]) -> str:
        if _NUMBER.match(f"\n{text[:20]}"):
            text = _NUMBER.sub("\n", f"\n{text}")[1:]
        known_rows, paragraphs = self._known, text.split("\n\n")
        rows = list(map(hash, zip(*[paragraphs[first:] for first in range(_IN_A_ROW)], strict=False)))
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
            parts.append("\n\n".join(paragraphs[begin : match.start() + _IN_A_ROW // 2]))
            begin = match.end() + _IN_A_ROW // 2
        return border.join([*parts, "\n\n".join(paragraphs[begin:])])


# The numbers of one conversation family: which placeholder stands for which value, and which numbers are taken.

# A number of more digits is never reached, so nothing can collide with it.
_TAKEN = re.compile(r"<([A-Z][A-Z0-9_]*)_(\d{1,6})>")
_TAKEN_USER = re.compile(r"USER_(\d{1,6})(?!\d)")
NAME_KIND = "USER"  # of a home directory or a user name: a pseudonym, where all other kinds are secrets


class _Numbering:
    """Placeholders in order of first appearance, behind every number that a text has already."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}  # replacements by kind
        self._placeholders: dict[str, str] = {}
        self._users: dict[str, str] = {}
        self._highest: dict[str, int] = {}

    def placeholder(self, kind: str, value: str) -> str:
        """The placeholder of a secret; counts as one replacement."""
        self.count(kind)
        placeholder = self._placeholders.get(value)
        if placeholder is None:
            placeholder = self._placeholders[value] = f"<{kind}_{self._next(kind)}>"
        return placeholder

    def pseudonym(self, name: str) -> str:
        """What stands for a person; counts as one replacement."""
        self.count(NAME_KIND)
        if name not in self._users:
            self._users[name] = f"{NAME_KIND}_{self._next(NAME_KIND)}"
        return self._users[name]

    def count(self, kind: str, times: int = 1) -> None:
        """Note replacements."""
        self.counts[kind] = self.counts.get(kind, 0) + times

    def _next(self, kind: str) -> int:
        self._highest[kind] = number = self._highest.get(kind, 0) + 1
        return number

    def reserve(self, text: str) -> bool:
        """Give no number away that a text has already, as `<KIND_3>` or `USER_1`; False when it has none."""
        pseudonyms = list(_taken(text))
        for kind, number in pseudonyms:
            if number > self._highest.get(kind, 0):
                self._highest[kind] = number
        return bool(pseudonyms)

    def reserve_all(self, value: Any) -> None:
        """The same for every string of a JSON-like value, keys too."""
        nodes = [value]
        for node in nodes:  # grows while it is walked
            if isinstance(node, str):
                self.reserve(node)
            elif isinstance(node, dict):
                nodes += [*node, *node.values()]
            elif isinstance(node, list | tuple):
                nodes += node


def _taken(text: str) -> Iterable[tuple[str, int]]:
    if "<" in text:
        yield from ((match[1], int(match[2])) for match in _TAKEN.finditer(text))
    if "USER_" in text:
        yield from ((NAME_KIND, int(match[1])) for match in _TAKEN_USER.finditer(text))


def _holds_number(text: str) -> bool:
    """Whether a text has placeholders or pseudonyms already."""
    return next(iter(_taken(text)), None) is not None


def _one_name_each(names: dict[Any, str], keys: Iterable[Any]) -> dict[Any, str]:
    """New names of keys, made different from each other and from the keys that stay: no value may be lost."""
    taken_names = {key for key in keys if key not in names}
    result: dict[Any, str] = {}
    for key, name in names.items():
        chosen, number = name, 2
        while chosen in taken_names:
            chosen, number = f"{name}#{number}", number + 1
        taken_names.add(chosen)
        result[key] = chosen
    return result


# What a scrub did: counts by kind, never a value.
@dataclass(frozen=True)
class ScrubReport:
    """How many replacements of each kind were made. Kinds are sorted, so equal work gives equal reports."""

    counts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", MappingProxyType(dict(sorted(self.counts.items()))))

    def to_dict(self) -> dict[str, int]:
        """A plain dict for JSON."""
        return dict(self.counts)

    def __reduce__(self) -> tuple[type[ScrubReport], tuple[dict[str, int]]]:
        # A mapping proxy cannot be pickled, and reports come back from worker processes.
        return (ScrubReport, (dict(self.counts),))
