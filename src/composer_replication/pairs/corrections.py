"""Calls that a session put right itself: the call that failed, and what should have been done in its place.

After most failures the log holds the right call. Not every one could have been known when the wrong one was made: so
the judge is asked at the state before the failing turn. Where it finds the text or path of the corrected call already
shown, that call is right there; where it does not, the look that came first and names what was missing is; and where
there is none, or the failing call's file had been read, there is nothing to learn from the two.
"""

from __future__ import annotations

import difflib
import itertools
import re
import shlex
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from composer_replication.pairs.later_calls import (
    MIN_ALIKE,
    LaterCall,
    LaterCalls,
    asked_by,
    belong_together,
    command_of,
    have_same_purpose,
    help_for,
    is_name,
    likeness_of_calls,
    lines_for,
    name_to_search,
    names_in,
    other_paths,
    plain_words,
    search_for,
    share_a_place,
    tree_with,
)
from composer_replication.sites.actions.edits import Operation, Replace, edit_operations
from composer_replication.sites.actions.equality import same_action
from composer_replication.sites.actions.session_state import SessionState
from composer_replication.sites.actions.shell_command import Command, is_path
from composer_replication.sites.actions.tools import (
    LISTS,
    PATH,
    SEARCHES,
    channel_of,
    command_parameter,
    is_edit,
    is_label,
    normal_path,
    only_looks,
    path_argument,
    plain_name,
)
from composer_replication.sites.find import NO_FAILURE, find_error_sites
from composer_replication.sites.judge.walk import JudgedCall, judged_calls
from composer_replication.sites.retyped import is_typed_otherwise
from composer_replication.sites.user_words import CORRECTED
from composer_replication.types import (
    Action,
    Conversation,
    ErrorSite,
    ToolCall,
)

if TYPE_CHECKING:
    from composer_replication.pairs.later_calls import LaterCalls
    from composer_replication.sites.judge import Judge, Judgement


How = Literal["corrected", "look_first", "looked_for_text", "looked_for_path"]
Source = Literal["correction", "user", "acted_at_once"]
ACTED: Source = "acted_at_once"


class Correction(NamedTuple):
    """The call that failed, the one to choose instead, and how the two belong together.

    Where acting at once was right, `chosen` was made and worked, and `failed` is a look that nobody made or needed.
    Both have the same id, and no words for the reader of the log: those of a corrected call answer its error.
    `turn_number` counts the assistant's turns from 0, `call_number` the calls of that turn.
    """

    site_id: str
    kind: str
    turn_number: int
    call_number: int
    failed: ToolCall
    chosen: ToolCall
    how: How
    source: Source


def correction_of(conversation: Conversation, site: ErrorSite) -> Correction | None:
    """What should have been done in place of the site's call, as far as its session knew; None where nobody can say."""
    own_corrections = own_pairs(conversation, find_error_sites(conversation), only={site.id})
    return next((correction for correction in own_corrections if correction.source != ACTED), None)


def own_pairs(
    conversation: Conversation, failures: Iterable[ErrorSite], *, only: Container[str] | None = None
) -> Iterator[Correction]:
    """What a session itself shows to be better and worse: its corrections, and calls that acted at once and were right.

    `failures` are all failures of the conversation, kept or not; `only` are ids of those to look at.
    """
    sites_by_call = {site.call_id: site for site in failures if site.kind != NO_FAILURE}
    log, turn_id = LaterCalls(conversation, sites_by_call), ""
    for judged in judged_calls(conversation, sites=sites_by_call):
        if judged.turn.id == turn_id:  # what the calls before it in the same turn brought was not known yet
            continue
        turn_id = judged.turn.id
        if judged.turn.origin != "model":
            continue
        for call_index, call in enumerate(judged.turn.calls):
            site = sites_by_call.get(call.id)
            if site is not None and site.is_kept and log.is_one(call) and (only is None or site.id in only):
                decided = decide(_FailedCall(judged.judge, site, call, log, conversation.cwd))
                if decided is not None:
                    yield _correction(site, (log.turn_number(turn_id), call_index), call, *decided)
        if only is None and len(judged.turn.calls) == 1 and log.has_worked(judged.call):
            yield from _acted(judged, log.turn_number(turn_id))


