"""What a hint may be made of, and how text from a session is put into one: short, on one line, and quoted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypedDict

MAX_SENTENCES = 2
_SENTENCE_END = re.compile(r"[.!?](?=\s+[A-Z`\"']|\s*$)")
_MAX_QUOTED = 120
_MAX_LISTED = 24

EditProblem = Literal[
    "line_numbers",
    "escapes",
    "whitespace",
    "line",
    "longer",
    "unshown",
    "own_edit",
    "changed",
    "differs",
    "elsewhere",
    "other_file",
    "unread",
]
"""Why a text is not in a file: it has a view's line numbers, or breaks written as escapes; only its whitespace differs,
a line does, or is longer than the file's, nobody had shown that part, an edit of this session has changed it, something
points to a change since it was shown, it is not what was shown, it is not in the file at all, it is in another one, or
was never shown."""


class HintContext(TypedDict, total=False):
    """Facts about one failure; a template uses those it finds and says less without the others.

    Some say what failed (`path`, `error_message`), and are never quoted. Those in `RIGHT` say what is right.
    """

    error_kind: str
    error_message: str
    available_tools: list[str]
    tool_name: str
    tool_schema: Mapping[str, Any]
    intent: str
    path: str
    meant: str
    is_from_error: bool
    names_there: list[str]
    other_ending: str
    was_read: bool
    counts_no_more: bool
    closest_line: str
    edit_problem: EditProblem
    num_matches: int
    can_replace_all: bool
    places: list[str]
    missing_parameters: list[str]
    unexpected_parameters: list[str]
    meant_parameter: str
    wrong_types: list[str]
    choices: list[str]
    command: str
    num_repeats: int
    advice: str
    seen_parameters: list[str]
    reader_tool: str
    finder_tool: str
    search_tool: str
    shell_folder: str
    project_folder: str
    path_from_shell: str
    own_cd: Literal["to", "before"]
    is_absolute: bool
    is_unknown_option: bool


RIGHT = (
    *(
        "available_tools",
        "tool_schema",
        "meant",
        "names_there",
        "other_ending",
        "closest_line",
        "places",
        "missing_parameters",
    ),
    *("wrong_types", "meant_parameter", "choices", "advice", "seen_parameters", "reader_tool", "finder_tool"),
    *("search_tool", "shell_folder", "project_folder", "path_from_shell"),
)
"""Facts that name what is right: a hint may quote them, whatever the failing call said."""


def right_texts(facts: Mapping[str, Any]) -> Iterator[str]:
    """All that the facts name as right, as text."""
    waiting: list[Any] = [facts.get(key) for key in RIGHT]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            waiting += value


def quoted(text: object) -> str:
    """Text of a session as it stands in a hint: one line, bounded, in backticks that it cannot leave."""
    line = " ".join(str(text).split())
    printable = "".join(char for char in line if char.isprintable()).replace("`", "'")
    if len(printable) > _MAX_QUOTED:
        printable = printable[: _MAX_QUOTED - 1] + "…"
    return f"`{printable}`" if printable else ""


def listed(names: Iterable[object]) -> str:
    """Names one after the other, each quoted; a long list is cut and says so."""
    quoted_names = [name for raw_name in names if (name := quoted(raw_name))]
    more = f" and {len(quoted_names) - _MAX_LISTED} more" if len(quoted_names) > _MAX_LISTED else ""
    return ", ".join(quoted_names[:_MAX_LISTED]) + more


def given(context: HintContext | None, key: str) -> Any:
    """A fact, or None where it is missing or empty."""
    value: Any = (context or {}).get(key)
    return value or None


def text_fact(context: HintContext | None, key: str) -> str:
    """A fact as quoted text; empty where it is missing."""
    value = given(context, key)
    return "" if value is None else quoted(value)


def first_sentences(text: str, number: int = MAX_SENTENCES) -> str:
    """The text up to the end of its `number`-th sentence: whoever writes a hint, it stays short."""
    ends = [
        match.end() for match in _SENTENCE_END.finditer(re.sub(r"`[^`]*`", lambda quote: "X" * len(quote[0]), text))
    ]
    return text[: ends[number - 1]] if len(ends) >= number else text


def count_sentences(text: str) -> int:
    """Sentences of a hint; what stands in backticks is one word."""
    return len(_SENTENCE_END.findall(re.sub(r"`[^`]*`", "X", text)))
