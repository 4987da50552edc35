"""Secrets out of text, before anything is written or sent.

`Scrubber` holds the rules; `Scope` holds the numbering of one conversation family (a session and its sub-agents), so
that parallel and serial runs agree. Neither shows a value in its repr, and a placeholder tells nothing but the kind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from composer_replication.privacy.entropy import names_a_hash
from composer_replication.privacy.fields import (
    PAIR_VALUES,
    field_strength,
    is_secret_number,
    is_whole_secret,
    opaque_field,
    pair_strength,
)
from composer_replication.privacy.identity import Identity
from composer_replication.privacy.names import Strength, name_strength
from composer_replication.privacy.report import ScrubReport
from composer_replication.privacy.rules import Rule
from composer_replication.privacy.scan import Scanner

_CACHE_SIZE = 1 << 16
_CACHED_LENGTH = 256
_SHORTEST = 6
# A replacement can bring two pieces together that match as one; more than a few rounds would be a bug.
_MAX_ROUNDS = 4
# Strings scanned together stay apart: no pattern crosses a NUL, and none takes it for a blank.
_APART = "\n\0\n"
# Ids and times: new on every record, so a cache does not help, and public.
_CONTAINERS = frozenset((dict, list, tuple))
_TRIVIAL = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|(?:toolu|msg|req|call)_[A-Za-z0-9]{20,30}"
    r"|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z?"
)


_Mark = str | tuple[int, int]


def _mark(text: str) -> _Mark:
    """What stands for a text in a cache. Long ones by hash: a log repeats whole files, and the cache stays small."""
    return text if len(text) <= _CACHED_LENGTH else (hash(text), len(text))


class _Seen:
    """Strings without secrets. Bounded, and it never holds a secret."""

    def __init__(self, shortest: int) -> None:
        self.shortest = shortest  # nothing below this length can hold anything
        self.clean: set[_Mark] = set()  # nothing in it
        self.people: set[_Mark] = set()  # no secret, but a home directory or a user name
        self.plain_keys: set[str] = set()  # clean field names that say nothing about their value

    def add(self, text: str, *, people: bool) -> None:
        chosen = self.people if people else self.clean
        if len(chosen) >= _CACHE_SIZE:
            chosen.clear()
            self.plain_keys.clear()
        chosen.add(_mark(text))


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
    ) -> None:
        self._scanner = Scanner(env_values or {}, extra_rules, use_entropy=entropy)
        self._identity = Identity(home_dirs, user_names)
        known = [*(env_values or {}).values(), *home_dirs, *user_names]
        self._seen = _Seen(min([_SHORTEST, *(len(word) for word in known if len(word) > 1)]))

    def scope(self) -> Scope:
        """A numbering of its own, for one conversation and the sub-agents linked to it."""
        return Scope(self._scanner, self._identity, self._seen)

    def __repr__(self) -> str:
        return "Scrubber()"


class Scope:
    """The placeholders of one conversation family, in order of first appearance."""

    def __init__(self, scanner: Scanner, identity: Identity, seen: _Seen) -> None:
        self._scanner = scanner
        self._identity = identity
        self._seen = seen
        self._placeholders: dict[str, str] = {}
        self._numbers: dict[str, int] = {}
        self._users: dict[str, str] = {}
        self._renamed: dict[_Mark, tuple[str, int]] = {}
        self._counts: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"Scope({self.report})"

    @property
    def report(self) -> ScrubReport:
        """What was replaced so far."""
        return ScrubReport(self._counts)

    def text(self, text: str) -> str:
        """The text with every secret as a placeholder; the same object when there was none."""
        return self._text(text, "")

    def value(self, value: Any) -> Any:
        """A JSON-like value with every string scrubbed; the same object when nothing was found.

        Most strings of a record are short and clean, so those not seen before are scanned together, as one text. Only
        when that finds something are they looked at one by one.
        """
        unseen: list[str] = []
        special = self._collect(value, Strength.NONE, unseen)
        if unseen and not self._all_clean(unseen):
            special = True
        if not special:
            return value
        return self._walk(value, "", Strength.NONE)

    def _all_clean(self, unseen: list[str]) -> bool:
        """Scan strings together and remember the clean ones; False when the record has to be walked."""
        joined = _APART.join(unseen)
        spans = self._scanner.spans(joined)
        people = self._identity.touches(joined)
        offset, index = 0, 0
        for text in unseen:
            end = offset + len(text)
            while index < len(spans) and spans[index].end <= offset:
                index += 1
            if index == len(spans) or spans[index].start >= end:
                self._seen.add(text, people=people and self._identity.touches(text))
            offset = end + len(_APART)
        return not people and not spans

    def _collect(self, value: Any, named: Strength, unseen: list[str]) -> bool:
        """Gather the strings not seen before; True when some field needs more than a scan of its text."""
        if isinstance(value, str):
            return self._collect_text(value, unseen)
        special = False
        if isinstance(value, dict):
            opaque = opaque_field(value) if "type" in value or "thoughtSignature" in value else None
            pair = pair_strength(value)
            seen = self._seen
            clean, plain_keys, shortest = seen.clean, seen.plain_keys, seen.shortest
            for key, item in value.items():
                if type(key) is not str or key == opaque:
                    continue
                if key in plain_keys:
                    strength = Strength.NONE
                else:
                    special |= self._collect_text(key, unseen)
                    strength = field_strength(key, named, pair)
                    if not name_strength(key) and key not in PAIR_VALUES and (len(key) < shortest or key in clean):
                        plain_keys.add(key)
                if strength and (is_secret_number(item, key, strength) or _has_whole_secret(item, strength)):
                    special = True
                elif type(item) is str:
                    if len(item) >= shortest and item not in clean:
                        special |= self._collect_text(item, unseen)
                elif item.__class__ in _CONTAINERS:
                    special |= self._collect(item, strength, unseen)
        elif isinstance(value, list | tuple):
            for item in value:
                special |= self._collect(item, named, unseen)
        return special

    def _collect_text(self, text: str, unseen: list[str]) -> bool:
        length = len(text)
        if length < self._seen.shortest or (19 < length < 37 and _TRIVIAL.fullmatch(text)):
            return False
        mark = _mark(text)
        if mark in self._seen.clean:
            return False
        if mark in self._seen.people:
            return True
        unseen.append(text)
        return False

    def _text(self, text: str, key: str) -> str:
        if (
            len(text) < self._seen.shortest
            or (mark := _mark(text)) in self._seen.clean
            or (len(text) < 37 and _TRIVIAL.fullmatch(text))
        ):
            return text
        if mark in self._seen.people:
            return self._rename(text, mark)
        result = self._secrets(text, key)
        if result is not text:
            return self._identity.replace(result, self._pseudonym)
        result = self._identity.replace(text, self._pseudonym)
        if not key:
            self._seen.add(text, people=result is not text)
        return result

    def _rename(self, text: str, mark: _Mark) -> str:
        """People only. The working directory stands on every record, so short results are kept, with their count."""
        if (known := self._renamed.get(mark)) is not None:
            self._counts["USER"] += known[1]
            return known[0]
        before = self._counts.get("USER", 0)
        result = self._identity.replace(text, self._pseudonym)
        if len(text) <= _CACHED_LENGTH:
            self._renamed[mark] = (result, self._counts.get("USER", 0) - before)
        return result

    def _secrets(self, text: str, key: str) -> str:
        for _ in range(_MAX_ROUNDS):
            spans = self._scanner.spans(text, key)
            if not spans:
                break
            pieces, cursor = [], 0
            for start, end, kind in spans:
                pieces += [text[cursor:start], self._placeholder(kind, text[start:end])]
                cursor = end
            text = "".join([*pieces, text[cursor:]])
        return text

    def _placeholder(self, kind: str, value: str) -> str:
        self._counts[kind] = self._counts.get(kind, 0) + 1
        placeholder = self._placeholders.get(value)
        if placeholder is None:
            self._numbers[kind] = number = self._numbers.get(kind, 0) + 1
            placeholder = self._placeholders[value] = f"<{kind}_{number}>"
        return placeholder

    def _pseudonym(self, name: str) -> str:
        self._counts["USER"] = self._counts.get("USER", 0) + 1
        return self._users.setdefault(name, f"USER_{len(self._users) + 1}")

    def _walk(self, value: Any, key: str, named: Strength) -> Any:
        if isinstance(value, str):
            return self._field(value, key, named)
        if isinstance(value, dict):
            return self._walk_dict(value, named)
        if isinstance(value, list | tuple):
            items = [self._walk(item, key, named) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return items if isinstance(value, list) else tuple(items)
        if is_secret_number(value, key, named):
            return self._placeholder("PASSWORD", str(value))
        return value

    def _walk_dict(self, value: dict[Any, Any], named: Strength) -> dict[Any, Any]:
        opaque, pair = opaque_field(value), pair_strength(value)
        seen, changed = self._seen, False
        result: dict[Any, Any] = {}
        for key, item in value.items():
            plain = key in seen.plain_keys
            if key == opaque or (plain and type(item) is str and item in seen.clean):
                result[key] = item
                continue
            name = key if isinstance(key, str) else str(key)
            new = self._walk(item, name, Strength.NONE if plain else field_strength(name, named, pair))
            # Keys are names and stay; a key that is itself a path or a secret (files by path) is text like any other.
            new_key = self._text(key, "") if isinstance(key, str) and not plain else key
            changed = changed or new is not item or new_key is not key
            result[new_key] = new
        return result if changed else value

    def _field(self, text: str, key: str, named: Strength) -> str:
        if not named or not is_whole_secret(text, named):
            return self._text(text, key if names_a_hash(key) else "")
        # A rule that covers all of it names the kind better than the field does.
        spans = self._scanner.spans(text)
        if len(spans) == 1 and (spans[0].start, spans[0].end) == (0, len(text)):
            return self._placeholder(spans[0].kind, text)
        kind = {Strength.PASSWORD: "PASSWORD", Strength.TOKEN: "SECRET"}.get(named, "KEY_VALUE")
        return self._placeholder(kind, text)


def _has_whole_secret(item: Any, strength: Strength) -> bool:
    if isinstance(item, str):
        return is_whole_secret(item, strength)
    # Lists under a secret name are walked; their strings are secrets too.
    return strength >= Strength.TOKEN and isinstance(item, list | tuple | dict)
