"""Pair a session's failed calls with the call that should have been made instead.

After most failures the log contains a call that works, but the model could not always have known it at the failing
turn. The judge therefore evaluates it in the state before that turn:

- If the session had already shown the text or path that the working call uses, that call is chosen.
- Otherwise the first later lookup that shows the missing fact is chosen ("look first").
- If there is no such lookup, or the file had already been read, no pair is made.

Pairs of the second kind alone would teach the model to look first every time. `find_session_pairs` therefore also
yields the opposite: pairs in which a call that succeeded at once is preferred over a lookup that it did not need.
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
    all_argument_text,
    call_command,
    call_similarity,
    edit_similarity,
    find_search,
    guess_filename_to_search,
    have_same_purpose,
    replace_same_text,
    token_similarity,
)
from composer_replication.sites.actions.edits import Operation, Replace, edit_operations
from composer_replication.sites.actions.equality import same_action
from composer_replication.sites.actions.session_state import SessionState
from composer_replication.sites.actions.shell_command import Command, is_path
from composer_replication.sites.actions.tools import (
    LIST_TOOLS,
    PATH_KEYS,
    SEARCH_TOOLS,
    command_parameter,
    is_descriptive_parameter,
    is_edit,
    is_read_only_tool_call,
    normal_path,
    path_argument,
    plain_name,
    tool_channel,
)
from composer_replication.sites.find import NO_FAILURE, find_error_sites
from composer_replication.sites.judge.judged_calls import JudgedCall, judged_calls
from composer_replication.sites.retyped_commands import corrects_typed_command
from composer_replication.sites.user_corrections import CORRECTED
from composer_replication.types import Action, Conversation, ErrorSite, ToolCall

if TYPE_CHECKING:
    from composer_replication.sites.judge import Judge, Judgement


Relation = Literal["corrected", "look_first", "looked_for_text", "looked_for_path"]
Source = Literal["correction", "user", "acted_at_once"]
ACTED: Source = "acted_at_once"


class Correction(NamedTuple):
    """A preference pair from one session: the rejected call `failed`, the `chosen` call, and how the two relate.

    If the source is "acted_at_once", `chosen` is a logged call that worked, and `failed` is a lookup that was never
    made. Both calls have the same id. Parameters that only describe the call, such as `description`, are removed from
    both: the description of a corrected call may refer to the error, which has not happened yet in the state of the
    pair.

    `turn_number` counts the assistant's turns from 0, and `call_number` the calls within that turn.
    """

    site_id: str
    kind: str
    turn_number: int
    call_number: int
    failed: ToolCall
    chosen: ToolCall
    how: Relation
    source: Source


def find_correction(conversation: Conversation, site: ErrorSite) -> Correction | None:
    """Return the call that should have been made at an error site, or None if the session does not show one."""
    own_corrections = find_session_pairs(conversation, find_error_sites(conversation), only={site.id})
    return next((correction for correction in own_corrections if correction.source != ACTED), None)


def find_session_pairs(
    conversation: Conversation, failures: Iterable[ErrorSite], *, only: Container[str] | None = None
) -> Iterator[Correction]:
    """Yield the preference pairs in a session: corrections, and calls that succeeded without a lookup.

    `failures` are all error sites in the conversation, whether kept or not. If `only` is given, just the corrections of
    the sites with these ids are returned.
    """
    sites_by_call = {site.call_id: site for site in failures if site.kind != NO_FAILURE}
    log, turn_id = LaterCalls(conversation, sites_by_call), ""
    for judged in judged_calls(conversation, sites=sites_by_call):
        # The calls in a turn are written before any of their results is known, so they all share the state before the
        # turn.
        if judged.turn.id == turn_id:
            continue
        turn_id = judged.turn.id
        if judged.turn.origin != "model":
            continue
        for call_index, call in enumerate(judged.turn.calls):
            site = sites_by_call.get(call.id)
            if site is not None and site.is_kept and log.has_unique_id(call) and (only is None or site.id in only):
                choice = _choose_correct_call(_FailedCall(judged.judge, site, call, log, conversation.cwd))
                if choice is not None:
                    yield _make_correction(site, (log.turn_number(turn_id), call_index), call, *choice)
        # In a turn with several calls, another call may have been the lookup.
        if only is None and len(judged.turn.calls) == 1 and log.has_succeeded(judged.call):
            yield from _pairs_without_lookup(judged, log.turn_number(turn_id))


def _make_correction(
    site: ErrorSite, position: tuple[int, int], call: ToolCall, chosen: ToolCall, how: Relation
) -> Correction:
    source: Source = "user" if site.kind == CORRECTED else "correction"
    calls = (_remove_descriptions(call), replace(_remove_descriptions(chosen), id=call.id))
    return Correction(site.id, site.kind, *position, *calls, how, source)


def _pairs_without_lookup(judged: JudgedCall, turn_number: int) -> Iterator[Correction]:
    lookup = _build_unneeded_lookup(judged.call, judged.judgement, judged.judge.state)
    how: Relation = "looked_for_text" if is_edit(judged.call.name) else "looked_for_path"
    if lookup is not None:
        yield Correction("", "", turn_number, 0, lookup, _remove_descriptions(judged.call), how, ACTED)


def _remove_descriptions(call: ToolCall) -> ToolCall:
    """Return the call without arguments that only describe it to the user, such as `description`."""
    arguments: dict[str, Any] = {
        key: value for key, value in call.arguments.items() if not is_descriptive_parameter(call.name, key)
    }
    return replace(call, arguments=arguments)


# A correction directly follows its failure: later calls are probably about something else.
_MAX_NEXT_CALLS = 3
# File names are compared by difflib's ratio, which is quadratic in their length.
_MAX_NAME_CHARS, _MIN_NAME_SIMILARITY = 100, 0.85
# "don't use the cache", "without --force"; not "note" or "nothing"
_NEGATION = re.compile(r"\b(?:don'?t|do not|no|not|never|without|skip|stop|instead|rather|too)\b", re.IGNORECASE)
_SYNTAX_KINDS = frozenset({"usage_error", "shell_syntax", "input_validation", "tool_not_found"})


def _choose_correct_call(failed: _FailedCall) -> CorrectCall:
    """Return the call that should have been made by the rule for this kind of failure, or None if it has no rule.

    Every rule returns the corrected call if the session had already shown everything that the call names. Otherwise it
    returns the first lookup that would have shown it, or None if there was no such lookup.
    """
    rules: Mapping[str, Callable[[_FailedCall], CorrectCall]] = {
        "edit_not_read": _correct_unread_file,
        "edit_stale": _correct_stale_file,
        "edit_no_match": _correct_unmatched_edit,
        "edit_ambiguous": _correct_ambiguous_edit,
        "edit_noop": _choose_corrected_edit,
        "file_not_found": _correct_missing_file,
        "is_directory": _choose_search_in_folder,
        "wrong_folder": _correct_folder,
        "shell_path_missing": _correct_folder,
        CORRECTED: _correct_as_user_said,
        **dict.fromkeys(_SYNTAX_KINDS, _correct_syntax),
    }
    rule = rules.get(failed.site.kind)
    choice = None if rule is None else rule(failed)
    return None if choice is None or _is_same_call(failed, choice[0]) else choice


def _is_same_call(failed: _FailedCall, chosen: ToolCall) -> bool:
    """Return whether the chosen call is the same as the failed one."""
    # `same_action` ignores the names of parameters, but a wrong name may be the reason why the input was invalid.
    if failed.site.kind == "input_validation":
        return chosen.name == failed.call.name and chosen.arguments == failed.call.arguments
    return same_action(_as_action(chosen), _as_action(failed.call))


def _correct_missing_file(failed: _FailedCall) -> CorrectCall:
    """Choose the same call with the right path if the session had shown that path, otherwise a search for the file."""
    if failed.path is None:
        return None
    name = failed.path.rstrip("/").rpartition("/")[2]
    for later in failed.later[:_MAX_NEXT_CALLS]:
        if later.call.name == failed.call.name and later.path and _is_same_target(failed, later, name):
            if _was_path_known(failed, later):
                # Rereading a file that is already known in full would not be a correction.
                is_needless = not is_edit(later.call.name) and _is_known_in_full(failed, later.path)
                return None if is_needless else (later.call, "corrected")
            break  # the first call for the same file decides
    return _choose_search(failed, failed.path) or _choose_search_by_name(failed, failed.path)


def _choose_search_by_name(failed: _FailedCall, path: str) -> CorrectCall:
    """Choose a search by file name, built with the session's own tools, or else the listing that showed the file."""
    name = guess_filename_to_search(path, failed.later, failed.judge.state, failed.cwd)
    search = name and (
        _build_filename_search(failed.call, name, failed.judge.state) or _find_listing_with(name, failed.later)
    )
    return (search, "look_first") if search else None


