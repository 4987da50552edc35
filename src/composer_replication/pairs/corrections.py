"""Pair a session's failed calls with the call that should have been made instead.

After most failures the log contains a call that works, but the model could not always have known it at the failing
turn. The judge therefore evaluates it in the state before that turn:

- If the session had already shown the text or path that the working call uses, that call is chosen.
- Otherwise the first later lookup that brings up the missing fact is chosen ("look first").
- If there is no such lookup, or the file had been read already, the failure makes no pair.

"Look first" alone would teach the model to look always. `own_pairs` therefore also returns pairs of the opposite sort,
in which a call that worked at once is chosen over a lookup that it did not need.
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
    MIN_SIMILARITY,
    LaterCall,
    LaterCalls,
    argument_text,
    call_similarity,
    command_of,
    edit_similarity,
    filename_to_search,
    find_help_call,
    find_search,
    have_same_purpose,
    is_name,
    lines_about,
    listing_with,
    names_in,
    new_paths_inside,
    plain_words,
    replace_same_text,
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
from composer_replication.types import Action, Conversation, ErrorSite, ToolCall

if TYPE_CHECKING:
    from composer_replication.sites.judge import Judge, Judgement


How = Literal["corrected", "look_first", "looked_for_text", "looked_for_path"]
Source = Literal["correction", "user", "acted_at_once"]
ACTED: Source = "acted_at_once"


class Correction(NamedTuple):
    """A preference pair of a session: the rejected call, the chosen call, and how the two relate.

    If the source is "acted_at_once", `chosen` is a logged call that worked and `failed` a lookup that was never made.
    Both calls have the same id. Labels such as `description` are removed from both: that of a corrected call
    may refer to the error, which has not happened yet in the pair's state.
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
    """Return the call that should have been made at an error site, or None if the session does not show one."""
    own_corrections = own_pairs(conversation, find_error_sites(conversation), only={site.id})
    return next((correction for correction in own_corrections if correction.source != ACTED), None)


def own_pairs(
    conversation: Conversation, failures: Iterable[ErrorSite], *, only: Container[str] | None = None
) -> Iterator[Correction]:
    """Yield the preference pairs that a session contains: corrections, and calls that needed no lookup.

    `failures` are all failed calls of the conversation, kept or not. `only` limits the pairs to sites with these ids
    and leaves out the calls that needed no lookup.
    """
    sites_by_call = {site.call_id: site for site in failures if site.kind != NO_FAILURE}
    log, turn_id = LaterCalls(conversation, sites_by_call), ""
    for judged in judged_calls(conversation, sites=sites_by_call):
        # One turn's calls are written before any of their results is known, so all share the state before the turn.
        if judged.turn.id == turn_id:
            continue
        turn_id = judged.turn.id
        if judged.turn.origin != "model":
            continue
        for call_index, call in enumerate(judged.turn.calls):
            site = sites_by_call.get(call.id)
            if site is not None and site.is_kept and log.has_unique_id(call) and (only is None or site.id in only):
                choice = _choose_instead(_FailedCall(judged.judge, site, call, log, conversation.cwd))
                if choice is not None:
                    yield _correction(site, (log.turn_number(turn_id), call_index), call, *choice)
        # In a turn with several calls another one may have been the lookup.
        if only is None and len(judged.turn.calls) == 1 and log.has_worked(judged.call):
            yield from _acted_at_once(judged, log.turn_number(turn_id))


def _correction(site: ErrorSite, position: tuple[int, int], call: ToolCall, chosen: ToolCall, how: How) -> Correction:
    source: Source = "user" if site.kind == CORRECTED else "correction"
    calls = (_without_labels(call), replace(_without_labels(chosen), id=call.id))
    return Correction(site.id, site.kind, *position, *calls, how, source)


def _acted_at_once(judged: JudgedCall, turn_number: int) -> Iterator[Correction]:
    lookup = _unneeded_lookup(judged.call, judged.judgement, judged.judge.state)
    how: How = "looked_for_text" if is_edit(judged.call.name) else "looked_for_path"
    if lookup is not None:
        yield Correction("", "", turn_number, 0, lookup, _without_labels(judged.call), how, ACTED)


