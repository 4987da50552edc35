"""Which calls failed, how, and whether anything that could help has happened since."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from composer_replication.actions.shell.effects import only_reads
from composer_replication.actions.tools import channel_of, command_text, is_label, only_looks, plain_name
from composer_replication.types import ToolCall

_NO_PROGRAM = re.compile(r"command not found: ([\w.+-]+)|(?:^|[\s:])([\w.+-]+): command not found(?!:)")
_NO_NAME = re.compile(r"Agent type '[^']{1,200}' not found|Unknown skill|is not a prompt-based skill")
_AGENTS = re.compile(r"Available agents: ([^\n<]{1,4000})")
_NAMING = {"task": "subagent_type", "agent": "subagent_type", "skill": "skill"}
_MAX_HEAD, _MAX_TEXT = 2000, 10_000


def named_by(call: ToolCall) -> tuple[str, str] | None:
    """The agent or skill that a call asks for by its name."""
    value = call.arguments.get(_NAMING.get(plain_name(call.name), ""))
    return (call.name, value) if isinstance(value, str) else None


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
        self.names: dict[tuple[str, str], bool] = {}  # agents and skills by the tool that takes them: are they there
        self.agents: frozenset[str] | None = None  # all of them, where somebody has listed them

    def heard(self, text: str) -> None:
        self._num_changes += bool(text.strip())

    def take(self, call: ToolCall, text: str, kind: str, *, failed: bool) -> None:
        """A call that was made, and what came back; `kind` is that of its failure."""
        command = command_text(call.name, call.arguments)
        is_shell = channel_of(call.name) == "shell"
        looks = only_reads(command) if is_shell else only_looks(call.name, call.arguments) or failed
        self._num_changes += not looks
        name = named_by(call)
        if name is not None and (not failed or _NO_NAME.search(text[:_MAX_HEAD])):
            self.names[name] = not failed
            listed = _AGENTS.search(text[:_MAX_TEXT]) if failed else None
            self.agents = frozenset(agent.strip() for agent in listed[1].split(",")) if listed else self.agents
        if failed:
            self._failed[_key(call)] = (kind, self._num_changes)
            if is_shell:
                self.missing_programs.update(first or then for first, then in _NO_PROGRAM.findall(text[:_MAX_HEAD]))
        elif self._failed:
            self._failed.pop(_key(call), None)

    def last(self, call: ToolCall) -> Failure | None:
        """How this very call failed when it was last made; None where it did not."""
        if not self._failed or (failure := self._failed.get(_key(call))) is None:
            return None
        return Failure(failure[0], failure[1] == self._num_changes)


def _key(call: ToolCall) -> str:
    arguments = {name: value for name, value in call.arguments.items() if not is_label(call.name, name)}
    return json.dumps([call.name, arguments, call.raw_arguments], sort_keys=True, default=str)
