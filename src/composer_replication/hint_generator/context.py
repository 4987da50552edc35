"""Define the facts that a hint may state, and extract them from a failing call, its error and the session before it.

In order: the record of facts (`HintContext`) and how a hint quotes text; guesses at the path that was meant; the state
of the session before a turn (`StateCursor`); corrections that the error message itself suggests; and errors in the
arguments.
"""

from __future__ import annotations

import difflib
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, Literal, NamedTuple, TypedDict

from composer_replication.sites.actions.session_state import SessionState
from composer_replication.sites.actions.tools import (
    NEW_TEXT_KEYS,
    OLD_TEXT_KEYS,
    command_text,
    first_string_argument,
    is_edit,
    path_argument,
    tool_channel,
    word_set,
)
from composer_replication.sites.cleaned_text import CleanedText
from composer_replication.types import Conversation, ErrorSite, ToolCall, ToolResult

MAX_SENTENCES = 2
# The end of a sentence: "Done."; "Read it first. `grep` finds it"; not the dot in "main.py has it"
_SENTENCE_END = re.compile(r"[.!?](?=\s+[A-Z`\"']|\s*$)")
# Limits that keep a hint short: characters in a quotation, and names in a list.
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
"""The reason why the text to replace is not in the file:

- `line_numbers`, `escapes`: the text contains line numbers copied from a view, or line breaks written as `\\n`;
- `whitespace`, `line`, `longer`: the text differs in whitespace or in one line, or only has additions to a line;
- `unshown`, `unread`: that part of the file, or the whole file, was never shown;
- `own_edit`, `changed`: an edit in this session replaced the text, or the file may have changed in another way;
- `differs`, `elsewhere`, `other_file`: the text differs from what was shown, is not in the file, or is in another file.
"""


class HintContext(TypedDict, total=False):
    """Facts about one failure. A template uses the facts that are present; without any, it states the general rule.

    Facts about what failed (`path`, `error_message`) are never quoted in a hint; those in `CORRECT_FACTS` may be. The
    keys are stored with every hint, so they are part of the file format.
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


CORRECT_FACTS = (
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
"""The facts that name something correct. A hint may quote them even if the failing call contains the same words."""


def correct_texts(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield every string, key and value in the facts that name something correct."""
    pending: list[Any] = [facts.get(key) for key in CORRECT_FACTS]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            pending += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            pending += value


def quote_text(text: object) -> str:
    """Format session text for quotation in a hint: on one line, shortened, in backticks that the text cannot close."""
    line = " ".join(str(text).split())
    printable = "".join(char for char in line if char.isprintable()).replace("`", "'")
    if len(printable) > _MAX_QUOTED:
        printable = printable[: _MAX_QUOTED - 1] + "…"
    return f"`{printable}`" if printable else ""


def first_sentences(text: str, number: int = MAX_SENTENCES) -> str:
    """Return the first `number` sentences of a text. Punctuation inside backticks does not end a sentence."""
    # Quoted text is replaced by the same number of letters, so that positions stay the same.
    ends = [
        match.end() for match in _SENTENCE_END.finditer(re.sub(r"`[^`]*`", lambda quote: "X" * len(quote[0]), text))
    ]
    return text[: ends[number - 1]] if len(ends) >= number else text


def count_sentences(text: str) -> int:
    """Return the number of sentences in a hint. Text in backticks counts as one word."""
    return len(_SENTENCE_END.findall(re.sub(r"`[^`]*`", "X", text)))


# ---- Missing paths: which file was meant, and what its folder contains -----------------------------------------------

# File names that occur in many folders, so a file of the same name elsewhere is unlikely to be the one meant.
_COMMON_FILE_NAMES = word_set(
    "index main mod lib init __init__ types type util utils common helper helpers test tests config constants errors"
    " readme makefile setup package agent client server model models app base core doc"
)
# The path or program that an error message complains about.
# "cat: src/a.py: No such file" -> "src/a.py"; "cannot access 'src/a.py'" -> "src/a.py"; "bash: foo" -> "foo"
_MESSAGE_SUBJECT = re.compile(
    r"['\"`\u2018\u2019]([^'\"`\u2018\u2019]{1,200})['\"`\u2018\u2019]"
    r"|(\S+?)(?=: (?:open: |stat: |directory )?(?:No such|Is a|command not|not found))|: (\S+)\s*$"
)
# Entries with other characters may be patterns or fragments of output: "main.py"
_PLAIN_NAME = re.compile(r"[\w.@+-]{1,100}")
_MAX_NAMES = 8
# Two names with at least this similarity (`SequenceMatcher.ratio`) count as misspellings of each other.
_MIN_SPELLING_RATIO = 0.88
# File extensions that are easily confused: if a file with one is missing, the same name with the other may exist.
_OTHER_ENDING = {".yml": ".yaml", ".yaml": ".yml", ".js": ".ts", ".jsx": ".tsx", ".htm": ".html", ".jpeg": ".jpg"}


