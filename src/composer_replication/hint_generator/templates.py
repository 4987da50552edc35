"""Write the text of a hint: one template for every kind of failure that the model can be blamed for.

A template is a function that takes the facts (`HintContext`) and returns one or two sentences. It quotes facts that are
correct, never the failing call. `register` adds or replaces a template.

Hints are training data, so any change to their wording requires a new `VERSION`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from composer_replication.errors import InputError, explain
from composer_replication.hint_generator.context import _MAX_LISTED, HintContext, first_sentences, quote_text
from composer_replication.sites.actions.tools import plain_name

Template = Callable[[HintContext], str]
# One version for all built-in templates. It is stored with every hint.
VERSION = 6


def hint_tool_not_found(ctx: HintContext | None = None) -> str:
    """Return the hint for a nonexistent tool: the tool that was probably meant, or else the available tools."""
    tools, meant = _get_fact(ctx, "available_tools"), _quoted_fact(ctx, "meant")
    if meant:
        return f"The tool for this is {meant}: call tools by their exact names."
    if not tools:
        return "Call only tools that this session offers, by their exact names."
    return f"Call only tools that there are, by their exact names. Reminder: available tools are {_list_names(tools)}."


def hint_json_decode(ctx: HintContext | None = None) -> str:
    """Return the hint for arguments that are not JSON. If the schema is known, it also lists the tool's parameters."""
    name, takes = _quoted_fact(ctx, "tool_name"), _list_parameters(ctx)
    form = "one complete JSON object, with quotes, backslashes and newlines in strings escaped."
    if name and takes:  # the demo student was trained on this text
        return f"Tool arguments must be {form} {name} takes {takes}."
    return f"Reminder: tool arguments must be valid JSON: {form}"


def hint_type_error(ctx: HintContext | None = None) -> str:
    """Return the hint for arguments that violate the schema: the right value or name, or else the tool's parameters."""
    name = _quoted_fact(ctx, "tool_name") or "the tool"
    meant, choices, renamed = (
        _quoted_fact(ctx, "meant"),
        _get_fact(ctx, "choices"),
        _quoted_fact(ctx, "meant_parameter"),
    )
    if meant:
        return f"The exact name here is {meant}: take names from the list that the tool gives, whole."
    if choices:
        return f"Take one of the names that {name} knows: {_list_names(choices)}."
    if advice := _get_fact(ctx, "advice"):
        return str(advice)
    if renamed:
        return f"In {name} this parameter is called {renamed}: tools name the same thing differently."
    return f"{_required_parameters_sentence(ctx, name)}{_known_parameters_sentence(ctx)}"


def _required_parameters_sentence(ctx: HintContext | None, name: str) -> str:
    """Return the sentence about missing, wrongly typed or unexpected parameters."""
    missing, types = _get_fact(ctx, "missing_parameters"), _get_fact(ctx, "wrong_types")
    if missing:
        return f"Give {name} all that it asks for: it needs {_list_names(missing)}."
    if types:
        return f"Give the parameters of {name} the types that it asks for: {_list_names(types)}."
    if _get_fact(ctx, "unexpected_parameters"):
        return f"Pass only parameters that {name} has."
    return f"Give each parameter of {name} a value of the kind that its description asks for."


def _known_parameters_sentence(ctx: HintContext | None) -> str:
    """Return the sentence that lists the tool's parameters, or "" if none are known."""
    takes, seen_parameters = _list_parameters(ctx), _get_fact(ctx, "seen_parameters")
    if takes:
        return f" It takes {takes}."
    return f" Calls that worked had {_list_names(seen_parameters)}." if seen_parameters else ""


def hint_repeated_failure(ctx: HintContext | None = None) -> str:
    """Return the hint for a repeated failure: a reminder, and the first sentence of the hint for its kind."""
    # Wrong arguments have no template of their own kind: `template_of` chooses between two.
    kind = str(_get_fact(ctx, "error_kind"))
    kind = "type_error" if kind == "input_validation" and kind not in HINT_TEMPLATES else kind
    template = HINT_TEMPLATES.get(kind) if kind != "repeated_failure" else None
    fallback = str(_get_fact(ctx, "advice") or "Read what came back for the cause first.")
    hint = fallback if template is None else template(ctx or {})
    return f"The same call has failed before, and would fail again unchanged. {first_sentences(hint, 1)}"


