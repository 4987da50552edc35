"""Define the facts that a hint may state, and extract them from a failing call, its error and the session before it.

In order: the record of facts (`HintContext`) and how a hint quotes text; guesses at the path that was meant; the state
of the session before a turn (`StateCursor`); corrections that the error message itself suggests; and errors in the
arguments.
"""

from __future__ import annotations

import difflib
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, Literal, NamedTuple, TypedDict

from composer_replication.sites.actions.session_state import SessionState
from composer_replication.sites.actions.tools import (
    NEW_TEXT,
    OLD_TEXT,
    channel_of,
    command_text,
    first_text,
    is_edit,
    path_argument,
    word_set,
)
from composer_replication.sites.view import CleanedText
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

    Facts about what failed (`path`, `error_message`) are never quoted in a hint; facts listed in `RIGHT` may be. The
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
"""The facts that name something correct. A hint may quote them even if the failing call contains the same words."""


def right_texts(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield every string, key and value in the facts that name something correct."""
    pending: list[Any] = [facts.get(key) for key in RIGHT]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            pending += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            pending += value


def quoted(text: object) -> str:
    """Format session text for quotation in a hint: on one line, shortened, in backticks that the text cannot close."""
    line = " ".join(str(text).split())
    printable = "".join(char for char in line if char.isprintable()).replace("`", "'")
    if len(printable) > _MAX_QUOTED:
        printable = printable[: _MAX_QUOTED - 1] + "…"
    return f"`{printable}`" if printable else ""


def listed(names: Iterable[object]) -> str:
    """Return the names quoted and separated by commas. A long list is cut, and the number of omitted names is added."""
    quoted_names = [name for raw_name in names if (name := quoted(raw_name))]
    more = f" and {len(quoted_names) - _MAX_LISTED} more" if len(quoted_names) > _MAX_LISTED else ""
    return ", ".join(quoted_names[:_MAX_LISTED]) + more


def get_fact(context: HintContext | None, key: str) -> Any:
    """Return a fact, or None if it is missing or empty."""
    value: Any = (context or {}).get(key)
    return value or None


def text_fact(context: HintContext | None, key: str) -> str:
    """Return a fact as quoted text, or "" if it is missing or empty."""
    value = get_fact(context, key)
    return "" if value is None else quoted(value)


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
_COMMON = word_set(
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
    names = [choice.rpartition("/")[2] for choice in choices_in(error_text)]
    meant = meant_name(error_text) or nearest(name, names)
    if meant is not None:
        return {"meant": meant, "is_from_error": True}
    if names:
        return {"names_there": names[:_MAX_NAMES], "is_from_error": True}
    entries = names_in(folder, state)
    close = [entry for entry in entries if _is_spelled_alike(name, entry)]
    if len(close) == 1:
        return {"meant": short_path(f"{folder}/{close[0]}", paths.root)}
    # If the folder exists, a file of the same name in another folder is probably not meant.
    is_folder = bool(entries) or folder in paths.folders
    namesake = None if is_folder else _same_name(full_path, paths.files)
    if namesake is not None:
        return {"meant": short_path(namesake, paths.root)}
    ending = _OTHER_ENDING.get(posixpath.splitext(name)[1])
    if ending:
        return {"other_ending": ending}
    # If the name has an extension, folders are not suggested.
    alike = [entry for entry in entries if ("." in entry) >= ("." in name)]
    alike.sort(key=lambda entry: -SequenceMatcher(None, name, entry).ratio())
    return {"names_there": alike[:_MAX_NAMES]} if alike else {}


def _is_spelled_alike(name: str, other_name: str) -> bool:
    """Whether two names differ only by extension or by a typo. An extra or missing word means another file."""
    (stem, ending), (other_stem, other_ending) = posixpath.splitext(name), posixpath.splitext(other_name)
    if stem == other_stem:
        return True
    num_words, num_other = (len(re.split(r"[_.-]", base)) for base in (stem, other_stem))
    is_near = SequenceMatcher(None, stem, other_stem).ratio() >= _MIN_SPELLING_RATIO
    return ending == other_ending and num_words == num_other and is_near


def _same_name(requested_path: str, files: set[str]) -> str | None:
    """Return the file with the same name, or the best match by folders if there are several; None for a tie."""
    *folders, name = requested_path.split("/")
    namesakes = sorted(path for path in files if path.rpartition("/")[2] == name and path != requested_path)
    related = [path for path in namesakes if _are_related(folders, path.split("/")[:-1])]
    if len(related) > 1:
        ranked = sorted((_num_same_end(folders, path.split("/")[:-1]), path) for path in related)
        return ranked[-1][1] if ranked[-1][0] > ranked[-2][0] else None
    if related:
        return related[0]
    is_common = name.partition(".")[0].lower() in _COMMON
    return namesakes[0] if len(namesakes) == 1 and not is_common else None


def _are_related(folders_a: Sequence[str], folders_b: Sequence[str]) -> bool:
    """Whether the shorter folder list is a subsequence of the longer one."""
    short, long = sorted((folders_a, folders_b), key=len)
    rest = iter(long)  # `in` consumes the iterator, so the order matters
    return all(part in rest for part in short)


def _num_same_end(folders_a: Sequence[str], folders_b: Sequence[str]) -> int:
    """Return the number of folders that two paths have in common at their ends."""
    pairs = zip(reversed(folders_a), reversed(folders_b), strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(folders_a), len(folders_b)))


def short_path(path: str, root: str | None) -> str:
    """Return a path relative to the project's folder. The project's folder itself is `.`."""
    if path == root:
        return "."
    return path[len(root) + 1 :] if root and path.startswith(f"{root}/") else path


def names_in(folder: str, state: SessionState) -> list[str]:
    """Return the names of the entries that the session has shown in a folder."""
    start = state.paths.absolute(folder, state.paths.root).rstrip("/") + "/"
    inside = {path[len(start) :].partition("/")[0] for path in state.paths.files if path.startswith(start)}
    return sorted(name for name in inside if _PLAIN_NAME.fullmatch(name))


def typed_path(message: str, command: str) -> str | None:
    """Return the path that a shell's error message is about, as typed in the command; None if it was not typed."""
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


def result_text_of(site: ErrorSite, conversation: Conversation) -> str:
    """Return the full result of the failing call."""
    results = (result for turn in conversation.turns if turn.id == site.result_turn_id for result in turn.results)
    return next((result.text for result in results if result.call_id == site.call_id), site.evidence_text)


class Case(NamedTuple):
    """A failing call with its result and what the session had shown before it."""

    site: ErrorSite
    call: ToolCall
    error_text: str
    state: SessionState
    edits: Callable[[str], list[tuple[str, str]]]
    """The (old, new) texts of the earlier edits of a file; see `StateCursor.edits_of`."""

    @property
    def command(self) -> str:
        return command_text(self.call.name, self.call.arguments)

    @property
    def path(self) -> str | None:
        """The path that the call failed on; for a shell command, the path in the error message."""
        if channel_of(self.call.name) != "shell":
            return path_argument(self.call.arguments)
        return typed_path(self.site.evidence_text, self.command)


def _has_failed(result: ToolResult) -> bool:
    """Whether a call failed. Rollouts have no error flag, but the harness marks the calls that it refused."""
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
            self._made |= {call.id: call for call in turn.calls}
            for result in turn.results:
                call = self._made.get(result.call_id)
                if call is not None:
                    self._take(call, result.text, failed=_has_failed(result))
            if turn.role != "assistant":
                self._state.add_message(turn.text)
        self._next = max(self._next, end)
        return self._state

    def edits_of(self, path: str) -> list[tuple[str, str]]:
        """Return the (old, new) texts of the successful edits of a file so far, in order."""
        return self._edits.get(path, [])

    def _take(self, call: ToolCall, text: str, *, failed: bool) -> None:
        self._state.add(call, text, failed=failed)
        path = path_argument(call.arguments)
        if path and not failed and is_edit(call.name):
            old, new = (first_text(call.arguments, keys) or "" for keys in (OLD_TEXT, NEW_TEXT))
            self._edits.setdefault(path, []).append((old, new))

    def _restart(self) -> None:
        self._state, self._made, self._next = SessionState(self._conversation.cwd), dict[str, ToolCall](), 0
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
_NO_CHOICE = frozenset(["or", "and", "the", "of", "but", "got", "received", "was", "found", "instead", "see", "for"])
# "Usage: tool [options]"; not "see usage: below"
_USAGE = re.compile(r"^\s*usage:", re.IGNORECASE | re.MULTILINE)
# A line of an option list: "  -v, --verbose   print more" -> "--verbose"; "  --depth=N\n" -> "--depth"
_FLAGS = re.compile(r"^[ \t]+(?:-\w, )?(--?[A-Za-z][\w-]{1,40})(?=[ =,\[\n])", re.MULTILINE)
# "unknown option '--colour'" -> "--colour"; "flag provided but not defined: -x" -> "-x"
_UNKNOWN_OPTION = re.compile(
    r"(?:unknown|unrecogni[sz]ed|invalid|illegal|unexpected|no such|unsupported|bad)"
    r"(?: \w+)? (?:flag|option|argument|switch|parameter)s?(?: provided)?:?\s*(?:-- )?['\"`]?"
    r"(?P<named>-{0,2}[A-Za-z][\w-]{0,60})|flag provided but not defined:? (?P<go>-[\w-]{1,60})",
    re.IGNORECASE,
)
# "Please run `make fmt` first" -> "make fmt"; "run npm install" -> "npm install"
_RUN = re.compile(
    r"(?:\b[Rr]un|\b[Uu]se|\b[Tt]ry|\b[Ee]xecute)(?: the following| this)?:?\s+"
    r"(?:['\"`](?P<quoted>[^'\"`\n]{3,80})['\"`]|(?P<bare>(?:mise|make|npm|pnpm|yarn|npx|cargo|go|gofmt|just|task|uv|ruff|black"
    r"|pre-commit|git|bundle|mvn|gradle)\b(?: [\w./:@=-]+){1,5}))"
    r"|\buse\s*\n\s+(?P<shown>git [^\n]{4,120})"
)
# Minimum similarity (`SequenceMatcher.ratio`) to the correct name, for a name and for an option.
_MIN_NAME_RATIO = 0.72
_MIN_OPTION_RATIO = 0.8


def meant_name(error_text: str) -> str | None:
    """Return the name that the error suggests, as in "did you mean …?", or None if it suggests none."""
    match = _SUGGESTED.search(error_text[:_MAX_ERROR]) or _MOST_SIMILAR.search(error_text[:_MAX_ERROR])
    return next(group for group in match.groups() if group).rstrip(".") if match else None


def choices_in(error_text: str) -> list[str]:
    """Return the valid names that an error lists. A list with a single name is ignored as a likely misreading."""
    match = _CHOICES.search(error_text[:_MAX_ERROR])
    if match is None:
        return []
    text = next(group for group in match.groups() if group)
    text = _END_OF_LIST.split(text, maxsplit=1)[0]
    names = [choice.rstrip(".:") for choice in _CHOICE.findall(text) if choice.lower() not in _NO_CHOICE]
    choices = [name for name in dict.fromkeys(names) if name][:_MAX_CHOICES]
    return choices if len(choices) > 1 else []


def unknown_option(error_text: str) -> str | None:
    """Return the option that a program rejects as unknown, or None if the error is about something else."""
    match = _UNKNOWN_OPTION.search(error_text[:_MAX_ERROR])
    return None if match is None else match["named"] or match["go"]


def near_option(wrong: str, options: Sequence[str]) -> str | None:
    """Return the only option that differs from the wrong one by a typo, or None."""
    names = [option.strip("-") for option in options]
    near = [name for ratio, name in _ranked(wrong.strip("-"), names) if ratio >= _MIN_OPTION_RATIO]
    return next(option for option in options if option.strip("-") == near[0]) if len(near) == 1 else None


def options_in(error_text: str) -> list[str]:
    """Return the options listed in the usage text that a program printed."""
    if _USAGE.search(error_text[:_MAX_ERROR]) is None:
        return []
    return list(dict.fromkeys(_FLAGS.findall(error_text[:_MAX_ERROR])))[:_MAX_CHOICES]


def command_to_run(error_text: str) -> str | None:
    """Return the command that a check or a hook asks the model to run, or None."""
    match = _RUN.search(error_text[:_MAX_ERROR])
    return None if match is None else next(group for group in match.groups() if group).strip()


def nearest(wrong: str, names: Sequence[str]) -> str | None:
    """Return the name that was probably meant, or None if that is unclear.

    A name qualifies if it is equal except for case, punctuation or a prefix, or much more similar than all others.
    """
    for is_same in (_is_same, _is_inside):
        matches = [name for name in names if is_same(wrong.casefold(), name.casefold())]
        if len(matches) == 1:
            return matches[0]
    # The best name needs a clear lead: if two names are about equally similar, either may be meant.
    ranked = sorted(_ranked(wrong, names), reverse=True)
    if not ranked or ranked[0][0] < _MIN_NAME_RATIO or (len(ranked) > 1 and ranked[1][0] > ranked[0][0] - 0.1):
        return None
    return ranked[0][1]


def _ranked(wrong: str, names: Sequence[str]) -> Iterator[tuple[float, str]]:
    """Yield each name with its similarity to the wrong one. Comparing is slow, so only 200 names are compared."""
    for name in names[: _MAX_CHOICES * 5]:
        yield difflib.SequenceMatcher(None, wrong.casefold(), name.casefold()).ratio(), name


def _is_same(wrong: str, name: str) -> bool:
    return re.sub(r"[\W_]", "", wrong) == re.sub(r"[\W_]", "", name)


def _is_inside(wrong: str, name: str) -> bool:
    return len(wrong) > 3 and wrong in re.split(r"[:/.]", name)


# ---- Errors in the arguments, according to the error message and the tool's schema ----------------------------------

# Building blocks for the patterns: a quoted name, an unquoted name, and the words for a parameter.
_NAME = r"[`'\"]([A-Za-z_]\w{0,60})[`'\"]"
_BARE = r"([A-Za-z_]\w{0,60})(?=[.,;)]|\s*$)"
_KIND = r"(?:parameter|property|argument|field|positional argument)s?"
# "missing required parameter 'path'" -> "path"; "parameter 'path' is required" -> "path"
_MISSING = re.compile(
    rf"(?:required|missing) (?:required )?{_KIND}:? {_NAME}|must have required property {_NAME}|missing field {_NAME}"
    rf"|{_KIND} {_NAME} is (?:required|missing)|missing (?:value for )?(?:a )?required {_KIND}: {_BARE}"
    rf"|missing \d+ required \w+ arguments?: {_NAME}|(?<=and ){_NAME}\s*$",
    re.IGNORECASE | re.MULTILINE,
)
# "unexpected keyword argument 'file'" -> "file"; "unknown parameter `file`" -> "file"
_UNEXPECTED = re.compile(
    rf"unexpected (?:keyword )?{_KIND}:? {_NAME}|unknown {_KIND}:? {_NAME}|additional {_KIND}:? {_NAME}", re.IGNORECASE
)
# Claude Code: "The parameter `limit` type is expected as `number` but provided as `string`" -> "limit"
_TYPE = re.compile(rf"parameter {_NAME} type is expected as {_NAME}", re.IGNORECASE)
# zod: `{"code": "invalid_type", "expected": "string", "received": "number", "path": ["query"]}` -> "query"
_EXPECTED = re.compile(r"\"expected\":\s*\"(\w{1,20})\"[^\[]{0,120}\"path\":\s*\[\s*\"(\w{1,60})\"")
# pydantic: "limit\n  Input should be a valid integer" -> "limit"
_SHOULD_BE = re.compile(r"^(\w{1,60})\n\s+Input should be an? (?:valid )?(\w{1,20})", re.MULTILINE)
# "failed to parse function arguments: EOF"; "Unexpected token } in JSON"; not "missing field `path`"
_JSON = re.compile(
    r"parse function arguments|not valid JSON|JSONDecodeError|Unexpected (?:token|end of JSON)"
    r"|Expecting (?:value|property|',')|(?:invalid|malformed) JSON|parse JSON",
    re.IGNORECASE,
)
# JSON schema types and their Python types. `bool` is an `int` in Python, hence the check in `_wrong_kind`.
_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
}


