"""What should have been done in place of an edit that failed: the edit as it worked, or the reading before it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

from composer_replication.actions.edits import Operation, Replace, edit_operations
from composer_replication.actions.tools import LISTS, SEARCHES, is_edit, plain_name
from composer_replication.pairs.failed_call import Decided, FailedCall
from composer_replication.pairs.likeness import asked_by, belong_together, lines_for, names_in, share_a_place
from composer_replication.pairs.needless_looks import reading
from composer_replication.types import ToolCall

_MAX_EDITS = 20
_CHANGED, _MAX_LINES = 2, 2000
_MIN_DONE = 8
_FOUND = ("found_in_whole_file", "found_in_part")


def not_read(failed: FailedCall) -> Decided:
    """The reading, where nothing in this log had read the file: what was read before a compaction is gone.

    The agent asks for it whatever comes next, so where the session did not read it, the whole file is to be read.
    """
    rule, state = failed.judge.verdict(failed.call).rule, failed.judge.state
    is_forgotten = rule == "read_before" and state.texts.is_continued and not state.has_touched(failed.path or "")
    if rule != "not_read" and not is_forgotten:
        return None
    return stale(failed)


def stale(failed: FailedCall) -> Decided:
    """The reading that the agent asks for: the session's own, else of the whole file."""
    whole = reading(failed.call, failed.path or "", failed.judge.state)
    return _reading(failed, to_edit=True) or (None if whole is None else (whole, "look_first"))


def no_match(failed: FailedCall) -> Decided:
    """The edit as it worked, where its text had been shown; the reading, where not all of the file had been.

    Nothing where the text was there before the turn, or an earlier edit had made the change: no call was needed.
    """
    verdict = failed.judge.verdict(failed.call)
    if verdict.says == "ok" or _is_done(failed):
        return None
    file = failed.judge.state.texts.get(failed.path or "")
    had_all = file is not None and file.is_whole and file.doubt != _CHANGED
    return edit_again(failed) or (None if had_all else _reading(failed))


def ambiguous(failed: FailedCall) -> Decided:
    """The edit as it worked, where the text had been shown more than once."""
    return edit_again(failed) if failed.judge.verdict(failed.call).kind == "edit_ambiguous" else None


def edit_again(failed: FailedCall) -> Decided:
    """The same change at the same place, as it worked later, where the session knew all of it before."""
    again = _same_edit(failed)
    verdict = None if again is None else failed.judge.verdict(again)
    if again is None or verdict is None or verdict.says != "ok" or not verdict.rule.startswith(_FOUND):
        return None
    pairs = itertools.product(_edits(failed, failed.call), _edits(failed, again))
    if not any(itertools.starmap(share_a_place, pairs)):
        return None  # the same words put elsewhere are another change
    return (again, "corrected") if _knew_names(failed, again) else None


def _is_done(failed: FailedCall) -> bool:
    has_shown = failed.judge.state.has_shown_text
    edits = [edit for edit in _edits(failed, failed.call) if isinstance(edit, Replace)]
    done = [edit for edit in edits if len(edit.new.strip()) >= _MIN_DONE and edit.new not in edit.old]
    return any(has_shown(edit.path, edit.new) and not has_shown(edit.path, edit.old) for edit in done)


def _knew_names(failed: FailedCall, again: ToolCall) -> bool:
    """Whether a call uses no name that was made or shown only between the failure and it."""
    between = itertools.takewhile(lambda later: later.call.id != again.id, failed.later)
    came_up = {name for later in between for text in (later.text, asked_by(later.call)) for name in names_in(text)}
    return failed.are_shown([*(names_in(asked_by(again)) - names_in(asked_by(failed.call))) & came_up])


def _same_edit(failed: FailedCall) -> ToolCall | None:
    """The first later edit that is the same change, and not rather that of another call of the failing turn."""
    edits = (later.call for later in failed.later if is_edit(later.call.name))
    return next((call for call in edits if failed.is_ours(call, partial(_sureness, failed))), None)


def _sureness(failed: FailedCall, one: ToolCall, other_call: ToolCall) -> float:
    pairs = itertools.product(_edits(failed, one), _edits(failed, other_call))
    return max(itertools.starmap(belong_together, pairs), default=0.0)


def _edits(failed: FailedCall, call: ToolCall) -> list[Operation]:
    return (edit_operations(call, failed.cwd) or [])[:_MAX_EDITS]


def _reading(failed: FailedCall, *, to_edit: bool = False) -> Decided:
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


def _as_known(failed: FailedCall, look: ToolCall, *, is_known: bool) -> Decided:
    """A reading as it could be asked for: of a part only where numbers of its lines had been shown."""
    offset, limit = (look.arguments.get(key) for key in ("offset", "limit"))
    first = offset if isinstance(offset, int) else 1
    lines = range(first, first + (limit if isinstance(limit, int) else _MAX_LINES))
    if is_known or (first > 1 and failed.log.had_lines(failed.site, failed.path or "", lines)):
        return look, "look_first"
    whole = reading(failed.call, failed.path or "", failed.judge.state)
    return None if whole is None else (whole, "look_first")


def _had_shown(failed: FailedCall, lines: Sequence[str]) -> bool:
    """Whether the session had shown or written these lines, and nobody is known to have changed the file since."""
    file = failed.judge.state.texts.get(failed.path or "")
    if file is None or file.doubt == _CHANGED:
        return False
    return all(file.count(line) for line in lines if line.strip())
