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
from composer_replication.actions.tools import LINE_NUMBER, OLD_TEXT, command_text, path_argument
from composer_replication.sites.taxonomy import Verdict

_NOT_BUILT = "the step that makes this path had failed"
_PRODUCT = re.compile(r"(?:^|/)(?:build|dist|target|out|bin|obj|\.next|node_modules|coverage|_build)/")
_CHANGES_FOLDER = re.compile(
    r"(?:^|[\s:)])cd(?::\d+)?: |can't cd to|Set-Location", re.IGNORECASE
)  # bash, zsh, sh, fish
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w{0,60})\}?")
_ABOUT_WORDS = frozenset(
    ["shell_path_missing", "wrong_folder", "usage_error", "git_state", "api_misuse", "is_directory"]
)
_LOOKED_FOR = re.compile(r"(?:stat|lstat|open|chdir) (/\S{1,400}): ")
_SHELL_SAYS = re.compile(r"\s*(?:/\S*/)?(?:bash|sh|zsh|dash)\b")


def reconsidered(verdict: Verdict, tool: str, arguments: Mapping[str, Any], text: str, before: SessionState) -> Verdict:
    """The verdict, with the model's blame taken back where the session says otherwise."""
    if verdict.blame != "model":
        return verdict
    if verdict.kind in _ABOUT_WORDS and _has_lost_variable(verdict, tool, arguments, text, before):
        return replace(verdict, blame="unknown", reason="a variable that had been set was empty")
    if verdict.kind == "shell_path_missing" and _is_elsewhere(tool, arguments, text[slice(*verdict.span)], before):
        return replace(verdict, kind="wrong_folder", reason="the session had shown this path from another folder")
    path = path_argument(arguments)
    if verdict.kind == "file_not_found" and path and not path.startswith(("/", "~")) and before.is_from_elsewhere(path):
        return replace(verdict, kind="wrong_folder", reason="the session had shown this path from another folder")
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
    if kind == "shell_path_missing" and _CHANGES_FOLDER.search(message) is None:
        paths = [word for word in command.words if word in message and is_path(word) and _ends_in(message, word)]
        if any(before.has_shown(typed_path) for typed_path in paths):
            yield "the session had shown this path"
        if before.build_failed and any(
            _PRODUCT.search(typed_path) or _SHELL_SAYS.match(message) for typed_path in paths
        ):
            yield _NOT_BUILT
    if kind == "edit_not_read" and path and before.has_touched(path):
        yield "the session had read or written this file"
    if kind == "output_too_large" and path and not before.had_failed(path):
        yield "nothing had shown how large this file is"
    if kind == "api_misuse" and any(before.has_shown(url) for url in _urls(arguments)):
        yield "the session had shown this address"
    if kind == "usage_error" and any(before.has_shown(name) for name in _names(message, command)):
        yield "the session had shown this name"
    if kind == "edit_no_match" and path and any(_had(before, path, arguments.get(key)) for key in OLD_TEXT):
        yield "the text was copied from the file as it was last read"


def _ends_in(message: str, path: str) -> bool:
    """Whether the message speaks of this path, and not of something inside it."""
    return re.search(rf"{re.escape(path)}(?![\w/-])", message) is not None


def _is_elsewhere(tool: str, arguments: Mapping[str, Any], message: str, before: SessionState) -> bool:
    """Whether a relative path was typed that the session had shown, and the shell stands in another folder."""
    command = Command.of(command_text(tool, arguments))
    looked_for = _LOOKED_FOR.search(message)
    words = (word.strip("'\"").removeprefix("./").rstrip("/.") for word in command.text.split())
    typed = {
        word for word in words if word in message and (is_path(word) or looked_for or _CHANGES_FOLDER.search(message))
    }
    for path in typed:
        if path.startswith(("/", "~")) or not path:
            continue
        if (
            looked_for is not None
            and looked_for[1].endswith(f"/{path}")
            and _is_doubled(looked_for[1].removesuffix(f"/{path}"), path)
        ):
            return True
        if before.is_from_elsewhere(path) or (_CHANGES_FOLDER.search(message) and before.has_shown(path)):
            return True
    return False


def _has_lost_variable(
    verdict: Verdict, tool: str, arguments: Mapping[str, Any], text: str, before: SessionState
) -> bool:
    """Whether the message fits a command whose variables were empty, though it or an earlier one had set them.

    Of a path the message shows what was left of the word; of other things it does not say what came in.
    """
    command = command_text(tool, arguments)
    variables = {
        name for name in _VARIABLE.findall(command) if _is_set(name, command) or before.was_in_a_command(f"{name}=")
    }
    if not variables:
        return False
    if verdict.kind not in ("shell_path_missing", "wrong_folder", "is_directory"):
        return True
    words = {word.strip("'\"") for word in command.split() if variables.intersection(_VARIABLE.findall(word))}
    remainders = {_VARIABLE.sub("", word).strip("'\"") for word in words}
    message = re.split(r"[\s:'\"`‘’]+", text[slice(*verdict.span)])
    return any(word in message for word in remainders if word) or "" in remainders


def _is_set(name: str, command: str) -> bool:
    return re.search(rf"(?:^|[\s;&(]){name}=|\bfor {name} in\b|\bread (?:-\w+ )*{name}\b", command) is not None


def _is_doubled(folder: str, path: str) -> bool:
    """Whether the shell stands inside the very folders that the path begins with."""
    names = path.split("/")
    return any(folder.endswith("/" + "/".join(names[:number])) for number in range(1, len(names) + 1))


def _urls(arguments: Mapping[str, Any]) -> list[str]:
    return [
        value for value in arguments.values() if isinstance(value, str) and value.startswith(("http://", "https://"))
    ]


def _names(message: str, command: Command) -> list[str]:
    """Names of tasks and scripts that the command gives and the message does not know; options are no names."""
    words = (word.strip("'\"`.,:;") for word in message.split())
    return [
        word for word in words if len(word) > 2 and not word.startswith("-") and word in command.words and ":" in word
    ]


def _had(before: SessionState, path: str, old_text: Any) -> bool:
    # Line numbers in what was wanted are the model's slip; those in front of what was shown are the tool's.
    return (
        isinstance(old_text, str)
        and bool(old_text.strip())
        and old_text in LINE_NUMBER.sub("", before.read.get(path, ""))
    )
