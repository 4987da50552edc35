"""What the session tells about a file: which one was meant, what its folder holds, where a text differs from it."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from difflib import SequenceMatcher

from composer_replication.actions.session_state import SessionState
from composer_replication.actions.tools import word_set
from composer_replication.hint_generator.context import HintContext
from composer_replication.hint_generator.error_words import choices_in, meant_name, nearest

# Names that files of many folders have: the same name elsewhere says nothing.
_COMMON = word_set(
    "index main mod lib init __init__ types type util utils common helper helpers test tests config constants errors"
    " readme makefile setup package agent client server model models app base core doc"
)
_THING = re.compile(
    r"['\"`\u2018\u2019]([^'\"`\u2018\u2019]{1,200})['\"`\u2018\u2019]"
    r"|(\S+?)(?=: (?:open: |stat: |directory )?(?:No such|Is a|command not|not found))|: (\S+)\s*$"
)
_NUMBERED = re.compile(r"^ *\d{1,6}(?:\t|→)", re.MULTILINE)
_PLAIN_NAME = re.compile(r"[\w.@+-]{1,100}")
_UNSEEN = "\0"
_MAX_NAMES = 8
_MAX_LINES = 20_000
_LIKE, _ALIKE = 0.6, 0.88
# Names that are guessed with one ending often have the other.
_OTHER_ENDING = {".yml": ".yaml", ".yaml": ".yml", ".js": ".ts", ".jsx": ".tsx", ".htm": ".html", ".jpeg": ".jpg"}
_MIN_ANCHOR = 4


def missing_path_facts(path: str, said: str, seen: SessionState) -> HintContext:
    """Which file was meant, where the error or the session says so; else what its folder is known to hold."""
    paths = seen.paths
    wanted = paths.absolute(path, paths.root)
    folder, _, name = wanted.rpartition("/")
    names = [each.rpartition("/")[2] for each in choices_in(said)]
    meant = meant_name(said) or nearest(name, names)
    if meant is not None:
        return {"meant": meant, "is_from_error": True}
    if names:
        return {"names_there": names[:_MAX_NAMES]}
    there = names_in(folder, seen)
    close = [each for each in there if _is_spelled_alike(name, each)]
    if len(close) == 1:
        return {"meant": short_path(f"{folder}/{close[0]}", paths.root)}
    is_folder = bool(there) or folder in paths.folders
    found = None if is_folder else _same_name(wanted, paths.files)
    if found is not None:
        return {"meant": short_path(found, paths.root)}
    ending = _OTHER_ENDING.get(posixpath.splitext(name)[1])
    if ending:
        return {"other_ending": ending}
    alike = [each for each in there if ("." in each) >= ("." in name)]
    alike.sort(key=lambda each: -SequenceMatcher(None, name, each).ratio())
    return {"names_there": alike[:_MAX_NAMES]} if alike else {}


def _is_spelled_alike(name: str, other: str) -> bool:
    """Another ending, or a slip of the pen; a word more or less, such as `test`, makes another file."""
    (stem, ending), (other_stem, other_ending) = posixpath.splitext(name), posixpath.splitext(other)
    if stem == other_stem:
        return True
    num_words, num_other = (len(re.split(r"[_.-]", each)) for each in (stem, other_stem))
    is_near = SequenceMatcher(None, stem, other_stem).ratio() >= _ALIKE
    return ending == other_ending and num_words == num_other and is_near


def _same_name(wanted: str, files: set[str]) -> str | None:
    """The one file of that name; of several the one whose folders agree best, if one alone does."""
    *folders, name = wanted.split("/")
    found = sorted(each for each in files if each.rpartition("/")[2] == name and each != wanted)
    related = [each for each in found if _are_related(folders, each.split("/")[:-1])]
    if len(related) > 1:
        agree = sorted((_num_same_end(folders, each.split("/")[:-1]), each) for each in related)
        return agree[-1][1] if agree[-1][0] > agree[-2][0] else None
    if related:
        return related[0]
    is_common = name.partition(".")[0].lower() in _COMMON
    return found[0] if len(found) == 1 and not is_common else None


def _are_related(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether the folders of one path are among those of the other, in order."""
    short, long = sorted((one, other), key=len)
    rest = iter(long)
    return all(part in rest for part in short)


def _num_same_end(one: Sequence[str], other: Sequence[str]) -> int:
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def short_path(path: str, root: str | None) -> str:
    """A path as it is called from the project's folder."""
    return path[len(root) + 1 :] if root and path.startswith(f"{root}/") else path


def names_in(folder: str, seen: SessionState) -> list[str]:
    """Names that the session has shown in a folder."""
    start = seen.paths.absolute(folder, seen.paths.root).rstrip("/") + "/"
    inside = {each[len(start) :].partition("/")[0] for each in seen.paths.files if each.startswith(start)}
    return sorted(each for each in inside if _PLAIN_NAME.fullmatch(each))


def typed_path(message: str, command: str) -> str | None:
    """The path that a shell's message is about, if the command names it."""
    for match in _THING.finditer(message):
        thing = next(each for each in match.groups() if each)
        if thing in command:
            return thing
        ends = [word for word in re.findall(r"[\w./@+~-]+", command) if "/" in word or "." in word]
        typed = next((word for word in ends if thing.endswith(f"/{word.removeprefix('./')}")), None)
        if typed is not None:
            return typed
    return None


# ---- edits


