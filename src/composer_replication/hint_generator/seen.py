"""What the turns before a site had shown: tools that answered, files that were read, paths that were listed."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from dataclasses import dataclass, field

from composer_replication.actions.names import LINE_NUMBER
from composer_replication.actions.shell.command import is_path
from composer_replication.actions.tools import channel_of, command_text, is_edit, path_argument, plain_name
from composer_replication.types import Conversation, ToolCall, ToolResult

# Enough for any session; a listing of a whole disk is not searched.
_MAX_PATHS = 2000
_MAX_FILE = 400_000
_MAX_LINES = 5000
_MAX_WORD = 300
_MAX_CANDIDATES = 40
_EDGES = "'\"`()[]{}<>,;:!?*=|"
_FINDERS = ("glob", "ls", "list_directory", "find_file", "list_dir", "list_files", "grep")
_LISTS = re.compile(r"^\s*(?:ls|find|fd|tree|rg --files|git ls-files)\b")


@dataclass
class Seen:
    """Collected from the calls that worked."""

    tools: set[str] = field(default_factory=set[str])
    parameters: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    paths: set[str] = field(default_factory=set[str])
    reader: str | None = None
    finder: str | None = None
    _texts: dict[str, str] = field(default_factory=dict[str, str])
    _shell: list[str] = field(default_factory=list[str])

    def shown_by_shell(self, path: str) -> bool:
        """Whether a shell command named the file, which does not count as reading it."""
        return any(path in command or path.rpartition("/")[2] in command for command in self._shell)

    def similar_path(self, path: str) -> str | None:
        """A path that was shown and may have been meant."""
        name = path.rpartition("/")[2]
        near = [each for each in self.paths if each != path and abs(len(each) - len(path)) < 12 and name[:2] in each]
        found = difflib.get_close_matches(path[:_MAX_WORD], sorted(near)[: _MAX_CANDIDATES * 5], n=1, cutoff=0.75)
        return found[0] if found else None

    def closest_line(self, path: str, wanted: str) -> str | None:
        """The line of the file, as last read, that is most like the first line of what was to be replaced."""
        text = self._texts.get(path)
        target = next((line for line in wanted.splitlines() if line.strip()), "")[:200]
        if text is None or not target:
            return None
        words = set(re.findall(r"\w+", target))
        lines = [LINE_NUMBER.sub("", line, count=1)[:200] for line in text.splitlines()[:_MAX_LINES]]
        shared = Counter(
            {line[:200]: len(words & set(re.findall(r"\w+", line[:200]))) for line in lines if line.strip()}
        )
        likely = [line for line, number in shared.most_common(_MAX_CANDIDATES) if number]
        near = difflib.get_close_matches(target, likely, n=1, cutoff=0.5)
        return near[0] if near else None

    def add(self, call: ToolCall, result: ToolResult) -> None:
        """A call that worked."""
        self.tools.add(call.name)
        self.parameters.setdefault(call.name, set()).update(call.arguments)
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
            elif path and is_edit(call.name) and call.arguments.get("command") != "view":
                self._texts.pop(path, None)  # what it holds now was not shown
            elif path:
                self.reader = self.reader or call.name
                self._texts[path] = result.text[:_MAX_FILE]

    def _list(self, text: str) -> None:
        for word in text[:_MAX_FILE].split():
            plain = word.strip(_EDGES)
            if len(plain) < _MAX_WORD and is_path(plain):
                self._remember(plain)

    def _remember(self, path: str) -> None:
        if len(self.paths) < _MAX_PATHS:
            self.paths.add(path)


class SeenAlong:
    """`Seen` before one turn after the other, without starting anew for each; a site further back starts anew."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._index = {turn.id: number for number, turn in enumerate(conversation.turns)}
        self._restart()

    def before(self, turn_id: str) -> Seen:
        end = self._index.get(turn_id, 0)
        if end < self._next:
            self._restart()
        for turn in self._conversation.turns[self._next : end]:
            self._made |= {call.id: call for call in turn.calls}
            for result in turn.results:
                call = self._made.get(result.call_id)
                if call is not None and result.is_error is not True:
                    self._seen.add(call, result)
        self._next = max(self._next, end)
        return self._seen

    def _restart(self) -> None:
        self._seen, self._made, self._next = Seen(), dict[str, ToolCall](), 0
