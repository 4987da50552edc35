"""States in which acting at once was right: what a look would have been there that nobody needed.

Most corrections teach to look first. Alone they would teach to look always, so as many pairs say the opposite: a call
that rested on what had been shown, and worked, is better than showing it again. The look is written as the session
writes such calls.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

from composer_replication.actions.session_state import SessionState
from composer_replication.actions.tools import (
    LISTS,
    PATH,
    SEARCHES,
    channel_of,
    command_parameter,
    is_edit,
    only_looks,
    path_argument,
    plain_name,
)
from composer_replication.types import ToolCall

if TYPE_CHECKING:
    from composer_replication.judge import Judgement

_FOUND = ("found_in_whole_file", "found_in_part")


def needless_look(call: ToolCall, judgement: Judgement, state: SessionState) -> ToolCall | None:
    """The look that this call did without, at the state before it; None where the judge does not say that it works."""
    path = path_argument(call.arguments) if channel_of(call.name) == "file" else None
    if judgement.says != "ok" or not path:
        return None
    if is_edit(call.name):
        return reading(call, path, state) if judgement.rule.startswith(_FOUND) else None
    reads = only_looks(call.name, call.arguments) and plain_name(call.name) not in LISTS | SEARCHES
    if reads and not state.has_touched(path):
        return searching(call, path.rstrip("/").rpartition("/")[2], state)
    return None


def reading(call: ToolCall, path: str, state: SessionState) -> ToolCall | None:
    """The reading of a whole file, as the session reads files; None where it has read none."""
    key = None if state.reader is None else next((name for name in PATH if name in state.tools[state.reader]), None)
    return None if key is None or state.reader is None else _look(call, state.reader, {key: path})


def searching(call: ToolCall, name: str, state: SessionState) -> ToolCall | None:
    """By the tool that finds files where the session has used it, else by its shell."""
    for tool, parameters in state.tools.items():
        if plain_name(tool) == "glob" and "pattern" in parameters:
            return _look(call, tool, {"pattern": f"**/{name}"})
    for tool, parameters in state.tools.items():
        key = command_parameter(tool, dict.fromkeys(parameters, ""))
        if key is not None:
            return _look(call, tool, {key: f"find . -name {shlex.quote(name)}"})
    return None


def _look(call: ToolCall, tool: str, arguments: Mapping[str, str]) -> ToolCall:
    return ToolCall(id=call.id, name=tool, arguments=dict(arguments))
