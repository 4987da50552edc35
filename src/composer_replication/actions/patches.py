"""Patches as changes to files: Codex's `*** Begin Patch` form and unified diffs, read strictly and applied exactly.

A patch that does not fit the text to the letter is not applied at all: what a tool would then make of it is not sure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_BEGIN, _END = "*** Begin Patch", "*** End Patch"
_END_OF_FILE = "*** End of File"
_SECTION = re.compile(r"\*\*\* (Update|Add|Delete) File: (.+)")
_MOVE = "*** Move to: "
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_MAX_WORK = 20_000_000  # lines compared: a patch of a thousand lines on twenty thousand
_NO_NEWLINE = "\\ No newline at end of file"


@dataclass
class Hunk:
    """Lines that must stand there, and those that take their place; `at` is the line a unified diff names."""

    old: list[str] = field(default_factory=list[str])
    new: list[str] = field(default_factory=list[str])
    header: str = ""  # a line that stands somewhere before
    at: int | None = None
    ends_file: bool = False  # looked for at the end first

    def add(self, line: str) -> bool:
        """Takes a line of the patch; False if it is none."""
        mark, text = line[:1], line[1:]
        if mark not in ("", " ", "-", "+"):
            return False
        if mark in ("", " ", "-"):
            self.old.append(text)
        if mark in ("", " ", "+"):
            self.new.append(text)
        return True


@dataclass
class FilePatch:
    """What happens to one file: `kind` is update, add or delete."""

    kind: str
    path: str
    target: str
    hunks: list[Hunk] = field(default_factory=list[Hunk])

    def applied(self, files: Mapping[str, str]) -> dict[str, str | None] | None:
        """The files it leaves behind (None: gone); None where it does not fit what is known."""
        if self.kind == "add":
            if self.path in files:
                return None
            return {self.path: "".join(f"{line}\n" for hunk in self.hunks for line in hunk.new)}
        text = files.get(self.path)
        if text is None:
            return {self.path: None} if self.kind == "delete" else None
        if self.kind == "delete":
            return {self.path: None}
        changed = _with_hunks(text, self.hunks)
        if changed is None or (self.target != self.path and self.target in files):
            return None
        removed_file: dict[str, str | None] = {self.path: None} if self.target != self.path else {}
        return removed_file | {self.target: changed}


def read_patch(text: str) -> list[FilePatch] | None:
    """The changes of a patch in either form; None for what is none, or not surely read."""
    stripped = text.strip("\n")
    if stripped.lstrip().startswith(_BEGIN):
        return _read_codex(stripped.strip().split("\n"))
    return _read_unified(stripped.split("\n"))


def _read_codex(lines: list[str]) -> list[FilePatch] | None:
    if lines[0].strip() != _BEGIN or lines[-1].strip() != _END:
        return None
    patches: list[FilePatch] = []
    for line in lines[1:-1]:
        section = _SECTION.fullmatch(line.rstrip())
        if section:
            path = section[2].strip()
            patches.append(FilePatch(section[1].lower(), path, path))
        elif not patches or not _take_codex(patches[-1], line):
            return None
    return patches or None


def _take_codex(patch: FilePatch, line: str) -> bool:
    if patch.kind == "delete":
        return False
    if patch.kind == "add":
        patch.hunks = patch.hunks or [Hunk()]
        patch.hunks[0].new.append(line[1:])
        return line.startswith("+")
    if line.startswith(_MOVE) and not patch.hunks:
        patch.target = line[len(_MOVE) :].strip()
        return True
    if line.startswith("@@"):
        if patch.hunks and not (patch.hunks[-1].old or patch.hunks[-1].new):
            return False  # several headers in a row: a path through nested blocks
        patch.hunks.append(Hunk(header=line[2:].strip()))
        return True
    if line.strip() == _END_OF_FILE and patch.hunks:
        patch.hunks[-1].ends_file = True
        return True
    if line.startswith("*** "):
        return False
    patch.hunks = patch.hunks or [Hunk()]
    return patch.hunks[-1].add(line)


def _read_unified(lines: list[str]) -> list[FilePatch] | None:
    patches: list[FilePatch] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ "):
            patch = _unified_file(line[4:], lines[at + 1][4:])
            if patch is None:
                return None
            patches.append(patch)
            at += 2
        elif (head := _HUNK.match(line)) and patches:
            end = _take_hunk(lines, at + 1, head, patches[-1])
            if end is None:
                return None
            at = end
        elif line.startswith(("diff --git ", "index ", "new file mode ", "deleted file mode ")) or not line.strip():
            at += 1
        else:
            return None
    return patches if patches and all(patch.hunks for patch in patches) else None


def _unified_file(old: str, new: str) -> FilePatch | None:
    old, new = (name.split("\t")[0].strip() for name in (old, new))
    if old.startswith("a/") and new.startswith("b/"):
        old, new = old[2:], new[2:]
    elif old == "/dev/null":
        new = new.removeprefix("b/")
        return FilePatch("add", new, new)
    elif new == "/dev/null":
        old = old.removeprefix("a/")
        return FilePatch("delete", old, old)
    return FilePatch("update", old, new) if old == new else None


def _take_hunk(lines: list[str], at: int, head: re.Match[str], patch: FilePatch) -> int | None:
    """Reads as many lines as the hunk's head announces; the place behind them, or None if they are not there."""
    num_old, num_new = int(head[2] or 1), int(head[4] or 1)
    hunk = Hunk(at=int(head[1]))
    while len(hunk.old) < num_old or len(hunk.new) < num_new:
        if at >= len(lines) or not hunk.add(lines[at]):
            return None
        at += 1
    if len(hunk.old) != num_old or len(hunk.new) != num_new or (at < len(lines) and lines[at] == _NO_NEWLINE):
        return None
    patch.hunks.append(hunk)
    return at


def _with_hunks(text: str, hunks: list[Hunk]) -> str | None:
    lines = text.removesuffix("\n").split("\n")
    result: list[str] = []
    cursor = 0
    for hunk in hunks:
        start = _place_of(hunk, lines, cursor)
        if start is None:
            return None
        result += [*lines[cursor:start], *hunk.new]
        cursor = start + len(hunk.old)
    return "\n".join([*result, *lines[cursor:]]) + "\n"


def _place_of(hunk: Hunk, lines: list[str], cursor: int) -> int | None:
    if hunk.at is not None:
        start = hunk.at - 1 if hunk.old else hunk.at
        if start >= cursor and lines[start : start + len(hunk.old)] == hunk.old and start <= len(lines):
            return start
        starts = _places(hunk.old, lines, cursor) if hunk.old else []
        return starts[0] if len(starts) == 1 else None
    if hunk.header:
        above = next((number for number in range(cursor, len(lines)) if lines[number].strip() == hunk.header), None)
        if above is None:
            return None
        cursor = above + 1
    if not hunk.old:
        return len(lines) if not hunk.header else None
    last = len(lines) - len(hunk.old)
    if hunk.ends_file and last >= cursor and lines[last:] == hunk.old:
        return last
    starts = _places(hunk.old, lines, cursor)
    return starts[0] if starts else None


def _places(old_lines: list[str], lines: list[str], cursor: int) -> list[int]:
    """Where the lines stand, the first two of them: more are not asked for."""
    starts: list[int] = []
    if len(old_lines) * len(lines) > _MAX_WORK:
        return starts
    for start in range(cursor, len(lines) - len(old_lines) + 1):
        if lines[start] == old_lines[0] and lines[start : start + len(old_lines)] == old_lines:
            starts.append(start)
            if len(starts) > 1:
                break
    return starts
