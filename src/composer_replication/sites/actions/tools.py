"""Classify the tools of coding agents: the kind of each tool, and the meaning of its parameters.

Agents have different names for the same tool (`Bash`, `execute_bash`, `run_terminal_cmd`) and the same parameter
(`file_path`, `filePath`, `target_file`). All stages interpret calls through these tables, so that they agree. The end
of the module normalizes paths.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Literal


def word_set(words: str) -> frozenset[str]:
    """Return the words in a string as a set. Long tables are easier to read without quotes and commas."""
    return frozenset(words.split())


# The names of the same parameter in different agents, the most common first.
PATH_KEYS = (
    "file_path",
    "path",
    "filePath",
    "notebook_path",
    "absolute_path",
    "filepath",
    "filename",
    "file",
    "target_file",
)
OLD_TEXT_KEYS = ("old_string", "old_str", "oldString", "oldText", "old_text", "search", "old")
NEW_TEXT_KEYS = ("new_string", "new_str", "newString", "newText", "new_text", "replace", "new")
REPLACE_ALL_KEYS = ("replace_all", "replaceAll")
# "    12→x = 1" (Claude Code), "    12\tx = 1" (cat -n) and "12: x = 1" -> "12"; not "12 apples"
LINE_NUMBER_PREFIX = re.compile(r"^[^\S\n]*(\d+)(?:→|\t|\| ?| ?: )", re.MULTILINE)
"""The line number that a tool prints before a line of a file."""
Channel = Literal["shell", "file", "other"]
_SHELL_TOOLS = word_set(
    "bash bashoutput shell sh zsh powershell pwsh cmd terminal run_terminal_cmd run_terminal_command execute_command"
    " execute_bash exec exec_command write_stdin local_shell local_shell_call container.exec unified_exec run_command"
    " run_shell_command shell_command run_in_terminal run command_line killshell"
    " computer_terminal bash_tool process"
)
_FILE_TOOLS = word_set(
    "read write edit multiedit notebookedit notebookread glob grep ls view create insert str_replace open_file"
    " str_replace_editor str_replace_based_edit_tool read_file write_file edit_file replace replace_in_file apply_patch"
    " applypatch patch read_many_files list_directory list_dir list_files search_file_content search_files file_search"
    " grep_search codebase_search create_file delete_file move_file write_to_file apply_diff edit_block undo_edit"
    " find_file search_dir search_file open goto scroll_up scroll_down edit_notebook_file directory_tree"
    " read_multiple_files get_file_info edit_anthropic"
)
_CODE_TOOLS = word_set(
    "python ipython run_ipython execute_python code_interpreter run_python jupyter execute_ipython_cell"
)
# MCP servers choose their own tool names, but most names reveal what the tool does.
_FILE_VERBS = "(?:read|write|edit|replace|create|delete|list|search|open|view|insert|move|find)"
# "read_text_file", "list_allowed_directories", "str_replace_all", "file_edit"; not "read_email"
_FILE_TOOL_NAME = re.compile(
    rf"^{_FILE_VERBS}_(?:\w+_)?(?:files?|director(?:y|ies)|folders?|text)(?:_|$)|^(?:str|string)_replace|^file_(?:edit"
    rf"|read|write)"
    r"|^(?:replace|edit)_string"
)
# "edit_block", "write_text_file", "multi_edit"; not "read_file"
_EDIT_TOOL_NAME = re.compile(
    r"^(?:edit|replace|write|create|insert|str_replace|string_replace|apply|file_edit|multi_?edit)"
)
_COMMAND_KEYS = ("command", "cmd", "script", "code", "input", "commands", "action")
_EDIT_TOOLS = word_set(
    "edit multiedit write notebookedit str_replace_editor str_replace_based_edit_tool write_file edit_file replace"
    " apply_patch applypatch create insert str_replace create_file write_to_file apply_diff edit_block"
)
LIST_TOOLS = word_set("glob ls list list_directory list_dir list_files find_file directory_tree file_search")
"""Tools that find files by name, without reading them."""
SEARCH_TOOLS = word_set("grep search_file_content search_files grep_search codebase_search search_dir")
"""Tools that search the content of files. They show lines, not whole files."""
# Parameters that only describe the call for readers of the log, and have no effect.
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
# The defaults documented in the tools' own descriptions. A call that spells out a default equals one without it.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Bash": {"timeout": 120_000, "run_in_background": False},
    "Read": {"offset": 1, "limit": 2000},
    "Edit": {"replace_all": False},
    "Grep": {"output_mode": "files_with_matches", "-i": False, "multiline": False},
}
_DEFAULT_PATH, _DEFAULT_WORKDIR = {"path": "."}, {"workdir": "."}
_FOLDER_DEFAULTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("glob", "grep", "ls", "list", "search_file_content", "find_file", "grep_search"), _DEFAULT_PATH),
    **dict.fromkeys(("shell", "exec_command", "shell_command", "local_shell"), _DEFAULT_WORKDIR),
    "run_shell_command": {"directory": ".", "dir_path": "."},
}
_READ_ONLY_TOOLS = word_set(
    "read read_file view view_file cat open_file glob grep ls list list_directory list_dir list_files notebookread"
    " search_file_content search_files file_search grep_search codebase_search read_many_files find_file search_dir"
    " search_file directory_tree read_multiple_files get_file_info webfetch websearch web_fetch web_search"
    " google_web_search"
)
_NON_POSIX_SHELLS = word_set("powershell pwsh cmd")
_SHELL_TOOLS_WITHOUT_SCRIPT = word_set("bashoutput killshell write_stdin process")
_SCRIPT_KEYS = ("command", "cmd", "script", "commands")


@lru_cache(maxsize=1024)
def tool_channel(tool: str) -> Channel:
    """Return whether a tool runs commands, works on files, or neither.

    An MCP server's prefix (`mcp__files__read_file`) and case are ignored.
    """
    name = plain_name(tool)
    if name in _SHELL_TOOLS or name in _CODE_TOOLS:
        return "shell"
    return "file" if name in _FILE_TOOLS or _FILE_TOOL_NAME.search(name) else "other"


def is_shell(tool: str) -> bool:
    """Return whether the tool runs shell commands, as opposed to code in a programming language."""
    return tool_channel(tool) == "shell" and plain_name(tool) not in _CODE_TOOLS


@lru_cache(maxsize=1024)
def plain_name(tool: str) -> str:
    """Return the tool's name in lower case, without its server prefix.

    For example, `mcp__files__Read_File` becomes `read_file`.
    """
    return re.split(r"__|::|/", tool)[-1].lower()


def is_edit(tool: str) -> bool:
    """Return whether the tool changes files."""
    name = plain_name(tool)
    return name in _EDIT_TOOLS or (tool_channel(tool) == "file" and _EDIT_TOOL_NAME.match(name) is not None)


def command_text(tool: str, arguments: Mapping[str, Any]) -> str:
    """Return the command passed to a shell tool, or "" for other tools. A list of words is joined with blanks."""
    if tool_channel(tool) != "shell":
        return ""
    for key in _COMMAND_KEYS:
        value = arguments.get(key)
        if isinstance(value, str) and value:
            return value
        if isinstance(value, list | tuple) and value:
            return " ".join(str(word) for word in value)
    return ""


def path_argument(arguments: Mapping[str, Any]) -> str | None:
    """Return the path that a file tool works on."""
    return first_string_argument(arguments, PATH_KEYS)


def first_string_argument(arguments: Mapping[str, Any], keys: Iterable[str]) -> str | None:
    """Return the value of the first key in `keys` whose argument is a string."""
    return next((arguments[key] for key in keys if isinstance(arguments.get(key), str)), None)


def is_descriptive_parameter(tool: str, parameter: str) -> bool:
    """Return whether a parameter only describes the call, such as `description` of Claude Code's `Bash`."""
    return parameter in _LABELS.get(plain_name(tool), ())