def hint_runtime_error(ctx: HintContext | None = None) -> str:
    """Return the hint for a failure whose kind has no template."""
    name = _quoted_fact(ctx, "tool_name") or "this tool"
    if advice := _get_fact(ctx, "advice"):
        return str(advice)
    return f"Check what a call of {name} takes for granted before making it, and look at what is there."


def _list_parameters(ctx: HintContext | None) -> str:
    """Return a schema's parameters as text, the required ones first: `a` (required), `b`, `c`."""
    schema = _get_fact(ctx, "tool_schema")
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping) or not properties:
        return ""
    required = cast("Mapping[str, Any]", schema).get("required")
    needed = set(cast("list[str]", required)) if isinstance(required, list) else set[str]()
    names = sorted(cast("Mapping[str, Any]", properties), key=lambda name: (name not in needed, name))
    labels = [quote_text(name) + (" (required)" if name in needed else "") for name in names[:12]]
    return ", ".join(labels)


# ---- Files: read before editing, copy text exactly, open paths that exist --------------------------------------------


def hint_edit_not_read(ctx: HintContext | None = None) -> str:
    """Return the hint for an edit of a file that was not read first."""
    reader, tool = _quoted_fact(ctx, "reader_tool"), _quoted_fact(ctx, "tool_name")
    rule = f"Open a file{f' with {reader}' if reader else ''} before changing it{f' with {tool}' if tool else ''}"
    # Harnesses forget which files were read when they summarize or restart a session.
    if _get_fact(ctx, "counts_no_more"):
        return (
            f"Open a file again{f' with {reader}' if reader else ''}, under its present name, before changing it: what"
            " was read before a summary of the session, a restart or a rename does not count any more."
        )
    if _get_fact(ctx, "was_read"):
        return f"{rule}. Seeing it through a shell command or a search does not count as reading it."
    if plain_name(str(_get_fact(ctx, "tool_name"))) in _WRITERS:
        return f"{rule}: a file that exists already can be replaced only after it was read in this session."
    return f"{rule}, also where its text is known from elsewhere: only what was read in this session can be changed."


def hint_edit_stale(ctx: HintContext | None = None) -> str:
    """Return the hint for an edit of a file that changed after it was read."""
    reader = _quoted_fact(ctx, "reader_tool")
    again = f"again with {reader}" if reader else "again"
    return f"Read a file {again} right before changing it where a formatter, a command or the user may have been at it."


def hint_edit_no_match(ctx: HintContext | None = None) -> str:
    """Return the hint for an edit whose old text is not in the file.

    The hint says where the old text and the file differ, or else what to read.
    """
    reader, right = _quoted_fact(ctx, "reader_tool"), _quoted_fact(ctx, "closest_line")
    read = f"Read the part to change{f' with {reader}' if reader else ''}"
    now = f", which now has {right} there" if right else ""
    other_file = _quoted_fact(ctx, "meant") or "another file"
    there = f" The file has {right} there." if right else ""
    rule = "The text to change must be copied exactly from the file, with its whitespace and without line numbers."
    # One text for every `EditProblem`.
    words = {
        "line_numbers": "Leave out the line numbers that a view puts before each line: the file does not have them.",
        "escapes": "Write line breaks and tabs of the text to change as such, not as escapes: the file has none.",
        "whitespace": f"Copy the whitespace of the text to change exactly as the file has it{_indentation(ctx)}.",
        "own_edit": f"An earlier edit of this session has changed this part of the file{now}. Build an edit on the text"
        " as the edits before it have left it.",
        "changed": f"The file may have changed since it was last shown. {read} again before editing, and copy from it.",
        "differs": f"The text to change has to be what the file has, not what it is remembered to have. {read} again,"
        " and copy from what that shows.",
        "other_file": f"Text like this stands in {other_file}, as this session has shown, not in the file to change."
        " Edit the file that has it.",
        "unshown": f"Not all of the text to change had been shown. {read} first, and copy it from there.",
        "unread": f"{read} right before editing, and copy the text to change from there, with its whitespace.",
        "elsewhere": "The file, as it was shown, has no such text. Search it for a word that must be there, and copy"
        " from that.",
        "line": f"Copy the text to change from what was shown instead of writing it from memory.{there}",
        "longer": "Copy the text to change from what was shown instead of writing it from memory. One of its lines is"
        " shorter in the file.",
    }
    fallback = str(_get_fact(ctx, "advice") or f"{rule} {read} again and copy from what it shows.")
    return words.get(str(_get_fact(ctx, "edit_problem")), fallback)


