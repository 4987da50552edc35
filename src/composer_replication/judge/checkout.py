"""A project's files at a date, out of the objects of a git repository. Nothing is checked out, and nothing of it runs.

Git is asked for objects only, by commands that know no hook, filter or pager; what a repository's settings could make
them start (a file system monitor, a fetch of missing objects, a signature check) is switched off.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path

from composer_replication.actions.shown.paths import with_parents
from composer_replication.errors import InputError, explain
from composer_replication.judge.history import History, merged_branches
from composer_replication.types import Conversation

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
_MAX_TEXT = 4_000_000
_MAX_TEXTS = 64_000_000  # all versions of one file
_MAX_VERSIONS = 300  # of one file
_SETTLED_S = 7 * 24 * 3600  # a work tree may be some days behind the commit that removed a file


class Repository:
    """Asks git; answers are kept."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self._ask("rev-parse", "--git-dir") is None:
            fix = "Name a clone of the project, or leave --repo out"
            raise InputError(explain("--repo", got=str(path), expected="a git repository", fix=fix))

    def at(self, when: str, branch: str | None = None) -> Checkout | None:
        """The files at a time: of the branch, also of one that was merged and is gone, else of the default branch."""
        seconds = seconds_of(when)
        return None if seconds is None else self._at_seconds(seconds, branch)

    def _at_seconds(self, seconds: int, branch: str | None = None) -> Checkout | None:
        commit, is_branch = self._commit(seconds, branch)
        return None if commit is None else Checkout(self, commit, seconds=seconds, is_branch=is_branch)

    def before(self, conversation: Conversation) -> Checkout | None:
        """The files when a conversation began, on the branch that its log names; None for a log without times."""
        when = next((turn.timestamp for turn in conversation.turns if turn.timestamp), None)
        branch = conversation.extra.get("git_branch")
        return None if when is None else self.at(when, branch if isinstance(branch, str) else None)

    @lru_cache(maxsize=16)  # noqa: B019
    def _commit(self, seconds: int, branch: str | None) -> tuple[str | None, bool]:
        """The commit, and whether it is one of the branch that was asked for."""
        names = [f"refs/heads/{branch}", f"refs/remotes/origin/{branch}"] if branch else []
        # A name may be used again: what was merged before is another branch, and of the others the next one is meant.
        merged = (tip for when, tip in (self._merged.get(branch, []) if branch else ()) if when > seconds)
        names += islice(merged, 1)
        for index, name in enumerate((*names, "HEAD", "refs/heads/main", "refs/heads/master")):
            # By the first parent: what others had committed by then may have been merged only later.
            commit = self._ask(
                "rev-list", "-1", "--first-parent", f"--before={seconds}", "--end-of-options", name, "--"
            )
            if commit is not None and commit.strip():
                return commit.strip().decode("ascii", "replace"), not branch or index < len(names)
        return None, False

    @cached_property
    def _merged(self) -> dict[str, list[tuple[int, str]]]:
        return merged_branches(self._ask("rev-list", "--all", "--merges", "--format=%P%x09%ct%x09%s") or b"")

    @lru_cache(maxsize=16)  # noqa: B019  # lives as long as the program
    def listing(self, commit: str) -> frozenset[str]:
        """All paths of a commit."""
        out = self._ask("ls-tree", "-r", "-z", "--name-only", "--full-tree", commit) or b""
        return frozenset(name.decode("utf-8", "replace") for name in out.split(b"\0") if name)

    @lru_cache(maxsize=32)  # noqa: B019
    def text(self, commit: str, path: str) -> str | None:
        size = self._ask("cat-file", "-s", f"{commit}:{path}")
        out = self._ask("cat-file", "blob", f"{commit}:{path}") if size and int(size) <= _MAX_TEXT else None
        return None if out is None else out.decode("utf-8", "replace").replace("\r\n", "\n")

    @cached_property
    def history(self) -> History | None:
        """What every commit of every branch has done; None: git cannot say."""
        times = self._ask("rev-list", "--all", "--timestamp")
        commits = b"\n".join(line.split(b" ")[-1] for line in (times or b"").split(b"\n"))
        changes = times and self._ask(
            "diff-tree", "--stdin", "--root", "-r", "-z", "-c", "--raw", "--no-abbrev", "--no-renames", "--no-ext-diff",
            "--no-textconv", given=commits,
        )  # fmt: skip
        return History(times, changes) if times and changes else None

    @lru_cache(maxsize=2)  # noqa: B019  # a session needs one of them, and each is as long as the history
    def behind(self, commit: str) -> frozenset[str]:
        """A commit and all that it rests on."""
        return frozenset((self._ask("rev-list", commit, "--") or b"").decode("ascii", "replace").split())

    @lru_cache(maxsize=2)  # noqa: B019
    def versions(self, path: str) -> tuple[str, ...]:
        """Every text that a file has had in any commit; none where not all of them can be had."""
        blobs = self.history.versions.get(path, []) if self.history else []
        blob_lines = "\n".join(blobs).encode()
        if not 0 < len(blobs) <= _MAX_VERSIONS or not self._can_be_had(blob_lines, len(blobs)):
            return ()
        texts = tuple(_texts(self._ask("cat-file", "--batch", given=blob_lines) or b""))
        return texts if len(texts) == len(blobs) else ()

    def _can_be_had(self, names: bytes, number: int) -> bool:
        """Whether all of these objects are there, and small enough; a missing one has no size."""
        lines = [line.split() for line in (self._ask("cat-file", "--batch-check", given=names) or b"").splitlines()]
        sizes = [int(line[2]) for line in lines if len(line) == 3 and line[1] == b"blob"]
        return len(sizes) == number and max(sizes) <= _MAX_TEXT and sum(sizes) <= _MAX_TEXTS

    @lru_cache(maxsize=2)  # noqa: B019
    def squeezed(self, path: str) -> str:
        """Every text that a file has had, without blanks and line breaks; a mark that is in no text between them."""
        return "\0".join(without_blanks(text) for text in self.versions(path))

    def _ask(self, *words: str, given: bytes | None = None) -> bytes | None:
        settings = [word for setting in _SETTINGS for word in ("-c", setting)]
        command = ["git", "--no-pager", "--no-replace-objects", *settings, *words]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | _ENVIRONMENT
        try:
            done = subprocess.run(  # noqa: S603  # the words are ours; the repository names a folder
                command, cwd=self.path, env=environment, input=given or b"", capture_output=True, timeout=_TIMEOUT_S,
                check=False,
            )  # fmt: skip
        except (OSError, ValueError, subprocess.TimeoutExpired):  # ValueError: a name that no command can hold
            return None
        return done.stdout if done.returncode == 0 else None


