"""Tools that coding agents share: what their parameters mean where no schema says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_replication.actions.tools import is_shell, plain_name, word_set

# Words for the reader of the log: the call does the same without them.
_LABELS: dict[str, frozenset[str]] = {
    **dict.fromkeys(("bash", "task", "agent", "run_shell_command"), word_set("description")),
    **dict.fromkeys(word_set("shell exec_command local_shell shell_command container.exec"), word_set("justification")),
    **dict.fromkeys(
        word_set(
            "run_terminal_cmd run_in_terminal read_file list_dir grep_search file_search codebase_search delete_file"
            " search_replace replace_string_in_file insert_edit_into_file"
        ),
        word_set("explanation"),
    ),
    "replace": word_set("instruction"),
    "execute_bash": word_set("security_risk"),
}
_CLAUDE_CODE = word_set(
    "Bash Read Edit MultiEdit Write Glob Grep LS NotebookEdit NotebookRead WebFetch WebSearch Task TodoWrite BashOutput"
    " KillShell"
)
# As the tools' own descriptions state them.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Bash": {"timeout": 120_000, "run_in_background": False},
    "Read": {"offset": 1, "limit": 2000},
    "Edit": {"replace_all": False},
    "Grep": {"output_mode": "files_with_matches", "-i": False, "multiline": False},
}
_HERE, _HERE_TOO = {"path": "."}, {"workdir": "."}
_HERE_BY_NAME: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("glob", "grep", "ls", "list", "search_file_content", "find_file", "grep_search"), _HERE),
    **dict.fromkeys(("shell", "exec_command", "shell_command", "local_shell"), _HERE_TOO),
    "run_shell_command": {"directory": ".", "dir_path": "."},
}
_LOOK = word_set(
    "read read_file view view_file cat open_file glob grep ls list list_directory list_dir list_files notebookread"
    " search_file_content search_files file_search grep_search codebase_search read_many_files find_file search_dir"
    " search_file directory_tree read_multiple_files get_file_info webfetch websearch web_fetch web_search"
    " google_web_search"
)
_NOT_POSIX = word_set("powershell pwsh cmd")
_NOT_A_COMMAND = word_set("bashoutput killshell write_stdin process")
_COMMAND_KEYS = ("command", "cmd", "script", "commands")


def is_label(tool: str, parameter: str) -> bool:
    return parameter in _LABELS.get(plain_name(tool), ())


def null_is_absent(tool: str) -> bool:
    """Whether a parameter that is null means what a missing one means."""
    return tool in _CLAUDE_CODE


def known_defaults(tool: str) -> Mapping[str, Any]:
    """What a parameter is where the call does not say; paths are against the session's folder."""
    return {**_HERE_BY_NAME.get(plain_name(tool), {}), **_DEFAULTS.get(tool, {})}


def only_looks(tool: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a call of a tool that is no shell changes nothing."""
    return plain_name(tool) in _LOOK or arguments.get("command") == "view"


def command_parameter(tool: str, arguments: Mapping[str, Any]) -> str | None:
    """The parameter that holds what a POSIX shell is told to run."""
    name = plain_name(tool)
    if not is_shell(tool) or name in _NOT_POSIX or name in _NOT_A_COMMAND:
        return None
    return next((key for key in _COMMAND_KEYS if isinstance(arguments.get(key), str | list)), None)