def missing_path_facts(path: str, error_text: str, state: SessionState) -> HintContext:
    """Return the path that was probably meant, if it can be inferred; otherwise the contents of the folder."""
    paths = state.paths
    full_path = paths.absolute(path, paths.root)
    folder, _, name = full_path.rpartition("/")
    names = [choice.rpartition("/")[2] for choice in listed_choices(error_text)]
    meant = suggested_name(error_text) or nearest_name(name, names)
    if meant is not None:
        return {"meant": meant, "is_from_error": True}
    if names:
        return {"names_there": names[:_MAX_NAMES], "is_from_error": True}
    entries = folder_entries(folder, state)
    misspelled = [entry for entry in entries if _is_spelled_alike(name, entry)]
    if len(misspelled) == 1:
        return {"meant": short_path(f"{folder}/{misspelled[0]}", paths.root)}
    # If the folder exists, a file of the same name in another folder is probably not meant.
    is_folder = bool(entries) or folder in paths.folders
    namesake = None if is_folder else _find_namesake(full_path, paths.files)
    if namesake is not None:
        return {"meant": short_path(namesake, paths.root)}
    ending = _OTHER_ENDING.get(posixpath.splitext(name)[1])
    if ending:
        return {"other_ending": ending}
    # If the name has an extension, folders are not suggested.
    similar = [entry for entry in entries if ("." in entry) >= ("." in name)]
    similar.sort(key=lambda entry: -SequenceMatcher(None, name, entry).ratio())
    return {"names_there": similar[:_MAX_NAMES]} if similar else {}


def _is_spelled_alike(name: str, other_name: str) -> bool:
    """Return whether two names differ only by extension or by a typo. An extra or missing word means another file."""
    (stem, ending), (other_stem, other_ending) = posixpath.splitext(name), posixpath.splitext(other_name)
    if stem == other_stem:
        return True
    num_words, num_other = (len(re.split(r"[_.-]", base)) for base in (stem, other_stem))
    is_near = SequenceMatcher(None, stem, other_stem).ratio() >= _MIN_SPELLING_RATIO
    return ending == other_ending and num_words == num_other and is_near


def _find_namesake(requested_path: str, files: set[str]) -> str | None:
    """Return the file with the same name.

    If several files have this name, return the one whose folders match best, or None for a tie.
    """
    *folders, name = requested_path.split("/")
    namesakes = sorted(path for path in files if path.rpartition("/")[2] == name and path != requested_path)
    related = [path for path in namesakes if _are_related(folders, path.split("/")[:-1])]
    if len(related) > 1:
        ranked = sorted((_num_common_last_folders(folders, path.split("/")[:-1]), path) for path in related)
        return ranked[-1][1] if ranked[-1][0] > ranked[-2][0] else None
    if related:
        return related[0]
    is_common = name.partition(".")[0].lower() in _COMMON_FILE_NAMES
    return namesakes[0] if len(namesakes) == 1 and not is_common else None


def _are_related(folders_a: Sequence[str], folders_b: Sequence[str]) -> bool:
    """Return whether the shorter folder list is a subsequence of the longer one."""
    short, long = sorted((folders_a, folders_b), key=len)
    rest = iter(long)  # `in` consumes the iterator, so the order matters
    return all(part in rest for part in short)


def _num_common_last_folders(folders_a: Sequence[str], folders_b: Sequence[str]) -> int:
    """Return the number of trailing folders that two paths have in common."""
    pairs = zip(reversed(folders_a), reversed(folders_b), strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(folders_a), len(folders_b)))


def short_path(path: str, root: str | None) -> str:
    """Return a path relative to the project's folder. The project's folder itself is `.`."""
    if path == root:
        return "."
    return path[len(root) + 1 :] if root and path.startswith(f"{root}/") else path


def folder_entries(folder: str, state: SessionState) -> list[str]:
    """Return the names of the entries that the session has shown in a folder."""
    start = state.paths.absolute(folder, state.paths.root).rstrip("/") + "/"
    inside = {path[len(start) :].partition("/")[0] for path in state.paths.files if path.startswith(start)}
    return sorted(name for name in inside if _PLAIN_NAME.fullmatch(name))


