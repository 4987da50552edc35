"""Where the shell stands: some tools keep it between calls, and say so when they put it back."""

from __future__ import annotations

import re

from composer_replication.actions.paths import normal_path
from composer_replication.actions.shell.dollars import NotUnderstood
from composer_replication.actions.shell.keys import folder_after
from composer_replication.actions.shell.tree import parse_script

_RESET = re.compile(r"Shell cwd was reset to (\S.{0,400})")
_MOVES = re.compile(r"\b(?:cd|pushd|popd)\b")


class ShellFolder:
    """`path` is None where it cannot be said."""

    def __init__(self, cwd: str | None) -> None:
        self.path = None if cwd is None else normal_path(cwd, None)

    @staticmethod
    def may_move(command: str, output: str) -> bool:
        """Whether a command may leave the shell elsewhere, or says where it stands."""
        return _MOVES.search(command) is not None or _RESET.search(output, max(0, len(output) - 600)) is not None

    def take(self, command: str, output: str, *, failed: bool) -> None:
        """After a command; one that failed leaves the shell where it was."""
        reset = _RESET.search(output, max(0, len(output) - 600))
        if reset is not None:
            self.path = normal_path(reset[1].strip(), None)
        elif not failed and _MOVES.search(command):
            try:
                folder = folder_after(parse_script(command), self.path)
            except NotUnderstood:
                folder = None
            self.path = None if folder is None else normal_path(folder, None)
