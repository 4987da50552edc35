"""A project's files at a date, out of the objects of a git repository. Nothing is checked out, and nothing of it runs.

Git is asked for objects only, by commands that know no hook, filter or pager; what a repository's settings could make
them start (a file system monitor, a fetch of missing objects, a signature check) is switched off.
"""

from __future__ import annotations

import os
import subprocess
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path

from composer_replication.actions.shown.paths import with_parents
from composer_replication.errors import InputError, explain
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


class Repository:
    """Asks git; answers are kept."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self._ask("rev-parse", "--git-dir") is None:
            fix = "Name a clone of the project, or leave --repo out"
            raise InputError(explain("--repo", got=str(path), expected="a git repository", fix=fix))

    def at(self, when: str, branch: str | None = None) -> Checkout | None:
        """The files at a time: of the branch, where there is one of that name, else of the default branch."""
        seconds = seconds_of(when)
        commit = None if seconds is None else self._commit(seconds, branch)
        return None if commit is None else Checkout(self, commit)

    def before(self, conversation: Conversation) -> Checkout | None:
        """The files when a conversation began, on the branch that its log names; None for a log without times."""
        when = next((turn.timestamp for turn in conversation.turns if turn.timestamp), None)
        branch = conversation.extra.get("git_branch")
        return None if when is None else self.at(when, branch if isinstance(branch, str) else None)

    def _commit(self, seconds: int, branch: str | None) -> str | None:
        names = [f"refs/heads/{branch}", f"refs/remotes/origin/{branch}"] if branch else []
        for name in (*names, "HEAD", "refs/heads/main", "refs/heads/master"):
            found = self._ask("rev-list", "-1", f"--before={seconds}", "--end-of-options", name, "--")
            if found is not None and found.strip():
                return found.strip().decode("ascii", "replace")
        return None

    @lru_cache(maxsize=16)  # noqa: B019  # lives as long as the program
    def listing(self, commit: str) -> frozenset[str]:
        """All paths of a commit."""
        out = self._ask("ls-tree", "-r", "-z", "--name-only", "--full-tree", commit) or b""
        return frozenset(name.decode("utf-8", "replace") for name in out.split(b"\0") if name)

    @lru_cache(maxsize=256)  # noqa: B019
    def text(self, commit: str, path: str) -> str | None:
        out = self._ask("cat-file", "blob", f"{commit}:{path}")
        return None if out is None or len(out) > _MAX_TEXT else out.decode("utf-8", "replace").replace("\r\n", "\n")

    @cached_property
    def ever_seen(self) -> frozenset[str] | None:
        """Every file and folder that any commit of any branch has added; None: git cannot say."""
        commits = self._ask("rev-list", "--all")
        out = commits and self._ask(
            "diff-tree", "--stdin", "--root", "-r", "-z", "--name-only", "--no-commit-id", "--diff-filter=A",
            "--no-renames", "--no-ext-diff", "--no-textconv", given=commits,
        )  # fmt: skip
        if not out:
            return None
        files = {entry.decode("utf-8", "replace") for entry in out.split(b"\0") if entry}
        return frozenset(path for file in files for path in with_parents(file))

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

    def __init__(self, repository: Repository, commit: str) -> None:
        self._repository, self.commit = repository, commit

    @property
    def files(self) -> frozenset[str]:
        return self._repository.listing(self.commit)

    @cached_property
    def folders(self) -> frozenset[str]:
        return frozenset(folder for path in self.files for folder in islice(with_parents(path), 1, None))

    def exists(self, relative: str) -> bool | None:
        """Whether it is there; None where any other commit has it, or git could not say.

        What a later commit adds may have been in the work tree before, or on a branch that the clone never had.
        """
        if relative in self.files or relative in self.folders:
            return True
        ever_seen = self._repository.ever_seen
        return None if ever_seen is None or not self.files or relative in ever_seen else False

    def text(self, relative: str) -> str | None:
        return self._repository.text(self.commit, relative) if relative in self.files else None


def seconds_of(when: str) -> int | None:
    try:
        return int(datetime.fromisoformat(when.replace("Z", "+00:00")).timestamp())
    except (ValueError, OverflowError):
        return None