def _find_typed_path(message: str, command: str) -> str | None:
    """Return the path that a shell's error message is about, as it was typed in the command.

    Return None if the path was not typed.
    """
    for match in _MESSAGE_SUBJECT.finditer(message):
        subject = next(group for group in match.groups() if group)
        if subject in command:
            return subject
        # Programs print absolute paths, of which the user may have typed only the end.
        paths = [word for word in re.findall(r"[\w./@+~-]+", command) if "/" in word or "." in word]
        typed = next((path for path in paths if subject.endswith(f"/{path.removeprefix('./')}")), None)
        if typed is not None:
            return typed
    return None


# ---- The failing call, and the session before it ---------------------------------------------------------------------


def find_call(site: ErrorSite, conversation: Conversation) -> ToolCall | None:
    """Return the call of an error site, or None if the turn does not contain it."""
    calls = (call for turn in conversation.turns if turn.id == site.turn_id for call in turn.calls)
    return next((call for call in calls if call.id == site.call_id), None)


def failing_result_text(site: ErrorSite, conversation: Conversation) -> str:
    """Return the full result of the failing call."""
    results = (result for turn in conversation.turns if turn.id == site.result_turn_id for result in turn.results)
    return next((result.text for result in results if result.call_id == site.call_id), site.evidence_text)


class FailingCall(NamedTuple):
    """A failing call with its result and what the session had shown before it."""

    site: ErrorSite
    call: ToolCall
    error_text: str
    state: SessionState
    edits: Callable[[str], list[tuple[str, str]]]
    """The (old, new) texts of the earlier edits of a file; see `StateCursor.edits_of_file`."""

    @property
    def command(self) -> str:
        return command_text(self.call.name, self.call.arguments)

    @property
    def path(self) -> str | None:
        """The path on which the call failed; for a shell command, the path in the error message."""
        if tool_channel(self.call.name) != "shell":
            return path_argument(self.call.arguments)
        return _find_typed_path(self.site.evidence_text, self.command)


def _has_failed(result: ToolResult) -> bool:
    """Return whether a call failed. Rollouts have no error flag, but the harness marks the calls that it refused."""
    return CleanedText.of(result.text).is_tagged if result.is_error is None else result.is_error