def _choose_search_in_folder(failed: _FailedCall) -> CorrectCall:
    """Choose the first search in the folder that the failed call took for a file."""
    return None if failed.path is None else _choose_search(failed, failed.path)


def _choose_search(failed: _FailedCall, path: str) -> CorrectCall:
    search = find_search(path, failed.call, failed.later, failed.judge.state, failed.cwd)
    return None if search is None else (search.call, "look_first")


def _correct_folder(failed: _FailedCall) -> CorrectCall:
    """Choose the same command with paths that had been shown, or without a folder in which the shell already was."""
    later = _next_similar_call(failed, failed.later_or_failed_at_task)
    if later is None:
        typed = (word for word in Command.of(call_command(failed.call)).words if is_path(word) and "/" in word)
        # The error message names the missing path. With several candidates, a search would be a guess.
        missing = [word for word in typed if word in failed.site.evidence_text]
        return _choose_search(failed, missing[0]) if len(missing) == 1 else None
    failed_words, later_words = (Command.of(text).words for text in (call_command(failed.call), later.words))
    new_paths = [word for word in later_words - failed_words if is_path(word) and "/" in word]
    # `cd app && ls` fails in /repo/app; the later command leaves out `app`.
    shell_folder = failed.judge.state.paths.shell.path or ""
    dropped_words = [word.removeprefix("./") for word in failed_words - later_words]
    was_in_folder = any(word and f"/{shell_folder}".endswith(f"/{word}") for word in dropped_words)
    return (later.call, "corrected") if (new_paths or was_in_folder) and failed.were_shown(new_paths) else None


