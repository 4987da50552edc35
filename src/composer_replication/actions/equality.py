"""When two actions are the same: each has a key, and equal keys are the same action.

An action with calls is its calls; what is said around them does not count. Calls that only look may come in any order,
others may not. Edits whose files are known count by the files they leave; everything else by its arguments. Where
nothing surer is known, the letters decide: taking different actions for the same is the worse mistake.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Any, cast

from composer_replication.actions.arguments import Schema, canonical_arguments, canonical_value
from composer_replication.actions.edits import Changes, changes_of, edit_operations, take_changes
from composer_replication.actions.paths import normal_path
from composer_replication.actions.prose import text_key
from composer_replication.actions.shell.effects import only_reads
from composer_replication.actions.shell.keys import argv_key, command_key
from composer_replication.actions.shell.tree import shell_script
from composer_replication.actions.shell.words import literal_word
from composer_replication.actions.tools import command_parameter, only_looks
from composer_replication.types import Action, ToolCall

_WORKDIR = ("workdir", "cwd", "working_directory", "working_dir", "directory", "dir_path")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionContext:
    """`files` holds whole files by normal path; `shell_moved` says that an earlier `cd` may have led elsewhere."""

    cwd: str | None = None
    tools: Mapping[str, Schema] = field(default_factory=dict[str, Schema])
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    shell_moved: bool = False

    @property
    def shell_folder(self) -> str | None:
        """Where a command starts, if that is sure."""
        return None if self.shell_moved else self.cwd


def same_action(a: Action, b: Action, context: ActionContext | None = None) -> bool:
    """Whether two actions do the same in this context."""
    return action_key(a, context) == action_key(b, context)


def action_key(action: Action, context: ActionContext | None = None) -> str:
    """A text that is equal exactly for the actions that count as the same in this context."""
    context = context if context is not None else ActionContext()
    if not action.calls:
        return _dumped(["text", *text_key(action.text)])
    steps = _steps(action.calls, context)
    if all(only_looks_at(call) for call in action.calls):
        steps.sort()
    return _dumped(["calls", *steps])


def action_kind(action: Action) -> str:
    """What kind of action it is: the tool's name, several joined by `+`, or text."""
    return "+".join(sorted({call.name for call in action.calls})) or "text"


def _steps(calls: tuple[ToolCall, ...], context: ActionContext) -> list[str]:
    """One text per call, or per run of edits that can be told by what they leave behind."""
    files = {normal_path(path, context.cwd): text for path, text in context.files.items()}
    steps: list[str] = []
    changed: Changes = {}
    for call in calls:
        call_changes = _changes(call, context, files)
        if call_changes is not None:
            changed |= call_changes
            take_changes(files, call_changes)
            continue
        if changed:
            steps.append(_changes_key(changed))
            changed = {}
        steps.append(_dumped(_call_key(call, context)))
        if not only_looks_at(call):
            files.clear()  # it may have changed any of them
    return [*steps, _changes_key(changed)] if changed else steps


def _changes(call: ToolCall, context: ActionContext, files: dict[str, str]) -> Changes | None:
    operations = None if _is_misspelled(call.name, context) else edit_operations(call, context.cwd)
    return changes_of(operations, files) if operations is not None else None


def _changes_key(changes: Changes) -> str:
    digests = {
        path: None if text is None else hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        for path, text in changes.items()
    }
    return _dumped(["files", digests])


def _call_key(call: ToolCall, context: ActionContext) -> object:
    if call.raw_arguments is not None:
        return ["raw", call.name, call.raw_arguments.strip()]
    if _is_misspelled(call.name, context):
        return ["unknown", call.name, canonical_value(call.arguments)]
    operations = edit_operations(call, context.cwd)
    if operations is not None and len(operations) == 1:
        # The same whatever the file holds, by whichever tool. Of several, some tools do all or nothing.
        return ["edit", type(operations[0]).__name__, astuple(operations[0])]
    arguments = canonical_arguments(call.name, call.arguments, context.tools.get(call.name), context.cwd)
    key = command_parameter(call.name, call.arguments)
    if key is not None:
        arguments[key] = _shell_key(call.arguments[key], _folder(arguments, context))
    return ["call", call.name, arguments]


def _folder(arguments: Mapping[str, object], context: ActionContext) -> str | None:
    """Where a command runs: the folder the call names, else where the shell stands."""
    workdir = next((arguments[name] for name in _WORKDIR if isinstance(arguments.get(name), str)), None)
    return str(workdir) if workdir is not None and workdir != context.cwd else context.shell_folder


def _shell_key(command: object, folder: str | None) -> object:
    if isinstance(command, str):
        return command_key(command, folder)
    words = cast("list[Any]", command)
    if not words or not all(isinstance(word, str) for word in words):
        return canonical_value(words)
    script = shell_script(words)
    if script is not None:
        return command_key(script, folder)
    return argv_key([literal_word(word) for word in words], folder)


def only_looks_at(call: ToolCall) -> bool:
    """Whether a call changes nothing, of a shell or of another tool."""
    if call.raw_arguments is not None:
        return False
    key = command_parameter(call.name, call.arguments)
    if key is None:
        return only_looks(call.name, call.arguments)
    command = call.arguments[key]
    return isinstance(command, str) and only_reads(command)


def _is_misspelled(name: str, context: ActionContext) -> bool:
    """A tool that is not offered while one of the same letters in another case is."""
    return name not in context.tools and any(name.lower() == tool.lower() for tool in context.tools)


def _dumped(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