def _correction(site: ErrorSite, position: tuple[int, int], call: ToolCall, chosen: ToolCall, how: How) -> Correction:
    source: Source = "user" if site.kind == CORRECTED else "correction"
    sides = (_without_labels(call), replace(_without_labels(chosen), id=call.id))
    return Correction(site.id, site.kind, *position, *sides, how, source)


def _acted(judged: JudgedCall, turn_number: int) -> Iterator[Correction]:
    look = _needless_look(judged.call, judged.judgement, judged.judge.state)
    how: How = "looked_for_text" if is_edit(judged.call.name) else "looked_for_path"
    if look is not None:
        yield Correction("", "", turn_number, 0, look, _without_labels(judged.call), how, ACTED)


def _without_labels(call: ToolCall) -> ToolCall:
    """The call without words that are for the reader of the log alone."""
    arguments: dict[str, Any] = {key: value for key, value in call.arguments.items() if not is_label(call.name, key)}
    return replace(call, arguments=arguments)


# What should have been done in place of a call that failed, by its kind of failure, as far as the session knew.
#
# The judge stands at the state before the failing turn. Every rule gives the corrected call where what it names had
# been shown by then, else the look that came first, else nothing.

_NEXT = 3
_MAX_NAME, _MIN_NAME = 100, 0.85
_AGAINST = re.compile(r"\b(?:don'?t|do not|no|not|never|without|skip|stop|instead|rather|too)\b", re.IGNORECASE)
_TYPED_WRONG = frozenset({"usage_error", "shell_syntax", "input_validation", "tool_not_found"})


