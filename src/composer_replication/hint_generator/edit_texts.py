"""Why a text is not in a file, or is there more than once: where it differs from what the session has shown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from composer_replication.actions.tools import word_set
from composer_replication.hint_generator.context import HintContext
from composer_replication.hint_generator.files import short_path

if TYPE_CHECKING:
    from composer_replication.actions.session_state import SessionState

_NUMBERED = re.compile(r"^ *\d{1,6}(?:\t|→)", re.MULTILINE)
_UNSEEN = "\0"
_MAX_NAMES = 8
_MAX_LINES = 20_000
_LIKE = 0.6
_MIN_ANCHOR, _MIN_TELLING = 4, 12
_WORD_OR_SIGN = re.compile(r"\s*(?:\w+|[^\w\s])")
_LEFT_OUT = "…"
_COMMENT = re.compile(r"\s*(?://|#|/?\*|--|<!--|\"\"\"|;)")
_DECLARED = re.compile(
    r"\b(?:def|func|function|fn|class|type|struct|interface|enum|trait|const|let|var|module|package)\s+"
    r"(?:\([^)]*\)\s*)?(\w+)"
)
_KEYWORDS = word_set(
    "return func function def class type struct interface const let var for while else elif switch case import from"
    " nil null none true false err error string int bool self this new async await public private static void with and"
    " not the end"
)


def no_match_facts(path: str, wanted: str, seen: SessionState, edits: Sequence[tuple[str, str]]) -> HintContext:
    """Where a text differs from the file as it was shown; `edits` are those of this session on the file, in order."""
    file = seen.texts.get(path)
    if len(_NUMBERED.findall(wanted)) >= max(1, wanted.count("\n")):
        return {"edit_problem": "line_numbers"}
    if _is_escaped(wanted, "" if file is None else file.text):
        return {"edit_problem": "escapes"}
    if file is None or not file.text.strip(_UNSEEN + "\n"):
        return {"edit_problem": "unread"}
    lines, wanted_lines = file.text.split("\n")[:_MAX_LINES], wanted.split("\n")
    other_path = _other_file(wanted_lines, lines, seen, path)
    if other_path is not None:
        return {"edit_problem": "other_file", "meant": other_path}
    offset = _place_of(wanted_lines, lines)
    facts = _alone(wanted_lines, lines, is_whole=file.is_whole) if offset is None else _at(offset, wanted_lines, lines)
    if facts.get("edit_problem") == "whitespace" and file.doubt < 2:
        return facts
    if file.doubt:  # what was shown then may not be what is there now
        return {"edit_problem": "changed" if file.doubt == 2 or file.may_be_reworked else "differs"}
    if _was_changed(wanted_lines, lines, edits):
        facts["edit_problem"] = "own_edit"
    return facts


def _is_escaped(old_text: str, text: str) -> bool:
    """Whether breaks between lines of the file were written as two characters."""
    parts = [part.strip() for part in re.split(r"\\[nt]", old_text) if len(part.strip()) >= _MIN_ANCHOR]
    if not text:
        return "\n" not in old_text and re.search(r"\\n[ \w]", old_text) is not None
    return len(parts) > 1 and old_text not in text and all(part in text for part in parts)


def _place_of(old_lines: Sequence[str], lines: Sequence[str]) -> int | None:
    """Where most lines of the text stand in the file, whatever their whitespace; None where none does."""
    positions_by_line: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        positions_by_line.setdefault(line.strip(), []).append(number)
    votes: dict[int, float] = {}
    for number, line in enumerate(old_lines):
        stripped = line.strip()
        positions = positions_by_line.get(stripped, []) if len(stripped) >= _MIN_ANCHOR else []
        for position in positions:
            votes[position - number] = votes.get(position - number, 0) + len(stripped) / len(positions)
    return max(votes, key=lambda offset: (votes[offset], -abs(offset))) if votes else None


def _at(offset: int, old_lines: Sequence[str], lines: Sequence[str]) -> HintContext:
    """The first line that differs where the text stands."""
    only_whitespace: str | None = None
    last = len(old_lines) - 1
    for number, line in enumerate(old_lines):
        position = offset + number
        right = lines[position] if 0 <= position < len(lines) else None
        if right == _UNSEEN or (right is None and position >= len(lines)):
            return {"edit_problem": "unshown"}
        if right is None or right == line or (number == last and right.startswith(line)):
            continue
        if number == 0 and right.endswith(line):
            continue
        if right.split() == line.split():
            only_whitespace = only_whitespace or right
            continue
        if right.strip() and _is_same_place(number, offset, old_lines, lines):
            return _line_facts(line.strip(), right.strip())
        return {"edit_problem": "differs"}
    if only_whitespace is not None:
        return {"edit_problem": "whitespace", "closest_line": only_whitespace}
    return {"edit_problem": "unshown"}


def _line_facts(wrong: str, right: str) -> HintContext:
    differing = _what_differs(wrong, right)
    return {"edit_problem": "line", "closest_line": differing} if differing else {"edit_problem": "longer"}


def _what_differs(wrong: str, right: str) -> str:
    """The parts of a line that the wrong one does not have, each with a word or sign on both sides; empty without any.

    A line that is nearly the wrong one, quoted whole, makes the wrong one likelier.
    """
    words = _WORD_OR_SIGN.findall(right)
    bare = [[word.strip() for word in line_words] for line_words in (_WORD_OR_SIGN.findall(wrong), words)]
    blocks = SequenceMatcher(None, *bare, autojunk=False).get_matching_blocks()
    own_indices = set(range(len(words))) - {k for block in blocks for k in range(block.b, block.b + block.size)}
    near = {k for index in own_indices for k in (index - 1, index, index + 1)}
    near |= {k for k in range(len(words)) if {k - 1, k + 1} <= near}  # one word is no shorter as three dots
    excerpt = "".join(word if index in near else _LEFT_OUT for index, word in enumerate(words)) if own_indices else ""
    return re.sub(f"{_LEFT_OUT}+", _LEFT_OUT, excerpt).strip(f"{_LEFT_OUT} ")


def _is_same_place(number: int, offset: int, old_lines: Sequence[str], lines: Sequence[str]) -> bool:
    """Whether a line that differs is the one that was meant: both neighbours stand next to it, or it says the same."""
    line, right = old_lines[number], lines[offset + number]
    neighbours = [
        (old_lines[near].strip(), lines[offset + near].strip() if 0 <= offset + near < len(lines) else None)
        for near in (_neighbour(number, old_lines, -1), _neighbour(number, old_lines, 1))
        if near is not None
    ]
    match = [neighbour for neighbour, is_there in neighbours if neighbour == is_there]
    is_alone = any(sum(other_line.strip() == neighbour for other_line in lines) == 1 for neighbour in match)
    return (is_alone and len(match) == 2) or _says_the_same(line, right, is_anchored=is_alone)


def _neighbour(number: int, old_lines: Sequence[str], step: int) -> int | None:
    """The next line of the text that is not empty."""
    indices = range(number + step, len(old_lines) if step > 0 else -1, step)
    return next((index for index in indices if old_lines[index].strip()), None)


def _says_the_same(line: str, right: str, *, is_anchored: bool = False) -> bool:
    """Whether two lines are about the same: what one declares the other does, and most of their names are shared.

    Next to a line that stands once in the file one shared name is enough, but not for comments, which are language.
    """
    is_comment = _COMMENT.match(line) is not None
    if is_comment != (_COMMENT.match(right) is not None):
        return False
    declared, other_declared = _DECLARED.search(line), _DECLARED.search(right)
    if (declared and declared[1]) != (other_declared and other_declared[1]):
        return False
    names, other_names = _names(line), _names(right)
    shared = names & other_names
    return bool(shared) and ((is_anchored and not is_comment) or 2 * len(shared) > len(names | other_names))


def _names(line: str) -> set[str]:
    return {name for name in re.findall(r"\w{3,}", line) if name.lower() not in _KEYWORDS}


def _alone(old_lines: Sequence[str], lines: Sequence[str], *, is_whole: bool) -> HintContext:
    """No line of the text is in the file: the nearest one to its longest, if one is near and says the same."""
    code = [line for line in old_lines if not _COMMENT.match(line)]
    longest = max((line.strip() for line in code), key=len, default="")[:200]
    likely = [line.strip() for line in lines if longest and _says_the_same(longest, line)]
    near = sorted(
        ((SequenceMatcher(None, longest, candidate[:200]).ratio(), candidate) for candidate in likely[:400]),
        reverse=True,
    )
    if near and near[0][0] >= _LIKE and (len(near) == 1 or near[1][0] < near[0][0]):
        return _line_facts(longest, near[0][1])
    return {"edit_problem": "elsewhere" if is_whole else "unshown"}


def _other_file(old_lines: Sequence[str], lines: Sequence[str], state: SessionState, path: str) -> str | None:
    """The one other file that was shown with all of the text, where none of its telling lines is in this one."""
    telling = {line.strip() for line in old_lines if len(line.strip()) >= _MIN_TELLING}
    if not telling or telling & {line.strip() for line in lines}:
        return None
    holders = [
        other_path
        for other_path, text in state.read.items()
        if other_path != path and all(line in text for line in telling)
    ]
    return short_path(holders[0], state.paths.root) if len(holders) == 1 else None


def _was_changed(old_lines: Sequence[str], lines: Sequence[str], edits: Sequence[tuple[str, str]]) -> bool:
    """Whether what is missing in the file stood there until an edit of this session replaced it."""
    there = {line.strip() for line in lines}
    missing = {line.strip() for line in old_lines if len(line.strip()) >= _MIN_ANCHOR} - there
    removed_lines = {line.strip() for old, new in edits for line in old.split("\n") if line.strip() not in new}
    return bool(missing) and bool(missing & removed_lines)


def ambiguous_facts(path: str, wanted: str, said: str, seen: SessionState) -> HintContext:
    """How often the text stands in the file, and below which lines that only one of the places has."""
    facts: HintContext = {}
    number = re.search(r"\b(\d{1,4}) (?:matches|occurrences|times|places|locations)|\bfound (\d{1,4})\b", said[:400])
    if number is not None:
        facts["num_matches"] = int(number[1] or number[2])
    lines = re.search(r" in lines \[((?:\d{1,6}, )+\d{1,6})\]", said[-400:])
    if lines is not None:
        return {
            "num_matches": lines[1].count(",") + 1,
            "places": [f"line {line_number}" for line_number in lines[1].split(", ")],
        }
    file = seen.texts.get(path)
    text = "" if file is None or file.doubt else file.text
    offsets = [match.start() for match in re.finditer(re.escape(wanted), text)] if wanted else []
    if len(offsets) < 2 or len(offsets) != facts.get("num_matches", len(offsets)):
        return facts
    heads = [_head_above(text[:offset].split("\n")) for offset in offsets[: _MAX_NAMES // 2]]
    if None not in heads and len(set(heads)) == len(heads):
        facts["places"] = [head for head in heads if head is not None]
    return facts


def _head_above(lines: Sequence[str]) -> str | None:
    """The line that opens what a place stands in: the nearest above that is not indented and no closing bracket."""
    for line in reversed(lines[:-1]):
        if line == _UNSEEN:
            return None
        if line[:1].isalpha() or line[:1] in "_@#<":
            return line.strip()[:80]
    return None
