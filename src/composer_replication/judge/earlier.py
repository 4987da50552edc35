"""What earlier sessions of the same project have shown of its paths, as it was known when a session began.

Sessions are of one project where they worked in the same folder, or where the folders hold the same files: clones and
worktrees of it. Paths are relative to the folder a session works in.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from itertools import islice
from typing import Any, TypeVar

from composer_replication.actions.session_state import SessionState
from composer_replication.actions.shown.paths import Standing, with_parents
from composer_replication.judge.checkout import seconds_of
from composer_replication.types import Conversation

_MIN_SHARED = 3  # files that two folders must have in common to be the same project's
_MIN_SHARE = 0.3
_MIN_SIBLINGS = 4  # files of a folder that must be known before one that nobody saw counts as missing
_MAX_COMPARED = 500

Event = tuple[int, str, bool]
"""When (seconds), from which folder, and whether it was there."""
_Entry = TypeVar("_Entry", bound=tuple[Any, ...])


class EarlierSessions:
    """Sessions are added in any order; what one knows is asked for as of the time that another began."""

    def __init__(self) -> None:
        self._events: dict[str, list[Event]] = defaultdict(list)
        self._inside: dict[str, dict[str, list[tuple[int, str]]]] = defaultdict(lambda: defaultdict(list))
        self._roots: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self._too_large: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self._texts: dict[str, list[tuple[int, str, str]]] = defaultdict(list)
        self._names: dict[tuple[str, str], list[Event]] = defaultdict(list)  # of agents and skills
        self._read: dict[str, frozenset[str]] = {}  # a conversation -> files that it has read or written
        self._named: dict[str, int] = {}  # the ends of paths that were ever named -> when first

    def add(self, conversation: Conversation, state: SessionState) -> None:
        """What a whole conversation has shown by its end; one without times is not used."""
        paths, when = state.paths, _last_time(conversation)
        root = paths.root
        self._read[conversation.id] = frozenset(state.texts.read)
        if root is None or when is None:
            return
        files = list(paths.relative_files())
        for relative in files:
            self._roots[root].append((when, relative))
            folder, _, name = relative.rpartition("/")
            self._inside[folder][name].append((when, root))
        for path in {shown_path for relative in files for shown_path in with_parents(relative)}:
            self._events[path].append((when, root, True))
        for ends in paths.named:
            self._named[ends] = min(when, self._named.get(ends, when))
        for name, is_there in state.attempts.names.items():
            self._names[name].append((when, root, is_there))
        for path in paths.missing:
            relative = paths.relative(path)
            if relative:
                self._events[relative].append((when, root, False))
        for path in paths.too_large:
            self._too_large[paths.relative(path) or path].append((when, root))
        for path, text in state.files.items():
            relative = paths.relative(path)
            if relative:
                self._texts[relative].append((when, root, text))

    def before(self, conversation: Conversation) -> PathKnowledge | None:
        """What was known when this conversation began."""
        first = next((turn.timestamp for turn in conversation.turns if turn.timestamp), None)
        when = None if first is None else seconds_of(first)
        if when is None or conversation.cwd is None:
            return None
        read_before = self._read.get(_part_before(conversation.id))
        return PathKnowledge(self, conversation.cwd, when, read_before=read_before)

    def sort(self) -> None:
        """Once all are added."""
        for table in (self._events, self._names, self._roots, self._too_large, self._texts):
            for entries in table.values():
                entries.sort(key=lambda entry: entry[0])
        for names in self._inside.values():
            for entries in names.values():
                entries.sort()


class PathKnowledge:
    """What the earlier sessions of one project know at one time."""

    def __init__(
        self, sessions: EarlierSessions, root: str, when: int, *, read_before: frozenset[str] | None = None
    ) -> None:
        self._sessions, self._root, self._when = sessions, root, when
        self.read_before = read_before  # files of the part of this session before its summary; None: it is in no log
        self._kin: frozenset[str] | None = None  # folders of the same project

    def standing(self, relative: str, shown: Iterable[str]) -> Standing | None:
        """Whether a path is there; `shown` are files of this session, by which its project is recognised."""
        kin = self._folders(shown)
        if not kin:
            return None
        for path in with_parents(relative):
            events = [event for event in self._until_now(self._sessions._events.get(path, [])) if event[1] in kin]
            if events and not events[-1][2]:
                is_new = events[-1][0] < self._sessions._named.get(_last_parts(path), 0) < self._when
                return None if is_new else Standing(False, "missing_in_earlier_session")
            if events and path == relative:
                return Standing(True, "folder" if self._num_inside(path, kin) else "seen_in_earlier_session")
            if events:
                break
        return self._by_its_folder(relative, kin)

    def _by_its_folder(self, relative: str, kin: frozenset[str]) -> Standing | None:
        """A path that nobody ever named, in a folder that is well known; one that is new may hold anything.

        At the root, where anybody puts what they like, only one beside which another ending of it is known.
        """
        folder = relative.rpartition("/")[0]
        if self._was_named(relative):
            return None
        is_known = self._has_stem(relative, kin) if not folder else self._num_inside(folder, kin) >= _MIN_SIBLINGS
        return Standing(False, "in_no_earlier_session") if is_known else None

    def _has_stem(self, name: str, kin: frozenset[str]) -> bool:
        """Whether a file of the root differs from this one in its ending alone."""
        stem = name.rpartition(".")[0]
        namesakes = [
            root_name for root_name in self._sessions._inside.get("", {}) if root_name.rpartition(".")[0] == stem
        ]
        return bool(stem) and any(self._is_inside("", namesake, kin) for namesake in namesakes)

    def _is_inside(self, folder: str, name: str, kin: frozenset[str]) -> bool:
        return any(root in kin for _, root in self._until_now(self._sessions._inside[folder][name]))

    def _was_named(self, relative: str) -> bool:
        return self._sessions._named.get(_last_parts(relative), self._when) < self._when

    def text(self, relative: str, shown: Iterable[str]) -> str | None:
        """The file as an earlier session last knew it whole."""
        kin = self._folders(shown)
        texts = [version for version in self._until_now(self._sessions._texts.get(relative, [])) if version[1] in kin]
        return texts[-1][2] if texts else None

    def is_too_large(self, relative: str, shown: Iterable[str]) -> bool:
        """Whether it was too large to be shown at once."""
        kin = self._folders(shown)
        return any(root in kin for _, root in self._until_now(self._sessions._too_large.get(relative, [])))

    def has_name(self, name: tuple[str, str], shown: Iterable[str]) -> bool | None:
        """Whether an agent or skill was there when it was last asked for; None where it never was."""
        kin = self._folders(shown) or {self._root}
        events = [event for event in self._until_now(self._sessions._names.get(name, [])) if event[1] in kin]
        return events[-1][2] if events else None

    def _num_inside(self, folder: str, kin: frozenset[str]) -> int:
        return sum(self._is_inside(folder, name, kin) for name in self._sessions._inside.get(folder, {}))

    def _folders(self, shown_files: Iterable[str]) -> frozenset[str]:
        if self._kin is None:
            own_files = [relative for _, relative in self._until_now(self._sessions._roots.get(self._root, []))]
            files = {path for path in (*own_files[-_MAX_COMPARED:], *islice(shown_files, _MAX_COMPARED)) if "/" in path}
            if not own_files and len(files) < _MIN_SHARED:
                return frozenset()  # nothing to recognise the project by yet
            events = (self._until_now(self._sessions._events.get(path, [])) for path in files)
            shared = Counter(
                root for path_events in events for root in {root for _, root, is_there in path_events if is_there}
            )
            self._kin = frozenset(
                {self._root, *(root for root, number in shared.items() if self._is_kin(root, number, files))}
            )
        return self._kin

    def _is_kin(self, root: str, num_shared: int, files: Collection[str]) -> bool:
        theirs = len({path for _, path in self._until_now(self._sessions._roots[root]) if "/" in path})
        return num_shared >= max(_MIN_SHARED, _MIN_SHARE * min(len(files), theirs))

    def _until_now(self, entries: list[_Entry]) -> list[_Entry]:
        return entries[: bisect_left(entries, self._when, key=lambda entry: entry[0])]


def _part_before(conversation_id: str) -> str:
    """The id of a session's part before this one; those that go on after a summary are numbered from 0."""
    session, _, number = conversation_id.rpartition("#")
    return f"{session}#{int(number) - 1}" if number.isdecimal() else ""


def _last_parts(path: str) -> str:
    return "/".join(path.split("/")[-2:])


def _last_time(conversation: Conversation) -> int | None:
    """In seconds: texts of times are ordered only where all name the same zone in the same form."""
    times = (seconds_of(turn.timestamp) for turn in conversation.turns if turn.timestamp)
    return max((time for time in times if time is not None), default=None)
