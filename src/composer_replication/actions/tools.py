"""Which kind of tool answered: what a text means depends on who may have written it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from composer_replication.actions.names import PATH, first_text


def word_set(words: str) -> frozenset[str]:
    """The words of a long line, for tables that are easier to read without quotes."""
    return frozenset(words.split())


Channel = Literal["shell", "file", "other"]

_SHELL = word_set(
    "bash bashoutput shell sh zsh powershell pwsh cmd terminal run_terminal_cmd run_terminal_command execute_command"
    " execute_bash exec exec_command write_stdin local_shell local_shell_call container.exec unified_exec run_command"
    " run_shell_command shell_command run_in_terminal run command_line killshell"
    " computer_terminal bash_tool process"
)
_FILE = word_set(
    "read write edit multiedit notebookedit notebookread glob grep ls view create insert str_replace open_file"
    " str_replace_editor str_replace_based_edit_tool read_file write_file edit_file replace replace_in_file apply_patch"
    " applypatch patch read_many_files list_directory list_dir list_files search_file_content search_files file_search"
    " grep_search codebase_search create_file delete_file move_file write_to_file apply_diff edit_block undo_edit"
    " find_file search_dir search_file open goto scroll_up scroll_down edit_notebook_file directory_tree"
    " read_multiple_files get_file_info edit_anthropic"
)
_CODE = word_set("python ipython execute_python code_interpreter run_python jupyter execute_ipython_cell")
# Servers name their tools as they like; most say what they do.
_VERBS = "(?:read|write|edit|replace|create|delete|list|search|open|view|insert|move|find)"
_FILE_WORDS = re.compile(
    rf"^{_VERBS}_(?:\w+_)?(?:files?|director(?:y|ies)|folders?|text)(?:_|$)|^(?:str|string)_replace|^file_(?:edit"
    rf"|read|write)"
    r"|^(?:replace|edit)_string"
)
_EDIT_WORDS = re.compile(
    r"^(?:edit|replace|write|create|insert|str_replace|string_replace|apply|file_edit|multi_?edit)"
)
_COMMAND_KEYS = ("command", "cmd", "script", "code", "input", "commands", "action")
_EDIT = word_set(
    "edit multiedit write notebookedit str_replace_editor str_replace_based_edit_tool write_file edit_file replace"
    " apply_patch applypatch create insert str_replace create_file write_to_file apply_diff edit_block"
)


@lru_cache(maxsize=1024)
def channel_of(tool: str) -> Channel:
    """Names are compared without a server's prefix (`mcp__files__read_file`) and without case."""
    name = plain_name(tool)
    if name in _SHELL or name in _CODE:
        return "shell"
    return "file" if name in _FILE or _FILE_WORDS.search(name) else "other"


def is_shell(tool: str) -> bool:
    """Whether it runs commands, rather than code of one language."""
    return channel_of(tool) == "shell" and plain_name(tool) not in _CODE


@lru_cache(maxsize=1024)
def plain_name(tool: str) -> str:
    return re.split(r"__|::|/", tool)[-1].lower()


def is_edit(tool: str) -> bool:
    """Whether the tool changes files."""
    name = plain_name(tool)
    return name in _EDIT or (channel_of(tool) == "file" and _EDIT_WORDS.match(name) is not None)


def command_text(tool: str, arguments: Mapping[str, Any]) -> str:
    """What a shell tool was told to run; lists are joined as they would be typed."""
    if channel_of(tool) != "shell":
        return ""
    for key in _COMMAND_KEYS:
        value = arguments.get(key)
        if isinstance(value, str) and value:
            return value
        if isinstance(value, list | tuple) and value:
            return " ".join(str(each) for each in value)
    return ""


def path_argument(arguments: Mapping[str, Any]) -> str | None:
    """The file that a file tool was pointed at."""
    return first_text(arguments, PATH)