def decide(failed: _FailedCall) -> Decided:
    """The call to choose, and how it belongs to the one that failed."""
    rules: Mapping[str, Callable[[_FailedCall], Decided]] = {
        "edit_not_read": not_read,
        "edit_stale": stale,
        "edit_no_match": no_match,
        "edit_ambiguous": ambiguous,
        "edit_noop": _edit_again,
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


def _is_the_call(failed: _FailedCall, chosen: ToolCall) -> bool:
    """Whether nothing would be chosen but the failing call; a parameter's wrong name is a difference, too."""
    if failed.site.kind == "input_validation":
        return chosen.name == failed.call.name and chosen.arguments == failed.call.arguments
    return same_action(_alone(chosen), _alone(failed.call))


def _not_found(failed: _FailedCall) -> Decided:
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


def _search_by_name(failed: _FailedCall, path: str) -> Decided:
    """A search that nobody made, as the session searches; where it never did, the list that brought the file up."""
    name = name_to_search(path, failed.later, failed.judge.state, failed.cwd)
    search = name and (searching(failed.call, name, failed.judge.state) or tree_with(name, failed.later))
    return (search, "look_first") if search else None


def _listing(failed: _FailedCall) -> Decided:
    return None if failed.path is None else _search(failed, failed.path)


def _search(failed: _FailedCall, path: str) -> Decided:
    search = search_for(path, failed.call, failed.later, failed.judge.state, failed.cwd)
    return None if search is None else (search.call, "look_first")


def _elsewhere(failed: _FailedCall) -> Decided:
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


def _typed_again(failed: _FailedCall) -> Decided:
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


def _other_paths(failed: _FailedCall) -> Decided:
    """The very next command, where it has other paths alone: folders around those it had, or shown ones in them."""
    later = next((candidate for candidate in failed.later[:1] if command_of(candidate.call)), None)
    inside = None if later is None else other_paths(command_of(failed.call), later.words)
    return (later.call, "corrected") if later is not None and inside is not None and failed.are_shown(inside) else None


def _typed_otherwise(failed: _FailedCall) -> LaterCall | None:
    ours = command_of(failed.call)
    calls = (later for later in failed.later[:_NEXT] if command_of(later.call))
    return next((later for later in calls if is_typed_otherwise(ours, command_of(later.call))), None)


def _told(failed: _FailedCall) -> Decided:
    """After a user's words: the same change, made as the user wants it; or the command that the words name.

    Words against something are about what the second command leaves out.
    """
    if is_edit(failed.call.name):
        return _edit_again(failed)
    user_words = set(plain_words(failed.site.evidence_text))
    for later in failed.later[:1]:
        if channel_of(later.call.name) == channel_of(failed.call.name) == "shell":
            mine, theirs = (set(plain_words(text)) for text in (command_of(failed.call), later.words))
            names_it = (theirs - mine) & user_words and not user_words & (mine - theirs)
            left_out = user_words & (mine - theirs) and not theirs - mine and _AGAINST.search(failed.site.evidence_text)
            if names_it or left_out:
                return later.call, "corrected"
    return None


def _next_alike(failed: _FailedCall, calls: Sequence[LaterCall] | None = None) -> LaterCall | None:
    """The next call of the same tool and purpose, if it is much like this one, and not more like one beside it."""
    for later in (failed.later if calls is None else calls)[:_NEXT]:
        same = later.call.name == failed.call.name and have_same_purpose(failed.call, later.call, failed.error)
        if same and failed.is_ours(later.call, likeness_of_calls):
            return later if likeness_of_calls(failed.call, later.call) >= MIN_ALIKE else None
    return None


def _is_meant(failed: _FailedCall, later: LaterCall, name: str) -> bool:
    """Whether a call is for a file of this name, and for the same in it."""
    later_name = (later.path or "").rstrip("/").rpartition("/")[2]
    like = difflib.SequenceMatcher(None, later_name[:_MAX_NAME], name[:_MAX_NAME]).ratio()
    same = failed.call.arguments.get("pattern") == later.call.arguments.get("pattern")
    return same and like >= _MIN_NAME


def _is_read(failed: _FailedCall, path: str) -> bool:
    """Whether all of it had been shown, and nobody came by since: to read it again tells nothing."""
    file = failed.judge.state.texts.get(path)
    return file is not None and file.is_whole and not file.doubt


def _is_shown(failed: _FailedCall, later: LaterCall) -> bool:
    return failed.judge.verdict(later.call).says == "ok" or failed.judge.state.has_shown(later.path or "")


def _alone(call: ToolCall) -> Action:
    return Action(text="", calls=(call,))


# What should have been done in place of an edit that failed: the edit as it worked, or the reading before it.

_MAX_EDITS = 20
_CHANGED, _MAX_LINES = 2, 2000
_MIN_DONE = 8
_FOUND = ("found_in_whole_file", "found_in_part")


def not_read(failed: _FailedCall) -> Decided:
    """The reading, where nothing in this log had read the file: what was read before a compaction is gone.

    The agent asks for it whatever comes next, so where the session did not read it, the whole file is to be read.
    """
    rule, state = failed.judge.verdict(failed.call).rule, failed.judge.state
    is_forgotten = rule == "read_before" and state.texts.is_continued and not state.has_touched(failed.path or "")
    if rule != "not_read" and not is_forgotten:
        return None
    return stale(failed)


def stale(failed: _FailedCall) -> Decided:
    """The reading that the agent asks for: the session's own, else of the whole file."""
    whole = reading(failed.call, failed.path or "", failed.judge.state)
    return _reading(failed, to_edit=True) or (None if whole is None else (whole, "look_first"))


def no_match(failed: _FailedCall) -> Decided:
    """The edit as it worked, where its text had been shown; the reading, where not all of the file had been.

    Nothing where the text was there before the turn, or an earlier edit had made the change: no call was needed.
    """
    verdict = failed.judge.verdict(failed.call)
    if verdict.says == "ok" or _is_done(failed):
        return None
    file = failed.judge.state.texts.get(failed.path or "")
    had_all = file is not None and file.is_whole and file.doubt != _CHANGED
    return _edit_again(failed) or (None if had_all else _reading(failed))


def ambiguous(failed: _FailedCall) -> Decided:
    """The edit as it worked, where the text had been shown more than once."""
    return _edit_again(failed) if failed.judge.verdict(failed.call).kind == "edit_ambiguous" else None


def _edit_again(failed: _FailedCall) -> Decided:
    """The same change at the same place, as it worked later, where the session knew all of it before."""
    again = _same_edit(failed)
    verdict = None if again is None else failed.judge.verdict(again)
    if again is None or verdict is None or verdict.says != "ok" or not verdict.rule.startswith(_FOUND):
        return None
    pairs = itertools.product(_edits(failed, failed.call), _edits(failed, again))
    if not any(itertools.starmap(share_a_place, pairs)):
        return None  # the same words put elsewhere are another change
    return (again, "corrected") if _knew_names(failed, again) else None


def _is_done(failed: _FailedCall) -> bool:
    has_shown = failed.judge.state.has_shown_text
    edits = [edit for edit in _edits(failed, failed.call) if isinstance(edit, Replace)]
    done = [edit for edit in edits if len(edit.new.strip()) >= _MIN_DONE and edit.new not in edit.old]
    return any(has_shown(edit.path, edit.new) and not has_shown(edit.path, edit.old) for edit in done)


def _knew_names(failed: _FailedCall, again: ToolCall) -> bool:
    """Whether a call uses no name that was made or shown only between the failure and it."""
    between = itertools.takewhile(lambda later: later.call.id != again.id, failed.later)
    came_up = {name for later in between for text in (later.text, asked_by(later.call)) for name in names_in(text)}
    return failed.are_shown([*(names_in(asked_by(again)) - names_in(asked_by(failed.call))) & came_up])


def _same_edit(failed: _FailedCall) -> ToolCall | None:
    """The first later edit that is the same change, and not rather that of another call of the failing turn."""
    edits = (later.call for later in failed.later if is_edit(later.call.name))
    return next((call for call in edits if failed.is_ours(call, partial(_sureness, failed))), None)


def _sureness(failed: _FailedCall, one: ToolCall, other_call: ToolCall) -> float:
    pairs = itertools.product(_edits(failed, one), _edits(failed, other_call))
    return max(itertools.starmap(belong_together, pairs), default=0.0)


def _edits(failed: _FailedCall, call: ToolCall) -> list[Operation]:
    return (edit_operations(call, failed.cwd) or [])[:_MAX_EDITS]


def _reading(failed: _FailedCall, *, to_edit: bool = False) -> Decided:
    """The first look at what the failing edit is about, before its file was changed, if it showed something new.

    `to_edit` is a look that the agent itself asks for, new or not; only a reading counts as one.
    """
    again = _same_edit(failed)
    edits = _edits(failed, failed.call) + ([] if again is None else _edits(failed, again))
    for later in failed.later:
        if later.path is None or failed.path is None or not failed.is_same_path(later.path, failed.path):
            continue
        if is_edit(later.call.name):
            return None
        if not later.is_look or (to_edit and plain_name(later.call.name) in LISTS | SEARCHES):
            continue
        lines = lines_for(edits, later.lines)
        is_whole = not {"offset", "limit"} & {*later.call.arguments}
        if lines or (to_edit and is_whole):
            is_new = to_edit or not _had_shown(failed, lines)
            may_be_top = not to_edit and later.call.arguments.get("offset") in (None, 0, 1)
            return _as_known(failed, later.call, is_known=is_whole or may_be_top) if is_new else None
    return None


def _as_known(failed: _FailedCall, look: ToolCall, *, is_known: bool) -> Decided:
    """A reading as it could be asked for: of a part only where numbers of its lines had been shown."""
    offset, limit = (look.arguments.get(key) for key in ("offset", "limit"))
    first = offset if isinstance(offset, int) else 1
    lines = range(first, first + (limit if isinstance(limit, int) else _MAX_LINES))
    if is_known or (first > 1 and failed.log.had_lines(failed.site, failed.path or "", lines)):
        return look, "look_first"
    whole = reading(failed.call, failed.path or "", failed.judge.state)
    return None if whole is None else (whole, "look_first")


def _had_shown(failed: _FailedCall, lines: Sequence[str]) -> bool:
    """Whether the session had shown or written these lines, and nobody is known to have changed the file since."""
    file = failed.judge.state.texts.get(failed.path or "")
    if file is None or file.doubt == _CHANGED:
        return False
    return all(file.count(line) for line in lines if line.strip())


# States in which acting at once was right: what a look would have been there that nobody needed.
#
# Most corrections teach to look first. Alone they would teach to look always, so as many pairs say the opposite: a call
# that rested on what had been shown, and worked, is better than showing it again. The look is written as the session
# writes such calls.


def _needless_look(call: ToolCall, judgement: Judgement, state: SessionState) -> ToolCall | None:
    """The look that this call did without, at the state before it; None where the judge does not say that it works."""
    path = path_argument(call.arguments) if channel_of(call.name) == "file" else None
    if judgement.says != "ok" or not path:
        return None
    if is_edit(call.name):
        return reading(call, path, state) if judgement.rule.startswith(_FOUND) else None
    reads = only_looks(call.name, call.arguments) and plain_name(call.name) not in LISTS | SEARCHES
    if reads and not state.has_touched(path):
        return searching(call, path.rstrip("/").rpartition("/")[2], state)
    return None


def reading(call: ToolCall, path: str, state: SessionState) -> ToolCall | None:
    """The reading of a whole file, as the session reads files; None where it has read none."""
    key = None if state.reader is None else next((name for name in PATH if name in state.tools[state.reader]), None)
    return None if key is None or state.reader is None else _look(call, state.reader, {key: path})


def searching(call: ToolCall, name: str, state: SessionState) -> ToolCall | None:
    """By the tool that finds files where the session has used it, else by its shell."""
    for tool, parameters in state.tools.items():
        if plain_name(tool) == "glob" and "pattern" in parameters:
            return _look(call, tool, {"pattern": f"**/{name}"})
    for tool, parameters in state.tools.items():
        key = command_parameter(tool, dict.fromkeys(parameters, ""))
        if key is not None:
            return _look(call, tool, {key: f"find . -name {shlex.quote(name)}"})
    return None


def _look(call: ToolCall, tool: str, arguments: Mapping[str, str]) -> ToolCall:
    return ToolCall(id=call.id, name=tool, arguments=dict(arguments))


# One failing call at the state before its turn: what the session knew by then, and what it did afterwards.

HowRepaired = Literal["corrected", "look_first"]
Decided = tuple[ToolCall, HowRepaired] | None
"""The call to choose, and how it belongs to the one that failed."""
_MAX_WORDS = 20


class _FailedCall:
    """What a rule is asked about. `later` are the calls after it, `beside` the others of its turn."""

    def __init__(self, judge: Judge, site: ErrorSite, call: ToolCall, log: LaterCalls, cwd: str | None) -> None:
        self.judge, self.site, self.call, self.cwd = judge, site, call, cwd
        self.later, self.beside, self.error = log.after(site), log.beside(site), log.text_of(call)
        self.ran, self.log = log.after(site, with_failed_work=True), log
        self.path = path_argument(call.arguments) if channel_of(call.name) == "file" else None

    def is_ours(self, later: ToolCall, measure: Callable[[ToolCall, ToolCall], float]) -> bool:
        """Whether a later call is like this one, and like no other of its turn more."""
        ours = measure(self.call, later)
        return ours > 0 and all(measure(other_call, later) <= ours for other_call in self.beside)

    def are_shown(self, words: Sequence[str]) -> bool:
        """Whether the session had shown all of them; of very many nobody asks, for each is searched for."""
        return len(words) <= _MAX_WORDS and all(map(self.judge.state.has_shown, words))

    def is_same_path(self, path: str, other: str) -> bool:
        return normal_path(path, self.cwd) == normal_path(other, self.cwd)
