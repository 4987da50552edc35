"""The numbers of one conversation family: which placeholder stands for which value, and which numbers are taken."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

# A number of more digits is never reached, so nothing can collide with it.
_TAKEN = re.compile(r"<([A-Z][A-Z0-9_]*)_(\d{1,6})>")
_TAKEN_USER = re.compile(r"USER_(\d{1,6})(?!\d)")
NAME_KIND = "USER"  # of a home directory or a user name: a pseudonym, where all other kinds are secrets


class Numbering:
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


def holds_number(text: str) -> bool:
    """Whether a text has placeholders or pseudonyms already."""
    return next(iter(_taken(text)), None) is not None


def one_name_each(names: dict[Any, str], keys: Iterable[Any]) -> dict[Any, str]:
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
