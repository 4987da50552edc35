"""Which look, made after a path was not there, should have been made before: one that is for it and told something."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from composer_replication.actions.paths import normal_path
from composer_replication.actions.session_state import SessionState
from composer_replication.actions.shell.command import Command, is_path
from composer_replication.actions.shown.views import without_reminders
from composer_replication.actions.tools import SEARCHES, plain_name
from composer_replication.pairs.later_calls import LaterCall
from composer_replication.types import ToolCall

_NEXT, _NEXT_USE, _MAX_NAMES, _MIN_WORD = 3, 2, 20, 3
_ASKS_FOR_HELP = re.compile(r"(?:^|\s)(?:--help|help)(?:\s|$)")
_LISTS_ITSELF = frozenset({"help", "tasks", "list", "ls"})
_SETTLED = ("not_listed", "not_globbed")
_NAMED_FILE = re.compile(r"[\w@+-][\w./@+-]*\.\w+|[\w@+.-]+/[\w./@+-]+")


def search_for(
    path: str, failed: ToolCall, later: Sequence[LaterCall], state: SessionState, cwd: str | None
) -> LaterCall | None:
    """The first look after the failure that is for what was missing and found something, before anything is done.

    It is for it where it is the same search elsewhere, or names it, or lists its folder and what it listed was opened.
    """
    folder, _, name = path.rstrip("/").rpartition("/")
    stem, pattern = name.lstrip(".").partition(".")[0].lower(), failed.arguments.get("pattern")
    is_settled = state.paths.standing(normal_path(path, cwd)).why in _SETTLED
    looks_for_text = plain_name(failed.name) in SEARCHES
    for index, look in enumerate(itertools.takewhile(lambda call: call.is_look, later[:_NEXT])):
        words = look.words.lower()
        if look.found_nothing and len(stem) >= _MIN_WORD and stem in words:
            return None  # there is no such file anywhere: its name was made up, and no search is for it
        if not look.has_found or not _is_into_what_was_shown(look, path, state, cwd):
            continue
        if isinstance(pattern, str) and len(pattern) >= _MIN_WORD and pattern.lower() in words:
            return look
        if not _is_new(look, state):
            continue
        if len(stem) >= _MIN_WORD and stem in words:
            return look
        uses = later[index + 1 : index + 1 + _NEXT_USE]
        if not looks_for_text and not is_settled and _lists(look, folder, cwd) and _is_used(look, uses, folder, cwd):
            return look
    return None


def name_to_search(path: str, later: Sequence[LaterCall], state: SessionState, cwd: str | None) -> str | None:
    """The name of a missing file, or its beginning, where a file called so was opened afterwards.

    None also where a look had settled that it is not there.
    """
    if state.paths.standing(normal_path(path, cwd)).is_there is False:
        return None
    folder, _, name = path.rstrip("/").rpartition("/")
    stem = name[: len(name) - len(name.lstrip("."))] + name.lstrip(".").partition(".")[0]
    other_paths = [call.path for call in later if call.path and normal_path(call.path, cwd) != normal_path(path, cwd)]
    if "." in name[1:] and any(other_path.rpartition("/")[2] == name for other_path in other_paths):
        return name
    is_beside = any(
        other_path.rpartition("/")[0] == folder and _begins(other_path.rpartition("/")[2], stem)
        for other_path in other_paths
    )
    return f"{stem}*" if is_beside and len(stem) > _MIN_WORD else None


def tree_with(name: str, later: Sequence[LaterCall]) -> ToolCall | None:
    """The list of a whole tree that brought up a file of this name."""
    lists = (look.call for look in later[:_NEXT] if look.is_listing and look.is_look and f"/{name}" in look.text)
    return next(lists, None)


def help_for(command: str, later: Sequence[LaterCall]) -> ToolCall | None:
    """What the same program says about itself, asked right after the failure."""
    programs = {name for name, _ in Command.of(command).programs}
    for look in later[:1]:
        look_command = Command.of(look.words)
        same = {first for name, first in look_command.programs if name in programs}
        if same and (_ASKS_FOR_HELP.search(look_command.text) or _LISTS_ITSELF & same):
            return look.call
    return None


def _begins(name: str, stem: str) -> bool:
    return name == stem or name.startswith(f"{stem}.")


def _is_into_what_was_shown(look: LaterCall, missing: str, state: SessionState, cwd: str | None) -> bool:
    """Whether it could have been made before the failure: not where it looks into what nobody had heard of."""
    words = (word for word in Command.of(look.words).words if is_path(word) and "/" in word and "*" not in word)
    names = [look.path] if look.path else list(itertools.islice(words, _MAX_NAMES))
    missing_path = normal_path(missing, cwd)
    return all(
        path == missing_path or _is_known(path, cwd, state) for path in (normal_path(name, cwd) for name in names)
    )


def _is_known(path: str, cwd: str | None, state: SessionState) -> bool:
    """Something had shown it, or it holds the working folder. The folder of a path that was guessed is guessed too."""
    return (
        f"{cwd or ''}/".startswith(f"{path.rstrip('/')}/")
        or bool(state.paths.standing(path).is_there)
        or state.has_shown(path)
    )


def _is_new(look: LaterCall, state: SessionState) -> bool:
    """Whether it brought a name that had not been shown."""
    names = _NAMED_FILE.findall(without_reminders(look.text))[:_MAX_NAMES]
    return not names or not all(map(state.has_shown, names))


def _lists(look: LaterCall, folder: str, cwd: str | None) -> bool:
    """Whether it shows what this folder holds."""
    names = [look.path or "", *(word for word in Command.of(look.words).words if is_path(word))]
    folders = {normal_path(name, cwd) for name in names if name} - {"/"}
    is_named = folder.rpartition("/")[2].lower() in re.split(r"[/\s]", look.words.lower())
    return look.is_listing and (is_named or normal_path(folder, cwd) in folders)


def _is_used(look: LaterCall, uses: Sequence[LaterCall], folder: str, cwd: str | None) -> bool:
    """Whether what it listed was then opened in that folder: so it was what the failing call was after."""
    paths = [call.path for call in uses if call.path]
    there = [path for path in paths if normal_path(path.rpartition("/")[0], cwd) == normal_path(folder, cwd)]
    return any(path.rpartition("/")[2] in look.text for path in there)
