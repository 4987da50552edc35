"""What a hint may be made of, and how text from a session is put into one: short, on one line, and quoted."""

from __future__ import annotations

import difflib
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

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
from composer_replication.types import (
    Conversation,
    ErrorSite,
    ToolCall,
    ToolResult,
)

if TYPE_CHECKING:
    from composer_replication.sites.actions.session_state import SessionState


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


# What the session tells about a path that is not there: which one was meant, and what its folder holds.

# Names that files of many folders have: the same name elsewhere says nothing.
_COMMON = word_set(
    "index main mod lib init __init__ types type util utils common helper helpers test tests config constants errors"
    " readme makefile setup package agent client server model models app base core doc"
)
_THING = re.compile(
    r"['\"`\u2018\u2019]([^'\"`\u2018\u2019]{1,200})['\"`\u2018\u2019]"
    r"|(\S+?)(?=: (?:open: |stat: |directory )?(?:No such|Is a|command not|not found))|: (\S+)\s*$"
)
_PLAIN_NAME = re.compile(r"[\w.@+-]{1,100}")
_MAX_NAMES = 8
_ALIKE = 0.88
# Names that are guessed with one ending often have the other.
_OTHER_ENDING = {".yml": ".yaml", ".yaml": ".yml", ".js": ".ts", ".jsx": ".tsx", ".htm": ".html", ".jpeg": ".jpg"}


def missing_path_facts(path: str, said: str, seen: SessionState) -> HintContext:
    """Which file was meant, where the error or the session says so; else what its folder is known to hold."""
    paths = seen.paths
    full_path = paths.absolute(path, paths.root)
    folder, _, name = full_path.rpartition("/")
    names = [choice.rpartition("/")[2] for choice in choices_in(said)]
    meant = meant_name(said) or nearest(name, names)
    if meant is not None:
        return {"meant": meant, "is_from_error": True}
    if names:
        return {"names_there": names[:_MAX_NAMES], "is_from_error": True}
    there = names_in(folder, seen)
    close = [entry for entry in there if _is_spelled_alike(name, entry)]
    if len(close) == 1:
        return {"meant": short_path(f"{folder}/{close[0]}", paths.root)}
    is_folder = bool(there) or folder in paths.folders
    namesake = None if is_folder else _same_name(full_path, paths.files)
    if namesake is not None:
        return {"meant": short_path(namesake, paths.root)}
    ending = _OTHER_ENDING.get(posixpath.splitext(name)[1])
    if ending:
        return {"other_ending": ending}
    alike = [entry for entry in there if ("." in entry) >= ("." in name)]
    alike.sort(key=lambda entry: -SequenceMatcher(None, name, entry).ratio())
    return {"names_there": alike[:_MAX_NAMES]} if alike else {}


def _is_spelled_alike(name: str, other_name: str) -> bool:
    """Another ending, or a slip of the pen; a word more or less, such as `test`, makes another file."""
    (stem, ending), (other_stem, other_ending) = posixpath.splitext(name), posixpath.splitext(other_name)
    if stem == other_stem:
        return True
    num_words, num_other = (len(re.split(r"[_.-]", base)) for base in (stem, other_stem))
    is_near = SequenceMatcher(None, stem, other_stem).ratio() >= _ALIKE
    return ending == other_ending and num_words == num_other and is_near


def _same_name(requested_path: str, files: set[str]) -> str | None:
    """The one file of that name; of several the one whose folders agree best, if one alone does."""
    *folders, name = requested_path.split("/")
    namesakes = sorted(path for path in files if path.rpartition("/")[2] == name and path != requested_path)
    related = [path for path in namesakes if _are_related(folders, path.split("/")[:-1])]
    if len(related) > 1:
        agree = sorted((_num_same_end(folders, path.split("/")[:-1]), path) for path in related)
        return agree[-1][1] if agree[-1][0] > agree[-2][0] else None
    if related:
        return related[0]
    is_common = name.partition(".")[0].lower() in _COMMON
    return namesakes[0] if len(namesakes) == 1 and not is_common else None


