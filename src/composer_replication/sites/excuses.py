"""What a session had shown until now, and what that says about a failure that looks like the model's.

A path that the session showed and that is missing now was not made up; a tool or a command that worked before does
exist; text copied from the file as it was last read was copied rightly. Such failures are somebody else's, and nobody
can tell whose.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from composer_replication.actions.names import LINE_NUMBER, OLD_TEXT
from composer_replication.actions.shell.command import Command, is_path
from composer_replication.actions.tools import channel_of, command_text, is_edit, path_argument, plain_name, word_set
from composer_replication.sites.classify import Verdict

_MAX_TEXT = 200_000
_BUILDERS = word_set(
    "make cmake gmake ninja gcc g++ clang cargo go javac tsc webpack vite mvn gradle gradlew dotnet bazel npm yarn pnpm"
)
_REMOVERS = frozenset({("rm", ""), ("mv", ""), ("rmdir", ""), ("unlink", ""), ("git", "rm"), ("git", "mv")})
_PRODUCT = re.compile(r"(?:^|/)(?:build|dist|target|out|bin|obj|\.next|node_modules|coverage|_build)/")
_SHELL_SAYS = re.compile(r"\s*(?:/\S*/)?(?:bash|sh|zsh|dash)\b")


class History:
    """Grows turn by turn; asked before each call what it makes of a verdict.

    Texts are kept as they are, and searched only when a path is missing: that is rare, and most are never asked for.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._removed: dict[str, int] = {}  # a path -> how many texts had been shown when it went
        self._tools: set[str] = set()
        self._programs: set[str] = set()
        self._read: dict[str, str] = {}
        self._build_failed = False

    def heard(self, text: str) -> None:
        """Words of the user, or of anybody but the model."""
        self._texts.append(text)

    def add(self, tool: str, arguments: Mapping[str, Any], verdict: Verdict, text: str = "") -> None:
        """A call and how it went."""
        command = Command.of(command_text(tool, arguments))
        programs = command.programs
        if any(name in _BUILDERS for name, _ in programs):
            self._build_failed = verdict.is_failure
        if verdict.is_failure:
            return
        self._tools.add(tool)
        path = path_argument(arguments)
        if channel_of(tool) == "file" and path:
            self._texts.append(path)
            if is_edit(tool) and arguments.get("command") != "view":
                self._read.pop(path, None)  # what it holds now was not shown
            else:
                self._read[path] = text[:_MAX_TEXT]
        self._programs.update(name for name, _ in programs)
        if any(pair in _REMOVERS or (pair[0], "") in _REMOVERS for pair in programs):
            self._removed |= dict.fromkeys(command.words, len(self._texts))
        elif command.only_shows:
            self._texts.append(command.text)
        self._texts.append(text)

    def reconsidered(self, verdict: Verdict, tool: str, arguments: Mapping[str, Any], text: str) -> Verdict:
        """The verdict, with the model's blame taken back where the session says otherwise."""
        if verdict.blame != "model":
            return verdict
        reason = next(self._excuses(verdict, tool, arguments, text), None)
        if reason is None:
            return verdict
        blame = "task" if reason == _NOT_BUILT else "unknown"
        return replace(verdict, blame=blame, reason=reason)

    def _excuses(self, verdict: Verdict, tool: str, arguments: Mapping[str, Any], text: str) -> Iterator[str]:
        message = text[slice(*verdict.span)]
        kind, path = verdict.kind, path_argument(arguments)
        command = Command.of(command_text(tool, arguments))
        if kind == "tool_not_found" and tool in self._tools:
            yield "this tool had answered before"
        if kind == "cmd_not_found" and any(name in self._programs and name in message for name, _ in command.programs):
            yield "this command had worked before"
        if kind == "file_not_found" and path and self._knows(path):
            yield "the session had shown this path"
        if kind == "shell_path_missing" and ": cd: " not in message:  # the folder may be there; the shell has moved
            paths = [word for word in command.words if word in message and is_path(word)]
            if any(self._knows(each) for each in paths):
                yield "the session had shown this path"
            if self._build_failed and any(_PRODUCT.search(each) or _SHELL_SAYS.match(message) for each in paths):
                yield _NOT_BUILT
        if kind == "edit_not_read" and path in self._read and plain_name(tool) != "write":
            yield "the session had read this file"
        if kind == "edit_no_match" and path and any(self._had(path, arguments.get(key)) for key in OLD_TEXT):
            yield "the text was copied from the file as it was last read"

    def _had(self, path: str, wanted: Any) -> bool:
        # Line numbers in what was wanted are the model's slip; those in front of what was shown are the tool's.
        return isinstance(wanted, str) and bool(wanted.strip()) and wanted in _plain(self._read.get(path, ""))

    def _knows(self, path: str) -> bool:
        """Whether a text has shown this path, as it is or as the end of a longer one, since it was last removed."""
        name = path.removeprefix("./")
        since = max(self._removed.get(path, 0), self._removed.get(name.rpartition("/")[2], 0))
        return any(_stands_in(name, text[:_MAX_TEXT]) for text in self._texts[since:])


def _stands_in(path: str, text: str) -> bool:
    position = text.find(path)
    while position >= 0:
        before, after = text[position - 1 : position], text[position + len(path) : position + len(path) + 1]
        if not (before.isalnum() or before in ("_", "-")) and not (after.isalnum() or after in ("_", "-", "/")):
            return True
        position = text.find(path, position + 1)
    return False


_NOT_BUILT = "the step that makes this path had failed"


def _plain(text: str) -> str:
    return LINE_NUMBER.sub("", text)
