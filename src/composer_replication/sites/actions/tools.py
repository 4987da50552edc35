"""Tools that coding agents share: which kind each is, what they call the same thing, what their parameters mean.

Every stage that reads a call reads it by these tables, so that what one stage knows is known to all.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Literal


def word_set(words: str) -> frozenset[str]:
    """The words of a long line, for tables that are easier to read without quotes."""
    return frozenset(words.split())


PATH = (
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
OLD_TEXT = ("old_string", "old_str", "oldString", "oldText", "old_text", "search", "old")
NEW_TEXT = ("new_string", "new_str", "newString", "newText", "new_text", "replace", "new")
EVERYWHERE = ("replace_all", "replaceAll")
LINE_NUMBER = re.compile(r"^[^\S\n]*(\d+)(?:→|\t|\| ?| ?: )", re.MULTILINE)
"""As `cat -n`, Claude Code and others number the lines of a file."""
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
# Servers name their tools as they like; most say what they do.
_FILE_VERBS = "(?:read|write|edit|replace|create|delete|list|search|open|view|insert|move|find)"
_FILE_TOOL_NAME = re.compile(
    rf"^{_FILE_VERBS}_(?:\w+_)?(?:files?|director(?:y|ies)|folders?|text)(?:_|$)|^(?:str|string)_replace|^file_(?:edit"
    rf"|read|write)"
    r"|^(?:replace|edit)_string"
)
_EDIT_TOOL_NAME = re.compile(
    r"^(?:edit|replace|write|create|insert|str_replace|string_replace|apply|file_edit|multi_?edit)"
)
_COMMAND_KEYS = ("command", "cmd", "script", "code", "input", "commands", "action")
_EDIT_TOOLS = word_set(
    "edit multiedit write notebookedit str_replace_editor str_replace_based_edit_tool write_file edit_file replace"
    " apply_patch applypatch create insert str_replace create_file write_to_file apply_diff edit_block"
)
LISTS = word_set("glob ls list list_directory list_dir list_files find_file directory_tree file_search")
SEARCHES = word_set("grep search_file_content search_files grep_search codebase_search search_dir")
"""Tools that find files, and those that find text in them; neither reads a file."""
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
_WITHOUT_SCRIPT = word_set("bashoutput killshell write_stdin process")
_SCRIPT_KEYS = ("command", "cmd", "script", "commands")


@lru_cache(maxsize=1024)
def channel_of(tool: str) -> Channel:
    """Names are compared without a server's prefix (`mcp__files__read_file`) and without case."""
    name = plain_name(tool)
    if name in _SHELL_TOOLS or name in _CODE_TOOLS:
        return "shell"
    return "file" if name in _FILE_TOOLS or _FILE_TOOL_NAME.search(name) else "other"


def is_shell(tool: str) -> bool:
    """Whether it runs commands, rather than code of one language."""
    return channel_of(tool) == "shell" and plain_name(tool) not in _CODE_TOOLS


@lru_cache(maxsize=1024)
def plain_name(tool: str) -> str:
    return re.split(r"__|::|/", tool)[-1].lower()


def is_edit(tool: str) -> bool:
    """Whether the tool changes files."""
    name = plain_name(tool)
    return name in _EDIT_TOOLS or (channel_of(tool) == "file" and _EDIT_TOOL_NAME.match(name) is not None)


def command_text(tool: str, arguments: Mapping[str, Any]) -> str:
    """What a shell tool was told to run; lists are joined as they would be typed."""
    if channel_of(tool) != "shell":
        return ""
    for key in _COMMAND_KEYS:
        value = arguments.get(key)
        if isinstance(value, str) and value:
            return value
        if isinstance(value, list | tuple) and value:
            return " ".join(str(word) for word in value)
    return ""


def path_argument(arguments: Mapping[str, Any]) -> str | None:
    """The file that a file tool was pointed at."""
    return first_text(arguments, PATH)