def _are_related(one: Sequence[str], other_folders: Sequence[str]) -> bool:
    """Whether the folders of one path are among those of the other, in order."""
    short, long = sorted((one, other_folders), key=len)
    rest = iter(long)
    return all(part in rest for part in short)


def _num_same_end(one: Sequence[str], other_folders: Sequence[str]) -> int:
    pairs = zip(reversed(one), reversed(other_folders), strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other_folders)))


def short_path(path: str, root: str | None) -> str:
    """A path as it is called from the project's folder, which itself is `.`."""
    if path == root:
        return "."
    return path[len(root) + 1 :] if root and path.startswith(f"{root}/") else path


def names_in(folder: str, seen: SessionState) -> list[str]:
    """Names that the session has shown in a folder."""
    start = seen.paths.absolute(folder, seen.paths.root).rstrip("/") + "/"
    inside = {path[len(start) :].partition("/")[0] for path in seen.paths.files if path.startswith(start)}
    return sorted(name for name in inside if _PLAIN_NAME.fullmatch(name))


def typed_path(message: str, command: str) -> str | None:
    """The path that a shell's message is about, if the command names it."""
    for match in _THING.finditer(message):
        thing = next(group for group in match.groups() if group)
        if thing in command:
            return thing
        ends = [word for word in re.findall(r"[\w./@+~-]+", command) if "/" in word or "." in word]
        typed = next((word for word in ends if thing.endswith(f"/{word.removeprefix('./')}")), None)
        if typed is not None:
            return typed
    return None


# A conversation read up to one turn after the other: the failing call there, and what had been shown by then.


def call_of(site: ErrorSite, conversation: Conversation) -> ToolCall | None:
    """The call that failed."""
    calls = (call for turn in conversation.turns if turn.id == site.turn_id for call in turn.calls)
    return next((call for call in calls if call.id == site.call_id), None)


def said_of(site: ErrorSite, conversation: Conversation) -> str:
    """What came back for the call that failed, whole."""
    results = (result for turn in conversation.turns if turn.id == site.result_turn_id for result in turn.results)
    return next((result.text for result in results if result.call_id == site.call_id), site.evidence_text)


class Case(NamedTuple):
    """A failing call, what came back, and what the session had shown before it."""

    site: ErrorSite
    call: ToolCall
    said: str
    seen: SessionState
    edits: Callable[[str], list[tuple[str, str]]]

    @property
    def command(self) -> str:
        return command_text(self.call.name, self.call.arguments)

    @property
    def path(self) -> str | None:
        if channel_of(self.call.name) != "shell":
            return path_argument(self.call.arguments)
        return typed_path(self.site.evidence_text, self.command)


def _has_failed(result: ToolResult) -> bool:
    """Rollouts have no flag, but the harness's words: an edit that was refused has changed nothing."""
    return CleanedText.of(result.text).is_tagged if result.is_error is None else result.is_error