def _without_labels(call: ToolCall) -> ToolCall:
    """Return the call without the arguments that only describe it to the user, such as `description`."""
    arguments: dict[str, Any] = {key: value for key, value in call.arguments.items() if not is_label(call.name, key)}
    return replace(call, arguments=arguments)


# A correction follows its failure closely: later calls are more likely to be about something else.
_MAX_NEXT_CALLS = 3
# File names are compared by difflib's ratio, which is quadratic in their length.
_MAX_NAME_CHARS, _MIN_NAME_SIMILARITY = 100, 0.85
# "don't use the cache", "without --force"; not "note" or "nothing"
_NEGATION = re.compile(r"\b(?:don'?t|do not|no|not|never|without|skip|stop|instead|rather|too)\b", re.IGNORECASE)
_SYNTAX_KINDS = frozenset({"usage_error", "shell_syntax", "input_validation", "tool_not_found"})


def _choose_instead(failed: _FailedCall) -> Choice:
    """Return the call to choose instead of a failed one, by the rule for its kind of failure; None without a rule.

    Every rule returns the corrected call if the session had shown what it names, else the first lookup that would have
    shown it, else None.
    """
    rules: Mapping[str, Callable[[_FailedCall], Choice]] = {
        "edit_not_read": _unread_file,
        "edit_stale": _stale_file,
        "edit_no_match": _text_not_found,
        "edit_ambiguous": _ambiguous_text,
        "edit_noop": _corrected_edit,
        "file_not_found": _file_not_found,
        "is_directory": _search_in_folder,
        "wrong_folder": _wrong_folder,
        "shell_path_missing": _wrong_folder,
        CORRECTED: _follow_user,
        **dict.fromkeys(_SYNTAX_KINDS, _retyped),
    }
    rule = rules.get(failed.site.kind)
    choice = None if rule is None else rule(failed)
    return None if choice is None or _is_same_call(failed, choice[0]) else choice


def _is_same_call(failed: _FailedCall, chosen: ToolCall) -> bool:
    """Return whether the chosen call is the failed call again."""
    # `same_action` ignores how parameters are named, but a wrong name may be why the input was invalid.
    if failed.site.kind == "input_validation":
        return chosen.name == failed.call.name and chosen.arguments == failed.call.arguments
    return same_action(_as_action(chosen), _as_action(failed.call))


def _file_not_found(failed: _FailedCall) -> Choice:
    """Choose the same file at its real path if the session had shown it, else a search for it."""
    if failed.path is None:
        return None
    name = failed.path.rstrip("/").rpartition("/")[2]
    for later in failed.later[:_MAX_NEXT_CALLS]:
        if later.call.name == failed.call.name and later.path and _is_same_target(failed, later, name):
            if _is_shown(failed, later):
                # To read a file again that is known in full would be no correction.
                is_needless = not is_edit(later.call.name) and _is_read(failed, later.path)
                return None if is_needless else (later.call, "corrected")
            break  # the first call for the same file decides
    return _search(failed, failed.path) or _search_by_name(failed, failed.path)


def _search_by_name(failed: _FailedCall, path: str) -> Choice:
    """Choose a search that the session did not make, with its own tools, or else the listing that showed the file."""
    name = filename_to_search(path, failed.later, failed.judge.state, failed.cwd)
    search = name and (_search_by_filename(failed.call, name, failed.judge.state) or listing_with(name, failed.later))
    return (search, "look_first") if search else None


def _search_in_folder(failed: _FailedCall) -> Choice:
    """Choose the first search in the folder that the failed call took for a file."""
    return None if failed.path is None else _search(failed, failed.path)


def _search(failed: _FailedCall, path: str) -> Choice:
    search = find_search(path, failed.call, failed.later, failed.judge.state, failed.cwd)
    return None if search is None else (search.call, "look_first")


