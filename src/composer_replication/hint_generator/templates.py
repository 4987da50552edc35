"""The table of templates: one for every kind that the model can be blamed for. `register` adds or replaces one.

Here are the words about calls themselves; those about files and about commands have a module each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from composer_replication.errors import InputError, explain
from composer_replication.hint_generator.context import (
    HintContext,
    first_sentences,
    given,
    listed,
    quoted,
    text_fact,
)
from composer_replication.hint_generator.file_templates import (
    hint_edit_ambiguous,
    hint_edit_no_match,
    hint_edit_noop,
    hint_edit_not_read,
    hint_edit_stale,
    hint_file_not_found,
    hint_is_directory,
    hint_output_too_large,
)
from composer_replication.hint_generator.shell_templates import (
    hint_api_misuse,
    hint_cmd_not_found,
    hint_git_state,
    hint_hook_blocked,
    hint_shell_path_missing,
    hint_shell_syntax,
    hint_usage_error,
    hint_wrong_folder,
)

Template = Callable[[HintContext], str]
# Of all built-in templates together: a hint says by which version it was written.
VERSION = 6


def hint_tool_not_found(ctx: HintContext | None = None) -> str:
    """The published example: a reminder of the tools there are."""
    tools, meant = given(ctx, "available_tools"), text_fact(ctx, "meant")
    if meant:
        return f"The tool for this is {meant}: call tools by their exact names."
    if not tools:
        return "Call only tools that this session offers, by their exact names."
    return f"Call only tools that there are, by their exact names. Reminder: available tools are {listed(tools)}."


def hint_json_decode(ctx: HintContext | None = None) -> str:
    """Say what JSON arguments have to be; where the tool's schema is known, also what the tool takes."""
    name, takes = text_fact(ctx, "tool_name"), _takes(ctx)
    form = "one complete JSON object, with quotes, backslashes and newlines in strings escaped."
    if name and takes:  # the words that the embedded student was trained with
        return f"Tool arguments must be {form} {name} takes {takes}."
    return f"Reminder: tool arguments must be valid JSON: {form}"


def hint_type_error(ctx: HintContext | None = None) -> str:
    """Arguments that do not fit the schema: the value or the name that is right, what is needed, what there is."""
    name = text_fact(ctx, "tool_name") or "the tool"
    meant, choices, renamed = text_fact(ctx, "meant"), given(ctx, "choices"), text_fact(ctx, "meant_parameter")
    if meant:
        return f"The exact name here is {meant}: take names from the list that the tool gives, whole."
    if choices:
        return f"Take one of the names that {name} knows: {listed(choices)}."
    if advice := given(ctx, "advice"):
        return str(advice)
    if renamed:
        return f"In {name} this parameter is called {renamed}: tools name the same thing differently."
    return f"{_what_is_needed(ctx, name)}{_what_there_is(ctx)}"


def _what_is_needed(ctx: HintContext | None, name: str) -> str:
    missing, types = given(ctx, "missing_parameters"), given(ctx, "wrong_types")
    if missing:
        return f"Give {name} all that it asks for: it needs {listed(missing)}."
    if types:
        return f"Give the parameters of {name} the types that it asks for: {listed(types)}."
    if given(ctx, "unexpected_parameters"):
        return f"Pass only parameters that {name} has."
    return f"Give each parameter of {name} a value of the kind that its description asks for."


def _what_there_is(ctx: HintContext | None) -> str:
    takes, seen_parameters = _takes(ctx), given(ctx, "seen_parameters")
    if takes:
        return f" It takes {takes}."
    return f" Calls that worked had {listed(seen_parameters)}." if seen_parameters else ""


def hint_repeated_failure(ctx: HintContext | None = None) -> str:
    """The same call again: that it was, and what its kind says of it."""
    kind = str(given(ctx, "error_kind"))
    kind = "type_error" if kind == "input_validation" and kind not in HINT_TEMPLATES else kind
    template = HINT_TEMPLATES.get(kind) if kind != "repeated_failure" else None
    fallback = str(given(ctx, "advice") or "Read what came back for the cause first.")
    hint = fallback if template is None else template(ctx or {})
    return f"The same call has failed before, and would fail again unchanged. {first_sentences(hint, 1)}"


def hint_runtime_error(ctx: HintContext | None = None) -> str:
    """The fallback for a failure that is the model's and has no template of its own."""
    name = text_fact(ctx, "tool_name") or "this tool"
    if advice := given(ctx, "advice"):
        return str(advice)
    return f"Check what a call of {name} takes for granted before making it, and look at what is there."


def _takes(ctx: HintContext | None) -> str:
    """The parameters of a schema in words: `a`, `b` (required), `c`."""
    schema = given(ctx, "tool_schema")
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping) or not properties:
        return ""
    required = cast("Mapping[str, Any]", schema).get("required")
    needed = set(cast("list[str]", required)) if isinstance(required, list) else set[str]()
    names = sorted(cast("Mapping[str, Any]", properties), key=lambda name: (name not in needed, name))
    labels = [quoted(name) + (" (required)" if name in needed else "") for name in names[:12]]
    return ", ".join(labels)


HINT_TEMPLATES: dict[str, Template] = {
    "tool_not_found": hint_tool_not_found,
    "json_decode": hint_json_decode,
    "type_error": hint_type_error,
    "repeated_failure": hint_repeated_failure,
    "runtime_error": hint_runtime_error,
    "edit_not_read": hint_edit_not_read,
    "edit_stale": hint_edit_stale,
    "edit_no_match": hint_edit_no_match,
    "edit_ambiguous": hint_edit_ambiguous,
    "edit_noop": hint_edit_noop,
    "file_not_found": hint_file_not_found,
    "is_directory": hint_is_directory,
    "output_too_large": hint_output_too_large,
    "cmd_not_found": hint_cmd_not_found,
    "shell_path_missing": hint_shell_path_missing,
    "wrong_folder": hint_wrong_folder,
    "usage_error": hint_usage_error,
    "shell_syntax": hint_shell_syntax,
    "api_misuse": hint_api_misuse,
    "git_state": hint_git_state,
    "hook_blocked": hint_hook_blocked,
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
