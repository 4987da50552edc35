"""The strings of a record that have not been looked at yet, so that they can be scanned together."""

from __future__ import annotations

from collections.abc import Callable
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
    opaque_field,
    pair_strength,
    written_secret,
)
from composer_replication.privacy.named.names import Strength, name_strength
from composer_replication.privacy.seen import Seen, is_id, is_trivial, mark_of

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
        for node, named in nodes:  # grows while it is walked
            if isinstance(node, dict):
                self._dict(node, named)
            elif isinstance(node, str):
                self._text(node)
            elif isinstance(node, _LISTS):
                self.special = self.special or is_command_line(node) or is_named_pair(node)
                nodes += [(item, named) for item in node if item.__class__ not in SCALARS]

    def _dict(self, node: dict[Any, Any], named: Strength) -> None:
        # The innermost loop of a scrub: most fields are known names with known strings.
        seen = self._seen
        clean, plain_keys, shortest = seen.clean, seen.plain_keys, seen.shortest
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
                self._named(key, item, field_strength(key, named, pair))

    def _is_blob(self, item: Any) -> bool:
        return is_blob(item) and not self._known(item)

    def _named(self, key: str, item: Any, strength: Strength) -> None:
        """A field whose name may say something, or has not been seen yet."""
        self._text(key)
        seen = self._seen
        if not name_strength(key) and key not in NEVER_PLAIN and (len(key) < seen.shortest or key in seen.clean):
            seen.plain_keys.add(key)
        if strength and holds_secret(item, key, strength):
            self.special = True
        elif item.__class__ not in SCALARS:
            self._nodes.append((item, strength))

    def _text(self, text: str) -> None:
        if len(text) >= self._seen.shortest and not is_trivial(text):
            self._unknown(text)

    def _unknown(self, text: str) -> None:
        seen = self._seen
        mark = mark_of(text)
        if mark in seen.people:
            self.special = True
        elif mark not in seen.clean:
            self.unseen[text] = None
