"""Determine which files a project had at a given date, from a git repository and from earlier sessions.

`Repository` and `Checkout` read git objects; nothing is checked out, and no code from the repository runs. Only
plumbing commands are used, which ignore hooks, filters and pagers. Repository settings that could start a program (a
file system monitor, a fetch of missing objects, a signature check) are overridden.

`EarlierSessions` and `PathKnowledge` collect what other sessions in the same project have shown.
"""

from __future__ import annotations

import os
import re
import subprocess
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from composer_replication.errors import InputError, explain
from composer_replication.sites.actions.known_paths import PathStatus, path_with_parents
from composer_replication.sites.actions.session_state import SessionState
from composer_replication.types import Conversation

# Repository settings that could start a program or use the network, overridden on every call.
_SETTINGS = (
    "core.fsmonitor=false",
    "core.hooksPath=/dev/null",
    "core.pager=cat",
    "core.sshCommand=false",
    "credential.helper=",
    "diff.external=",
    "log.showSignature=false",
    "protocol.allow=never",
)
# Replaces all GIT_… variables in the environment. LC_ALL keeps git's messages untranslated.
_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_ALLOW_PROTOCOL": "none",
    "LC_ALL": "C",
}
_TIMEOUT_S = 120
_MAX_TEXT = 4_000_000  # bytes per file
_MAX_TEXTS = 64_000_000  # bytes for all versions of one file
_MAX_VERSIONS = 300  # per file
_GRACE_S = 7 * 24 * 3600  # a work tree may be some days older than the commit that removed a file