class StateAlong:
    """What a conversation had shown before one turn after the other; a turn further back is read from the start."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._index = {turn.id: number for number, turn in enumerate(conversation.turns)}
        self._restart()

    def before(self, turn_id: str) -> SessionState:
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
        """Old and new text of the edits that have worked on a file so far, in order."""
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


# What an error itself says is right: the name that was meant, the names there are, options, what to run first.

_MAX_SAID = 6000
_MAX_CHOICES = 40
_MEANT = re.compile(r"[Dd]id you mean:?\s+(?!one of)['\"`]?([^\s'\"`?,<]{1,200})['\"`]?[^\n?]{0,40}\?")
_NEAR = re.compile(
    r"[Tt]he most similar (?:command|choice)s? (?:is|are)\s+(\S{1,80})|[Dd]id you mean:\s+command '(\S{1,80}?)'"
)
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
_CHOICE = re.compile(r"[A-Za-z@./][\w.:@/+-]{0,200}")
_END_OF_LIST = re.compile(r"</|\bat line\b|\bbut\b|\bgot\b|\. ")
_NO_CHOICE = frozenset(["or", "and", "the", "of", "but", "got", "received", "was", "found", "instead", "see", "for"])
_USAGE = re.compile(r"^\s*usage:", re.IGNORECASE | re.MULTILINE)
_FLAGS = re.compile(r"^[ \t]+(?:-\w, )?(--?[A-Za-z][\w-]{1,40})(?=[ =,\[\n])", re.MULTILINE)
_UNKNOWN_OPTION = re.compile(
    r"(?:unknown|unrecogni[sz]ed|invalid|illegal|unexpected|no such|unsupported|bad)"
    r"(?: \w+)? (?:flag|option|argument|switch|parameter)s?(?: provided)?:?\s*(?:-- )?['\"`]?"
    r"(?P<named>-{0,2}[A-Za-z][\w-]{0,60})|flag provided but not defined:? (?P<go>-[\w-]{1,60})",
    re.IGNORECASE,
)
_RUN = re.compile(
    r"(?:\b[Rr]un|\b[Uu]se|\b[Tt]ry|\b[Ee]xecute)(?: the following| this)?:?\s+"
    r"(?:['\"`](?P<quoted>[^'\"`\n]{3,80})['\"`]|(?P<bare>(?:mise|make|npm|pnpm|yarn|npx|cargo|go|gofmt|just|task|uv|ruff|black"
    r"|pre-commit|git|bundle|mvn|gradle)\b(?: [\w./:@=-]+){1,5}))"
    r"|\buse\s*\n\s+(?P<shown>git [^\n]{4,120})"
)
_CLOSE = 0.72
_SLIP = 0.8


def meant_name(said: str) -> str | None:
    """What the error asks about: "did you mean …?"."""
    match = _MEANT.search(said[:_MAX_SAID]) or _NEAR.search(said[:_MAX_SAID])
    return next(group for group in match.groups() if group).rstrip(".") if match else None


def choices_in(said: str) -> list[str]:
    """The names that an error lists as those there are."""
    match = _CHOICES.search(said[:_MAX_SAID])
    if match is None:
        return []
    text = next(group for group in match.groups() if group)
    text = _END_OF_LIST.split(text, maxsplit=1)[0]
    names = [choice.rstrip(".:") for choice in _CHOICE.findall(text) if choice.lower() not in _NO_CHOICE]
    choices = [name for name in dict.fromkeys(names) if name][:_MAX_CHOICES]
    return choices if len(choices) > 1 else []


def unknown_option(said: str) -> str | None:
    """The option that a program says it does not know; other errors of use are not about one."""
    match = _UNKNOWN_OPTION.search(said[:_MAX_SAID])
    return None if match is None else match["named"] or match["go"]


def near_option(wrong: str, options: Sequence[str]) -> str | None:
    """The one option that differs from this one by a slip of the pen; another option is no better than none."""
    near = [
        name for ratio, name in _ranked(wrong.strip("-"), [option.strip("-") for option in options]) if ratio >= _SLIP
    ]
    return next(option for option in options if option.strip("-") == near[0]) if len(near) == 1 else None


def options_in(said: str) -> list[str]:
    """The options that a program printed with its usage."""
    if _USAGE.search(said[:_MAX_SAID]) is None:
        return []
    return list(dict.fromkeys(_FLAGS.findall(said[:_MAX_SAID])))[:_MAX_CHOICES]


def command_to_run(said: str) -> str | None:
    """The command that a check or a hook asks for."""
    match = _RUN.search(said[:_MAX_SAID])
    return None if match is None else next(group for group in match.groups() if group).strip()


def nearest(wrong: str, names: Sequence[str]) -> str | None:
    """The one name that was surely meant: the same but for case or a prefix, or much nearer than all others."""
    for is_same in (_is_same, _is_inside):
        matches = [name for name in names if is_same(wrong.casefold(), name.casefold())]
        if len(matches) == 1:
            return matches[0]
    ranked = sorted(_ranked(wrong, names), reverse=True)
    if not ranked or ranked[0][0] < _CLOSE or (len(ranked) > 1 and ranked[1][0] > ranked[0][0] - 0.1):
        return None
    return ranked[0][1]


def _ranked(wrong: str, names: Sequence[str]) -> Iterator[tuple[float, str]]:
    for name in names[: _MAX_CHOICES * 5]:
        yield difflib.SequenceMatcher(None, wrong.casefold(), name.casefold()).ratio(), name


def _is_same(wrong: str, name: str) -> bool:
    return re.sub(r"[\W_]", "", wrong) == re.sub(r"[\W_]", "", name)


def _is_inside(wrong: str, name: str) -> bool:
    return len(wrong) > 3 and wrong in re.split(r"[:/.]", name)


# What is wrong with arguments: told by the schema where there is one, and by the words of the error.

_NAME = r"[`'\"]([A-Za-z_]\w{0,60})[`'\"]"
_BARE = r"([A-Za-z_]\w{0,60})(?=[.,;)]|\s*$)"
_KIND = r"(?:parameter|property|argument|field|positional argument)s?"
_MISSING = re.compile(
    rf"(?:required|missing) (?:required )?{_KIND}:? {_NAME}|must have required property {_NAME}|missing field {_NAME}"
    rf"|{_KIND} {_NAME} is (?:required|missing)|missing (?:value for )?(?:a )?required {_KIND}: {_BARE}"
    rf"|missing \d+ required \w+ arguments?: {_NAME}|(?<=and ){_NAME}\s*$",
    re.IGNORECASE | re.MULTILINE,
)
_UNEXPECTED = re.compile(
    rf"unexpected (?:keyword )?{_KIND}:? {_NAME}|unknown {_KIND}:? {_NAME}|additional {_KIND}:? {_NAME}", re.IGNORECASE
)
_TYPE = re.compile(rf"parameter {_NAME} type is expected as {_NAME}", re.IGNORECASE)
_EXPECTED = re.compile(r"\"expected\":\s*\"(\w{1,20})\"[^\[]{0,120}\"path\":\s*\[\s*\"(\w{1,60})\"")
_SHOULD_BE = re.compile(r"^(\w{1,60})\n\s+Input should be an? (?:valid )?(\w{1,20})", re.MULTILINE)
_JSON = re.compile(
    r"parse function arguments|not valid JSON|JSONDecodeError|Unexpected (?:token|end of JSON)"
    r"|Expecting (?:value|property|',')|(?:invalid|malformed) JSON|parse JSON",
    re.IGNORECASE,
)
_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
}


def is_json_error(call: ToolCall | None, message: str) -> bool:
    """Whether the arguments were no JSON object at all, rather than one that does not fit."""
    if call is not None and call.raw_arguments is not None:
        return True
    return _JSON.search(message) is not None and not _named(_MISSING, message) and not _named(_UNEXPECTED, message)


def parameter_facts(call: ToolCall | None, message: str, schema: Mapping[str, Any] | None) -> HintContext:
    """Missing, unexpected and wrongly typed parameters. What the message names goes before what the schema shows."""
    facts: HintContext = {}
    missing, unexpected, wrong = _named(_MISSING, message), _named(_UNEXPECTED, message), _types(message)
    properties = schema.get("properties") if schema is not None else None
    if call is not None and call.raw_arguments is None and isinstance(properties, Mapping):
        required = schema.get("required") if schema is not None else None
        missing = missing or [name for name in required or () if name not in call.arguments]
        closed = schema is not None and schema.get("additionalProperties") is False
        unexpected = unexpected or [name for name in call.arguments if closed and name not in properties]
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


def _named(pattern: re.Pattern[str], message: str) -> list[str]:
    names = (next(group for group in match.groups() if group) for match in pattern.finditer(message[:4000]))
    return list(dict.fromkeys(names))


def _types(message: str) -> list[str]:
    text = message[:4000]
    typed_names = [
        *_TYPE.findall(text),
        *_SHOULD_BE.findall(text),
        *((name, kind) for kind, name in _EXPECTED.findall(text)),
    ]
    return [f"{name}: {kind}" for name, kind in typed_names]


def _wrong_kind(value: Any, schema: Any) -> str | None:
    """The type that a value should have, if it has another."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    allowed = _KINDS.get(kind) if isinstance(kind, str) else None
    if allowed is None or value is None:
        return None
    fits = isinstance(value, allowed) and (kind == "boolean" or not isinstance(value, bool))
    return None if fits else kind
