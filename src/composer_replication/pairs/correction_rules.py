"""What should have been done in place of a call that failed, by its kind of failure, as far as the session knew.

The judge stands at the state before the failing turn. Every rule gives the corrected call where what it names had been
shown by then, else the look that came first, else nothing.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from composer_replication.actions.edits import Operation, Replace, edit_operations
from composer_replication.actions.equality import same_action
from composer_replication.actions.paths import normal_path
from composer_replication.actions.shell.command import Command, is_path
from composer_replication.actions.shown.views import without_reminders
from composer_replication.actions.tools import LINE_NUMBER, channel_of, command_text, is_edit, is_label, path_argument
from composer_replication.pairs.later_calls import LaterCall, LaterCalls
from composer_replication.sites.user_words import CORRECTED
from composer_replication.types import Action, ErrorSite, ToolCall

if TYPE_CHECKING:
    from composer_replication.judge import Judge

How = Literal["corrected", "look_first"]
Decided = tuple[ToolCall, How] | None
_NEXT = 3
_MIN_ALIKE = 0.6
_MAX_WORDS, _MAX_EDITS, _MAX_LINES = 20, 20, 400
_MIN_NEW, _CHANGED = 0.2, 2
_MIN_CONTAINED, _MIN_COMPARED, _MAX_COMPARED, _MAX_NAME = 8, 20, 4000, 100
_TOKEN = re.compile(r"[\w-]+|[^\w\s-]")
_FOUND = ("found_in_whole_file", "found_in_part")
_ASKS_FOR_HELP = re.compile(r"(?:^|\s)(?:--help|-h|help|tasks|list|ls)(?:\s|$)")
_TYPED_WRONG = frozenset({"usage_error", "shell_syntax", "input_validation", "tool_not_found"})


class Decision:
    """One failing call, at the state before its turn."""

    def __init__(self, judge: Judge, site: ErrorSite, call: ToolCall, log: LaterCalls, cwd: str | None) -> None:
        self._judge, self._site, self._call, self._cwd = judge, site, call, cwd
        self._later, self._error = log.after(site), log.text_of(call)
        self._path = path_argument(call.arguments) if channel_of(call.name) == "file" else None

    def made(self) -> Decided:
        """The call to choose, and how it belongs to the one that failed."""
        rules: Mapping[str, Callable[[], Decided]] = {
            "edit_not_read": self._not_read,
            "edit_no_match": self._no_match,
            "edit_ambiguous": self._no_match,
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
        if found is None or same_action(_alone(found[0]), _alone(self._call)):
            return None
        return found

    def _not_read(self) -> Decided:
        """The reading, where the judge agrees that the file had not been read: not even before a compaction."""
        return self._reading() if self._judge.verdict(self._call).rule == "not_read" else None

    def _no_match(self) -> Decided:
        """The edit as it worked, where its text had been shown; the reading, where not all of the file had been."""
        said = self._judge.verdict(self._call)
        had_all = said.says == "fails" and said.kind in ("edit_no_match", "edit_ambiguous")
        return self._edit_again() or (None if had_all else self._reading(to_see_more=True))

    def _edit_again(self) -> Decided:
        for later in self._later:
            if is_edit(later.call.name) and self._is_same_change(later.call):
                said = self._judge.verdict(later.call)
                return (later.call, "corrected") if said.says == "ok" and said.rule.startswith(_FOUND) else None
        return None

    def _reading(self, *, to_see_more: bool = False) -> Decided:
        """The first look at the failing call's file, before it was changed; `to_see_more` than had been shown of it."""
        for later in self._later:
            if later.path is None or self._path is None or not self._is_same_path(later.path, self._path):
                continue
            if is_edit(later.call.name):
                return None
            if later.is_look:
                return None if to_see_more and self._had_shown(later) else (later.call, "look_first")
        return None

    def _had_shown(self, later: LaterCall) -> bool:
        """Whether most of what a look shows had been shown, and nobody is known to have changed the file since."""
        known = self._judge.state.texts.get(self._path or "")
        if known is None or known.doubt == _CHANGED:
            return False
        shown = without_reminders(later.text).splitlines()[:_MAX_LINES]
        lines = [line for each in shown if (line := LINE_NUMBER.sub("", each)).strip()]
        return sum(known.count(line) == 0 for line in lines) < _MIN_NEW * len(lines)

    def _not_found(self) -> Decided:
        """The same file where it really is, if that had been shown; else the search for it."""
        if self._path is None:
            return None
        name = self._path.rstrip("/").rpartition("/")[2]
        for later in self._later[:_NEXT]:
            if later.call.name == self._call.name and later.path and self._is_meant(later.path, name):
                if self._is_shown(later):
                    return later.call, "corrected"
                break
        return self._search(self._path)

    def _listing(self) -> Decided:
        return None if self._path is None else self._search(self._path)

    def _search(self, path: str) -> Decided:
        """The first look after the failure that names what was missing and found something, before anything is done."""
        looks = itertools.takewhile(lambda later: later.is_look, self._later[:_NEXT])
        found = next((later for later in looks if later.has_found and self._is_for(later, path)), None)
        return None if found is None else (found.call, "look_first")

    def _is_for(self, later: LaterCall, path: str) -> bool:
        """Whether a look is for this path: by its name, as a list of a folder above, or the same search elsewhere."""
        folder, _, name = path.rstrip("/").rpartition("/")
        stem, above = name.lstrip(".").partition(".")[0], folder.rpartition("/")[2]
        words = later.words.lower()
        if len(stem) > 2 and stem.lower() in words:
            return True
        ours, theirs = (each.arguments.get("pattern") for each in (self._call, later.call))
        if ours is not None and ours == theirs and later.call.name == self._call.name:
            return True
        if not later.is_listing:
            return False
        named = [later.path or "", *(word for word in Command.of(later.words).words if is_path(word))]
        folders = {normal_path(each, self._cwd) for each in named if each}
        parts = re.split(r"[/\s]", words)
        return above.lower() in parts or any(f"{path}/".startswith(f"{each}/") for each in folders - {"/"})

    def _elsewhere(self) -> Decided:
        """The same command with paths that had been shown."""
        later = self._next_alike()
        if later is None:
            return None
        new = Command.of(later.words).words - Command.of(_command(self._call)).words
        paths = [word for word in new if is_path(word) and "/" in word]
        return (later.call, "corrected") if paths and self._are_shown(paths) else None

    def _are_shown(self, words: Sequence[str]) -> bool:
        """Whether the session had shown all of them; of very many nobody asks, for each is searched for."""
        return len(words) <= _MAX_WORDS and all(map(self._judge.state.has_shown, words))

    def _typed_again(self) -> Decided:
        """The same call as it has to be typed; what it names besides had been shown, and was not told by the error."""
        later = self._next_alike()
        if later is None:
            return self._help()
        if is_edit(later.call.name):
            said = self._judge.verdict(later.call)
            return (later.call, "corrected") if said.says == "ok" else None
        told = Command.of(self._error).words
        new = Command.of(_texts(later.call)).words - Command.of(_texts(self._call)).words
        named = [word for word in new if word in told or (is_path(word) and "/" in word)]
        return (later.call, "corrected") if self._are_shown(named) else None

    def _help(self) -> Decided:
        """What the same program says about itself, asked right after the failure."""
        programs = {name for name, _ in Command.of(_command(self._call)).programs}
        for later in self._later[:1]:
            asked = Command.of(later.words)
            if programs & {name for name, _ in asked.programs} and _ASKS_FOR_HELP.search(asked.text):
                return later.call, "look_first"
        return None

    def _told(self) -> Decided:
        """After a user's words: the same change, made as the user wants it; or the command that the words name."""
        if is_edit(self._call.name):
            return self._edit_again()
        said = set(_plain_words(self._site.evidence_text))
        for later in self._later[:1]:
            if channel_of(later.call.name) == channel_of(self._call.name) == "shell":
                mine, theirs = (set(_plain_words(text)) for text in (_command(self._call), later.words))
                if (theirs - mine) & said and not said & (mine - theirs):
                    return later.call, "corrected"
        return None

    def _next_alike(self) -> LaterCall | None:
        """The next call of the same tool, if it asks for about the same."""
        for later in self._later[:_NEXT]:
            if later.call.name == self._call.name and _same_programs(later.call, self._call):
                return later if _alike(_texts(later.call), _texts(self._call)) >= _MIN_ALIKE else None
        return None

    def _is_same_change(self, call: ToolCall) -> bool:
        ours, theirs = ((edit_operations(each, self._cwd) or [])[:_MAX_EDITS] for each in (self._call, call))
        return any(_belong_together(one, other) for one in ours for other in theirs)

    def _is_same_path(self, path: str, other: str) -> bool:
        return normal_path(path, self._cwd) == normal_path(other, self._cwd)

    def _is_meant(self, path: str, name: str) -> bool:
        return difflib.SequenceMatcher(None, path.rpartition("/")[2][:_MAX_NAME], name[:_MAX_NAME]).ratio() >= 0.8

    def _is_shown(self, later: LaterCall) -> bool:
        return self._judge.verdict(later.call).says == "ok" or self._judge.state.has_shown(later.path or "")


