"""The edits that lead from one text to another, each of them clear: what it replaces stands there once."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from composer_replication.envs.workspace.task import Edit


def edits_between(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Edit, ...]:
    """Edits that make `after` of `before`, applied in their order; a file that is new is written whole."""
    edits: list[Edit] = []
    for path in sorted(after):
        if path not in before:
            edits.append(Edit(path=path, old="", new=after[path]))
        elif before[path] != after[path]:
            edits += _edits_of(path, before[path], after[path])
    return tuple(edits)


def _edits_of(path: str, before: str, after: str) -> list[Edit]:
    old_lines, new_lines = before.split("\n"), after.split("\n")
    blocks = difflib.SequenceMatcher(a=old_lines, b=new_lines, autojunk=False).get_opcodes()
    lines, shift, edits = old_lines, 0, list[Edit]()
    for tag, start, end, new_start, new_end in blocks:
        if tag == "equal":
            continue
        first, last = start + shift, end + shift
        put = new_lines[new_start:new_end]
        edits.append(_clear_edit(path, lines, first, last, put))
        lines = [*lines[:first], *put, *lines[last:]]
        shift += len(put) - (end - start)
    return edits


def _clear_edit(path: str, lines: list[str], first: int, last: int, put: list[str]) -> Edit:
    """Lines [first, last) replaced by `put`, with as many lines around them as it takes to be clear."""
    text = "\n".join(lines)
    is_pure = first == last or not put  # nothing to replace, or nothing to put there: a line of context says where
    begin, end = first, last
    while (is_pure and end - begin == last - first) or text.count("\n".join(lines[begin:end])) != 1:
        begin, end = (begin - 1, end) if begin > 0 else (begin, end + 1)
    return Edit(
        path=path,
        old="\n".join(lines[begin:end]),
        new="\n".join([*lines[begin:first], *put, *lines[last:end]]),
    )