class Checkout:
    """A project's files at one time, by path relative to its root."""

    def __init__(self, repository: Repository, commit: str, *, seconds: int = 0, is_branch: bool = True) -> None:
        """`seconds` is the time that is asked about, `is_branch` whether the commit is of the branch that is.

        Without either nothing is known to be removed.
        """
        self._repository, self.commit, self._seconds, self._is_branch = repository, commit, seconds, is_branch

    @property
    def files(self) -> frozenset[str]:
        return self._repository.listing(self.commit)

    @cached_property
    def folders(self) -> frozenset[str]:
        return frozenset(folder for path in self.files for folder in islice(with_parents(path), 1, None))

    def exists(self, relative: str) -> bool | None:
        """Whether it is there; None where a commit that does not lie behind this one has it, or git could not say.

        What a later commit adds may have been in the work tree before, or on a branch that the clone never had. What
        was removed is gone, if not just now: a work tree may be behind. Nor if the session's branch is not known: it
        may have left this one before the removal.
        """
        if relative in self.files or relative in self.folders:
            return True
        history = self._repository.history
        if history is None or not self.files or history.adds_elsewhere(relative, self._repository.behind(self.commit)):
            return None
        removed_at = history.removed_at(relative)
        if removed_at is None or (removed_at and not self._is_branch):
            return None
        return None if removed_at and removed_at > self._seconds - _SETTLED_S else False

    def text(self, relative: str) -> str | None:
        return self._repository.text(self.commit, relative) if relative in self.files else None

    def is_trunks(self, relative: str, text: str) -> bool:
        """Whether a text stands in a file as the default branch has it at this time: nobody's own work yet."""
        trunk = self._repository._at_seconds(self._seconds)
        return text in ((trunk and trunk.text(relative)) or "")

    def has_ever_held(self, relative: str, text: str, *, but_for_blanks: bool = False) -> bool | None:
        """Whether any version of a file, also a later one, holds a text; None where no commit has the file."""
        if but_for_blanks:
            squeezed = self._repository.squeezed(relative)
            return without_blanks(text) in squeezed if squeezed else None
        versions, plain = self._repository.versions(relative), text.replace("\r\n", "\n")
        needle = plain.rstrip("\n") or plain  # an edit is tried without its last line's end, too
        return any(needle in version for version in versions) if versions else None


def without_blanks(text: str) -> str:
    """A text by what formatters leave alone."""
    return "".join(text.split())


def _texts(out: bytes) -> Iterator[str]:
    """The texts that `cat-file --batch` prints, each behind its name and size."""
    position = 0
    while (end := out.find(b"\n", position)) >= 0:
        words = out[position:end].split()
        position = end + 1
        size = int(words[2]) if len(words) == 3 else -1  # a missing object has no size, and no line of its own
        if 0 <= size <= _MAX_TEXT and words[1] == b"blob":
            yield out[position : position + size].decode("utf-8", "replace").replace("\r\n", "\n")
        position += size + 1


def seconds_of(when: str) -> int | None:
    try:
        return int(datetime.fromisoformat(when.replace("Z", "+00:00")).timestamp())
    except (ValueError, OverflowError):
        return None