class Repository:
    """A git repository, accessed read-only. Answers are cached."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self._git("rev-parse", "--git-dir") is None:
            fix = "Pass the path of a clone of the project, or omit --repo"
            raise InputError(explain("--repo", got=str(path), expected="a git repository", fix=fix))

    def at(self, when: str, branch: str | None = None) -> Checkout | None:
        """Return the files at a given time, on the given branch or else on the default branch.

        The branch is found even if it was deleted after a merge. Return None if the time is malformed.
        """
        seconds = _parse_time(when)
        return None if seconds is None else self._at_seconds(seconds, branch)

    def _at_seconds(self, seconds: int, branch: str | None = None) -> Checkout | None:
        commit, is_branch = self._find_commit(seconds, branch)
        return None if commit is None else Checkout(self, commit, seconds=seconds, is_branch=is_branch)

    def before(self, conversation: Conversation) -> Checkout | None:
        """Return the files at the start of a conversation, on the branch in its log.

        Return None if the log has no times.
        """
        when = next((turn.timestamp for turn in conversation.turns if turn.timestamp), None)
        branch = conversation.extra.get("git_branch")
        return None if when is None else self.at(when, branch if isinstance(branch, str) else None)

    # A cache on a method keeps its object alive (B019). That is intended: a repository is used until the program ends.
    @lru_cache(maxsize=16)  # noqa: B019
    def _find_commit(self, seconds: int, branch: str | None) -> tuple[str | None, bool]:
        """Return the commit, and whether it is on the requested branch."""
        names = [f"refs/heads/{branch}", f"refs/remotes/origin/{branch}"] if branch else []
        # Branch names are reused: a branch merged before this time is a different one, so the next merge counts.
        merged = (tip for when, tip in (self._merged_branches.get(branch, []) if branch else ()) if when > seconds)
        names += islice(merged, 1)
        for index, name in enumerate((*names, "HEAD", "refs/heads/main", "refs/heads/master")):
            # First parents only: commits on another branch may be older than this time but merged later.
            commit = self._git(
                "rev-list", "-1", "--first-parent", f"--before={seconds}", "--end-of-options", name, "--"
            )
            if commit is not None and commit.strip():
                return commit.strip().decode("ascii", "replace"), not branch or index < len(names)
        return None, False

    @cached_property
    def _merged_branches(self) -> dict[str, list[tuple[int, str]]]:
        return _parse_merged_branches(self._git("rev-list", "--all", "--merges", "--format=%P%x09%ct%x09%s") or b"")

    @lru_cache(maxsize=16)  # noqa: B019
    def listing(self, commit: str) -> frozenset[str]:
        """Return all paths in a commit."""
        out = self._git("ls-tree", "-r", "-z", "--name-only", "--full-tree", commit) or b""
        return frozenset(name.decode("utf-8", "replace") for name in out.split(b"\0") if name)

    @lru_cache(maxsize=32)  # noqa: B019
    def text(self, commit: str, path: str) -> str | None:
        """Return a file in a commit with Unix line endings, or None if it is missing or too large."""
        # The size is checked first, so that a huge file is never loaded.
        size = self._git("cat-file", "-s", f"{commit}:{path}")
        out = self._git("cat-file", "blob", f"{commit}:{path}") if size and int(size) <= _MAX_TEXT else None
        return None if out is None else out.decode("utf-8", "replace").replace("\r\n", "\n")

    @cached_property
    def history(self) -> _FileHistory | None:
        """The changes made by every commit on every branch, or None if git fails."""
        times = self._git("rev-list", "--all", "--timestamp")
        # A single diff-tree process reads all commits from stdin, instead of one process per commit.
        commits = b"\n".join(line.split(b" ")[-1] for line in (times or b"").split(b"\n"))
        changes = times and self._git(
            "diff-tree", "--stdin", "--root", "-r", "-z", "-c", "--raw", "--no-abbrev", "--no-renames", "--no-ext-diff",
            "--no-textconv", stdin=commits,
        )  # fmt: skip
        return _FileHistory(times, changes) if times and changes else None

    # A session needs only one set of ancestors, and each set is as large as the history.
    @lru_cache(maxsize=2)  # noqa: B019
    def ancestors(self, commit: str) -> frozenset[str]:
        """Return a commit and all its ancestors."""
        return frozenset((self._git("rev-list", commit, "--") or b"").decode("ascii", "replace").split())

    @lru_cache(maxsize=2)  # noqa: B019
    def versions(self, path: str) -> tuple[str, ...]:
        """Return every version of a file in any commit.

        The result is empty if a version cannot be read or there are too many.
        """
        blobs = self.history.versions.get(path, []) if self.history else []
        blob_lines = "\n".join(blobs).encode()
        if not 0 < len(blobs) <= _MAX_VERSIONS or not self._are_readable(blob_lines, len(blobs)):
            return ()
        texts = tuple(_read_batch_texts(self._git("cat-file", "--batch", stdin=blob_lines) or b""))
        return texts if len(texts) == len(blobs) else ()

    def _are_readable(self, names: bytes, count: int) -> bool:
        """Return whether all objects exist and are small enough to read."""
        # A missing object has no size: its line is "<name> missing".
        lines = [line.split() for line in (self._git("cat-file", "--batch-check", stdin=names) or b"").splitlines()]
        sizes = [int(line[2]) for line in lines if len(line) == 3 and line[1] == b"blob"]
        return len(sizes) == count and max(sizes) <= _MAX_TEXT and sum(sizes) <= _MAX_TEXTS

    @lru_cache(maxsize=2)  # noqa: B019
    def versions_without_blanks(self, path: str) -> str:
        """Return every version of a file without whitespace, joined by a character that occurs in none of them."""
        return "\0".join(remove_blanks(text) for text in self.versions(path))

    def _git(self, *words: str, stdin: bytes | None = None) -> bytes | None:
        """Return the output of a git command, or None if it fails or times out."""
        settings = [word for setting in _SETTINGS for word in ("-c", setting)]
        command = ["git", "--no-pager", "--no-replace-objects", *settings, *words]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | _ENVIRONMENT
        try:
            process = subprocess.run(  # noqa: S603  # the arguments are ours; the repository is only a folder name
                command, cwd=self.path, env=environment, input=stdin or b"", capture_output=True, timeout=_TIMEOUT_S,
                check=False,
            )  # fmt: skip
        except (
            OSError,
            ValueError,
            subprocess.TimeoutExpired,
        ):  # ValueError: a name that cannot be passed as an argument
            return None
        return process.stdout if process.returncode == 0 else None


class Checkout:
    """A project's files at a given time, by path relative to its root."""

    def __init__(self, repository: Repository, commit: str, *, seconds: int = 0, is_branch: bool = True) -> None:
        """Initialize the checkout of a commit.

        Args:
            repository: The repository that contains the commit.
            commit: The commit id.
            seconds: The requested time, in seconds since the epoch. 0: unknown, so no path counts as removed.
            is_branch: Whether the commit is on the requested branch. If not, no path counts as removed.
        """
        self._repository, self.commit, self._seconds, self._is_branch = repository, commit, seconds, is_branch

    @property
    def files(self) -> frozenset[str]:
        """All files, relative to the root."""
        return self._repository.listing(self.commit)

    @cached_property
    def folders(self) -> frozenset[str]:
        """All folders, relative to the root, excluding the root."""
        return frozenset(folder for path in self.files for folder in islice(path_with_parents(path), 1, None))

    def exists(self, relative: str) -> bool | None:
        """Return whether a path existed in the session's work tree, or None if that is uncertain.

        A path that is missing from this commit may still have existed if

        - a commit that is not an ancestor adds it: it may have been in the work tree earlier, or on another branch;
        - it was removed only a few days earlier: the work tree may be older;
        - it was removed and the session's branch is unknown: the branch may have started before the removal.
        """
        if relative in self.files or relative in self.folders:
            return True
        history = self._repository.history
        if (
            history is None
            or not self.files
            or history.added_on_other_branch(relative, self._repository.ancestors(self.commit))
        ):
            return None
        removed_at = history.removed_at(relative)
        if removed_at is None or (removed_at and not self._is_branch):
            return None
        return None if removed_at and removed_at > self._seconds - _GRACE_S else False

    def text(self, relative: str) -> str | None:
        """Return the text of a file, or None if it is missing or too large."""
        return self._repository.text(self.commit, relative) if relative in self.files else None

    def is_trunks(self, relative: str, text: str) -> bool:
        """Return whether the default branch has this text in the file at this time, so that it is not a new change."""
        trunk = self._repository._at_seconds(self._seconds)
        return text in ((trunk and trunk.text(relative)) or "")

    def has_ever_held(self, relative: str, text: str, *, but_for_blanks: bool = False) -> bool | None:
        """Return whether any version of a file, even a later one, contains this text.

        Return None if no commit has the file.
        """
        if but_for_blanks:
            versions_without_blanks = self._repository.versions_without_blanks(relative)
            return remove_blanks(text) in versions_without_blanks if versions_without_blanks else None
        versions, plain = self._repository.versions(relative), text.replace("\r\n", "\n")
        needle = plain.rstrip("\n") or plain  # an edit is also tried without its final newline
        return any(needle in version for version in versions) if versions else None


