"""The templates: one for every kind that the model can be blamed for. `register` adds or replaces one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from composer_replication.errors import InputError, explain
from composer_replication.hint_generator.context import HintContext, given, listed, quoted, text_fact

Template = Callable[[HintContext], str]
# Of all built-in templates together: a hint says by which version it was written.
VERSION = 1


# Calls: the tool's name, its arguments, and calls that were made before.


def hint_tool_not_found(ctx: HintContext | None = None) -> str:
    """The published example: a reminder of the tools there are."""
    name, tools = text_fact(ctx, "tool_name"), given(ctx, "available_tools")
    missing = f"There is no tool named {name}" if name else "There is no such tool"
    if not tools:
        return f"{missing}. Call only tools that this session offers, by their exact names."
    return f"{missing}. Reminder: available tools are {listed(tools)}."


def hint_json_decode(ctx: HintContext | None = None) -> str:
    """Arguments that are no JSON at all."""
    name, takes = text_fact(ctx, "tool_name"), _takes(ctx)
    rule = "Tool arguments must be one complete JSON object, with quotes, backslashes and newlines in strings escaped."
    return f"{rule} {name} takes {takes}." if name and takes else rule


def hint_type_error(ctx: HintContext | None = None) -> str:
    """Arguments that do not fit the schema: which are missing, which do not exist, which have the wrong type."""
    name = text_fact(ctx, "tool_name") or "the tool"
    slips = [
        f"{label} {listed(found)}"
        for key, label in (
            ("missing_parameters", "it needs"),
            ("unexpected_parameters", "it does not take"),
            ("wrong_types", "of another type must be"),
        )
        if (found := given(ctx, key))
    ]
    takes, seen = _takes(ctx), given(ctx, "seen_parameters")
    first = f"The arguments must fit the schema of {name}" + (f": {'; '.join(slips)}." if slips else ".")
    if takes:
        return f"{first} It takes {takes}."
    return f"{first} Calls that worked had {listed(seen)}." if seen else first


def hint_repeated_failure(ctx: HintContext | None = None) -> str:
    """The same call again."""
    name, times = text_fact(ctx, "tool_name"), given(ctx, "num_repeats")
    what = f"This call of {name}" if name else "This call"
    count = f"{times} time{'s' if times != 1 else ''}" if isinstance(times, int) else "before"
    message = text_fact(ctx, "error_message")
    because = f" with {message}" if message else ""
    rule = "Do not repeat a failed call unchanged: find out why, then change it."
    return f"{what} has already failed {count}{because}. {rule}"


def hint_runtime_error(ctx: HintContext | None = None) -> str:
    """The fallback for a failure that is the model's and has no template of its own."""
    name, message = text_fact(ctx, "tool_name"), text_fact(ctx, "error_message")
    what = f"This call of {name} fails" if name else "This call fails"
    return f"{what}{f' with {message}' if message else ''}. Check what it assumes before making it."


# Files: reading before changing, exact text, paths that exist.


def hint_edit_not_read(ctx: HintContext | None = None) -> str:
    """A change without a look."""
    path, reader = text_fact(ctx, "path"), text_fact(ctx, "reader_tool")
    rule = f"Read a file{f' with {reader}' if reader else ''} before changing it"
    if not path:
        return f"{rule}."
    seen = "has not been read with it" if given(ctx, "was_read") else "has not been read in this session"
    return f"{rule}. {path} {seen}."


def hint_edit_stale(ctx: HintContext | None = None) -> str:
    """A change on the ground of an old look."""
    path = text_fact(ctx, "path")
    return f"Read {path or 'a file'} again before changing it: it has changed since it was read."


def hint_edit_no_match(ctx: HintContext | None = None) -> str:
    """Text that is not in the file; the nearest line that the session shows helps to see why."""
    path, closest = text_fact(ctx, "path"), text_fact(ctx, "closest_line")
    rule = "The text to replace must be copied exactly from the file, with its whitespace and without line numbers."
    if closest and given(ctx, "only_whitespace"):
        return f"{rule} Here only the whitespace differs from the line {closest}."
    if closest:
        return f"{rule} The closest line{f' of {path}' if path else ''} is {closest}."
    return f"{rule} Read {path or 'the file'} again and copy from what it shows."


