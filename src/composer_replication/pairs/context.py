"""What a state knows besides the action: the folder, the tools' schemas, and the files the session has shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from composer_replication.actions.messages import content_text, message_calls
from composer_replication.errors import InputError
from composer_replication.pairs.arguments import Schema
from composer_replication.pairs.commands import folder_after
from composer_replication.pairs.edits import changes_of, edit_operations, take_changes
from composer_replication.pairs.file_views import FILE_CHANGED_NOTE, file_in_output, file_in_view
from composer_replication.pairs.known_tools import command_parameter, only_looks
from composer_replication.pairs.paths import normal_path
from composer_replication.pairs.read_only import keeps_sources
from composer_replication.pairs.shell_dollars import NotUnderstood
from composer_replication.pairs.shell_parse import parse_script
from composer_replication.sites.classify import classify
from composer_replication.sites.tools import channel_of, plain_name
from composer_replication.types import ToolCall

Tools = Mapping[str, Schema] | Sequence[Mapping[str, Any]]
"""Tool name -> JSON schema of its arguments, or a list of tools as the OpenAI, Anthropic and MCP interfaces have it."""

_SCHEMA_KEYS = ("parameters", "input_schema", "inputSchema")


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


def context_of_messages(
    messages: Sequence[Mapping[str, Any]], *, cwd: str | None = None, tools: Tools | None = None
) -> ActionContext:
    """What the messages before an action show; calls that failed show nothing."""
    return ContextAlong(cwd=cwd, tools=tools).at(messages)


class ContextAlong:
    """Contexts of one state after the other: messages that the last state had already are not read again."""

    def __init__(self, *, cwd: str | None = None, tools: Tools | None = None) -> None:
        self._cwd = normal_path(cwd, None) if cwd else None
        self._tools = tool_schemas(tools)
        self._read: list[Mapping[str, Any]] = []
        self._seen = _Seen(self._cwd)

    def at(self, messages: Sequence[Mapping[str, Any]]) -> ActionContext:
        num_read = len(self._read)
        if num_read > len(messages) or list(messages[:num_read]) != self._read:
            self._read, self._seen, num_read = [], _Seen(self._cwd), 0
        for message in messages[num_read:]:
            self._seen.take(message)
        self._read += messages[num_read:]
        seen = self._seen
        return ActionContext(
            cwd=seen.cwd, tools=self._tools, files=dict(seen.files), shell_moved=seen.folder != seen.cwd
        )


def tool_schemas(tools: Tools | None) -> dict[str, Schema]:
    """Tool name -> schema; entries of no known shape are left out, since a schema only helps."""
    if tools is None:
        return {}
    if isinstance(tools, Mapping):
        return {name: schema for name, schema in tools.items() if isinstance(schema, Mapping)}
    found: dict[str, Schema] = {}
    for tool in tools:
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        body = cast("Mapping[str, Any]", inner) if isinstance(inner, Mapping) else {}
        schema = next((body[key] for key in _SCHEMA_KEYS if isinstance(body.get(key), Mapping)), None)
        if isinstance(body.get("name"), str) and schema is not None:
            found[body["name"]] = schema
    return found


@dataclass
class _Seen:
    """Collected message by message. `folder` is where the shell stands, None where that cannot be said."""

    cwd: str | None
    files: dict[str, str] = field(default_factory=dict[str, str])
    folder: str | None = None
    _calls: dict[str, ToolCall] = field(default_factory=dict[str, ToolCall])

    def __post_init__(self) -> None:
        self.folder = self.cwd

    def take(self, message: Mapping[str, Any]) -> None:
        role, content = message.get("role"), message.get("content")
        if role == "assistant":
            self._remember(message)
        elif role in ("tool", "function"):
            self._result(message.get("tool_call_id"), content, is_error=None)
        elif isinstance(content, list):
            for block in cast("list[object]", content):
                if isinstance(block, Mapping) and block.get("type") == "tool_result":
                    flag = block.get("is_error")
                    self._result(block.get("tool_use_id"), block.get("content"), is_error=True if flag else None)
        for path in FILE_CHANGED_NOTE.findall(content_text(content)) if role == "user" else ():
            self.files.pop(normal_path(path, self.cwd), None)

    def _remember(self, message: Mapping[str, Any]) -> None:
        try:
            calls = message_calls(message, "a turn")
        except InputError:
            return  # a turn that cannot be read shows nothing
        self._calls |= {call.id: call for call in calls}

    def _result(self, call_id: object, content: object, *, is_error: bool | None) -> None:
        call = self._calls.get(call_id) if isinstance(call_id, str) else None
        if call is None or call.raw_arguments is not None:
            return
        text = content_text(content)
        if not classify(call.name, call.arguments, text, is_error).is_failure:
            self._learn(call, text)

    def _learn(self, call: ToolCall, text: str) -> None:
        operations = edit_operations(call, self.cwd)
        key = command_parameter(call.name, call.arguments)
        if operations is not None:
            changes = changes_of(operations, self.files)
            if changes is None:
                for operation in operations:
                    self.files.pop(operation.path, None)  # what it holds now was not shown
            else:
                take_changes(self.files, changes)
        elif key is not None:
            self._ran(call.arguments[key], text)
        elif only_looks(call.name, call.arguments):
            shown = file_in_view(call, text)
            if shown is not None:
                self.files[normal_path(shown.path, self.cwd)] = shown.text
        elif channel_of(call.name) == "file" or plain_name(call.name) in ("task", "agent"):
            self.files.clear()  # it may have changed any of them

    def _ran(self, command: object, output: str) -> None:
        words = cast("list[object]", command) if isinstance(command, list) else None
        if words is not None:
            is_shell = len(words) == 3 and words[1] in ("-c", "-lc")
            command = words[2] if is_shell else " ".join(str(word) for word in words)
        text = str(command)
        shown = file_in_output(text, output)
        if shown is not None:
            if self.folder is not None or shown.path.startswith("/"):
                self.files[normal_path(shown.path, self.folder)] = shown.text
            return
        if not keeps_sources(text):
            self.files.clear()
        if words is None:
            self._follow(text)

    def _follow(self, command: str) -> None:
        """Where the shell stands now: some tools keep it between calls, so only a way back makes it sure again."""
        try:
            self.folder = folder_after(parse_script(command), self.folder)
        except NotUnderstood:
            self.folder = self.folder if " cd " not in f" {command}" else None