class StateCursor:
    """The session state before a turn. Moving forward processes only the turns in between; moving back starts over."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._index = {turn.id: number for number, turn in enumerate(conversation.turns)}
        self._restart()

    def before(self, turn_id: str) -> SessionState:
        """Return what the conversation had shown before a turn. The next call changes the returned object."""
        end = self._index.get(turn_id, 0)
        if end < self._next:
            self._restart()
        for turn in self._conversation.turns[self._next : end]:
            self._calls_by_id |= {call.id: call for call in turn.calls}
            for result in turn.results:
                call = self._calls_by_id.get(result.call_id)
                if call is not None:
                    self._add_call(call, result.text, failed=_has_failed(result))
            if turn.role != "assistant":
                self._state.add_message(turn.text)
        self._next = max(self._next, end)
        return self._state

    def edits_of_file(self, path: str) -> list[tuple[str, str]]:
        """Return the (old, new) texts of the successful edits of a file so far, in order."""
        return self._edits.get(path, [])

    def _add_call(self, call: ToolCall, text: str, *, failed: bool) -> None:
        self._state.add(call, text, failed=failed)
        path = path_argument(call.arguments)
        if path and not failed and is_edit(call.name):
            old, new = (first_string_argument(call.arguments, keys) or "" for keys in (OLD_TEXT_KEYS, NEW_TEXT_KEYS))
            self._edits.setdefault(path, []).append((old, new))

    def _restart(self) -> None:
        self._state, self._calls_by_id, self._next = SessionState(self._conversation.cwd), dict[str, ToolCall](), 0
        self._edits: dict[str, list[tuple[str, str]]] = {}


# ---- Corrections suggested by the error message: the name that was meant, the valid names, the command to run --------

# Limits: characters of a message that are searched, and names that are read from a list in it.
_MAX_ERROR = 6000
_MAX_CHOICES = 40
# "Did you mean 'main.py'?" -> "main.py"; not "Did you mean one of these?"
_SUGGESTED = re.compile(r"[Dd]id you mean:?\s+(?!one of)['\"`]?([^\s'\"`?,<]{1,200})['\"`]?[^\n?]{0,40}\?")
# git and npm: "The most similar command is\n    status" -> "status"
_MOST_SIMILAR = re.compile(
    r"[Tt]he most similar (?:command|choice)s? (?:is|are)\s+(\S{1,80})|[Dd]id you mean:\s+command '(\S{1,80}?)'"
)
# "Available tools: grep, read" -> "grep, read"; "expected one of 'a', 'b'" -> "'a', 'b'"
_CHOICES = re.compile(
    r"\b(?:available|valid|allowed|supported|possible|known|existing|accepted) "
    r"(?:\w+ ){0,2}?(?:agents?|skills?|tools?|types?|values?|options?|fields?|commands?|subcommands?|choices?|names?"
    r"|tasks?|formats?|models?)(?: are)?:\s*(?P<available>[^\n]{2,4000}(?:\n[ \t]+[\w.:@/-]{2,60}(?=\s))*)"
    r"|(?:(?:must be|expected|should be|choose|pick|try|not)(?: to be)? one of|\bone of(?=:? [\[\"'`(])|choose from)"
    r"(?: the following)?:? "
    r"(?P<one>[^\n]{3,2000})"
    r"|Available fields:\n(?P<fields>(?:[ \t]+\w{2,60}\n?){2,})"
    r"|available:\s*\[(?P<brackets>[^\]\n]{3,2000})\]|did you mean one of these\?\n(?P<lines>(?:\S{1,300}\n?){1,10})",
    re.IGNORECASE,
)
# "read_file"; "src/a.py"; not "42"
_CHOICE = re.compile(r"[A-Za-z@./][\w.:@/+-]{0,200}")
# Ends a list of names: "a, b but got c"; "a, b. See the manual"; not "a, b.c"
_END_OF_LIST = re.compile(r"</|\bat line\b|\bbut\b|\bgot\b|\. ")
# Words between the names in a list that are not names themselves.
_NOT_CHOICES = frozenset(["or", "and", "the", "of", "but", "got", "received", "was", "found", "instead", "see", "for"])
# Minimum similarity (`SequenceMatcher.ratio`) to the name that was meant.
_MIN_NAME_RATIO = 0.72


def suggested_name(error_text: str) -> str | None:
    """Return the name that the error suggests, as in "did you mean …?", or None if it suggests none."""
    match = _SUGGESTED.search(error_text[:_MAX_ERROR]) or _MOST_SIMILAR.search(error_text[:_MAX_ERROR])
    return next(group for group in match.groups() if group).rstrip(".") if match else None


def listed_choices(error_text: str) -> list[str]:
    """Return the valid names that an error lists. A list with a single name is ignored as a likely misreading."""
    match = _CHOICES.search(error_text[:_MAX_ERROR])
    if match is None:
        return []
    text = next(group for group in match.groups() if group)
    text = _END_OF_LIST.split(text, maxsplit=1)[0]
    names = [choice.rstrip(".:") for choice in _CHOICE.findall(text) if choice.lower() not in _NOT_CHOICES]
    choices = [name for name in dict.fromkeys(names) if name][:_MAX_CHOICES]
    return choices if len(choices) > 1 else []


def nearest_name(wrong: str, names: Sequence[str]) -> str | None:
    """Return the name that was probably meant, or None if that is unclear.

    A name qualifies if it is equal except for case, punctuation or a prefix, or much more similar than all others.
    """
    for is_match in (_is_equal_without_punctuation, _is_name_component):
        matches = [name for name in names if is_match(wrong.casefold(), name.casefold())]
        if len(matches) == 1:
            return matches[0]
    # The best name needs a clear lead: if two names are about equally similar, either may be meant.
    ranked = sorted(_similarities(wrong, names), reverse=True)
    if not ranked or ranked[0][0] < _MIN_NAME_RATIO or (len(ranked) > 1 and ranked[1][0] > ranked[0][0] - 0.1):
        return None
    return ranked[0][1]


def _similarities(wrong: str, names: Sequence[str]) -> Iterator[tuple[float, str]]:
    """Yield each name with its similarity to the wrong name. Only 200 names are compared, since comparing is slow."""
    for name in names[: _MAX_CHOICES * 5]:
        yield difflib.SequenceMatcher(None, wrong.casefold(), name.casefold()).ratio(), name


def _is_equal_without_punctuation(wrong: str, name: str) -> bool:
    return re.sub(r"[\W_]", "", wrong) == re.sub(r"[\W_]", "", name)


def _is_name_component(wrong: str, name: str) -> bool:
    return len(wrong) > 3 and wrong in re.split(r"[:/.]", name)