def _correct_syntax(failed: _FailedCall) -> CorrectCall:
    """Choose the same call with the right syntax, if the session had already shown every name that is new in it.

    If there is no such call, choose a call for the program's help text, provided that the session made it next.
    """
    if (same_command := _choose_same_command_with_other_paths(failed)) is not None:
        return same_command
    later = _next_similar_call(failed) or _next_corrected_command(failed)
    if later is None:
        help_call = _find_help_call(call_command(failed.call), failed.later)
        return None if help_call is None else (help_call, "look_first")
    if is_edit(later.call.name):
        verdict = failed.judge.verdict(later.call)
        return (later.call, "corrected") if verdict.says == "ok" else None
    # The model may have learned a new word from the error message, so this word must have been shown earlier, like a
    # name.
    error_words, failed_words = Command.of(failed.error).words, Command.of(all_argument_text(failed.call)).words
    new_words = Command.of(all_argument_text(later.call)).words - failed_words
    names = [word for word in new_words if word in error_words or _must_be_known(word)]
    if not call_command(later.call):  # an argument of a single word is a name: of a skill, an agent or a folder
        later_texts = {value for value in later.call.arguments.values() if isinstance(value, str)}
        new_texts = [
            text for text in later_texts - {*failed.call.arguments.values()} if text and not re.search(r"\s", text)
        ]
        names += new_texts
        if not all("/" in text or failed.log.was_mentioned_by_user(failed.site, text) for text in new_texts):
            return None
    return (later.call, "corrected") if failed.were_shown(names) else None


def _choose_same_command_with_other_paths(failed: _FailedCall) -> CorrectCall:
    """Choose the next command if it differs from the failed one in its paths only.

    Its new paths must be parents of the old ones, or lie below them and have been shown.
    """
    later = next((candidate for candidate in failed.later[:1] if call_command(candidate.call)), None)
    paths = None if later is None else _find_new_subpaths(call_command(failed.call), later.words)
    return (later.call, "corrected") if later is not None and paths is not None and failed.were_shown(paths) else None