def _wrong_folder(failed: _FailedCall) -> Choice:
    """Choose the same command with paths that had been shown, or without the folder in which the shell already was."""
    later = _next_similar(failed, failed.ran)
    if later is None:
        typed = (word for word in Command.of(command_of(failed.call)).words if is_path(word) and "/" in word)
        # The error message names the path that is missing; with several candidates the search would be a guess.
        missing = [word for word in typed if word in failed.site.evidence_text]
        return _search(failed, missing[0]) if len(missing) == 1 else None
    failed_words, later_words = (Command.of(text).words for text in (command_of(failed.call), later.words))
    new_paths = [word for word in later_words - failed_words if is_path(word) and "/" in word]
    # `cd app && ls` fails in /repo/app; the later command leaves out `app`.
    shell_folder = failed.judge.state.paths.shell.path or ""
    dropped_words = [word.removeprefix("./") for word in failed_words - later_words]
    was_in_folder = any(word and f"/{shell_folder}".endswith(f"/{word}") for word in dropped_words)
    return (later.call, "corrected") if (new_paths or was_in_folder) and failed.are_shown(new_paths) else None


def _retyped(failed: _FailedCall) -> Choice:
    """Choose the same call with the right syntax, if the session had shown every name that is new in it.

    Without such a call, the program's own help is chosen, if the session asked for it next.
    """
    if (same_command := _same_command_other_paths(failed)) is not None:
        return same_command
    later = _next_similar(failed) or _next_retyped(failed)
    if later is None:
        help_call = find_help_call(command_of(failed.call), failed.later)
        return None if help_call is None else (help_call, "look_first")
    if is_edit(later.call.name):
        verdict = failed.judge.verdict(later.call)
        return (later.call, "corrected") if verdict.says == "ok" else None
    # The model may know a new word from the error message only, so that has to have been shown before, like a name.
    error_words, failed_words = Command.of(failed.error).words, Command.of(argument_text(failed.call)).words
    new_words = Command.of(argument_text(later.call)).words - failed_words
    names = [word for word in new_words if word in error_words or is_name(word)]
    if not command_of(later.call):  # an argument of a single word is a name: of a skill, an agent or a folder
        later_texts = {value for value in later.call.arguments.values() if isinstance(value, str)}
        new_texts = [
            text for text in later_texts - {*failed.call.arguments.values()} if text and not re.search(r"\s", text)
        ]
        names += new_texts
        if not all("/" in text or failed.log.was_mentioned_by_user(failed.site, text) for text in new_texts):
            return None
    return (later.call, "corrected") if failed.are_shown(names) else None


def _same_command_other_paths(failed: _FailedCall) -> Choice:
    """Choose the very next command if only its paths differ: parent folders, or paths inside them that were shown."""
    later = next((candidate for candidate in failed.later[:1] if command_of(candidate.call)), None)
    paths = None if later is None else new_paths_inside(command_of(failed.call), later.words)
    return (later.call, "corrected") if later is not None and paths is not None and failed.are_shown(paths) else None


def _next_retyped(failed: _FailedCall) -> LaterCall | None:
    """Return the next command that is the failed one in another spelling, or None."""
    failed_command = command_of(failed.call)
    commands = (later for later in failed.later[:_MAX_NEXT_CALLS] if command_of(later.call))
    return next((later for later in commands if is_typed_otherwise(failed_command, command_of(later.call))), None)


def _follow_user(failed: _FailedCall) -> Choice:
    """Choose the edit as the user wanted it, or the next command if it does what the user's message names.

    "use pytest" names what the next command adds. "don't use --force" names what it leaves out.
    """
    if is_edit(failed.call.name):
        return _corrected_edit(failed)
    user_words = set(plain_words(failed.site.evidence_text))
    for later in failed.later[:1]:
        if channel_of(later.call.name) == channel_of(failed.call.name) == "shell":
            failed_words, later_words = (set(plain_words(text)) for text in (command_of(failed.call), later.words))
            new_words, dropped_words = later_words - failed_words, failed_words - later_words
            is_negated = _NEGATION.search(failed.site.evidence_text)
            adds_named_word = user_words & new_words and not user_words & dropped_words
            drops_named_word = user_words & dropped_words and not new_words and is_negated
            if adds_named_word or drops_named_word:
                return later.call, "corrected"
    return None


