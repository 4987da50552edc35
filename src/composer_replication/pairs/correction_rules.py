"""What should have been done in place of a call that failed, by its kind of failure, as far as the session knew.

The judge stands at the state before the failing turn. Every rule gives the corrected call where what it names had been
shown by then, else the look that came first, else nothing.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence

from composer_replication.actions.equality import same_action
from composer_replication.actions.shell.command import Command, is_path
from composer_replication.actions.tools import channel_of, is_edit
from composer_replication.pairs import edit_rules
from composer_replication.pairs.failed_call import Decided, FailedCall
from composer_replication.pairs.later_calls import LaterCall
from composer_replication.pairs.likeness import (
    MIN_ALIKE,
    asked_by,
    command_of,
    have_same_purpose,
    is_name,
    likeness_of_calls,
    other_paths,
    plain_words,
)
from composer_replication.pairs.needless_looks import searching
from composer_replication.pairs.searches import help_for, name_to_search, search_for, tree_with
from composer_replication.sites.retyped import is_typed_otherwise
from composer_replication.sites.user_words import CORRECTED
from composer_replication.types import Action, ToolCall

_NEXT = 3
_MAX_NAME, _MIN_NAME = 100, 0.85
_AGAINST = re.compile(r"\b(?:don'?t|do not|no|not|never|without|skip|stop|instead|rather|too)\b", re.IGNORECASE)
_TYPED_WRONG = frozenset({"usage_error", "shell_syntax", "input_validation", "tool_not_found"})


def decide(failed: FailedCall) -> Decided:
    """The call to choose, and how it belongs to the one that failed."""
    rules: Mapping[str, Callable[[FailedCall], Decided]] = {
        "edit_not_read": edit_rules.not_read,
        "edit_stale": edit_rules.stale,
        "edit_no_match": edit_rules.no_match,
        "edit_ambiguous": edit_rules.ambiguous,
        "edit_noop": edit_rules.edit_again,
        "file_not_found": _not_found,
        "is_directory": _listing,
        "wrong_folder": _elsewhere,
        "shell_path_missing": _elsewhere,
        CORRECTED: _told,
        **dict.fromkeys(_TYPED_WRONG, _typed_again),
    }
    rule = rules.get(failed.site.kind)
    decision = None if rule is None else rule(failed)
    return None if decision is None or _is_the_call(failed, decision[0]) else decision


def _is_the_call(failed: FailedCall, chosen: ToolCall) -> bool:
    """Whether nothing would be chosen but the failing call; a parameter's wrong name is a difference, too."""
    if failed.site.kind == "input_validation":
        return chosen.name == failed.call.name and chosen.arguments == failed.call.arguments
    return same_action(_alone(chosen), _alone(failed.call))


def _not_found(failed: FailedCall) -> Decided:
    """The same file where it really is, if that had been shown; else the search for it."""
    if failed.path is None:
        return None
    name = failed.path.rstrip("/").rpartition("/")[2]
    for later in failed.later[:_NEXT]:
        if later.call.name == failed.call.name and later.path and _is_meant(failed, later, name):
            if _is_shown(failed, later):
                is_needless = not is_edit(later.call.name) and _is_read(failed, later.path)
                return None if is_needless else (later.call, "corrected")
            break
    return _search(failed, failed.path) or _search_by_name(failed, failed.path)


def _search_by_name(failed: FailedCall, path: str) -> Decided:
    """A search that nobody made, as the session searches; where it never did, the list that brought the file up."""
    name = name_to_search(path, failed.later, failed.judge.state, failed.cwd)
    search = name and (searching(failed.call, name, failed.judge.state) or tree_with(name, failed.later))
    return (search, "look_first") if search else None


def _listing(failed: FailedCall) -> Decided:
    return None if failed.path is None else _search(failed, failed.path)


def _search(failed: FailedCall, path: str) -> Decided:
    search = search_for(path, failed.call, failed.later, failed.judge.state, failed.cwd)
    return None if search is None else (search.call, "look_first")


def _elsewhere(failed: FailedCall) -> Decided:
    """The same command with paths that had been shown; or without the folder that the shell stood in already."""
    later = _next_alike(failed, failed.ran)
    if later is None:
        typed = (word for word in Command.of(command_of(failed.call)).words if is_path(word) and "/" in word)
        missing = [word for word in typed if word in failed.site.evidence_text]
        return _search(failed, missing[0]) if len(missing) == 1 else None
    ours, theirs = (Command.of(text).words for text in (command_of(failed.call), later.words))
    paths = [word for word in theirs - ours if is_path(word) and "/" in word]
    here, left_out = failed.judge.state.paths.shell.path or "", [word.removeprefix("./") for word in ours - theirs]
    stood_there = any(word and f"/{here}".endswith(f"/{word}") for word in left_out)
    return (later.call, "corrected") if (paths or stood_there) and failed.are_shown(paths) else None