def _next_corrected_command(failed: _FailedCall) -> LaterCall | None:
    """Return the next command that repeats the failed one with corrected spelling, or None."""
    failed_command = call_command(failed.call)
    commands = (later for later in failed.later[:_MAX_NEXT_CALLS] if call_command(later.call))
    return next((later for later in commands if corrects_typed_command(failed_command, call_command(later.call))), None)


def _correct_as_user_said(failed: _FailedCall) -> CorrectCall:
    """Choose the edit that the user asked for, or the next command if it does what the user's message says.

    After "use pytest", the next command must add that word. After "don't use --force", it must omit it.
    """
    if is_edit(failed.call.name):
        return _choose_corrected_edit(failed)
    comment_words = set(_lowercase_words(failed.site.evidence_text))
    for later in failed.later[:1]:
        if tool_channel(later.call.name) == tool_channel(failed.call.name) == "shell":
            failed_words, later_words = (
                set(_lowercase_words(text)) for text in (call_command(failed.call), later.words)
            )
            new_words, dropped_words = later_words - failed_words, failed_words - later_words
            is_negated = _NEGATION.search(failed.site.evidence_text)
            adds_named_word = comment_words & new_words and not comment_words & dropped_words
            drops_named_word = comment_words & dropped_words and not new_words and is_negated
            if adds_named_word or drops_named_word:
                return later.call, "corrected"
    return None


def _next_similar_call(failed: _FailedCall, calls: Sequence[LaterCall] | None = None) -> LaterCall | None:
    """Return the next call with the same tool and purpose if it is similar enough to the failed call, or None.

    A call that is more similar to a different failed call in the same turn is taken as the correction of that call.
    """
    for later in (failed.later if calls is None else calls)[:_MAX_NEXT_CALLS]:
        is_same_tool = later.call.name == failed.call.name
        has_same_purpose = is_same_tool and have_same_purpose(failed.call, later.call, failed.error)
        if has_same_purpose and failed.is_best_match(later.call, call_similarity):
            return later if call_similarity(failed.call, later.call) >= MIN_SIMILARITY else None
    return None


def _is_same_target(failed: _FailedCall, later: LaterCall, name: str) -> bool:
    """Return whether a call concerns a file with almost the same name and, for a search, uses the same pattern."""
    later_name = (later.path or "").rstrip("/").rpartition("/")[2]
    similarity = difflib.SequenceMatcher(None, later_name[:_MAX_NAME_CHARS], name[:_MAX_NAME_CHARS]).ratio()
    same_pattern = failed.call.arguments.get("pattern") == later.call.arguments.get("pattern")
    return same_pattern and similarity >= _MIN_NAME_SIMILARITY


def _is_known_in_full(failed: _FailedCall, path: str) -> bool:
    """Return whether the whole file had been shown, and cannot have changed since then."""
    file = failed.judge.state.texts.get(path)
    return file is not None and file.is_whole and not file.doubt


def _was_path_known(failed: _FailedCall, later: LaterCall) -> bool:
    return failed.judge.verdict(later.call).says == "ok" or failed.judge.state.has_shown(later.path or "")


def _as_action(call: ToolCall) -> Action:
    return Action(text="", calls=(call,))


# Calls with several edits are compared edit by edit. The first few edits are enough to identify a call.
_MAX_EDITS = 20
# The highest value of `FileText.doubt`: the file has certainly changed since it was shown.
_DOUBT_CHANGED = 2
# The number of lines that agents' read tools show without a `limit`.
_DEFAULT_READ_LINES = 2000
# A shorter text may occur in the file by chance, which does not prove that the edit had already been made.
_MIN_APPLIED_CHARS = 8
# The judge's rules for an edit whose old text the session had shown.
_TEXT_SHOWN_RULES = ("found_in_whole_file", "found_in_part")


