"""What the session tells about a path that is not there: which one was meant, and what its folder holds."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from composer_replication.actions.tools import word_set
from composer_replication.hint_generator.context import HintContext
from composer_replication.hint_generator.error_words import choices_in, meant_name, nearest

if TYPE_CHECKING:
    from composer_replication.actions.session_state import SessionState

# Names that files of many folders have: the same name elsewhere says nothing.
_COMMON = word_set(
    "index main mod lib init __init__ types type util utils common helper helpers test tests config constants errors"
    " readme makefile setup package agent client server model models app base core doc"
)
_THING = re.compile(
    r"['\"`\u2018\u2019]([^'\"`\u2018\u2019]{1,200})['\"`\u2018\u2019]"
    r"|(\S+?)(?=: (?:open: |stat: |directory )?(?:No such|Is a|command not|not found))|: (\S+)\s*$"
)
_PLAIN_NAME = re.compile(r"[\w.@+-]{1,100}")
_MAX_NAMES = 8
_ALIKE = 0.88
# Names that are guessed with one ending often have the other.
_OTHER_ENDING = {".yml": ".yaml", ".yaml": ".yml", ".js": ".ts", ".jsx": ".tsx", ".htm": ".html", ".jpeg": ".jpg"}


def missing_path_facts(path: str, said: str, seen: SessionState) -> HintContext:
    """Which file was meant, where the error or the session says so; else what its folder is known to hold."""
    paths = seen.paths
    full_path = paths.absolute(path, paths.root)
    folder, _, name = full_path.rpartition("/")
    names = [choice.rpartition("/")[2] for choice in choices_in(said)]
    meant = meant_name(said) or nearest(name, names)
    if meant is not None:
        return {"meant": meant, "is_from_error": True}
    if names:
        return {"names_there": names[:_MAX_NAMES], "is_from_error": True}
    there = names_in(folder, seen)
    close = [entry for entry in there if _is_spelled_alike(name, entry)]
    if len(close) == 1:
        return {"meant": short_path(f"{folder}/{close[0]}", paths.root)}
    is_folder = bool(there) or folder in paths.folders
    namesake = None if is_folder else _same_name(full_path, paths.files)
    if namesake is not None:
        return {"meant": short_path(namesake, paths.root)}
    ending = _OTHER_ENDING.get(posixpath.splitext(name)[1])
    if ending:
        return {"other_ending": ending}
    alike = [entry for entry in there if ("." in entry) >= ("." in name)]
    alike.sort(key=lambda entry: -SequenceMatcher(None, name, entry).ratio())
    return {"names_there": alike[:_MAX_NAMES]} if alike else {}


def _is_spelled_alike(name: str, other_name: str) -> bool:
    """Another ending, or a slip of the pen; a word more or less, such as `test`, makes another file."""
    (stem, ending), (other_stem, other_ending) = posixpath.splitext(name), posixpath.splitext(other_name)
    if stem == other_stem:
        return True
    num_words, num_other = (len(re.split(r"[_.-]", base)) for base in (stem, other_stem))
    is_near = SequenceMatcher(None, stem, other_stem).ratio() >= _ALIKE
    return ending == other_ending and num_words == num_other and is_near


def _same_name(requested_path: str, files: set[str]) -> str | None:
    """The one file of that name; of several the one whose folders agree best, if one alone does."""
    *folders, name = requested_path.split("/")
    namesakes = sorted(path for path in files if path.rpartition("/")[2] == name and path != requested_path)
    related = [path for path in namesakes if _are_related(folders, path.split("/")[:-1])]
    if len(related) > 1:
        agree = sorted((_num_same_end(folders, path.split("/")[:-1]), path) for path in related)
        return agree[-1][1] if agree[-1][0] > agree[-2][0] else None
    if related:
        return related[0]
    is_common = name.partition(".")[0].lower() in _COMMON
    return namesakes[0] if len(namesakes) == 1 and not is_common else None


def _are_related(one: Sequence[str], other_folders: Sequence[str]) -> bool:
    """Whether the folders of one path are among those of the other, in order."""
    short, long = sorted((one, other_folders), key=len)
    rest = iter(long)
    return all(part in rest for part in short)


def _num_same_end(one: Sequence[str], other_folders: Sequence[str]) -> int:
    pairs = zip(reversed(one), reversed(other_folders), strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other_folders)))


def short_path(path: str, root: str | None) -> str:
    """A path as it is called from the project's folder, which itself is `.`."""
    if path == root:
        return "."
    return path[len(root) + 1 :] if root and path.startswith(f"{root}/") else path


def names_in(folder: str, seen: SessionState) -> list[str]:
    """Names that the session has shown in a folder."""
    start = seen.paths.absolute(folder, seen.paths.root).rstrip("/") + "/"
    inside = {path[len(start) :].partition("/")[0] for path in seen.paths.files if path.startswith(start)}
    return sorted(name for name in inside if _PLAIN_NAME.fullmatch(name))


def typed_path(message: str, command: str) -> str | None:
    """The path that a shell's message is about, if the command names it."""
    for match in _THING.finditer(message):
        thing = next(group for group in match.groups() if group)
        if thing in command:
            return thing
        ends = [word for word in re.findall(r"[\w./@+~-]+", command) if "/" in word or "." in word]
        typed = next((word for word in ends if thing.endswith(f"/{word.removeprefix('./')}")), None)
        if typed is not None:
            return typed
    return None
