"""Which files commands have written, by where the shell stood; looked at only when somebody asks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, NamedTuple

from composer_replication.actions.paths import normal_path
from composer_replication.actions.shell.writes import written_by

if TYPE_CHECKING:
    from composer_replication.actions.shown.folder import ShellFolder

Change = Literal["", "maybe", "surely"]

_MAX_OUTPUT = 400_000
# A formatter that names what it changed: `gofmt -l` and `go fmt`, black, isort, prettier.
_FORMATTED = re.compile(r"^(?:reformatted |Fixing )?(\S+)(?: \d+ ?ms)?$", re.MULTILINE)


class _Ran(NamedTuple):
    when: int
    command: str
    output: str
    failed: bool


class CommandChanges:
    """`when` is any number that grows with the session; `shell` is told of the commands here, and of no others."""

    def __init__(self, shell: ShellFolder) -> None:
        self._shell = shell
        self._waiting: list[_Ran] = []
        self._written_at: dict[str, int] = {}
        self._formatted_at = 0

    def ran(self, when: int, command: str, output: str, *, may_change: bool) -> None:
        """A command that worked."""
        if may_change or self._shell.may_move(command, output):
            self._waiting.append(_Ran(when, command, output, failed=False))

    def failed(self, output: str) -> None:
        """A command that did not: all it can have done that counts is to tell where the shell stands."""
        if self._shell.may_move("", output):
            self._waiting.append(_Ran(0, "", output, failed=True))

    def since(self, when: int, path: str) -> Change:
        """What became of a normal path after that time: a formatter may have left it as it was."""
        for run in self._waiting:
            if not run.failed:
                self._take(run)
            self._shell.take(run.command, run.output, failed=run.failed)
        self._waiting.clear()
        if self._written_at.get(path, 0) > when:
            return "surely"
        return "maybe" if self._formatted_at > when else ""

    def _take(self, run: _Ran) -> None:
        names, formats = written_by(run.command)
        self._formatted_at = run.when if formats else self._formatted_at
        formatted_names = _FORMATTED.findall(run.output[:_MAX_OUTPUT]) if formats == "alone" else []
        for name in (*names, *formatted_names):
            if name.startswith("/") or self._shell.path is not None:
                self._written_at[normal_path(name, self._shell.path)] = run.when
