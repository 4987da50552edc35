"""Write short, rule-like hints about the model's errors, using facts that the session itself shows.

context        the facts that a hint may state, extracted from a failing call, its error and the session before it
shell_facts    the shell's working folder, and advice chosen by the wording of the error message
facts          the facts about one error site, by kind of failure
templates      the text of the hints, one template per kind of failure
hint_sources   write the hint for a site, and check that it does not quote the failing call
teacher_hints  hints written by a model
"""

from composer_replication.hint_generator.context import HintContext, count_sentences
from composer_replication.hint_generator.hint_sources import write_hint
from composer_replication.hint_generator.templates import (
    HINT_TEMPLATES,
    dispatch,
    hint_cmd_not_found,
    hint_edit_ambiguous,
    hint_edit_no_match,
    hint_edit_noop,
    hint_edit_not_read,
    hint_edit_stale,
    hint_file_not_found,
    hint_git_state,
    hint_is_directory,
    hint_json_decode,
    hint_output_too_large,
    hint_repeated_failure,
    hint_runtime_error,
    hint_shell_path_missing,
    hint_tool_not_found,
    hint_type_error,
    register,
)

__all__ = [
    "HINT_TEMPLATES",
    "HintContext",
    "count_sentences",
    "dispatch",
    "hint_cmd_not_found",
    "hint_edit_ambiguous",
    "hint_edit_no_match",
    "hint_edit_noop",
    "hint_edit_not_read",
    "hint_edit_stale",
    "hint_file_not_found",
    "hint_git_state",
    "hint_is_directory",
    "hint_json_decode",
    "hint_output_too_large",
    "hint_repeated_failure",
    "hint_runtime_error",
    "hint_shell_path_missing",
    "hint_tool_not_found",
    "hint_type_error",
    "register",
    "write_hint",
]
