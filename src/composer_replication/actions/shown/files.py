"""Whole files as a session has shown and changed them; what may have changed unseen is not among them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from composer_replication.actions.edits import changes_of, edit_operations, take_changes
from composer_replication.actions.paths import normal_path
from composer_replication.actions.shell.dollars import NotUnderstood
from composer_replication.actions.shell.effects import keeps_sources
from composer_replication.actions.shell.keys import folder_after
from composer_replication.actions.shell.tree import parse_script, shell_script
from composer_replication.actions.shown.views import CHANGED_NOTE, file_in_output, file_in_view
from composer_replication.actions.tools import channel_of, command_parameter, only_looks, plain_name
from composer_replication.types import ToolCall


@dataclass
class ShownFiles:
    """Files by normal path, call by call. `folder` is where the shell stands, None where that cannot be said."""

    cwd: str | None
    files: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        self.folder = self.cwd

    def heard(self, text: str) -> None:
        """Words of the user, among which agents put a note where a file was changed by somebody else."""
        for path in CHANGED_NOTE.findall(text):
            self.files.pop(normal_path(path, self.cwd), None)

    def take(self, call: ToolCall, text: str) -> None:
        """A call that worked, and what it showed."""
        if call.raw_arguments is not None:
            return
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
            shown_file = file_in_view(call, text)
            if shown_file is not None:
                self.files[normal_path(shown_file.path, self.cwd)] = shown_file.text
        elif channel_of(call.name) == "file" or plain_name(call.name) in ("task", "agent"):
            self.files.clear()  # it may have changed any of them

    def _ran(self, command: object, output: str) -> None:
        words = [str(word) for word in cast("list[object]", command)] if isinstance(command, list) else None
        text = str(command) if words is None else shell_script(words) or " ".join(words)
        shown_file = file_in_output(text, output)
        if shown_file is not None:
            if self.folder is not None or shown_file.path.startswith("/"):
                self.files[normal_path(shown_file.path, self.folder)] = shown_file.text
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