def _next_similar(failed: _FailedCall, calls: Sequence[LaterCall] | None = None) -> LaterCall | None:
    """Return the next call of the same tool and purpose if it is similar enough, or None.

    A call that is more similar to another failed call of the same turn belongs to that one.
    """
    for later in (failed.later if calls is None else calls)[:_MAX_NEXT_CALLS]:
        is_same_tool = later.call.name == failed.call.name
        has_same_purpose = is_same_tool and have_same_purpose(failed.call, later.call, failed.error)
        if has_same_purpose and failed.is_best_match(later.call, call_similarity):
            return later if call_similarity(failed.call, later.call) >= MIN_SIMILARITY else None
    return None


def _is_same_target(failed: _FailedCall, later: LaterCall, name: str) -> bool:
    """Return whether a call is about a file with nearly this name and, if it searches, for the same pattern."""
    later_name = (later.path or "").rstrip("/").rpartition("/")[2]
    similarity = difflib.SequenceMatcher(None, later_name[:_MAX_NAME_CHARS], name[:_MAX_NAME_CHARS]).ratio()
    same_pattern = failed.call.arguments.get("pattern") == later.call.arguments.get("pattern")
    return same_pattern and similarity >= _MIN_NAME_SIMILARITY


def _is_read(failed: _FailedCall, path: str) -> bool:
    """Return whether the whole file had been shown and cannot have changed since."""
    file = failed.judge.state.texts.get(path)
    return file is not None and file.is_whole and not file.doubt


def _is_shown(failed: _FailedCall, later: LaterCall) -> bool:
    return failed.judge.verdict(later.call).says == "ok" or failed.judge.state.has_shown(later.path or "")


def _as_action(call: ToolCall) -> Action:
    return Action(text="", calls=(call,))


# A call with many edits is compared edit by edit with each later one; the first few identify it.
_MAX_EDITS = 20
# The highest `doubt` of a file in `SessionState.texts`: it has certainly changed since it was shown.
_DOUBT_CHANGED = 2
# What the agents' read tools show without a `limit`.
_DEFAULT_READ_LINES = 2000
# A shorter new text may be in the file by chance, and does not prove that the edit was made before.
_MIN_APPLIED_CHARS = 8
# The judge's rules for "the text to replace was shown".
_TEXT_SHOWN_RULES = ("found_in_whole_file", "found_in_part")


def _unread_file(failed: _FailedCall) -> Choice:
    """Choose a read of the file if the session had not read it, or had read it only before a compaction."""
    # After a compaction the log goes on without what was read before, and the agent asks for a new read.
    rule, state = failed.judge.verdict(failed.call).rule, failed.judge.state
    is_forgotten = rule == "read_before" and state.texts.is_continued and not state.has_touched(failed.path or "")
    if rule != "not_read" and not is_forgotten:
        return None
    return _stale_file(failed)


def _stale_file(failed: _FailedCall) -> Choice:
    """Choose the read that the agent demands before an edit: the session's own, else one of the whole file."""
    whole_read = _read_whole_file(failed.call, failed.path or "", failed.judge.state)
    return _first_lookup(failed, to_edit=True) or (None if whole_read is None else (whole_read, "look_first"))


def _text_not_found(failed: _FailedCall) -> Choice:
    """Choose the edit as it worked later if its text had been shown; else a read if the file was not known in full.

    None if the text was in the file before the turn, or the change had been made already: no call was needed.
    """
    verdict = failed.judge.verdict(failed.call)
    if verdict.says == "ok" or _is_already_applied(failed):
        return None
    file = failed.judge.state.texts.get(failed.path or "")
    was_known_in_full = file is not None and file.is_whole and file.doubt != _DOUBT_CHANGED
    return _corrected_edit(failed) or (None if was_known_in_full else _first_lookup(failed))


def _ambiguous_text(failed: _FailedCall) -> Choice:
    """Choose the edit as it worked later if the session had shown that the text occurs more than once."""
    return _corrected_edit(failed) if failed.judge.verdict(failed.call).kind == "edit_ambiguous" else None