def remove_blanks(text: str) -> str:
    """Return the text without whitespace, so that it is unaffected by formatters."""
    return "".join(text.split())


def _read_batch_texts(out: bytes) -> Iterator[str]:
    """Yield the texts in the output of `cat-file --batch`, in which a header with name and size precedes each text."""
    position = 0
    while (end := out.find(b"\n", position)) >= 0:
        words = out[position:end].split()
        position = end + 1
        size = int(words[2]) if len(words) == 3 else -1  # a missing object has no size, and no content line
        if 0 <= size <= _MAX_TEXT and words[1] == b"blob":
            yield out[position : position + size].decode("utf-8", "replace").replace("\r\n", "\n")
        position += size + 1


def _parse_time(when: str) -> int | None:
    """Convert an ISO time to seconds since the epoch. Return None if the time is malformed."""
    try:
        return int(datetime.fromisoformat(when.replace("Z", "+00:00")).timestamp())
    except (ValueError, OverflowError):
        return None


# "Merge pull request #7 from ann/fix-cart" -> "fix-cart", "Merge branch 'fix-cart' into main" -> "fix-cart"; not
# "Fix the cart (#7)" from a squashed pull request, which does not name its branch
_MERGE_SUBJECT = re.compile(
    r"Merge pull request #\d+ from [^\s/]+/(\S+)|Merge (?:remote-tracking )?branch '(?:origin/)?([^']+)'"
)


