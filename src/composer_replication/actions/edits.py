"""Edits by what they do: the operations a call asks for, and the files as they are after them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from composer_replication.actions.patches import FilePatch, read_patch
from composer_replication.actions.paths import normal_path
from composer_replication.actions.shell.tree import lone_command
from composer_replication.actions.tools import (
    EVERYWHERE,
    NEW_TEXT,
    OLD_TEXT,
    PATH,
    command_parameter,
    is_label,
    plain_name,
    word_set,
)
from composer_replication.types import ToolCall

Changes = dict[str, str | None]
"""Path -> its whole text; None where the file is gone."""


@dataclass(frozen=True, slots=True)
class Replace:
    path: str
    old: str
    new: str
    everywhere: bool = False

    def applied(self, files: Mapping[str, str]) -> Changes | None:
        text = files.get(self.path)
        if text is None or not self.old or self.old == self.new:
            return None
        number = text.count(self.old)
        if number == 0 or (number > 1 and not self.everywhere):
            return None
        return {self.path: text.replace(self.old, self.new)}


@dataclass(frozen=True, slots=True)
class Put:
    """A whole file; one that must be `new` is not written over."""

    path: str
    text: str
    is_new: bool = False

    def applied(self, files: Mapping[str, str]) -> Changes | None:
        return None if self.is_new and self.path in files else {self.path: self.text}


@dataclass(frozen=True, slots=True)
class Insert:
    """Lines behind the line of that number."""

    path: str
    line: int
    text: str

    def applied(self, files: Mapping[str, str]) -> Changes | None:
        text = files.get(self.path)
        lines = text.split("\n") if text is not None else []
        if text is None or not 0 <= self.line <= len(lines):
            return None
        return {
            self.path: "\n".join([*lines[: self.line], *self.text.removesuffix("\n").split("\n"), *lines[self.line :]])
        }


Operation = Replace | Put | Insert | FilePatch

_TEXT = ("content", "contents", "file_text", "text")
_PATCH = ("input", "patch", "patchText", "diff")
_EDITORS = word_set("edit replace str_replace replace_string_in_file search_replace edit_file string_replace")
_WRITERS = word_set("write write_file create_file write_to_file create")
_COMMANDED = word_set("str_replace_editor str_replace_based_edit_tool edit_anthropic")
_AROUND_PATCH = ("workdir", "timeout", "timeout_ms", "login")
_PATCHERS = word_set("apply_patch applypatch patch")


def edit_operations(call: ToolCall, cwd: str | None) -> list[Operation] | None:
    """What a call does to files, step by step; None for a call that is no edit, or one not surely understood."""
    if call.raw_arguments is not None:
        return None
    arguments = {name: value for name, value in call.arguments.items() if value is not None}
    arguments = {name: value for name, value in arguments.items() if not is_label(call.name, name)}
    base = normal_path(arguments["workdir"], cwd) if isinstance(arguments.get("workdir"), str) else cwd
    operations = _operations(plain_name(call.name), call, arguments)
    return None if operations is None else [_placed(operation, base) for operation in operations]


def changes_of(operations: list[Operation], files: Mapping[str, str]) -> Changes | None:
    """The files after all of them; None where one meets a file that is not known, or does not fit it."""
    if len(operations) == 1:
        return operations[0].applied(files)
    known_files, changes = dict(files), Changes()
    for operation in operations:
        operation_changes = operation.applied(known_files)
        if operation_changes is None:
            return None
        changes |= operation_changes
        take_changes(known_files, operation_changes)
    return changes


def take_changes(files: dict[str, str], changes: Changes) -> None:
    """Bring what is known of files up to date."""
    for path, text in changes.items():
        if text is None:
            files.pop(path, None)
        else:
            files[path] = text


def _operations(tool: str, call: ToolCall, arguments: dict[str, Any]) -> list[Operation] | None:
    if tool in _COMMANDED:
        return _commanded(arguments)
    if tool in _EDITORS:
        return _list_edits(arguments) if "edits" in arguments else _replace_of(arguments)
    if tool == "multiedit":
        return _list_edits(arguments)
    if tool in _WRITERS:
        path, text = _one(arguments, PATH), _one(arguments, _TEXT)
        is_new = tool.startswith("create")
        return [Put(path, text, is_new)] if path and text is not None and len(arguments) == 2 else None
    if tool in _PATCHERS:
        patch = _one(arguments, _PATCH)
        return _patches(patch) if patch is not None and len(arguments) == 1 else None
    return _shell_patch(call, arguments)


def _commanded(arguments: dict[str, Any]) -> list[Operation] | None:
    command, path = arguments.get("command"), _one(arguments, PATH)
    if path is None:
        return None
    if command == "create" and isinstance(arguments.get("file_text"), str) and len(arguments) == 3:
        return [Put(path, arguments["file_text"], is_new=True)]
    if command == "str_replace":
        rest = {name: value for name, value in arguments.items() if name != "command"}
        return _replace_of({"new_str": "", **rest})
    line, text = arguments.get("insert_line"), _one(arguments, ("new_str", "insert_text"))
    if command == "insert" and type(line) is int and text is not None and len(arguments) == 4:
        return [Insert(path, line, text)]
    return None


def _replace_of(arguments: dict[str, Any]) -> list[Operation] | None:
    path, old, new = _one(arguments, PATH), _one(arguments, OLD_TEXT), _one(arguments, NEW_TEXT)
    other_names = arguments.keys() - {*PATH, *OLD_TEXT, *NEW_TEXT, *EVERYWHERE}
    everywhere = next((arguments[name] for name in EVERYWHERE if name in arguments), False)
    if path is None or old is None or new is None or other_names or not isinstance(everywhere, bool):
        return None
    return [Replace(path, old, new, everywhere)]


def _list_edits(arguments: dict[str, Any]) -> list[Operation] | None:
    path, edits = _one(arguments, PATH), arguments.get("edits")
    if path is None or not isinstance(edits, list) or arguments.keys() - {*PATH, "edits"}:
        return None
    operations: list[Operation] = []
    for edit in cast("list[object]", edits):
        one = _replace_of({**cast("dict[str, Any]", edit), "path": path}) if isinstance(edit, dict) else None
        if one is None:
            return None
        operations += one
    return operations or None


def _shell_patch(call: ToolCall, arguments: dict[str, Any]) -> list[Operation] | None:
    """`apply_patch` called through the shell, with the patch as its word or on its input."""
    key = command_parameter(call.name, arguments)
    command = arguments.get(key) if key is not None and not arguments.keys() - {key, *_AROUND_PATCH} else None
    if isinstance(command, list):
        words = cast("list[object]", command)
        is_patch = len(words) == 2 and words[0] in ("apply_patch", "applypatch") and isinstance(words[1], str)
        return _patches(cast("str", words[1])) if is_patch else None
    if not isinstance(command, str) or not re.match(r"\s*apply_?patch\b", command):
        return None
    simple = lone_command(command)
    if simple is None:
        return None
    texts = [word.literal for word in simple.words[1:]]
    texts += [redirect.target.literal if redirect.op == "<<" else None for redirect in simple.redirects]
    return _patches(texts[0]) if len(texts) == 1 and texts[0] is not None else None


def _patches(text: str) -> list[Operation] | None:
    patches = read_patch(text)
    return None if patches is None else [*patches]


def _one(arguments: dict[str, Any], names: tuple[str, ...]) -> str | None:
    """The value of the one of these names that is there, if it is text."""
    present = [arguments[name] for name in names if name in arguments]
    return present[0] if len(present) == 1 and isinstance(present[0], str) else None


def _placed(operation: Operation, cwd: str | None) -> Operation:
    """With its paths in one spelling."""
    path = normal_path(operation.path, cwd)
    if isinstance(operation, FilePatch):
        return replace(operation, path=path, target=normal_path(operation.target, cwd))
    return replace(operation, path=path)