def _corrected_edit(failed: _FailedCall) -> Choice:
    """Choose the same change in the same lines as it worked later, if the session already knew all of it."""
    later_edit = _next_same_edit(failed)
    verdict = None if later_edit is None else failed.judge.verdict(later_edit)
    if later_edit is None or verdict is None or verdict.says != "ok" or not verdict.rule.startswith(_TEXT_SHOWN_RULES):
        return None
    pairs = itertools.product(_edits(failed, failed.call), _edits(failed, later_edit))
    if not any(itertools.starmap(replace_same_text, pairs)):
        return None  # the same new text in other lines is another change
    return (later_edit, "corrected") if _knows_names(failed, later_edit) else None


def _is_already_applied(failed: _FailedCall) -> bool:
    """Return whether the file was shown with the new text of an edit, and without its old text."""
    has_shown = failed.judge.state.has_shown_text
    edits = [edit for edit in _edits(failed, failed.call) if isinstance(edit, Replace)]
    edits = [edit for edit in edits if len(edit.new.strip()) >= _MIN_APPLIED_CHARS and edit.new not in edit.old]
    return any(has_shown(edit.path, edit.new) and not has_shown(edit.path, edit.old) for edit in edits)


def _knows_names(failed: _FailedCall, later_edit: ToolCall) -> bool:
    """Return whether an edit uses no name that first came up between the failure and the edit."""
    calls_between = itertools.takewhile(lambda later: later.call.id != later_edit.id, failed.later)
    texts_between = (text for later in calls_between for text in (later.text, argument_text(later.call)))
    names_between = {name for text in texts_between for name in names_in(text)}
    new_names = names_in(argument_text(later_edit)) - names_in(argument_text(failed.call))
    return failed.are_shown([*new_names & names_between])


def _next_same_edit(failed: _FailedCall) -> ToolCall | None:
    """Return the first later edit that makes the same change, unless it matches another failed call better."""
    edits = (later.call for later in failed.later if is_edit(later.call.name))
    return next((call for call in edits if failed.is_best_match(call, partial(_edit_match, failed))), None)


def _edit_match(failed: _FailedCall, failed_edit: ToolCall, later_edit: ToolCall) -> float:
    """Return how well the best pair of edits of two calls matches; 0 if none does."""
    pairs = itertools.product(_edits(failed, failed_edit), _edits(failed, later_edit))
    return max(itertools.starmap(edit_similarity, pairs), default=0.0)


def _edits(failed: _FailedCall, call: ToolCall) -> list[Operation]:
    return (edit_operations(call, failed.cwd) or [])[:_MAX_EDITS]


def _first_lookup(failed: _FailedCall, *, to_edit: bool = False) -> Choice:
    """Choose the first lookup of the lines that the failed edit is about, if it showed something new.

    `to_edit` is for agents that demand a read before an edit: then only a read counts, whether it shows something new
    or not. None if the file was edited before it was looked at.
    """
    later_edit = _next_same_edit(failed)
    edits = _edits(failed, failed.call) + ([] if later_edit is None else _edits(failed, later_edit))
    for later in failed.later:
        if later.path is None or failed.path is None or not failed.is_same_path(later.path, failed.path):
            continue
        # An edit in between has changed the file, so a later read may show text that did not exist before the failure.
        if is_edit(later.call.name):
            return None
        if not later.is_look or (to_edit and plain_name(later.call.name) in LISTS | SEARCHES):
            continue
        lines = lines_about(edits, later.lines)
        is_whole = not {"offset", "limit"} & {*later.call.arguments}
        if lines or (to_edit and is_whole):
            is_new = to_edit or not _has_shown_lines(failed, lines)
            is_top = not to_edit and later.call.arguments.get("offset") in (None, 0, 1)
            return _with_known_range(failed, later.call, is_known=is_whole or is_top) if is_new else None
    return None


def _with_known_range(failed: _FailedCall, lookup: ToolCall, *, is_known: bool) -> Choice:
    """Choose a read of a part only if its line numbers had been shown, else a read of the whole file."""
    offset, limit = (lookup.arguments.get(key) for key in ("offset", "limit"))
    first = offset if isinstance(offset, int) else 1
    lines = range(first, first + (limit if isinstance(limit, int) else _DEFAULT_READ_LINES))
    if is_known or (first > 1 and failed.log.has_shown_line_numbers(failed.site, failed.path or "", lines)):
        return lookup, "look_first"
    whole_read = _read_whole_file(failed.call, failed.path or "", failed.judge.state)
    return None if whole_read is None else (whole_read, "look_first")