class _FileHistory:
    """The changes to files by all commits in a repository. `versions` are the objects of each path, newest first.

    A path that was never added by any commit never existed. A path that is missing from a checkout, although only its
    ancestors have added it, was removed or was dropped by a merge.
    """

    def __init__(self, times: bytes, changes: bytes) -> None:
        """Parse the output of `rev-list --timestamp` and of `diff-tree --stdin -z -c --raw`."""
        self.versions: dict[str, list[str]] = {}
        self._added: dict[str, list[str]] = defaultdict(list)
        self._added_at: dict[str, int] = {}
        self._removed: dict[str, int] = {}
        blobs: dict[str, dict[str, None]] = defaultdict(dict)
        rows = (line.partition(" ") for line in _decode(times).split("\n"))
        seconds = {commit: int(when) for when, _, commit in rows if commit}
        for commit, status, blob, path in _changed_paths(changes):
            when = seconds.get(commit, 0)
            if "A" in status:
                self._added[path].append(commit)
                self._added_at[path] = max(when, self._added_at.get(path, 0))
            if set(blob) == {"0"}:
                self._removed[path] = max(when, self._removed.get(path, 0))
            else:
                blobs[path][blob] = None
        self.versions = {path: list(versions) for path, versions in blobs.items()}
        self._paths = sorted(self._added)

    def added_on_other_branch(self, path: str, ancestors: Collection[str]) -> bool:
        """Return whether a commit that is not an ancestor of the checkout has added the path or a file inside it."""
        return any(
            commit not in ancestors
            for added_path in self._paths_at_or_below(path)
            for commit in self._added[added_path]
        )

    def removed_at(self, path: str) -> int | None:
        """Return the time at which the path, or the last file inside it, was removed.

        The result is 0 if the path never existed, and None if it was not removed.
        """
        last = 0
        for added_path in self._paths_at_or_below(path):
            when = self._removed.get(added_path, 0)
            if when <= self._added_at[added_path]:
                return None  # a file dropped by a merge is not listed as removed there
            last = max(last, when)
        return last

    def _paths_at_or_below(self, path: str) -> Iterator[str]:
        """Yield the path if it was ever a file, and every file that was ever inside it."""
        if path in self._added:
            yield path
        start = f"{path}/"
        # The paths are sorted, so everything below a folder is a contiguous range.
        for index in range(bisect_left(self._paths, start), len(self._paths)):
            if not self._paths[index].startswith(start):
                return
            yield self._paths[index]


def _parse_merged_branches(merges: bytes) -> dict[str, list[tuple[int, str]]]:
    """Return each branch's merges as (time, last commit), the earliest merge first.

    `merges` is the output of `rev-list --merges --format=%P%x09%ct%x09%s`.
    """
    branches: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for line in _decode(merges).split("\n"):
        parents, _, rest = line.partition("\t")
        when, _, subject = rest.partition("\t")
        name = _MERGE_SUBJECT.match(subject)
        if name is not None and len(parents.split()) == 2 and when.isdecimal():
            branches[name[1] or name[2]].append((int(when), parents.split()[1]))
    return {name: sorted(tips) for name, tips in branches.items()}


def _changed_paths(changes: bytes) -> Iterator[tuple[str, str, str, str]]:
    """Yield the commit, the status letters, the resulting object and the path of each change.

    For a merge, the status has one letter per parent.
    """
    # With -z, fields end in NUL: a commit id, then ":<modes> <objects> <status>" and the path for each change.
    commit, entry = "", None
    for field in changes.split(b"\0"):
        word = _decode(field)
        if entry is not None:
            *_, blob, status = entry
            yield commit, status, blob, word
            entry = None
        elif word.startswith(":"):
            entry = word.split(" ")
        else:
            commit = word


def _decode(content: bytes) -> str:
    return content.decode("utf-8", "replace")


# Two folders belong to the same project if they share at least this many files, and this fraction of the smaller set.
_MIN_SHARED = 3
_MIN_SHARE = 0.3
_MIN_SIBLINGS = 4  # known files in a folder before an unseen file counts as missing there
_MAX_COMPARED = 500
PathEvent = tuple[int, str, bool]
"""Time in seconds, the session's folder, and whether the path existed."""
_TimedEntry = TypeVar("_TimedEntry", bound=tuple[Any, ...])


