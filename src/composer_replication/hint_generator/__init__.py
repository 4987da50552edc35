"""What to say about a failure: short, rule-like hints, filled with facts that the session itself shows.

context          what a hint may be made of, and how text of a session is put into one
error_words      what an error itself says is right
files            which file was meant
along            a conversation read up to one turn after the other, and the failing call there
advice           what to do instead, by the words of shells, programs, services and git
parameters       what is wrong with a call's arguments
edit_texts       where a text differs from a file
shell_facts      where the shell stood, and what a path is called from there
facts            what the session had shown by the time of the erring turn
file_templates   the hints' words about files
shell_templates  the hints' words about commands
templates        the table of templates, and the words about calls themselves
contract         what a hint may not say: anything of the failing call that is not right
write            the hint of a site, from the first source that has one
"""

from composer_replication.hint_generator.context import HintContext, count_sentences
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
from composer_replication.hint_generator.write import write_hint

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