def hint_edit_ambiguous(ctx: HintContext | None = None) -> str:
    """Return the hint for an edit whose old text occurs more than once in the file."""
    number, locations = _get_fact(ctx, "num_matches"), _get_fact(ctx, "places")
    everywhere = _quoted_fact(ctx, "meant_parameter")
    times = {2: "twice"}.get(number, f"{number} times") if isinstance(number, int) and number > 1 else "more than once"
    where = f", at {_list_names(locations)}" if locations else ""
    how = f"set {everywhere}" if everywhere else "have all of them changed at once"
    can_all = everywhere or _get_fact(ctx, "can_replace_all")
    all_of_them = f", or {how} where every place is to change" if can_all else ""
    return (
        f"The text to change stands {times} in the file{where}. Add a neighbouring line that only the meant place has,"
        f" such as the first line of its function{all_of_them}."
    )


def hint_edit_noop(ctx: HintContext | None = None) -> str:
    """Return the hint for an edit that changes nothing."""
    name = _quoted_fact(ctx, "tool_name") or "an edit"
    return (
        f"Put the change into the new text of {name}, which has to differ from the old one. Where the file is already"
        " as wanted, go on without an edit."
    )


def hint_file_not_found(ctx: HintContext | None = None) -> str:
    """Return the hint for a missing file: the right path, or how to find it."""
    meant, names, ending = _quoted_fact(ctx, "meant"), _get_fact(ctx, "names_there"), _quoted_fact(ctx, "other_ending")
    finder, is_search = (
        _quoted_fact(ctx, "finder_tool"),
        plain_name(str(_get_fact(ctx, "tool_name"))) in TEXT_SEARCH_TOOLS,
    )
    how = f"by name with {finder}" if finder else "by listing its folder"
    # From the most reliable source to the most general rule: the error, the session, the usual extensions.
    if meant and _get_fact(ctx, "is_from_error"):
        return f"The file is called {meant} here. Find a file {how} instead of guessing its name or ending."
    if meant and not (is_search and _is_file_for_folder(ctx)):
        return f"The file is {meant}, as this session has shown. Take paths from listings and results, not from memory."
    if is_search and ending:
        return f"Search the whole project, not one place that was guessed: the name may end in {ending} here."
    if is_search:
        return (
            "Search the whole project, or a folder that a listing or a result has shown, instead of guessing where it"
            " is."
        )
    if ending:
        return f"Find a file {how} before opening it: its name may end in {ending} here."
    if names:
        return f"Find the file {how} instead of guessing its name. {_valid_names_sentence(ctx)}"
    return f"Open only paths that a listing or a result has shown: find the file {how} first, instead of guessing."


def hint_is_directory(ctx: HintContext | None = None) -> str:
    """Return the hint for a call that opened a folder as if it were a file."""
    names, finder = _get_fact(ctx, "names_there"), _quoted_fact(ctx, "finder_tool")
    sample = f", such as {_list_names(names)}" if names else ""
    return (
        f"This path is a folder, and the tool opens single files. List it with {finder or '`ls`'} and open one{sample}."
    )


def hint_output_too_large(ctx: HintContext | None = None) -> str:
    """Return the hint for a result that was too large."""
    search = _quoted_fact(ctx, "search_tool") or "a search"
    rule = f"A file of this size is read in parts, with an offset and a limit: find the part with {search} first."
    return str(_get_fact(ctx, "advice") or rule)


# ---- Commands: programs, folders, options, git, services, project checks ---------------------------------------------


def hint_cmd_not_found(ctx: HintContext | None = None) -> str:
    """Return the hint for a program that is not installed."""
    meant, advice = _quoted_fact(ctx, "meant"), _get_fact(ctx, "advice")
    if meant:
        return f"The command here is {meant}. Use commands that have worked in this session."
    fallback = "Use commands that this session has shown to work, or check with `command -v` before relying on another."
    return str(advice or fallback)