def _typed_again(failed: FailedCall) -> Decided:
    """The same call as it has to be typed; what it names besides had been shown, and was not told by the error."""
    if (otherwise := _other_paths(failed)) is not None:
        return otherwise
    later = _next_alike(failed) or _typed_otherwise(failed)
    if later is None:
        help_call = help_for(command_of(failed.call), failed.later)
        return None if help_call is None else (help_call, "look_first")
    if is_edit(later.call.name):
        verdict = failed.judge.verdict(later.call)
        return (later.call, "corrected") if verdict.says == "ok" else None
    error_words, ours = Command.of(failed.error).words, Command.of(asked_by(failed.call)).words
    new = Command.of(asked_by(later.call)).words - ours
    names = [word for word in new if word in error_words or is_name(word)]
    if not command_of(later.call):  # a value of one word names something: a skill, an agent, a folder
        later_texts = {value for value in later.call.arguments.values() if isinstance(value, str)}
        new_texts = [
            text for text in later_texts - {*failed.call.arguments.values()} if text and not re.search(r"\s", text)
        ]
        names += new_texts
        if not all("/" in text or failed.log.was_said(failed.site, text) for text in new_texts):
            return None
    return (later.call, "corrected") if failed.are_shown(names) else None


def _other_paths(failed: FailedCall) -> Decided:
    """The very next command, where it has other paths alone: folders around those it had, or shown ones in them."""
    later = next((candidate for candidate in failed.later[:1] if command_of(candidate.call)), None)
    inside = None if later is None else other_paths(command_of(failed.call), later.words)
    return (later.call, "corrected") if later is not None and inside is not None and failed.are_shown(inside) else None


def _typed_otherwise(failed: FailedCall) -> LaterCall | None:
    ours = command_of(failed.call)
    calls = (later for later in failed.later[:_NEXT] if command_of(later.call))
    return next((later for later in calls if is_typed_otherwise(ours, command_of(later.call))), None)


def _told(failed: FailedCall) -> Decided:
    """After a user's words: the same change, made as the user wants it; or the command that the words name.

    Words against something are about what the second command leaves out.
    """
    if is_edit(failed.call.name):
        return edit_rules.edit_again(failed)
    user_words = set(plain_words(failed.site.evidence_text))
    for later in failed.later[:1]:
        if channel_of(later.call.name) == channel_of(failed.call.name) == "shell":
            mine, theirs = (set(plain_words(text)) for text in (command_of(failed.call), later.words))
            names_it = (theirs - mine) & user_words and not user_words & (mine - theirs)
            left_out = user_words & (mine - theirs) and not theirs - mine and _AGAINST.search(failed.site.evidence_text)
            if names_it or left_out:
                return later.call, "corrected"
    return None


def _next_alike(failed: FailedCall, calls: Sequence[LaterCall] | None = None) -> LaterCall | None:
    """The next call of the same tool and purpose, if it is much like this one, and not more like one beside it."""
    for later in (failed.later if calls is None else calls)[:_NEXT]:
        same = later.call.name == failed.call.name and have_same_purpose(failed.call, later.call, failed.error)
        if same and failed.is_ours(later.call, likeness_of_calls):
            return later if likeness_of_calls(failed.call, later.call) >= MIN_ALIKE else None
    return None


def _is_meant(failed: FailedCall, later: LaterCall, name: str) -> bool:
    """Whether a call is for a file of this name, and for the same in it."""
    later_name = (later.path or "").rstrip("/").rpartition("/")[2]
    like = difflib.SequenceMatcher(None, later_name[:_MAX_NAME], name[:_MAX_NAME]).ratio()
    same = failed.call.arguments.get("pattern") == later.call.arguments.get("pattern")
    return same and like >= _MIN_NAME


def _is_read(failed: FailedCall, path: str) -> bool:
    """Whether all of it had been shown, and nobody came by since: to read it again tells nothing."""
    file = failed.judge.state.texts.get(path)
    return file is not None and file.is_whole and not file.doubt


def _is_shown(failed: FailedCall, later: LaterCall) -> bool:
    return failed.judge.verdict(later.call).says == "ok" or failed.judge.state.has_shown(later.path or "")


def _alone(call: ToolCall) -> Action:
    return Action(text="", calls=(call,))