def is_json_error(call: ToolCall | None, message: str) -> bool:
    """Return whether the arguments were not a JSON object at all, as opposed to violating the schema."""
    if call is not None and call.raw_arguments is not None:
        return True
    names = _captured_names(_MISSING, message) or _captured_names(_UNEXPECTED, message)
    return _JSON.search(message) is not None and not names


def parameter_facts(call: ToolCall | None, message: str, schema: Mapping[str, Any] | None) -> HintContext:
    """Return missing, unexpected and wrongly typed parameters, taken from the message or else from the schema."""
    facts: HintContext = {}
    missing, unexpected = _captured_names(_MISSING, message), _captured_names(_UNEXPECTED, message)
    wrong = _expected_types(message)
    properties = schema.get("properties") if schema is not None else None
    if call is not None and call.raw_arguments is None and isinstance(properties, Mapping):
        required = schema.get("required") if schema is not None else None
        missing = missing or [name for name in required or () if name not in call.arguments]
        is_closed = schema is not None and schema.get("additionalProperties") is False
        unexpected = unexpected or [name for name in call.arguments if is_closed and name not in properties]
        wrong = wrong or [
            f"{name}: {kind}"
            for name, value in call.arguments.items()
            if (kind := _wrong_kind(value, properties.get(name))) is not None
        ]
    if missing:
        facts["missing_parameters"] = missing
    if unexpected:
        facts["unexpected_parameters"] = unexpected
    if wrong:
        facts["wrong_types"] = wrong
    return facts


def _captured_names(pattern: re.Pattern[str], message: str) -> list[str]:
    """Return the distinct names that a pattern captures in a message."""
    names = (next(group for group in match.groups() if group) for match in pattern.finditer(message[:4000]))
    return list(dict.fromkeys(names))


def _expected_types(message: str) -> list[str]:
    """Return "name: type" for each parameter whose type the message complains about."""
    text = message[:4000]
    typed_names = [
        *_TYPE.findall(text),
        *_SHOULD_BE.findall(text),
        *((name, kind) for kind, name in _EXPECTED.findall(text)),
    ]
    return [f"{name}: {kind}" for name, kind in typed_names]


def _wrong_kind(value: Any, schema: Any) -> str | None:
    """Return the type that a value should have, or None if the value fits the schema or the type is unknown."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    allowed = _KINDS.get(kind) if isinstance(kind, str) else None
    if allowed is None or value is None:
        return None
    fits = isinstance(value, allowed) and (kind == "boolean" or not isinstance(value, bool))
    return None if fits else kind
