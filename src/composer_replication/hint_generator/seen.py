"""What the turns before a site had shown: tools that answered, files that were read, paths that were listed."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field

from composer_replication.sites.tools import channel_of, command_text, is_edit, path_argument, plain_name
from composer_replication.types import Conversation, ToolCall, ToolResult

# Enough for any session; a listing of a whole disk is not searched.
_MAX_PATHS = 2000
_MAX_FILE = 400_000
_NUMBERED = re.compile(r"^\s*\d+(?:→|\t|\|| ?: )")
_PATH = re.compile(r"(?:[\w.@~+-]*/)+[\w.@+-]+|[\w@+-]+\.\w{1,8}")
_FINDERS = ("glob", "ls", "list_directory", "find_file", "list_dir", "list_files", "grep")
_LISTS = re.compile(r"^\s*(?:ls|find|fd|tree|rg --files|git ls-files)\b")


@dataclass
class Seen:
    """Collected from the calls that worked."""

    tools: set[str] = field(default_factory=set[str])
    paths: set[str] = field(default_factory=set[str])
    reader: str | None = None
    finder: str | None = None
    _texts: dict[str, str] = field(default_factory=dict[str, str])
    _shell: list[str] = field(default_factory=list[str])

    @staticmethod
    def before(conversation: Conversation, turn_id: str) -> Seen:
        """From the turns before the one that erred."""
        seen, made = Seen(), dict[str, ToolCall]()
        for turn in conversation.turns:
            if turn.id == turn_id:
                break
            made |= {call.id: call for call in turn.calls}
            for result in turn.results:
                call = made.get(result.call_id)
                if call is not None and result.is_error is not True:
                    seen._add(call, result)
        return seen

    def shown_by_shell(self, path: str) -> bool:
        """Whether a shell command named the file, which does not count as reading it."""
        return any(path in command or path.rpartition("/")[2] in command for command in self._shell)

    def closest_line(self, path: str, wanted: str) -> str | None:
        """The line of the file, as last read, that is most like the first line of what was to be replaced."""
        text = self._texts.get(path)
        target = next((line.strip() for line in wanted.splitlines() if line.strip()), "")
        if text is None or not target:
            return None
        lines = {plain.strip() for line in text.splitlines() if (plain := _NUMBERED.sub("", line, count=1)).strip()}
        near = difflib.get_close_matches(target[:200], [line[:200] for line in sorted(lines)[:5000]], n=1, cutoff=0.5)
        return near[0] if near else None

    def _add(self, call: ToolCall, result: ToolResult) -> None:
        self.tools.add(call.name)
        channel, path, name = channel_of(call.name), path_argument(call.arguments), plain_name(call.name)
        if channel == "shell":
            command = command_text(call.name, call.arguments)
            self._shell.append(command)
            if _LISTS.match(command):
                self._list(result.text)
        elif channel == "file":
            if path:
                self._remember(path)
            if name in _FINDERS:
                self.finder = self.finder or call.name
                self._list(result.text)
            elif path and (not is_edit(call.name) or call.arguments.get("command") == "view"):
                self.reader = self.reader or call.name
                self._texts[path] = result.text[:_MAX_FILE]

    def _list(self, text: str) -> None:
        for path in _PATH.findall(text[:_MAX_FILE]):
            self._remember(path)

    def _remember(self, path: str) -> None:
        if len(self.paths) < _MAX_PATHS:
            self.paths.add(path)
