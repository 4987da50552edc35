"""What a session had shown until a failure, and what that says about one that looks like the model's.

A path that the session showed and that is missing now was not made up; a tool or a command that worked before does
exist; text copied from the file as it was last read was copied rightly. Such failures are somebody else's, and nobody
can tell whose.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from composer_replication.actions.session_state import SessionState
from composer_replication.actions.shell.command import Command, is_path
from composer_replication.actions.tools import LINE_NUMBER, OLD_TEXT, command_text, path_argument, plain_name
from composer_replication.sites.taxonomy import Verdict

_NOT_BUILT = "the step that makes this path had failed"
_PRODUCT = re.compile(r"(?:^|/)(?:build|dist|target|out|bin|obj|\.next|node_modules|coverage|_build)/")
_SHELL_SAYS = re.compile(r"\s*(?:/\S*/)?(?:bash|sh|zsh|dash)\b")


def reconsidered(verdict: Verdict, tool: str, arguments: Mapping[str, Any], text: str, before: SessionState) -> Verdict:
    """The verdict, with the model's blame taken back where the session says otherwise."""
    if verdict.blame != "model":
        return verdict
    reason = next(_excuses(verdict, tool, arguments, text, before), None)
    if reason is None:
        return verdict
    return replace(verdict, blame="task" if reason == _NOT_BUILT else "unknown", reason=reason)


def _excuses(
    verdict: Verdict, tool: str, arguments: Mapping[str, Any], text: str, before: SessionState
) -> Iterator[str]:
    message = text[slice(*verdict.span)]
    kind, path = verdict.kind, path_argument(arguments)
    command = Command.of(command_text(tool, arguments))
    if kind == "tool_not_found" and tool in before.tools:
        yield "this tool had answered before"
    if kind == "cmd_not_found" and any(name in before.programs and name in message for name, _ in command.programs):
        yield "this command had worked before"
    if kind == "file_not_found" and path and before.has_shown(path):
        yield "the session had shown this path"
    if kind == "shell_path_missing" and ": cd: " not in message:  # the folder may be there; the shell has moved
        paths = [word for word in command.words if word in message and is_path(word)]
        if any(before.has_shown(each) for each in paths):
            yield "the session had shown this path"
        if before.build_failed and any(_PRODUCT.search(each) or _SHELL_SAYS.match(message) for each in paths):
            yield _NOT_BUILT
    if kind == "edit_not_read" and path in before.read and plain_name(tool) != "write":
        yield "the session had read this file"
    if kind == "edit_no_match" and path and any(_had(before, path, arguments.get(key)) for key in OLD_TEXT):
        yield "the text was copied from the file as it was last read"


def _had(before: SessionState, path: str, wanted: Any) -> bool:
    # Line numbers in what was wanted are the model's slip; those in front of what was shown are the tool's.
    return isinstance(wanted, str) and bool(wanted.strip()) and wanted in LINE_NUMBER.sub("", before.read.get(path, ""))