def no_match_facts(path: str, wanted: str, seen: SessionState, edits: Sequence[tuple[str, str]]) -> HintContext:
    """Where a text differs from the file as it was shown; `edits` are those of this session on the file, in order."""
    file = seen.texts.get(path)
    if len(_NUMBERED.findall(wanted)) >= max(1, wanted.count("\n")):
        return {"edit_problem": "line_numbers"}
    if _is_escaped(wanted, "" if file is None else file.text):
        return {"edit_problem": "escapes"}
    if file is None or not file.text.strip(_UNSEEN + "\n"):
        return {"edit_problem": "unread"}
    lines, asked = file.text.split("\n")[:_MAX_LINES], wanted.split("\n")
    offset = _place_of(asked, lines)
    facts = _alone(asked, lines, is_whole=file.is_whole) if offset is None else _at(offset, asked, lines)
    if facts.get("edit_problem") == "whitespace" and file.doubt < 2:
        return facts
    if file.doubt:  # what was shown then may not be what is there now
        return {"edit_problem": "changed"}
    if _was_changed(asked, lines, edits):
        facts["edit_problem"] = "own_edit"
    return facts


def _is_escaped(wanted: str, text: str) -> bool:
    """Whether breaks between lines of the file were written as two characters."""
    parts = [part.strip() for part in re.split(r"\\[nt]", wanted) if len(part.strip()) >= _MIN_ANCHOR]
    if not text:
        return "\n" not in wanted and re.search(r"\\n[ \w]", wanted) is not None
    return len(parts) > 1 and wanted not in text and all(part in text for part in parts)


def _place_of(asked: Sequence[str], lines: Sequence[str]) -> int | None:
    """Where most lines of the text stand in the file, whatever their whitespace; None where none does."""
    places: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        places.setdefault(line.strip(), []).append(number)
    votes: dict[int, float] = {}
    for number, line in enumerate(asked):
        stripped = line.strip()
        found = places.get(stripped, []) if len(stripped) >= _MIN_ANCHOR else []
        for place in found:
            votes[place - number] = votes.get(place - number, 0) + len(stripped) / len(found)
    return max(votes, key=lambda offset: (votes[offset], -abs(offset))) if votes else None


def _at(offset: int, asked: Sequence[str], lines: Sequence[str]) -> HintContext:
    """The first line that differs where the text stands."""
    only_whitespace: str | None = None
    last = len(asked) - 1
    for number, line in enumerate(asked):
        place = offset + number
        right = lines[place] if 0 <= place < len(lines) else None
        if right == _UNSEEN or (right is None and place >= len(lines)):
            return {"edit_problem": "unshown"}
        if right is None or right == line or (number == last and right.startswith(line)):
            continue
        if number == 0 and right.endswith(line):
            continue
        if right.split() == line.split():
            only_whitespace = only_whitespace or right
            continue
        facts: HintContext = {"edit_problem": "line"}
        return {**facts, "closest_line": right.strip()} if right.strip() else facts
    if only_whitespace is not None:
        return {"edit_problem": "whitespace", "closest_line": only_whitespace}
    return {"edit_problem": "unshown"}


def _alone(asked: Sequence[str], lines: Sequence[str], *, is_whole: bool) -> HintContext:
    """No line of the text is in the file: the nearest one to its longest, if one is near."""
    longest = max((line.strip() for line in asked), key=len, default="")[:200]
    words = set(re.findall(r"\w{3,}", longest))
    likely = [line.strip() for line in lines if words & set(re.findall(r"\w{3,}", line))]
    near = sorted(((SequenceMatcher(None, longest, each[:200]).ratio(), each) for each in likely[:400]), reverse=True)
    if near and near[0][0] >= _LIKE and (len(near) == 1 or near[1][0] < near[0][0]):
        return {"edit_problem": "line", "closest_line": near[0][1]}
    return {"edit_problem": "elsewhere" if is_whole else "unshown"}


def _was_changed(asked: Sequence[str], lines: Sequence[str], edits: Sequence[tuple[str, str]]) -> bool:
    """Whether what is missing in the file stood there until an edit of this session replaced it."""
    there = {line.strip() for line in lines}
    missing = {line.strip() for line in asked if len(line.strip()) >= _MIN_ANCHOR} - there
    gone = {line.strip() for old, new in edits for line in old.split("\n") if line.strip() not in new}
    return bool(missing) and bool(missing & gone)


def ambiguous_facts(path: str, wanted: str, said: str, seen: SessionState) -> HintContext:
    """How often the text stands in the file, and below which lines that only one of the places has."""
    facts: HintContext = {}
    number = re.search(r"\b(\d{1,4}) (?:matches|occurrences|times|places|locations)|\bfound (\d{1,4})\b", said[:400])
    if number is not None:
        facts["num_matches"] = int(number[1] or number[2])
    lines = re.search(r" in lines \[((?:\d{1,6}, )+\d{1,6})\]", said[-400:])
    if lines is not None:
        return {"num_matches": lines[1].count(",") + 1, "places": [f"line {each}" for each in lines[1].split(", ")]}
    file = seen.texts.get(path)
    text = "" if file is None or file.doubt else file.text
    places = [match.start() for match in re.finditer(re.escape(wanted), text)] if wanted else []
    if len(places) < 2 or len(places) != facts.get("num_matches", len(places)):
        return facts
    heads = [_head_above(text[:place].split("\n")) for place in places[: _MAX_NAMES // 2]]
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