def hint_edit_ambiguous(ctx: HintContext | None = None) -> str:
    """Text that is in the file more than once."""
    path = text_fact(ctx, "path")
    rule = f"The text to replace must occur only once{f' in {path}' if path else ''}."
    return f"{rule} Add lines around it until it is unique, or replace all of them on purpose."


def hint_edit_noop(ctx: HintContext | None = None) -> str:
    """A replacement by the same text."""
    path = text_fact(ctx, "path")
    return f"The new text must differ from the old one: this edit changes nothing{f' in {path}' if path else ''}."


def hint_file_not_found(ctx: HintContext | None = None) -> str:
    """A path that was guessed."""
    path, similar, finder = (text_fact(ctx, key) for key in ("path", "similar_path", "finder_tool"))
    missing = f"{path} does not exist" if path else "The file does not exist"
    if similar:
        return f"{missing}; this session has shown {similar}. Use paths that were listed or read, not guessed ones."
    return (
        f"{missing}. Look for a file{f' with {finder}' if finder else ''} before opening a path that nothing has shown."
    )


def hint_is_directory(ctx: HintContext | None = None) -> str:
    """A folder where a file is needed."""
    path = text_fact(ctx, "path")
    return f"{path or 'The path'} is a folder, and a file is needed. List a folder to see which files it has."


def hint_output_too_large(ctx: HintContext | None = None) -> str:
    """More than a result can hold."""
    path = text_fact(ctx, "path")
    return f"{path or 'The result'} is too large to read at once. Search it, or read a part of it by offset and limit."


# Shell commands.


def hint_cmd_not_found(ctx: HintContext | None = None) -> str:
    """A command that is not there."""
    program = text_fact(ctx, "program")
    missing = f"There is no command {program} here" if program else "There is no such command here"
    return f"{missing}. Use commands that this session has shown to work, or check with `command -v` first."


def hint_shell_path_missing(ctx: HintContext | None = None) -> str:
    """A path in a command that does not exist from where the shell stands."""
    path, similar, advice = text_fact(ctx, "path"), text_fact(ctx, "similar_path"), (ctx or {}).get("git_advice")
    if advice:
        return f"{path} is not known to git. {advice}" if path else advice
    missing = (
        f"{path} does not exist from the folder the shell is in" if path else "A path of this command does not exist"
    )
    if similar:
        return (
            f"{missing}; this session has shown {similar}. Use paths that were listed, and mind where the shell stands."
        )
    return f"{missing}. Name only paths that were listed or made before, and mind where the shell stands."


def hint_git_state(ctx: HintContext | None = None) -> str:
    """A git command that the state of the repository does not allow."""
    advice, message = (ctx or {}).get("git_advice"), text_fact(ctx, "error_message")
    rule = advice or "Look at `git status` before a command that depends on the branch, the remote or a clean tree."
    return f"{rule} Git said {message}." if message else rule


# The same whatever was typed: what is right stands in no fact of the session.
_ALWAYS = {
    "wrong_folder": "Mind the folder that the shell stands in: earlier commands may have changed it. Name paths from"
    " that folder, or give the absolute path.",
    "usage_error": "Use only options, arguments and names that this program has: its `--help`, or its list of tasks or"
    " commands, shows them. Options differ between programs and between systems.",
    "shell_syntax": "Close every quote and bracket, and put single quotes around text that the shell must not read,"
    " such as patterns, addresses and inline programs. Longer text is safer in a file or a here-document.",
    "api_misuse": "Take the endpoint, the identifiers and the fields from what the service has returned or from its"
    " documentation, instead of composing them from memory.",
    "hook_blocked": "This project checks such calls and has refused one before. Do first what the check asks for, then"
    " call.",
}


def _always(text: str) -> Template:
    return lambda _=None: text


def _takes(ctx: HintContext | None) -> str:
    """The parameters of a schema in words: `a`, `b` (required), `c`."""
    schema = given(ctx, "tool_schema")
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping) or not properties:
        return ""
    required = cast("Mapping[str, Any]", schema).get("required")
    needed = set(cast("list[str]", required)) if isinstance(required, list) else set[str]()
    names = sorted(cast("Mapping[str, Any]", properties), key=lambda each: (each not in needed, each))
    shown = [quoted(each) + (" (required)" if each in needed else "") for each in names[:12]]
    return ", ".join(shown)


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
    "git_state": hint_git_state,
    **{kind: _always(text) for kind, text in _ALWAYS.items()},
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