def _correct_unread_file(failed: _FailedCall) -> CorrectCall:
    """Choose a read of the file if the session had never read it, or had only read it before a compaction."""
    # After a compaction, the log no longer contains what was read earlier, and the agent requires a new read.
    rule, state = failed.judge.verdict(failed.call).rule, failed.judge.state
    is_forgotten = rule == "read_before" and state.texts.is_continued and not state.has_touched(failed.path or "")
    if rule != "not_read" and not is_forgotten:
        return None
    return _correct_stale_file(failed)


def _correct_stale_file(failed: _FailedCall) -> CorrectCall:
    """Choose the read that the agent requires before an edit.

    This is the next read in the session, or else a read of the whole file.
    """
    whole_read = _build_whole_file_read(failed.call, failed.path or "", failed.judge.state)
    return _choose_first_lookup(failed, to_edit=True) or (None if whole_read is None else (whole_read, "look_first"))


def _correct_unmatched_edit(failed: _FailedCall) -> CorrectCall:
    """Choose the later successful edit if its old text had been shown, or else a read unless the file was fully known.

    Return None if the file contained the text before the turn, or if the change had already been made: no call was
    needed.
    """
    verdict = failed.judge.verdict(failed.call)
    if verdict.says == "ok" or _is_already_applied(failed):
        return None
    file = failed.judge.state.texts.get(failed.path or "")
    was_known_in_full = file is not None and file.is_whole and file.doubt != _DOUBT_CHANGED
    return _choose_corrected_edit(failed) or (None if was_known_in_full else _choose_first_lookup(failed))


def _correct_ambiguous_edit(failed: _FailedCall) -> CorrectCall:
    """Choose the later successful edit, if the session had shown that the text occurs more than once."""
    return _choose_corrected_edit(failed) if failed.judge.verdict(failed.call).kind == "edit_ambiguous" else None


def _choose_corrected_edit(failed: _FailedCall) -> CorrectCall:
    """Choose the later successful edit that makes the same change in the same lines.

    The session must already have known all of its text.
    """
    later_edit = _next_same_edit(failed)
    verdict = None if later_edit is None else failed.judge.verdict(later_edit)
    if later_edit is None or verdict is None or verdict.says != "ok" or not verdict.rule.startswith(_TEXT_SHOWN_RULES):
        return None
    pairs = itertools.product(_edit_operations(failed, failed.call), _edit_operations(failed, later_edit))
    if not any(itertools.starmap(replace_same_text, pairs)):
        return None  # the same new text in other lines is a different change
    return (later_edit, "corrected") if _uses_known_names_only(failed, later_edit) else None


def _is_already_applied(failed: _FailedCall) -> bool:
    """Return whether the file had been shown with the new text of an edit and without its old text."""
    has_shown = failed.judge.state.has_shown_text
    edits = [edit for edit in _edit_operations(failed, failed.call) if isinstance(edit, Replace)]
    edits = [edit for edit in edits if len(edit.new.strip()) >= _MIN_APPLIED_CHARS and edit.new not in edit.old]
    return any(has_shown(edit.path, edit.new) and not has_shown(edit.path, edit.old) for edit in edits)


def _uses_known_names_only(failed: _FailedCall, later_edit: ToolCall) -> bool:
    """Return whether all identifiers in an edit were known before the failure.

    An identifier that was first shown between the failure and the edit does not count as known.
    """
    calls_between = itertools.takewhile(lambda later: later.call.id != later_edit.id, failed.later)
    texts_between = (text for later in calls_between for text in (later.text, all_argument_text(later.call)))
    names_between = {name for text in texts_between for name in _identifiers(text)}
    new_names = _identifiers(all_argument_text(later_edit)) - _identifiers(all_argument_text(failed.call))
    return failed.were_shown([*new_names & names_between])


def _next_same_edit(failed: _FailedCall) -> ToolCall | None:
    """Return the first later edit that makes the same change and does not match another failed call better."""
    edits = (later.call for later in failed.later if is_edit(later.call.name))
    return next((call for call in edits if failed.is_best_match(call, partial(_best_edit_similarity, failed))), None)


