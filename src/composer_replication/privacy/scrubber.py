"""Secrets out of text, before anything is written or sent.

`Scrubber` holds the rules; `Scope` holds the numbering of one conversation family (a session and its sub-agents), so
that parallel and serial runs agree. Neither shows a value in its repr, and a placeholder tells nothing but the kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from composer_replication.privacy.named.names import Strength, is_searchable, name_strength
from composer_replication.privacy.numbering import Numbering, ScrubReport, holds_number, one_name_each
from composer_replication.privacy.rules import Rule, Span, is_strong
from composer_replication.privacy.scan import Scanner
from composer_replication.privacy.seen import CACHED_LENGTH, Mark, Paragraphs, Seen, is_id, is_trivial, mark_of
from composer_replication.privacy.shapes.surroundings import names_a_hash

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
        self._seen = Seen(min([_SHORTEST, *(len(word) for word in known_texts if len(word) > 1)]))

    def scope(self) -> Scope:
        """A numbering of its own, for one conversation and the sub-agents linked to it."""
        return Scope(self._scanner, self._unblurred, self._identity, self._seen)

    def __repr__(self) -> str:
        return "Scrubber()"


class Scope:
    """The placeholders of one conversation family, in order of first appearance."""

    def __init__(self, scanner: Scanner, unblurred: Scanner, identity: Identity, seen: Seen) -> None:
        self._scanner = scanner
        self._unblurred = unblurred  # all layers but randomness, for fields that are random by nature
        self._identity = identity
        self._seen = seen
        self._paragraphs = Paragraphs()
        self._numbering = Numbering()
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
            names = one_name_each(names, value)
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
        people, numbered = self._identity.touches(joined, words), holds_number(joined)
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
            if clean and not (numbered and holds_number(text)):
                self._seen.add(text, people=people and self._identity.touches(text))
            offset = end + len(_APART)
        return False

    def _text(self, text: str, key: str) -> str:
        if len(text) < self._seen.shortest or (mark := mark_of(text)) in self._seen.clean or is_trivial(text):
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
            elif kind in SCALARS or (kind is str and (item in clean or is_trivial(item))):
                continue
            else:
                new = self._walk(item, key, Strength.NONE)
            if new is not item:
                items[key] = new
        if not items and not names:
            return value
        names = one_name_each(names, value)
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

    def __init__(self, seen: Seen, known: Callable[[str], bool]) -> None:
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
        if len(text) >= self._seen.shortest and not is_trivial(text):
            self._unknown(text)

    def _unknown(self, text: str) -> None:
        seen_texts = self._seen
        mark = mark_of(text)
        if mark in seen_texts.people:
            self.special = True
        elif mark not in seen_texts.clean:
            self.unseen[text] = None