class EarlierSessions:
    """What sessions have shown about the paths in their projects.

    Add sessions in any order, call `sort`, then query what was known before a session began. Sessions belong to the
    same project if they worked in the same folder, or in folders with the same files, such as clones and worktrees.
    Paths are relative to the session's folder.
    """

    def __init__(self) -> None:
        # By path relative to the session's folder. Each entry begins with its time.
        self._events: dict[str, list[PathEvent]] = defaultdict(list)
        # folder -> name of a file in it -> (time, session's folder)
        self._names_in_folder: dict[str, dict[str, list[tuple[int, str]]]] = defaultdict(lambda: defaultdict(list))
        self._roots: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self._too_large: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self._read_batch_texts: dict[str, list[tuple[int, str, str]]] = defaultdict(list)
        self._agents_and_skills: dict[tuple[str, str], list[PathEvent]] = defaultdict(list)  # (tool, name) -> its calls
        self._read: dict[str, frozenset[str]] = {}  # conversation -> the files it has read or written
        self._first_mentioned: dict[
            str, int
        ] = {}  # the last two components of a path -> when they were first mentioned

    def add(self, conversation: Conversation, state: SessionState) -> None:
        """Add what a conversation has shown by its end. A conversation without times is ignored."""
        paths, when = state.paths, _last_time(conversation)
        root = paths.root
        self._read[conversation.id] = frozenset(state.texts.read)
        if root is None or when is None:
            return
        files = list(paths.relative_files())
        for relative in files:
            self._roots[root].append((when, relative))
            folder, _, name = relative.rpartition("/")
            self._names_in_folder[folder][name].append((when, root))
        for path in {shown_path for relative in files for shown_path in path_with_parents(relative)}:
            self._events[path].append((when, root, True))
        for ends in paths.mentioned_endings:
            self._first_mentioned[ends] = min(when, self._first_mentioned.get(ends, when))
        for name, exists in state.attempts.names.items():
            self._agents_and_skills[name].append((when, root, exists))
        for path in paths.missing:
            relative = paths.relative(path)
            if relative:
                self._events[relative].append((when, root, False))
        for path in paths.too_large:
            self._too_large[paths.relative(path) or path].append((when, root))
        for path, text in state.files.items():
            relative = paths.relative(path)
            if relative:
                self._read_batch_texts[relative].append((when, root, text))

    def before(self, conversation: Conversation) -> PathKnowledge | None:
        """Return what was known when this conversation began, or None if its start time or folder is unknown."""
        first = next((turn.timestamp for turn in conversation.turns if turn.timestamp), None)
        when = None if first is None else _parse_time(first)
        if when is None or conversation.cwd is None:
            return None
        read_before = self._read.get(_previous_part_id(conversation.id))
        return PathKnowledge(self, conversation.cwd, when, read_before=read_before)

    def sort(self) -> None:
        """Sort the events by time. Call it after the last `add`."""
        for table in (self._events, self._agents_and_skills, self._roots, self._too_large, self._read_batch_texts):
            for entries in table.values():
                entries.sort(key=lambda entry: entry[0])
        for names in self._names_in_folder.values():
            for entries in names.values():
                entries.sort()


