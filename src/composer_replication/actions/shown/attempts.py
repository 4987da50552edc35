"""Which calls failed, how, and whether anything that could help has happened since."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from composer_replication.actions.shell.effects import only_reads
from composer_replication.actions.tools import channel_of, command_text, is_label, only_looks
from composer_replication.types import ToolCall

_NO_PROGRAM = re.compile(r"command not found: ([\w.+-]+)|(?:^|[\s:])([\w.+-]+): command not found")
_MAX_HEAD = 2000


class Failure(NamedTuple):
    """The last failure of a call: its kind, where somebody named it, and whether something has changed since."""

    kind: str
    is_unchanged: bool


class Attempts:
    """Grows with the session; a call is the same whatever it says about itself."""

    def __init__(self) -> None:
        self._failed: dict[str, tuple[str, int]] = {}
        self._num_changes = 0
        self.missing_programs: set[str] = set()

    def heard(self, text: str) -> None:
        self._num_changes += bool(text.strip())

    def take(self, call: ToolCall, text: str, kind: str, *, failed: bool) -> None:
        """A call that was made, and what came back; `kind` is that of its failure."""
        command = command_text(call.name, call.arguments)
        is_shell = channel_of(call.name) == "shell"
        looks = only_reads(command) if is_shell else only_looks(call.name, call.arguments) or failed
        self._num_changes += not looks
        if failed:
            self._failed[_key(call)] = (kind, self._num_changes)
            if is_shell:
                self.missing_programs.update(first or then for first, then in _NO_PROGRAM.findall(text[:_MAX_HEAD]))
        elif self._failed:
            self._failed.pop(_key(call), None)

    def last(self, call: ToolCall) -> Failure | None:
        """How this very call failed when it was last made; None where it did not."""
        if not self._failed or (found := self._failed.get(_key(call))) is None:
            return None
        return Failure(found[0], found[1] == self._num_changes)


def _key(call: ToolCall) -> str:
    asked = {name: value for name, value in call.arguments.items() if not is_label(call.name, name)}
    return json.dumps([call.name, asked, call.raw_arguments], sort_keys=True, default=str)