def first_text(arguments: Mapping[str, Any], keys: Iterable[str]) -> str | None:
    """The value of the first of the keys that holds text."""
    return next((arguments[key] for key in keys if isinstance(arguments.get(key), str)), None)


def is_label(tool: str, parameter: str) -> bool:
    return parameter in _LABELS.get(plain_name(tool), ())


def null_is_absent(tool: str) -> bool:
    """Whether a parameter that is null means what a missing one means."""
    return tool in _CLAUDE_CODE


def known_defaults(tool: str) -> Mapping[str, Any]:
    """What a parameter is where the call does not say; paths are against the session's folder."""
    return {**_FOLDER_DEFAULTS.get(plain_name(tool), {}), **_DEFAULTS.get(tool, {})}


def only_looks(tool: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a call of a tool that is no shell changes nothing."""
    return plain_name(tool) in _READ_ONLY_TOOLS or arguments.get("command") == "view"


def command_parameter(tool: str, arguments: Mapping[str, Any]) -> str | None:
    """The parameter that holds what a POSIX shell is told to run."""
    name = plain_name(tool)
    if not is_shell(tool) or name in _NON_POSIX_SHELLS or name in _WITHOUT_SCRIPT:
        return None
    return next((key for key in _SCRIPT_KEYS if isinstance(arguments.get(key), str | list)), None)


# Paths in one spelling: against the folder the session works in, by the text alone, case kept.

_DRIVE = re.compile(r"[A-Za-z]:[\\/]")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# These say file or folder in any tool; the others also name routes, keys or branches, and mean a file in a file tool.
_PATH_PARAMETERS = word_set(
    "file_path filepath filePath file_paths filePaths notebook_path absolute_path absolutePath dir_path dirPath"
    " directory_path target_file targetFile relative_workspace_path target_directory workdir cwd working_directory"
    " working_dir workingDirectory"
)
_FILE_TOOL_PARAMETERS = word_set(
    "path paths file files filename file_name directory dir folder source destination src dst old_path new_path"
)
_MENTIONS_FILES = re.compile(r"\b(?:file|files|directory|directories|folder)\b", re.IGNORECASE)
_PATH_FORMATS = ("path", "file-path", "directory-path")


def normal_path(path: str, base: str | None) -> str:
    """One spelling of a path: no `.`, `//` or final `/`, `..` taken back; absolute where `base` is.

    `a/../b` is `b` by the text; where `a` is a link this may be another file, as for everyone who reads the text.
    """
    if not path or _SCHEME.match(path):
        return path
    if _DRIVE.match(path) or (base is not None and _DRIVE.match(base)):
        return _windows_path(path, base)
    if path.startswith("~"):
        return posixpath.normpath(path)  # whose home it is, the session does not say
    joined = path if base is None or path.startswith("/") else f"{base}/{path}"
    return _collapse(joined)


def is_path_parameter(tool: str, name: str, parameter_schema: Mapping[str, Any]) -> bool:
    """Whether a parameter holds a path (or paths): by its name, its tool, or what the schema says of it."""
    if name in _PATH_PARAMETERS or parameter_schema.get("format") in _PATH_FORMATS:
        return True
    if name not in _FILE_TOOL_PARAMETERS:
        return False
    if channel_of(tool) == "other":
        text = parameter_schema.get("description")
        return isinstance(text, str) and _MENTIONS_FILES.search(text) is not None
    return True


def _windows_path(path: str, base: str | None) -> str:
    slashed_path = path.replace("\\", "/")
    is_absolute = _DRIVE.match(path) is not None or slashed_path.startswith("/")
    joined = slashed_path if is_absolute or base is None else f"{base}/{slashed_path}".replace("\\", "/")
    return _collapse(joined[:1].upper() + joined[1:] if joined[1:2] == ":" else joined)


def _collapse(path: str) -> str:
    plain = posixpath.normpath(path)
    return plain[1:] if plain.startswith("//") else plain  # POSIX lets two slashes mean something; no one uses it
