"""The hints' words about files: reading before changing, exact text, paths that exist."""

from __future__ import annotations

import re

from composer_replication.actions.tools import plain_name
from composer_replication.hint_generator.context import HintContext, given, listed, quoted, text_fact

_WRITERS = ("write", "write_file", "create_file", "write_to_file")
SEARCHERS = ("grep", "search_file_content", "grep_search")
_WORDS = re.compile(r"(?:\s*(?:\w+|[^\w\s])){1,3}")
_INDENT = {"\t": "tab", " ": "space"}


def hint_edit_not_read(ctx: HintContext | None = None) -> str:
    """A change without a look."""
    reader, tool = text_fact(ctx, "reader_tool"), text_fact(ctx, "tool_name")
    rule = f"Open a file{f' with {reader}' if reader else ''} before changing it{f' with {tool}' if tool else ''}"
    if given(ctx, "counts_no_more"):
        return (
            f"Open a file again{f' with {reader}' if reader else ''}, under its present name, before changing it: what"
            " was read before a summary of the session, a restart or a rename does not count any more."
        )
    if given(ctx, "was_read"):
        return f"{rule}. Seeing it through a shell command or a search does not count as reading it."
    if plain_name(str(given(ctx, "tool_name"))) in _WRITERS:
        return f"{rule}: a file that exists already can be replaced only after it was read in this session."
    return f"{rule}, also where its text is known from elsewhere: only what was read in this session can be changed."


def hint_edit_stale(ctx: HintContext | None = None) -> str:
    """A change on the ground of an old look."""
    reader = text_fact(ctx, "reader_tool")
    again = f"again with {reader}" if reader else "again"
    return f"Read a file {again} right before changing it where a formatter, a command or the user may have been at it."


def hint_edit_no_match(ctx: HintContext | None = None) -> str:
    """Text that is not in the file: where it differs, or what to look at."""
    reader, right = text_fact(ctx, "reader_tool"), text_fact(ctx, "closest_line")
    read = f"Read the part to change{f' with {reader}' if reader else ''}"
    now = f", which now has {right} there" if right else ""
    other_file = text_fact(ctx, "meant") or "another file"
    there = f" The file has {right} there." if right else ""
    rule = "The text to change must be copied exactly from the file, with its whitespace and without line numbers."
    words = {
        "line_numbers": "Leave out the line numbers that a view puts before each line: the file does not have them.",
        "escapes": "Write line breaks and tabs of the text to change as such, not as escapes: the file has none.",
        "whitespace": f"Copy the whitespace of the text to change exactly as the file has it{_indent(ctx)}.",
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
    fallback = str(given(ctx, "advice") or f"{rule} {read} again and copy from what it shows.")
    return words.get(str(given(ctx, "edit_problem")), fallback)


def _indent(ctx: HintContext | None) -> str:
    """How a line of the file is indented, in words: whitespace itself does not survive on one line."""
    right = str(given(ctx, "closest_line") or "")
    indent = right[: len(right) - len(right.lstrip())]
    kind = _INDENT.get(indent[:1])
    if kind is None or len(set(indent)) != 1 or not right.strip():
        return ""
    return f": {len(indent)} {kind}{'s' if len(indent) != 1 else ''} before {quoted(_beginning(right.strip()))}"


def _beginning(line: str) -> str:
    """What tells a line from others; the rest of it stands in the failing call too."""
    start = _WORDS.match(line)
    return line if start is None or start.end() == len(line) else f"{start[0]}…"


def hint_edit_ambiguous(ctx: HintContext | None = None) -> str:
    """Text that is in the file more than once."""
    number, locations, everywhere = given(ctx, "num_matches"), given(ctx, "places"), text_fact(ctx, "meant_parameter")
    times = {2: "twice"}.get(number, f"{number} times") if isinstance(number, int) and number > 1 else "more than once"
    where = f", at {listed(locations)}" if locations else ""
    how = f"set {everywhere}" if everywhere else "have all of them changed at once"
    can_all = everywhere or given(ctx, "can_replace_all")
    all_of_them = f", or {how} where every place is to change" if can_all else ""
    return (
        f"The text to change stands {times} in the file{where}. Add a neighbouring line that only the meant place has,"
        f" such as the first line of its function{all_of_them}."
    )


def hint_edit_noop(ctx: HintContext | None = None) -> str:
    """A replacement by the same text."""
    name = text_fact(ctx, "tool_name") or "an edit"
    return (
        f"Put the change into the new text of {name}, which has to differ from the old one. Where the file is already"
        " as wanted, go on without an edit."
    )


def hint_file_not_found(ctx: HintContext | None = None) -> str:
    """A path that was guessed."""
    meant, names, ending = text_fact(ctx, "meant"), given(ctx, "names_there"), text_fact(ctx, "other_ending")
    finder, is_search = text_fact(ctx, "finder_tool"), plain_name(str(given(ctx, "tool_name"))) in SEARCHERS
    how = f"by name with {finder}" if finder else "by listing its folder"
    if meant and given(ctx, "is_from_error"):
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
        return f"Find the file {how} instead of guessing its name. {names_shown(ctx)}"
    return f"Open only paths that a listing or a result has shown: find the file {how} first, instead of guessing."


def _is_file_for_folder(ctx: HintContext | None) -> bool:
    """A folder was guessed to search in, and only a file has its name: what is searched for may lie in another one."""
    guessed, meant = (str(given(ctx, name) or "").rpartition("/")[2] for name in ("path", "meant"))
    return "." not in guessed and "." in meant


def names_shown(ctx: HintContext | None) -> str:
    """Which names there are, if the error lists them; those that are merely near are the failing one in other words.

    The folder is not named: it stands in the failing call, and what is quoted is copied.
    """
    if given(ctx, "is_from_error"):
        return f"The names to choose from are {listed(given(ctx, 'names_there') or ())}."
    return "In the folder meant, this session has shown other names: see whether one of those is meant."


def hint_is_directory(ctx: HintContext | None = None) -> str:
    """A folder where a file is needed."""
    names, finder = given(ctx, "names_there"), text_fact(ctx, "finder_tool")
    sample = f", such as {listed(names)}" if names else ""
    return (
        f"This path is a folder, and the tool opens single files. List it with {finder or '`ls`'} and open one{sample}."
    )


def hint_output_too_large(ctx: HintContext | None = None) -> str:
    """More than a result can hold."""
    search = text_fact(ctx, "search_tool") or "a search"
    rule = f"A file of this size is read in parts, with an offset and a limit: find the part with {search} first."
    return str(given(ctx, "advice") or rule)