def hint_shell_path_missing(ctx: HintContext | None = None) -> str:
    """Return the hint for a path in a command that does not exist relative to the shell's folder."""
    meant, names, advice = _quoted_fact(ctx, "meant"), _get_fact(ctx, "names_there"), _get_fact(ctx, "advice")
    if _get_fact(ctx, "path_from_shell"):
        return _hint_wrong_folder(ctx)
    if meant:
        return f"The path is {meant}, as this session has shown. Take paths from listings, not from memory."
    if advice:
        return str(advice)
    if names:
        return f"{_LIST_FIRST} {_valid_names_sentence(ctx)}"
    if _get_fact(ctx, "is_absolute"):
        return _LIST_FIRST
    return "List a folder before naming a file in it, and mind which folder the shell stands in."


def _hint_wrong_folder(ctx: HintContext | None = None) -> str:
    """Return the hint for a path that exists, but not relative to the shell's folder."""
    here, root, path = (_quoted_fact(ctx, key) for key in ("shell_folder", "project_folder", "path_from_shell"))
    # A path after the command's own `cd` is resolved from there, whatever folder the shell was in before.
    is_after_cd = _get_fact(ctx, "own_cd") == "before"
    if is_after_cd and here and path:
        return f"Behind its own `cd` the command stands in {here}: from there the path is {path}."
    if _get_fact(ctx, "path_from_shell") == "." and here:
        what = "Leave the `cd` out" if _get_fact(ctx, "own_cd") else "Call it `.`"
        return f"{what}: since an earlier command the shell already stands in the folder meant."
    if here and path:
        return f"The shell stands in {here} since an earlier command: from there the path is {path}."
    if here and root and not is_after_cd and not _get_fact(ctx, "is_absolute"):
        back = f"`cd {root.strip('`')}`"
        return f"The shell stands in {here} since an earlier command. Name paths from there, or go back with {back}."
    if meant := _quoted_fact(ctx, "meant"):
        return f"From the project's folder the path is {meant}: mind which folder the shell stands in."
    fallback = _LIST_FIRST if _get_fact(ctx, "is_absolute") else _AFTER_CD if is_after_cd else _FOLDER
    return str(_get_fact(ctx, "advice") or fallback)


def hint_usage_error(ctx: HintContext | None = None) -> str:
    """Return the hint for an option, an argument or a name that a program does not have."""
    meant, choices, advice = _quoted_fact(ctx, "meant"), _get_fact(ctx, "choices"), _get_fact(ctx, "advice")
    if meant:
        return f"The name here is {meant}. Look at a program's `--help` before using an option that it has not shown."
    if choices:
        return f"This command takes {_list_names(choices)}: use one of these."
    if _get_fact(ctx, "is_unknown_option"):
        fallback = (
            "Leave out an option that the program has not shown, or look it up in its `--help` first: options differ"
            " between programs and between systems."
        )
    else:
        fallback = (
            "Look up what the call takes before making it: the program's `--help`, or its list of tasks or commands,"
            " shows which arguments it needs and in which form."
        )
    return str(advice or fallback)


def hint_git_state(ctx: HintContext | None = None) -> str:
    """Return the hint for a git command that the current state of the repository does not allow."""
    advice, command = _get_fact(ctx, "advice"), _quoted_fact(ctx, "meant")
    if _get_fact(ctx, "shell_folder"):
        return _hint_wrong_folder(ctx)
    rule = "Look at `git status` before a command that depends on the branch, the remote or a clean tree."
    rule = str(advice or rule)
    return f"{first_sentences(rule, 1)} Here that is {command}." if command else rule


def _hint_hook_blocked(ctx: HintContext | None = None) -> str:
    """Return the hint for a call that a project check has refused repeatedly."""
    command = _quoted_fact(ctx, "meant")
    if command:
        return f"This project checks such calls: run {command} before them, as it has asked for before."
    return "This project checks such calls and has refused one before. Do first what the check asks for, then call."


def _advice_template(text: str) -> Callable[[HintContext | None], str]:
    """Return a template whose hint is the advice for the error message, or `text` if there is no advice."""

    def hint(ctx: HintContext | None = None) -> str:
        return str(_get_fact(ctx, "advice") or text)

    return hint


hint_shell_syntax = _advice_template(
    "Close every quote and bracket, and put single quotes around text that the shell must not read, such as patterns,"
    " addresses and inline programs. Longer text is safer in a file or a here-document."
)
hint_api_misuse = _advice_template(
    "Take the endpoint, the identifiers and the fields from what the service has returned or from its documentation,"
    " instead of composing them from memory."
)