def treats_null_as_absent(tool: str) -> bool:
    """Return whether the tool treats a null parameter as missing."""
    return tool in _CLAUDE_CODE


def default_arguments(tool: str) -> Mapping[str, Any]:
    """Return the default values of a tool's parameters. Paths are relative to the session's folder."""
    return {**_FOLDER_DEFAULTS.get(plain_name(tool), {}), **_DEFAULTS.get(tool, {})}


def is_read_only_tool_call(tool: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether a call to a non-shell tool changes nothing."""
    return plain_name(tool) in _READ_ONLY_TOOLS or arguments.get("command") == "view"


def command_parameter(tool: str, arguments: Mapping[str, Any]) -> str | None:
    """Return the name of the parameter that contains a POSIX shell script, or None if there is none."""
    name = plain_name(tool)
    if not is_shell(tool) or name in _NON_POSIX_SHELLS or name in _SHELL_TOOLS_WITHOUT_SCRIPT:
        return None
    return next((key for key in _SCRIPT_KEYS if isinstance(arguments.get(key), str | list)), None)


# "C:\src" and "c:/src"; not "C:src", which is relative on Windows
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")
# "https://host/a" and "file:///a": URLs are not paths and are not changed
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# These names denote a path in any tool. Those in _FILE_TOOL_PARAMETERS may also denote routes, keys or branches, so
# they count as paths only in file tools, or if the schema says so.
_PATH_PARAMETERS = word_set(
    "file_path filepath filePath file_paths filePaths notebook_path absolute_path absolutePath dir_path dirPath"
    " directory_path target_file targetFile relative_workspace_path target_directory workdir cwd working_directory"
    " working_dir workingDirectory"
)
_FILE_TOOL_PARAMETERS = word_set(
    "path paths file files filename file_name directory dir folder source destination src dst old_path new_path"
)
# "The file to open" and "A directory"; not "The profile name"
_MENTIONS_FILES = re.compile(r"\b(?:file|files|directory|directories|folder)\b", re.IGNORECASE)
_PATH_FORMATS = ("path", "file-path", "directory-path")


def normal_path(path: str, base: str | None) -> str:
    """Return a normalized path: without `.`, `..`, `//` or a trailing `/`, and absolute if `base` is.

    Symbolic links are ignored: `a/../b` becomes `b`, which may be another file if `a` is a symbolic link.
    """
    if not path or _SCHEME.match(path):
        return path
    if _DRIVE.match(path) or (base is not None and _DRIVE.match(base)):
        return _normalize_windows_path(path, base)
    if path.startswith("~"):
        return posixpath.normpath(path)  # the session does not reveal whose home it is
    joined = path if base is None or path.startswith("/") else f"{base}/{path}"
    return _normalize_posix_path(joined)


def is_path_parameter(tool: str, name: str, parameter_schema: Mapping[str, Any]) -> bool:
    """Return whether a parameter holds one or more paths, judging by its name, its tool and its JSON schema."""
    if name in _PATH_PARAMETERS or parameter_schema.get("format") in _PATH_FORMATS:
        return True
    if name not in _FILE_TOOL_PARAMETERS:
        return False
    if tool_channel(tool) == "other":
        text = parameter_schema.get("description")
        return isinstance(text, str) and _MENTIONS_FILES.search(text) is not None
    return True


def _normalize_windows_path(path: str, base: str | None) -> str:
    slashed_path = path.replace("\\", "/")
    is_absolute = _DRIVE.match(path) is not None or slashed_path.startswith("/")
    joined = slashed_path if is_absolute or base is None else f"{base}/{slashed_path}".replace("\\", "/")
    return _normalize_posix_path(joined[:1].upper() + joined[1:] if joined[1:2] == ":" else joined)


def _normalize_posix_path(path: str) -> str:
    plain = posixpath.normpath(path)
    # normpath keeps a leading "//", which POSIX allows to have a special meaning that is never used in practice.
    return plain[1:] if plain.startswith("//") else plain
