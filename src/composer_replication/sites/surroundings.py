"""What stands around a message in the same result, and what that says about it."""

from __future__ import annotations

import re
from dataclasses import replace

from composer_replication.actions.shell.command import Command, is_path
from composer_replication.sites.taxonomy import Verdict
from composer_replication.sites.view import View

# Of a file, which a compiler or a linter speaks of.
_PLACE = re.compile(r"\s*[\w./+-]{1,200}\.\w{1,8}:\d+|.{0,200}\.\w{1,8}:\d+:\d+:")
_LISTS_COMMANDS = re.compile(r"[;\n]|\|\|")
# What an agent's shell prints after every command.
_PROMPT = re.compile(r"^\(Open file: .{0,400}\)$|^\(Current directory: .{0,400}\)$|^bash-\$\s*$", re.MULTILINE)
_STREAMS = re.compile(r"^(?:Error|Stderr|Output|Stdout): (?:\(none\)|\(empty\))?\s*$", re.MULTILINE)  # of an envelope
# Looks whether something is there: that it is not is the answer.
_PROBES = re.compile(r"\s*(?:/\S{1,40}/)?(?:ls|find|stat|test|\[|file|du|lsd|exa|gls): ")
_REPEATS_COMMAND = re.compile(r"^Command: .*", re.MULTILINE)  # an envelope that says what was run
_HOOK = re.compile(r"husky|pre-commit|lint-staged|commit-msg|\bhook\b", re.IGNORECASE)
# An installation, a download or a build that failed makes what comes after it fail too.
_TROUBLE_BEFORE = re.compile(
    r"^(?:E: |W: |Err:|Error|ERROR|error:|curl: \(|wget: |fatal:|npm ERR|Traceback|╷|│ Error|Warning: No )"
    r"|unable to locate"
    r"|not created successfully|is not compatible|no formula|could not (?:get lock|open lock)|returned error: \d"
    r"|pull access denied|command not found|not found in",
    re.MULTILINE | re.IGNORECASE,
)


def weighed(found: Verdict, view: View, command: Command) -> Verdict:
    """A slip, with the blame taken back where something else had gone wrong before, or where it was a question."""
    if found.kind == "git_state":
        by_hook = _HOOK.search(view.text) is not None
        return replace(found, blame="unknown", reason="a hook may have said this") if by_hook else found
    begin = view.here(found.span[0])
    before = _STREAMS.sub("", _REPEATS_COMMAND.sub("", view.text[:begin]))
    message = view.text[begin : begin + 300].partition("\n")[0]
    if _TROUBLE_BEFORE.search(before) is not None:
        return replace(found, blame="unknown", reason="something else in the command had failed before")
    if found.kind == "shell_path_missing" and _PROBES.match(message) is not None:
        return replace(found, blame="task", reason="a look whether the path is there")
    listed = any(is_path(word) and word in before and word in message for word in command.words)
    return replace(found, blame="unknown", reason="the same result shows this path") if listed else found


def follows_trouble(before: str, command: Command) -> bool:
    """Whether another command, which runs before this one however it ends, had failed."""
    return _LISTS_COMMANDS.search(command.text) is not None and _TROUBLE_BEFORE.search(before) is not None


def names_a_place(line: str) -> bool:
    """Whether a line begins with the place in a file that it is about."""
    return _PLACE.match(line) is not None


def is_all(span: tuple[int, int], view: View) -> bool:
    """Whether nothing but this, and what a shell prints after every command, came back."""
    rest = view.text[: span[0]] + view.text[span[1] :]
    return not _PROMPT.sub("", rest).strip()
