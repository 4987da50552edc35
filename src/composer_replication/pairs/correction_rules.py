"""What should have been done in place of a call that failed, by its kind of failure, as far as the session knew.

The judge stands at the state before the failing turn. Every rule gives the corrected call where what it names had been
shown by then, else the look that came first, else nothing.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from composer_replication.actions.edits import Operation, Replace, edit_operations
from composer_replication.actions.equality import same_action
from composer_replication.actions.paths import normal_path
from composer_replication.actions.shell.command import Command, is_path
from composer_replication.actions.tools import channel_of, is_edit, path_argument, plain_name
from composer_replication.pairs.later_calls import LISTS, SEARCHES, LaterCall, LaterCalls
from composer_replication.pairs.likeness import (
    MIN_ALIKE,
    asked_by,
    belong_together,
    command_of,
    have_same_purpose,
    is_name,
    likeness_of_calls,
    lines_for,
    names_in,
    other_paths,
    plain_words,
    share_a_place,
)
from composer_replication.pairs.needless_looks import reading, searching
from composer_replication.pairs.searches import help_for, name_to_search, search_for, tree_with
from composer_replication.sites.retyped import is_typed_otherwise
from composer_replication.sites.user_words import CORRECTED
from composer_replication.types import Action, ErrorSite, ToolCall

if TYPE_CHECKING:
    from composer_replication.judge import Judge

How = Literal["corrected", "look_first"]
Decided = tuple[ToolCall, How] | None
_NEXT = 3
_MAX_WORDS, _MAX_EDITS = 20, 20
_CHANGED, _MAX_LINES = 2, 2000
_MIN_DONE, _MAX_NAME, _MIN_NAME = 8, 100, 0.85
_FOUND = ("found_in_whole_file", "found_in_part")
_AGAINST = re.compile(r"\b(?:don'?t|do not|no|not|never|without|skip|stop|instead|rather|too)\b", re.IGNORECASE)
_TYPED_WRONG = frozenset({"usage_error", "shell_syntax", "input_validation", "tool_not_found"})


class Decision:
    """One failing call, at the state before its turn."""

    def __init__(self, judge: Judge, site: ErrorSite, call: ToolCall, log: LaterCalls, cwd: str | None) -> None:
        self._judge, self._site, self._call, self._cwd = judge, site, call, cwd
        self._later, self._beside, self._error = log.after(site), log.beside(site), log.text_of(call)
        self._ran, self._log = log.after(site, with_failed_work=True), log
        self._path = path_argument(call.arguments) if channel_of(call.name) == "file" else None

    def made(self) -> Decided:
        """The call to choose, and how it belongs to the one that failed."""
        rules: Mapping[str, Callable[[], Decided]] = {
            "edit_not_read": self._not_read,
            "edit_stale": self._stale,
            "edit_no_match": self._no_match,
            "edit_ambiguous": self._ambiguous,
            "edit_noop": self._edit_again,
            "file_not_found": self._not_found,
            "is_directory": self._listing,
            "wrong_folder": self._elsewhere,
            "shell_path_missing": self._elsewhere,
            CORRECTED: self._told,
            **dict.fromkeys(_TYPED_WRONG, self._typed_again),
        }
        rule = rules.get(self._site.kind)
        found = None if rule is None else rule()
        return None if found is None or self._is_the_call(found[0]) else found

    def _is_the_call(self, chosen: ToolCall) -> bool:
        """Whether nothing would be chosen but the failing call; a parameter's wrong name is a difference, too."""
        if self._site.kind == "input_validation":
            return chosen.name == self._call.name and chosen.arguments == self._call.arguments
        return same_action(_alone(chosen), _alone(self._call))

    def _not_read(self) -> Decided:
        """The reading, where nothing in this log had read the file: what was read before a compaction is gone.

        The agent asks for it whatever comes next, so where the session did not read it, the whole file is to be read.
        """
        rule, state = self._judge.verdict(self._call).rule, self._judge.state
        gone = rule == "read_before" and state.texts.is_continued and not state.has_touched(self._path or "")
        if rule != "not_read" and not gone:
            return None
        return self._stale()

    def _stale(self) -> Decided:
        """The reading that the agent asks for: the session's own, else of the whole file."""
        whole = reading(self._call, self._path or "", self._judge.state)
        return self._reading(to_edit=True) or (None if whole is None else (whole, "look_first"))

    def _no_match(self) -> Decided:
        """The edit as it worked, where its text had been shown; the reading, where not all of the file had been.

        Nothing where the text was there before the turn, or an earlier edit had made the change: no call was needed.
        """
        said = self._judge.verdict(self._call)
        if said.says == "ok" or self._is_done():
            return None
        known = self._judge.state.texts.get(self._path or "")
        had_all = known is not None and known.is_whole and known.doubt != _CHANGED
        return self._edit_again() or (None if had_all else self._reading())

    def _ambiguous(self) -> Decided:
        """The edit as it worked, where the text had been shown more than once."""
        return self._edit_again() if self._judge.verdict(self._call).kind == "edit_ambiguous" else None

    def _is_done(self) -> bool:
        shown = self._judge.state.has_shown_text
        edits = [each for each in self._edits(self._call) if isinstance(each, Replace)]
        done = [each for each in edits if len(each.new.strip()) >= _MIN_DONE and each.new not in each.old]
        return any(shown(each.path, each.new) and not shown(each.path, each.old) for each in done)

    def _edit_again(self) -> Decided:
        again = self._same_edit()
        said = None if again is None else self._judge.verdict(again)
        if again is None or said is None or said.says != "ok" or not said.rule.startswith(_FOUND):
            return None
        pairs = itertools.product(self._edits(self._call), self._edits(again))
        if not any(itertools.starmap(share_a_place, pairs)):
            return None  # the same words put elsewhere are another change
        return (again, "corrected") if self._knew_names(again) else None

    def _knew_names(self, again: ToolCall) -> bool:
        """Whether a call uses no name that was made or shown only between the failure and it."""
        between = itertools.takewhile(lambda later: later.call.id != again.id, self._later)
        came_up = {name for later in between for text in (later.text, asked_by(later.call)) for name in names_in(text)}
        return self._are_shown([*(names_in(asked_by(again)) - names_in(asked_by(self._call))) & came_up])

    def _same_edit(self) -> ToolCall | None:
        """The first later edit that is the same change, and not rather that of another call of the failing turn."""
        edits = (later.call for later in self._later if is_edit(later.call.name))
        return next((call for call in edits if self._is_ours(call, self._sureness)), None)

    def _sureness(self, one: ToolCall, other: ToolCall) -> float:
        pairs = itertools.product(self._edits(one), self._edits(other))
        return max(itertools.starmap(belong_together, pairs), default=0.0)

    def _is_ours(self, later: ToolCall, measure: Callable[[ToolCall, ToolCall], float]) -> bool:
        """Whether a later call is like this one, and like no other of its turn more."""
        ours = measure(self._call, later)
        return ours > 0 and all(measure(each, later) <= ours for each in self._beside)

    def _edits(self, call: ToolCall) -> list[Operation]:
        return (edit_operations(call, self._cwd) or [])[:_MAX_EDITS]

    def _reading(self, *, to_edit: bool = False) -> Decided:
        """The first look at what the failing edit is about, before its file was changed, if it showed something new.

        `to_edit` is a look that the agent itself asks for, new or not; only a reading counts as one.
        """
        again = self._same_edit()
        edits = self._edits(self._call) + ([] if again is None else self._edits(again))
        for later in self._later:
            if later.path is None or self._path is None or not self._is_same_path(later.path, self._path):
                continue
            if is_edit(later.call.name):
                return None
            if not later.is_look or (to_edit and plain_name(later.call.name) in LISTS | SEARCHES):
                continue
            lines = lines_for(edits, later.lines)
            is_whole = not {"offset", "limit"} & {*later.call.arguments}
            if lines or (to_edit and is_whole):
                is_new = to_edit or not self._had_shown(lines)
                may_be_top = not to_edit and later.call.arguments.get("offset") in (None, 0, 1)
                return self._as_known(later.call, is_known=is_whole or may_be_top) if is_new else None
        return None

    def _as_known(self, look: ToolCall, *, is_known: bool) -> Decided:
        """A reading as it could be asked for: of a part only where numbers of its lines had been shown."""
        offset, limit = (look.arguments.get(key) for key in ("offset", "limit"))
        first = offset if isinstance(offset, int) else 1
        lines = range(first, first + (limit if isinstance(limit, int) else _MAX_LINES))
        if is_known or (first > 1 and self._log.had_lines(self._site, self._path or "", lines)):
            return look, "look_first"
        whole = reading(self._call, self._path or "", self._judge.state)
        return None if whole is None else (whole, "look_first")

    def _had_shown(self, lines: Sequence[str]) -> bool:
        """Whether the session had shown or written these lines, and nobody is known to have changed the file since."""
        known = self._judge.state.texts.get(self._path or "")
        if known is None or known.doubt == _CHANGED:
            return False
        return all(known.count(line) for line in lines if line.strip())

    def _not_found(self) -> Decided:
        """The same file where it really is, if that had been shown; else the search for it."""
        if self._path is None:
            return None
        name = self._path.rstrip("/").rpartition("/")[2]
        for later in self._later[:_NEXT]:
            if later.call.name == self._call.name and later.path and self._is_meant(later, name):
                if self._is_shown(later):
                    is_needless = not is_edit(later.call.name) and self._is_read(later.path)
                    return None if is_needless else (later.call, "corrected")
                break
        return self._search(self._path) or self._search_by_name(self._path)

    def _search_by_name(self, path: str) -> Decided:
        """A search that nobody made, as the session searches; where it never did, the list that brought the file up."""
        name = name_to_search(path, self._later, self._judge.state, self._cwd)
        found = name and (searching(self._call, name, self._judge.state) or tree_with(name, self._later))
        return (found, "look_first") if found else None

    def _listing(self) -> Decided:
        return None if self._path is None else self._search(self._path)

    def _search(self, path: str) -> Decided:
        found = search_for(path, self._call, self._later, self._judge.state, self._cwd)
        return None if found is None else (found.call, "look_first")

    def _elsewhere(self) -> Decided:
        """The same command with paths that had been shown; or without the folder that the shell stood in already."""
        later = self._next_alike(self._ran)
        if later is None:
            typed = (word for word in Command.of(command_of(self._call)).words if is_path(word) and "/" in word)
            missing = [word for word in typed if word in self._site.evidence_text]
            return self._search(missing[0]) if len(missing) == 1 else None
        ours, theirs = (Command.of(text).words for text in (command_of(self._call), later.words))
        paths = [word for word in theirs - ours if is_path(word) and "/" in word]
        here, left_out = self._judge.state.paths.shell.path or "", [word.removeprefix("./") for word in ours - theirs]
        stood_there = any(word and f"/{here}".endswith(f"/{word}") for word in left_out)
        return (later.call, "corrected") if (paths or stood_there) and self._are_shown(paths) else None

    def _are_shown(self, words: Sequence[str]) -> bool:
        """Whether the session had shown all of them; of very many nobody asks, for each is searched for."""
        return len(words) <= _MAX_WORDS and all(map(self._judge.state.has_shown, words))

    def _typed_again(self) -> Decided:
        """The same call as it has to be typed; what it names besides had been shown, and was not told by the error."""
        if (otherwise := self._other_paths()) is not None:
            return otherwise
        later = self._next_alike() or self._typed_otherwise()
        if later is None:
            asked = help_for(command_of(self._call), self._later)
            return None if asked is None else (asked, "look_first")
        if is_edit(later.call.name):
            said = self._judge.verdict(later.call)
            return (later.call, "corrected") if said.says == "ok" else None
        told, ours = Command.of(self._error).words, Command.of(asked_by(self._call)).words
        new = Command.of(asked_by(later.call)).words - ours
        named = [word for word in new if word in told or is_name(word)]
        if not command_of(later.call):  # a value of one word names something: a skill, an agent, a folder
            given = {each for each in later.call.arguments.values() if isinstance(each, str)}
            others = [each for each in given - {*self._call.arguments.values()} if each and not re.search(r"\s", each)]
            named += others
            if not all("/" in each or self._log.was_said(self._site, each) for each in others):
                return None
        return (later.call, "corrected") if self._are_shown(named) else None

    def _other_paths(self) -> Decided:
        """The very next command, where it has other paths alone: folders around those it had, or shown ones in them."""
        later = next((each for each in self._later[:1] if command_of(each.call)), None)
        inside = None if later is None else other_paths(command_of(self._call), later.words)
        return (
            (later.call, "corrected") if later is not None and inside is not None and self._are_shown(inside) else None
        )

    def _typed_otherwise(self) -> LaterCall | None:
        ours = command_of(self._call)
        calls = (later for later in self._later[:_NEXT] if command_of(later.call))
        return next((later for later in calls if is_typed_otherwise(ours, command_of(later.call))), None)

    def _told(self) -> Decided:
        """After a user's words: the same change, made as the user wants it; or the command that the words name.

        Words against something are about what the second command leaves out.
        """
        if is_edit(self._call.name):
            return self._edit_again()
        said = set(plain_words(self._site.evidence_text))
        for later in self._later[:1]:
            if channel_of(later.call.name) == channel_of(self._call.name) == "shell":
                mine, theirs = (set(plain_words(text)) for text in (command_of(self._call), later.words))
                names_it = (theirs - mine) & said and not said & (mine - theirs)
                left_out = said & (mine - theirs) and not theirs - mine and _AGAINST.search(self._site.evidence_text)
                if names_it or left_out:
                    return later.call, "corrected"
        return None

    def _next_alike(self, calls: Sequence[LaterCall] | None = None) -> LaterCall | None:
        """The next call of the same tool and purpose, if it is much like this one, and not more like one beside it."""
        for later in (self._later if calls is None else calls)[:_NEXT]:
            same = later.call.name == self._call.name and have_same_purpose(self._call, later.call, self._error)
            if same and self._is_ours(later.call, likeness_of_calls):
                return later if likeness_of_calls(self._call, later.call) >= MIN_ALIKE else None
        return None

    def _is_same_path(self, path: str, other: str) -> bool:
        return normal_path(path, self._cwd) == normal_path(other, self._cwd)

    def _is_meant(self, later: LaterCall, name: str) -> bool:
        """Whether a call is for a file of this name, and for the same in it."""
        other = (later.path or "").rstrip("/").rpartition("/")[2]
        like = difflib.SequenceMatcher(None, other[:_MAX_NAME], name[:_MAX_NAME]).ratio()
        same = self._call.arguments.get("pattern") == later.call.arguments.get("pattern")
        return same and like >= _MIN_NAME

    def _is_read(self, path: str) -> bool:
        """Whether all of it had been shown, and nobody came by since: to read it again tells nothing."""
        known = self._judge.state.texts.get(path)
        return known is not None and known.is_whole and not known.doubt

    def _is_shown(self, later: LaterCall) -> bool:
        return self._judge.verdict(later.call).says == "ok" or self._judge.state.has_shown(later.path or "")


def _alone(call: ToolCall) -> Action:
    return Action(text="", calls=(call,))