def _best_edit_similarity(failed: _FailedCall, failed_edit: ToolCall, later_edit: ToolCall) -> float:
    """Return the highest similarity between any edit of one call and any edit of the other.

    The result is 0 if no two edits overlap.
    """
    pairs = itertools.product(_edit_operations(failed, failed_edit), _edit_operations(failed, later_edit))
    return max(itertools.starmap(edit_similarity, pairs), default=0.0)


def _edit_operations(failed: _FailedCall, call: ToolCall) -> list[Operation]:
    return (edit_operations(call, failed.cwd) or [])[:_MAX_EDITS]


def _choose_first_lookup(failed: _FailedCall, *, to_edit: bool = False) -> CorrectCall:
    """Choose the first lookup of the lines that the failed edit concerns, if it showed anything new.

    Set `to_edit` for agents that require a read before an edit: then only a read counts, even if it shows nothing new.
    Return None if the file was edited before it was looked up.
    """
    later_edit = _next_same_edit(failed)
    edits = _edit_operations(failed, failed.call) + ([] if later_edit is None else _edit_operations(failed, later_edit))
    for later in failed.later:
        if later.path is None or failed.path is None or not failed.is_same_path(later.path, failed.path):
            continue
        # The edit has changed the file, so a later read may show text that did not exist before the failure.
        if is_edit(later.call.name):
            return None
        if not later.is_lookup or (to_edit and plain_name(later.call.name) in LIST_TOOLS | SEARCH_TOOLS):
            continue
        lines = _lines_affected_by_edits(edits, later.lines)
        is_whole = not {"offset", "limit"} & {*later.call.arguments}
        if lines or (to_edit and is_whole):
            is_new = to_edit or not _knew_lines(failed, lines)
            is_top = not to_edit and later.call.arguments.get("offset") in (None, 0, 1)
            return _choose_read_range(failed, later.call, is_known=is_whole or is_top) if is_new else None
    return None


def _choose_read_range(failed: _FailedCall, lookup: ToolCall, *, is_known: bool) -> CorrectCall:
    """Choose a partial read only if its line numbers had been shown, otherwise a read of the whole file."""
    offset, limit = (lookup.arguments.get(key) for key in ("offset", "limit"))
    first = offset if isinstance(offset, int) else 1
    lines = range(first, first + (limit if isinstance(limit, int) else _DEFAULT_READ_LINES))
    if is_known or (first > 1 and failed.log.has_shown_line_numbers(failed.site, failed.path or "", lines)):
        return lookup, "look_first"
    whole_read = _build_whole_file_read(failed.call, failed.path or "", failed.judge.state)
    return None if whole_read is None else (whole_read, "look_first")


def _knew_lines(failed: _FailedCall, lines: Sequence[str]) -> bool:
    """Return whether the session had shown or written these lines, and the file has not certainly changed since."""
    file = failed.judge.state.texts.get(failed.path or "")
    if file is None or file.doubt == _DOUBT_CHANGED:
        return False
    return all(file.count(line) for line in lines if line.strip())


def _build_unneeded_lookup(call: ToolCall, judgement: Judgement, state: SessionState) -> ToolCall | None:
    """Build a lookup that this successful call did not need, with tools that the session has used.

    Return None if the judge did not predict that the call would work: then a lookup might have helped.
    """
    path = path_argument(call.arguments) if tool_channel(call.name) == "file" else None
    if judgement.says != "ok" or not path:
        return None
    if is_edit(call.name):
        return _build_whole_file_read(call, path, state) if judgement.rule.startswith(_TEXT_SHOWN_RULES) else None
    reads = is_read_only_tool_call(call.name, call.arguments) and plain_name(call.name) not in LIST_TOOLS | SEARCH_TOOLS
    if reads and not state.has_touched(path):
        return _build_filename_search(call, path.rstrip("/").rpartition("/")[2], state)
    return None


def _build_whole_file_read(call: ToolCall, path: str, state: SessionState) -> ToolCall | None:
    """Build a read of a whole file with the session's read tool, or return None if the session has not used one."""
    key = (
        None if state.reader is None else next((name for name in PATH_KEYS if name in state.tools[state.reader]), None)
    )
    return None if key is None or state.reader is None else _make_lookup_call(call, state.reader, {key: path})


