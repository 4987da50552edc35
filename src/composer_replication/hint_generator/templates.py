"""The table of templates: one for every kind that the model can be blamed for. `register` adds or replaces one."""

from __future__ import annotations

from collections.abc import Callable

from composer_replication.errors import InputError, explain
from composer_replication.hint_generator import calls, files, shell
from composer_replication.hint_generator.context import HintContext

Template = Callable[[HintContext], str]
# Of all built-in templates together: a hint says by which version it was written.
VERSION = 1

HINT_TEMPLATES: dict[str, Template] = {
    "tool_not_found": calls.hint_tool_not_found,
    "json_decode": calls.hint_json_decode,
    "type_error": calls.hint_type_error,
    "repeated_failure": calls.hint_repeated_failure,
    "runtime_error": calls.hint_runtime_error,
    "edit_not_read": files.hint_edit_not_read,
    "edit_stale": files.hint_edit_stale,
    "edit_no_match": files.hint_edit_no_match,
    "edit_ambiguous": files.hint_edit_ambiguous,
    "edit_noop": files.hint_edit_noop,
    "file_not_found": files.hint_file_not_found,
    "is_directory": files.hint_is_directory,
    "output_too_large": files.hint_output_too_large,
    "cmd_not_found": shell.hint_cmd_not_found,
    "shell_path_missing": shell.hint_shell_path_missing,
    "git_state": shell.hint_git_state,
}


def dispatch(error_kind: str, ctx: HintContext | None = None) -> str | None:
    """The hint of a kind, or None where no template knows it."""
    template = HINT_TEMPLATES.get(error_kind)
    return None if template is None else template({"error_kind": error_kind, **(ctx or {})})


def register(error_kind: str, fn: Template) -> None:
    """Use `fn` for this kind from now on."""
    if not error_kind or not callable(fn):
        expected = "a kind and a function of its context that returns the hint"
        raise InputError(explain("template", got=f"{error_kind!r}, {type(fn).__name__}", expected=expected))
    HINT_TEMPLATES[error_kind] = fn
