"""What all commits of a repository have done to its files, and where branches that are gone ended.

Read once from git's plumbing, as bytes. A path that no commit has added was never there; one that only commits behind a
checkout have added, and that the checkout does not have, was removed, or dropped by a merge.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator

# As git itself and hosts of pull requests write it; a squashed branch is named nowhere.
_MERGED = re.compile(
    r"Merge pull request #\d+ from [^\s/]+/(\S+)|Merge (?:remote-tracking )?branch '(?:origin/)?([^']+)'"
)


class History:
    """`versions` are the objects of each path, the newest first; who asks knows what lies behind a checkout."""

    def __init__(self, times: bytes, changes: bytes) -> None:
        """`times` as `rev-list --timestamp` prints them, `changes` as `diff-tree --stdin -z -c --raw` does."""
        self.versions: dict[str, list[str]] = {}
        self._added: dict[str, list[str]] = defaultdict(list)
        self._added_at: dict[str, int] = {}
        self._removed: dict[str, int] = {}
        blobs: dict[str, dict[str, None]] = defaultdict(dict)
        seconds = {commit: int(when) for when, _, commit in (line.partition(" ") for line in _text(times).split("\n"))
                   if commit}  # fmt: skip
        for commit, status, blob, path in _entries(changes):
            when = seconds.get(commit, 0)
            if "A" in status:
                self._added[path].append(commit)
                self._added_at[path] = max(when, self._added_at.get(path, 0))
            if set(blob) == {"0"}:
                self._removed[path] = max(when, self._removed.get(path, 0))
            else:
                blobs[path][blob] = None
        self.versions = {path: list(versions) for path, versions in blobs.items()}
        self._paths = sorted(self._added)

    def adds_elsewhere(self, path: str, behind: Collection[str]) -> bool:
        """Whether a commit that does not lie behind the checkout has added the path, or something below it."""
        return any(commit not in behind for added_path in self._at_or_below(path) for commit in self._added[added_path])

    def removed_at(self, path: str) -> int | None:
        """When the last of it was removed; 0 where it never was there, None where it was and nobody removed it."""
        last = 0
        for added_path in self._at_or_below(path):
            when = self._removed.get(added_path, 0)
            if when <= self._added_at[added_path]:
                return None  # a merge that took the other side's files does not say so
            last = max(last, when)
        return last

    def _at_or_below(self, path: str) -> Iterator[str]:
        if path in self._added:
            yield path
        start = f"{path}/"
        for index in range(bisect_left(self._paths, start), len(self._paths)):
            if not self._paths[index].startswith(start):
                return
            yield self._paths[index]


def merged_branches(merges: bytes) -> dict[str, list[tuple[int, str]]]:
    """When branches were merged and their last commits, by the name that the merge gives them; the earliest first.

    `merges` as `rev-list --merges --format=%P%x09%ct%x09%s` prints them.
    """
    branches: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for line in _text(merges).split("\n"):
        parents, _, rest = line.partition("\t")
        when, _, subject = rest.partition("\t")
        name = _MERGED.match(subject)
        if name is not None and len(parents.split()) == 2 and when.isdecimal():
            branches[name[1] or name[2]].append((int(when), parents.split()[1]))
    return {name: sorted(tips) for name, tips in branches.items()}


def _entries(changes: bytes) -> Iterator[tuple[str, str, str, str]]:
    """Commit, letters of what happened, the object afterwards, path. A merge has a column for each parent."""
    commit, entry = "", None
    for field in changes.split(b"\0"):
        word = _text(field)
        if entry is not None:
            *_, blob, status = entry
            yield commit, status, blob, word
            entry = None
        elif word.startswith(":"):
            entry = word.split(" ")
        else:
            commit = word


def _text(content: bytes) -> str:
    return content.decode("utf-8", "replace")