def _build_filename_search(call: ToolCall, name: str, state: SessionState) -> ToolCall | None:
    """Build a search for a file name.

    It uses the glob tool if the session has used that tool, otherwise `find` in the session's shell.
    """
    for tool, parameters in state.tools.items():
        if plain_name(tool) == "glob" and "pattern" in parameters:
            return _make_lookup_call(call, tool, {"pattern": f"**/{name}"})
    for tool, parameters in state.tools.items():
        key = command_parameter(tool, dict.fromkeys(parameters, ""))
        if key is not None:
            return _make_lookup_call(call, tool, {key: f"find . -name {shlex.quote(name)}"})
    return None


def _make_lookup_call(call: ToolCall, tool: str, arguments: Mapping[str, str]) -> ToolCall:
    return ToolCall(id=call.id, name=tool, arguments=dict(arguments))


# ---- Words, names and lines of commands and edits --------------------------------------------------------------------

# "uv --help", "git help log"; not "helper.py"
_ASKS_FOR_HELP = re.compile(r"(?:^|\s)(?:--help|help)(?:\s|$)")
_HELP_SUBCOMMANDS = frozenset({"help", "tasks", "list", "ls"})
# Minimum similarity of a line of an edit to a line of the file.
_MIN_LINE_SIMILARITY = 0.8
# A shorter line in an edit, such as `else:`, must equal a line in the file.
_MIN_LINE_CHARS = 6
# The number of an edit's longest lines by which it is located, and the number of lines of the file that are searched.
_NUM_ANCHOR_LINES, _MAX_LINES = 3, 3000
# "user_id = userId" -> "user_id", "userId"
_NAME = re.compile(r"\w+")
# "userId", "HttpServer"; not "Http" or "HTTP"
_INNER_CAPITAL = re.compile(r"[a-z][A-Z]")
_MAX_NAMES_TEXT = 100_000
# The "50" in "-n 50" is a count, which anyone can choose. Longer numbers may be ids or ports.
_SMALL_NUMBER = re.compile(r"\d{1,4}")


def _find_listing_with(name: str, later: Sequence[LaterCall]) -> ToolCall | None:
    """Return the next listing that shows a file with this name, or None."""
    listings = (
        lookup.call
        for lookup in later[:_MAX_NEXT_CALLS]
        if lookup.is_listing and lookup.is_lookup and f"/{name}" in lookup.text
    )
    return next(listings, None)


def _find_help_call(command: str, later: Sequence[LaterCall]) -> ToolCall | None:
    """Return the call right after the failure if it asks the same program for help or its subcommands.

    Return None otherwise.
    """
    programs = {name for name, _ in Command.of(command).programs}
    for lookup in later[:1]:
        lookup_command = Command.of(lookup.words)
        subcommands = {subcommand for name, subcommand in lookup_command.programs if name in programs}
        if subcommands and (_ASKS_FOR_HELP.search(lookup_command.text) or _HELP_SUBCOMMANDS & subcommands):
            return lookup.call
    return None


def _find_new_subpaths(failed_command: str, later_command: str) -> list[str] | None:
    """Return the new paths in a later command that are below paths in the failed command.

    Parents of the failed command's paths are omitted, since nobody has to look them up. Return None if the commands
    differ in anything but their paths, or if a new path is not below an old path.
    """
    failed_words, later_words = (set(text.split()) for text in (failed_command, later_command))
    is_extension = failed_words <= later_words or later_words <= failed_words
    if is_extension or not all("/" in word for word in failed_words ^ later_words):
        return None
    old_paths = {_strip_path(word) for word in failed_words - later_words}
    new_paths = {_strip_path(word) for word in later_words - failed_words}
    inside = [word for word in new_paths if not any(f"{path}/".startswith(f"{word}/") for path in old_paths)]
    return inside if all(any(word.startswith(f"{path}/") for path in old_paths) for word in inside) else None


def _strip_path(word: str) -> str:
    """Return a path without a leading `./` and without Go's `...`, which means all packages below.

    For example, `./cmd/...` becomes `cmd`.
    """
    return word.removeprefix("./").removesuffix("...").rstrip("/")