# The kinds defined in `sites.rule`, and the published template names (`json_decode`, `type_error`, `runtime_error`).
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
    "wrong_folder": _hint_wrong_folder,
    "usage_error": hint_usage_error,
    "shell_syntax": hint_shell_syntax,
    "api_misuse": hint_api_misuse,
    "git_state": hint_git_state,
    "hook_blocked": _hint_hook_blocked,
}


def dispatch(error_kind: str, ctx: HintContext | None = None) -> str | None:
    """Return the hint for a kind of failure, or None if it has no template."""
    template = HINT_TEMPLATES.get(error_kind)
    return None if template is None else template({"error_kind": error_kind, **(ctx or {})})


def register(error_kind: str, fn: Template) -> None:
    """Register `fn` as the template for a kind of failure. Raises InputError if either argument is invalid."""
    if not error_kind or not callable(fn):
        expected = "a nonempty kind of failure, and a function that takes a HintContext and returns the hint"
        raise InputError(explain("template", got=f"{error_kind!r}, {type(fn).__name__}", expected=expected))
    HINT_TEMPLATES[error_kind] = fn


# The same tool has different names in different agents.
_WRITERS = ("write", "write_file", "create_file", "write_to_file")
TEXT_SEARCH_TOOLS = ("grep", "search_file_content", "grep_search")
# Up to three words or symbols: "return self.x" -> "return self."
_FIRST_WORDS = re.compile(r"(?:\s*(?:\w+|[^\w\s])){1,3}")
_INDENT = {"\t": "tab", " ": "space"}


def _indentation(ctx: HintContext | None) -> str:
    """Return a description of a line's indentation, since whitespace itself would not survive in a hint."""
    right = str(_get_fact(ctx, "closest_line") or "")
    indent = right[: len(right) - len(right.lstrip())]
    kind = _INDENT.get(indent[:1])
    if kind is None or len(set(indent)) != 1 or not right.strip():
        return ""
    return f": {len(indent)} {kind}{'s' if len(indent) != 1 else ''} before {quote_text(_first_words(right.strip()))}"


def _first_words(line: str) -> str:
    """Return the first words of a line. The rest is also in the failing call, so it must not be quoted."""
    start = _FIRST_WORDS.match(line)
    return line if start is None or start.end() == len(line) else f"{start[0]}…"


def _is_file_for_folder(ctx: HintContext | None) -> bool:
    """Return whether the search named a folder, while the path that was probably meant is a file.

    Names with an extension are taken for files. Such a file merely has a name like the folder's, so it is not
    suggested.
    """
    guessed, meant = (str(_get_fact(ctx, name) or "").rpartition("/")[2] for name in ("path", "meant"))
    return "." not in guessed and "." in meant


def _valid_names_sentence(ctx: HintContext | None) -> str:
    """Return a sentence with the valid names, if the error lists them.

    Merely similar names are not quoted, nor is the folder: both are almost the failing call, and a model copies what a
    hint quotes.
    """
    if _get_fact(ctx, "is_from_error"):
        return f"The names to choose from are {_list_names(_get_fact(ctx, 'names_there') or ())}."
    return "In the folder meant, this session has shown other names: see whether one of those is meant."


# The general rules for folders.
_FOLDER = (
    "Mind the folder that the shell stands in: earlier commands may have changed it. Name paths from that folder,"
    " or give the absolute path."
)
_AFTER_CD = "A command's paths hold from the folder that its own `cd` goes to: name them from there."
_LIST_FIRST = "List a folder before naming it, or a file in it, in a command."


def _get_fact(context: HintContext | None, key: str) -> Any:
    """Return a fact, or None if it is missing or empty."""
    value: Any = (context or {}).get(key)
    return value or None


def _quoted_fact(context: HintContext | None, key: str) -> str:
    """Return a fact as quoted text, or "" if it is missing or empty."""
    value = _get_fact(context, key)
    return "" if value is None else quote_text(value)


def _list_names(names: Iterable[object]) -> str:
    """Return the names quoted and separated by commas. A long list is cut, and the number of omitted names is added."""
    quoted_names = [name for raw_name in names if (name := quote_text(raw_name))]
    more = f" and {len(quoted_names) - _MAX_LISTED} more" if len(quoted_names) > _MAX_LISTED else ""
    return ", ".join(quoted_names[:_MAX_LISTED]) + more
