"""Which paths any text has named, whoever wrote it: that says that somebody spoke of them, not that they are there."""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_TEXT = 300_000
MAX_PATH = 300
_MAX_ENDS = 100_000  # of paths that a session names; deep ones have many
PATH_WORD = re.compile(r"/?[\w.@+\-]+(?:/[\w.@+\-]+)*")


class NamedPaths:
    """Grows with the texts of a session, which are read when somebody asks. `root` is the session's folder."""

    def __init__(self, root: str | None) -> None:
        self._inside = f"{root}/" if root else "/"
        self._unread: list[str] = []  # texts whose words nobody has asked for
        self._words: set[str] = set()  # all that looks like a path, as it was named
        self._names: set[str] = set()  # their last parts
        self._ends: set[str] = set()  # and what paths from elsewhere end in

    def hear(self, text: str) -> None:
        self._unread.append(text)

    def last_two_parts(self) -> Iterator[str]:
        """Of every path that was named."""
        self._read_words()
        return ("/".join(word.rsplit("/", 2)[-2:]) for word in self._words if "/" in word)

    def how(self, path: str, spelled: str) -> str:
        """Whether an absolute path, which is `spelled` so from the root, was named in whole or in part, in a word."""
        self._read_words()
        if path in self._words or spelled in self._words or spelled in self._ends:
            return "named"
        if any(end in self._words for end in _ends(spelled)):
            return "its_end_named"
        return "only_its_name" if spelled.rpartition("/")[2] in self._names else "unseen"

    def _read_words(self) -> None:
        for text in self._unread:
            for word in {word.rstrip(".") for word in PATH_WORD.findall(text[:MAX_TEXT])} - self._words:
                if not 2 < len(word) < MAX_PATH:
                    continue
                plain = word.removeprefix(self._inside)
                self._words.update((word, plain))
                self._names.add(plain.rpartition("/")[2])
                is_elsewhere = plain.startswith("/") or "." in plain.partition("/")[0]
                if is_elsewhere and len(self._ends) < _MAX_ENDS:
                    self._ends.update(_ends(plain))  # of another place, or of what the project is called elsewhere
        self._unread.clear()


def _ends(path: str) -> Iterator[str]:
    """What a path ends in, of two parts and more."""
    parts = path.strip("/").split("/")
    return ("/".join(parts[start:]) for start in range(len(parts) - 1))