def _command(call: ToolCall) -> str:
    return command_text(call.name, call.arguments)


def _same_programs(one: ToolCall, other: ToolCall) -> bool:
    """Whether two commands run the same programs; calls that are no commands do."""
    first, second = (Command.of(_command(each)).programs for each in (one, other))
    return {name for name, _ in first if name != "cd"} == {name for name, _ in second if name != "cd"}


def _alone(call: ToolCall) -> Action:
    return Action(text="", calls=(call,))


def _texts(call: ToolCall) -> str:
    return " ".join(str(each) for key, each in call.arguments.items() if not is_label(call.name, key))


def _alike(one: str, other: str) -> float:
    """The share of words and signs that two texts have in common, in any order: in linear time, whatever they are."""
    first, second = (Counter(_TOKEN.findall(text[:_MAX_COMPARED])) for text in (one, other))
    return 2 * (first & second).total() / max(first.total() + second.total(), 1)


def _belong_together(one: Operation, other: Operation) -> bool:
    """Whether two edits are about the same place of the same file."""
    if not isinstance(one, Replace) or not isinstance(other, Replace) or one.path != other.path:
        return False
    return _overlap(one.old, other.old) or _overlap(one.new, other.new)


def _overlap(one: str, other: str) -> bool:
    """Whether one text is in the other or much like it; short ones are alike by chance."""
    shorter, longer = sorted((one.strip(), other.strip()), key=len)
    if len(shorter) < _MIN_CONTAINED:
        return bool(shorter) and shorter == longer
    return shorter in longer or (len(shorter) >= _MIN_COMPARED and _alike(one, other) >= _MIN_ALIKE)


def _plain_words(text: str) -> list[str]:
    return [word for word in "".join(each if each.isalnum() else " " for each in text.lower()).split() if len(word) > 2]