class PathKnowledge:
    """What the earlier sessions in a project knew at a given time."""

    def __init__(
        self, sessions: EarlierSessions, root: str, when: int, *, read_before: frozenset[str] | None = None
    ) -> None:
        self._sessions, self._root, self._when = sessions, root, when
        self.read_before = (
            read_before  # files read in the part before this session's summary; None if that part has no log
        )
        self._project_roots: frozenset[str] | None = None  # folders of the same project, once determined

    def standing(self, relative: str, shown: Iterable[str]) -> PathStatus | None:
        """Return whether a path exists, or None if unknown. `shown` are files that identify the session's project."""
        roots = self._roots_of_project(shown)
        if not roots:
            return None
        for path in path_with_parents(relative):
            events = [event for event in self._before_start(self._sessions._events.get(path, [])) if event[1] in roots]
            # The last session that knew decides. If the path was first mentioned later, it may have been created.
            if events and not events[-1][2]:
                is_new = events[-1][0] < self._sessions._first_mentioned.get(_last_two_parts(path), 0) < self._when
                return None if is_new else PathStatus(False, "missing_in_earlier_session")
            if events and path == relative:
                return PathStatus(True, "folder" if self._num_files_in(path, roots) else "seen_in_earlier_session")
            if events:
                break
        return self._status_by_folder(relative, roots)

    def _status_by_folder(self, relative: str, roots: frozenset[str]) -> PathStatus | None:
        """Return `missing` if no session ever mentioned the path and its folder is well known, otherwise None.

        At the root, where people put all kinds of files, a path counts as missing only if the same name with another
        extension exists.
        """
        folder = relative.rpartition("/")[0]
        if self._was_mentioned(relative):
            return None
        is_known = (
            self._has_namesake(relative, roots) if not folder else self._num_files_in(folder, roots) >= _MIN_SIBLINGS
        )
        return PathStatus(False, "in_no_earlier_session") if is_known else None

    def _has_namesake(self, name: str, roots: frozenset[str]) -> bool:
        """Return whether a file at the root has the same name with another extension."""
        stem = name.rpartition(".")[0]
        namesakes = [
            root_name
            for root_name in self._sessions._names_in_folder.get("", {})
            if root_name.rpartition(".")[0] == stem
        ]
        return bool(stem) and any(self._is_file_in("", namesake, roots) for namesake in namesakes)

    def _is_file_in(self, folder: str, name: str, roots: frozenset[str]) -> bool:
        return any(root in roots for _, root in self._before_start(self._sessions._names_in_folder[folder][name]))

    def _was_mentioned(self, relative: str) -> bool:
        return self._sessions._first_mentioned.get(_last_two_parts(relative), self._when) < self._when

    def text(self, relative: str, shown: Iterable[str]) -> str | None:
        """Return the file as last known in full by an earlier session, or None."""
        roots = self._roots_of_project(shown)
        texts = [
            version
            for version in self._before_start(self._sessions._read_batch_texts.get(relative, []))
            if version[1] in roots
        ]
        return texts[-1][2] if texts else None

    def is_too_large(self, relative: str, shown: Iterable[str]) -> bool:
        """Return whether a session found the file too large to be shown in one call."""
        roots = self._roots_of_project(shown)
        return any(root in roots for _, root in self._before_start(self._sessions._too_large.get(relative, [])))

    def has_name(self, name: tuple[str, str], shown: Iterable[str]) -> bool | None:
        """Return whether an agent or skill existed when it was last called, or None if it was never called."""
        roots = self._roots_of_project(shown) or {self._root}
        events = [
            event for event in self._before_start(self._sessions._agents_and_skills.get(name, [])) if event[1] in roots
        ]
        return events[-1][2] if events else None

    def _num_files_in(self, folder: str, roots: frozenset[str]) -> int:
        return sum(self._is_file_in(folder, name, roots) for name in self._sessions._names_in_folder.get(folder, {}))

    def _roots_of_project(self, shown_files: Iterable[str]) -> frozenset[str]:
        """Return the folders in which sessions worked on the same project, including this session's folder."""
        if self._project_roots is None:
            # Only files in subfolders count: README.md or setup.py is at the root of many projects.
            session_files = [relative for _, relative in self._before_start(self._sessions._roots.get(self._root, []))]
            files = {
                path for path in (*session_files[-_MAX_COMPARED:], *islice(shown_files, _MAX_COMPARED)) if "/" in path
            }
            if not session_files and len(files) < _MIN_SHARED:
                return frozenset()  # too few files to identify the project; more may be shown later
            events = (self._before_start(self._sessions._events.get(path, [])) for path in files)
            shared = Counter(
                root for path_events in events for root in {root for _, root, exists in path_events if exists}
            )
            self._project_roots = frozenset(
                {
                    self._root,
                    *(root for root, num_shared in shared.items() if self._is_project_folder(root, num_shared, files)),
                }
            )
        return self._project_roots

    def _is_project_folder(self, root: str, num_shared: int, files: Collection[str]) -> bool:
        num_files = len({path for _, path in self._before_start(self._sessions._roots[root]) if "/" in path})
        return num_shared >= max(_MIN_SHARED, _MIN_SHARE * min(len(files), num_files))

    def _before_start(self, entries: list[_TimedEntry]) -> list[_TimedEntry]:
        return entries[: bisect_left(entries, self._when, key=lambda entry: entry[0])]


def _previous_part_id(conversation_id: str) -> str:
    """Return the id of the preceding part of a session. Parts are separated by summaries and numbered from 0."""
    session, _, number = conversation_id.rpartition("#")
    return f"{session}#{int(number) - 1}" if number.isdecimal() else ""


def _last_two_parts(path: str) -> str:
    return "/".join(path.split("/")[-2:])


def _last_time(conversation: Conversation) -> int | None:
    """Return the latest time in a conversation in seconds since the epoch, or None if it has no times.

    The times are parsed first, because time strings from different time zones do not sort correctly.
    """
    times = (_parse_time(turn.timestamp) for turn in conversation.turns if turn.timestamp)
    return max((time for time in times if time is not None), default=None)