def _has_shown_lines(failed: _FailedCall, lines: Sequence[str]) -> bool:
    """Return whether the session had shown or written these lines, and the file is not known to have changed since."""
    file = failed.judge.state.texts.get(failed.path or "")
    if file is None or file.doubt == _DOUBT_CHANGED:
        return False
    return all(file.count(line) for line in lines if line.strip())


def _unneeded_lookup(call: ToolCall, judgement: Judgement, state: SessionState) -> ToolCall | None:
    """Return a lookup that this working call did not need, with the session's own tools.

    None if the judge did not predict that the call works: then a lookup might have been worth it.
    """
    path = path_argument(call.arguments) if channel_of(call.name) == "file" else None
    if judgement.says != "ok" or not path:
        return None
    if is_edit(call.name):
        return _read_whole_file(call, path, state) if judgement.rule.startswith(_TEXT_SHOWN_RULES) else None
    reads = only_looks(call.name, call.arguments) and plain_name(call.name) not in LISTS | SEARCHES
    if reads and not state.has_touched(path):
        return _search_by_filename(call, path.rstrip("/").rpartition("/")[2], state)
    return None


def _read_whole_file(call: ToolCall, path: str, state: SessionState) -> ToolCall | None:
    """Return a read of a whole file with the session's read tool; None if the session has not used one."""
    key = None if state.reader is None else next((name for name in PATH if name in state.tools[state.reader]), None)
    return None if key is None or state.reader is None else _lookup_call(call, state.reader, {key: path})


def _search_by_filename(call: ToolCall, name: str, state: SessionState) -> ToolCall | None:
    """Return a search for a file name, by glob if the session has used that tool, else by `find` in its shell."""
    for tool, parameters in state.tools.items():
        if plain_name(tool) == "glob" and "pattern" in parameters:
            return _lookup_call(call, tool, {"pattern": f"**/{name}"})
    for tool, parameters in state.tools.items():
        key = command_parameter(tool, dict.fromkeys(parameters, ""))
        if key is not None:
            return _lookup_call(call, tool, {key: f"find . -name {shlex.quote(name)}"})
    return None


def _lookup_call(call: ToolCall, tool: str, arguments: Mapping[str, str]) -> ToolCall:
    return ToolCall(id=call.id, name=tool, arguments=dict(arguments))


Choice = tuple[ToolCall, Literal["corrected", "look_first"]] | None
"""The call to choose, and how it relates to the failed one; None if nothing can be learned from the failure."""

# Every word is searched for in everything that was shown. A call with more new words is not checked, only rejected.
_MAX_WORDS = 20


class _FailedCall:
    """A failed call in the state before its turn, with what the session did afterwards.

    `later` are the calls that worked after it, `ran` also those that failed at their task (such as tests), and
    `siblings` the other failed calls of its turn.
    """

    def __init__(self, judge: Judge, site: ErrorSite, call: ToolCall, log: LaterCalls, cwd: str | None) -> None:
        self.judge, self.site, self.call, self.cwd = judge, site, call, cwd
        self.later, self.siblings, self.error = log.after(site), log.failed_siblings(site), log.result_text(call)
        self.ran, self.log = log.after(site, with_failed_work=True), log
        self.path = path_argument(call.arguments) if channel_of(call.name) == "file" else None

    def is_best_match(self, later: ToolCall, similarity: Callable[[ToolCall, ToolCall], float]) -> bool:
        """Return whether a later call is similar to this one, and not more so to another failed call of the turn."""
        score = similarity(self.call, later)
        return score > 0 and all(similarity(sibling, later) <= score for sibling in self.siblings)

    def are_shown(self, words: Sequence[str]) -> bool:
        """Return whether the session had shown all of these words; False for very many."""
        return len(words) <= _MAX_WORDS and all(map(self.judge.state.has_shown, words))

    def is_same_path(self, path_a: str, path_b: str) -> bool:
        return normal_path(path_a, self.cwd) == normal_path(path_b, self.cwd)