def _lines_affected_by_edits(edits: Iterable[Operation], lines: list[str]) -> list[str]:
    """Return the lines of a file that the edits concern.

    An edit is located by its longest lines. Where one of them matches, as many lines are returned as the edit replaces.
    An edit that replaces no text, such as a write of the whole file, concerns all lines.
    """
    lines, line_numbers = lines[:_MAX_LINES], set[int]()
    for edit in edits:
        edit_lines = edit.old.split("\n") if isinstance(edit, Replace) else []
        if not any(line.strip() for line in edit_lines):
            return lines
        longest_first = sorted(range(len(edit_lines)), key=lambda number: -len(edit_lines[number].strip()))
        for number in longest_first[:_NUM_ANCHOR_LINES]:
            for position in _matching_positions(edit_lines[number].strip(), lines):
                line_numbers.update(range(position - number, position - number + len(edit_lines)))
    return [lines[number] for number in sorted(line_numbers) if 0 <= number < len(lines)]


def _matching_positions(edit_line: str, lines: list[str]) -> list[int]:
    """Return the indices of the lines that contain this line of an edit or are similar to it."""
    if not edit_line or (len(edit_line) < _MIN_LINE_CHARS and not any(edit_line == line.strip() for line in lines)):
        return []
    return [
        index
        for index, line in enumerate(lines)
        if edit_line in line or token_similarity(line, edit_line) >= _MIN_LINE_SIMILARITY
    ]


def _identifiers(text: str) -> set[str]:
    """Return the identifiers in a text: words with an underscore or an inner capital letter."""
    return {word for word in _NAME.findall(text[:_MAX_NAMES_TEXT]) if "_" in word or _INNER_CAPITAL.search(word)}


def _must_be_known(word: str) -> bool:
    """Return whether a word in a command cannot be guessed, such as a path or a version."""
    if word.startswith(("-", "/dev/")) or _SMALL_NUMBER.fullmatch(word):
        return False
    return ("/" in word and is_path(word)) or any(letter.isdigit() for letter in word)


def _lowercase_words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation and single letters."""
    return [word for word in "".join(char if char.isalnum() else " " for char in text.lower()).split() if len(word) > 1]


CorrectCall = tuple[ToolCall, Literal["corrected", "look_first"]] | None
"""The call that should have been made and how it relates to the failed one; None if the failure teaches nothing."""

# Each word is searched for in everything that was shown, so a call with more new words is rejected without a search.
_MAX_WORDS = 20


class _FailedCall:
    """A failed call with the session state before its turn, and with what the session did afterwards.

    `later` has the later calls that worked. `later_or_failed_at_task` also has those that ran as intended but whose
    task failed, such as tests. `siblings` are the other failed calls in the same turn.
    """

    def __init__(self, judge: Judge, site: ErrorSite, call: ToolCall, log: LaterCalls, cwd: str | None) -> None:
        self.judge, self.site, self.call, self.cwd = judge, site, call, cwd
        self.log, self.error, self.siblings = log, log.result_text(call), log.failed_siblings(site)
        self.later = log.successful_calls_after(site)
        self.later_or_failed_at_task = log.successful_calls_after(site, with_failed_work=True)
        self.path = path_argument(call.arguments) if tool_channel(call.name) == "file" else None

    def is_best_match(self, later: ToolCall, similarity: Callable[[ToolCall, ToolCall], float]) -> bool:
        """Return whether a later call is similar to this one.

        The answer is False if another failed call in the turn is more similar to it.
        """
        score = similarity(self.call, later)
        return score > 0 and all(similarity(sibling, later) <= score for sibling in self.siblings)

    def were_shown(self, words: Sequence[str]) -> bool:
        """Return whether the session had shown all of these words; always False for more than `_MAX_WORDS`."""
        return len(words) <= _MAX_WORDS and all(map(self.judge.state.has_shown, words))

    def is_same_path(self, path_a: str, path_b: str) -> bool:
        return normal_path(path_a, self.cwd) == normal_path(path_b, self.cwd)
