"""What a session did after a call that failed: the calls that worked, and what each of them looks at or for."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from composer_replication.sites.actions.edits import Operation, Replace
from composer_replication.sites.actions.session_state import SessionState
from composer_replication.sites.actions.shell_command import Command, is_path, only_reads
from composer_replication.sites.actions.shown_paths import without_reminders
from composer_replication.sites.actions.tools import (
    LINE_NUMBER,
    LISTS,
    SEARCHES,
    channel_of,
    command_text,
    is_label,
    normal_path,
    only_looks,
    path_argument,
    plain_name,
    word_set,
)
from composer_replication.sites.find import INTERRUPTED
from composer_replication.types import Conversation, ErrorSite, ToolCall

_MAX_LATER = 12  # calls after the failure; what comes later answers something else
_MAX_TEXT = 300_000
_NUMBER = re.compile(r"^[^\S\n]*(\d{1,6})(?:→|\t|[:-])", re.MULTILINE)  # as readers and searches show lines of one file
_ASK = word_set("askuserquestion ask_user ask_user_question ask_followup_question")
_FINDS_NOTHING = ("No files found", "No matches found", "No files matched")
_LISTING_PROGRAMS = word_set("ls find fd tree")
_LS_FILES = ("git", "ls-files")
_SEARCHING_PROGRAMS = word_set("grep rg ag locate")


@dataclass(frozen=True, slots=True)
class LaterCall:
    """A call that was made after the failure and worked."""

    call: ToolCall
    text: str

    @property
    def path(self) -> str | None:
        return path_argument(self.call.arguments) if channel_of(self.call.name) == "file" else None

    @property
    def words(self) -> str:
        """What it asks for, in its own letters."""
        command = command_text(self.call.name, self.call.arguments)
        return command or " ".join(value for value in self.call.arguments.values() if isinstance(value, str))

    @property
    def lines(self) -> list[str]:
        """Of the file that it shows, without their numbers."""
        return [LINE_NUMBER.sub("", line) for line in without_reminders(self.text).splitlines()]

    @property
    def is_look(self) -> bool:
        """Whether it changes nothing, and showed something."""
        command = self._command
        looks = only_reads(command.text) or command.only_shows or only_looks(self.call.name, self.call.arguments)
        return looks and bool(self.text.strip())

    @property
    def has_found(self) -> bool:
        """Whether it is a look that can find a file, and not only show one, and did."""
        programs = {name for name, _ in self._command.programs} & _SEARCHING_PROGRAMS
        searches = self.is_listing or bool(programs) or plain_name(self.call.name) in SEARCHES
        return searches and self.is_look and not self.found_nothing

    @property
    def found_nothing(self) -> bool:
        """Whether it says that there is nothing of the kind."""
        return self.text.strip().startswith(_FINDS_NOTHING)

    @property
    def is_listing(self) -> bool:
        """Whether it shows what a folder holds."""
        programs = self._command.programs
        by_program = any(name in _LISTING_PROGRAMS or (name, first) == _LS_FILES for name, first in programs)
        return plain_name(self.call.name) in LISTS or by_program

    @property
    def _command(self) -> Command:
        return Command.of(command_text(self.call.name, self.call.arguments))


class LaterCalls:
    """The calls of a conversation, what became of each, and where a person spoke."""

    def __init__(self, conversation: Conversation, failures: Mapping[str, ErrorSite]) -> None:
        self._conversation = conversation
        self._results = {result.call_id: result for turn in conversation.turns for result in turn.results}
        self._failures = failures
        call_counts = Counter(call.id for turn in conversation.turns for call in turn.calls)
        self._reused = {identity for identity, number in call_counts.items() if number > 1}
        self._places = {turn.id: number for number, turn in enumerate(conversation.turns)}
        assistant = [turn.id for turn in conversation.turns if turn.role == "assistant"]
        self._numbers = {turn_id: number for number, turn_id in enumerate(assistant)}

    def has_worked(self, call: ToolCall) -> bool:
        result = self._results.get(call.id)
        if result is None or call.id in self._reused or call.id in self._failures:
            return False
        return result.is_error is not True

    def _has_run(self, call: ToolCall) -> bool:
        failure = self._failures.get(call.id)
        return failure is not None and failure.blame == "task" and call.id not in self._reused

    def is_one(self, call: ToolCall) -> bool:
        """Whether no other call has its id: some logs use ids again, and nobody knows whose result is whose."""
        return call.id not in self._reused

    def text_of(self, call: ToolCall) -> str:
        """What came back for a call."""
        return self._results[call.id].text if call.id in self._results else ""

    def turn_number(self, turn_id: str) -> int:
        """Which of the assistant's turns it is, counted from 0."""
        return self._numbers[turn_id]

    def beside(self, site: ErrorSite) -> list[ToolCall]:
        """The other calls of the site's turn that failed as well."""
        turn_index = self._places.get(site.turn_id)
        calls = () if turn_index is None else self._conversation.turns[turn_index].calls
        return [call for call in calls if call.id != site.call_id and call.id in self._failures]

    def was_said(self, site: ErrorSite, word: str) -> bool:
        """Whether a person had named it of their own accord, and not in answer to a question."""
        turns = self._conversation.turns[: self._places.get(site.turn_id, 0)]
        return any(word in turn.text for turn in turns if turn.role == "user" and turn.origin == "human")

    def had_lines(self, site: ErrorSite, path: str, lines: range) -> bool:
        """Whether one of these lines of a file had been shown with its number before the site: `12→`, `a.py:12`."""
        turns = self._conversation.turns[: self._places.get(site.turn_id, 0)]
        of_file = {call.id for turn in turns for call in turn.calls if path_argument(call.arguments) == path}
        line_reference = re.compile(rf"{re.escape(path.rpartition('/')[2])}(?:[:-]|,? lines? )(\d{{1,6}})")
        results = (
            (result.text, _NUMBER if result.call_id in of_file else line_reference)
            for turn in turns
            for result in turn.results
        )
        user_texts = ((turn.text, line_reference) for turn in turns if turn.role == "user")
        return any(
            int(number) in lines for text, form in (*results, *user_texts) for number in form.findall(text[:_MAX_TEXT])
        )

    def after(self, site: ErrorSite, *, with_failed_work: bool = False) -> list[LaterCall]:
        """Calls that worked after the site's turn, until a person speaks; words that the site is about do not count.

        `with_failed_work` are also those that ran what they should, and it failed: tests, a build.
        """
        later_calls: list[LaterCall] = []
        turns = self._conversation.turns
        for turn in itertools.islice(turns, self._places.get(site.turn_id, len(turns)) + 1, None):
            is_heard = turn.role == "user" and turn.origin == "human" and turn.id != site.result_turn_id
            if is_heard and not turn.text.startswith(INTERRUPTED):
                break
            ran = [call for call in turn.calls if self.has_worked(call) or (with_failed_work and self._has_run(call))]
            later_calls += [LaterCall(call, self.text_of(call)) for call in ran]
            if len(later_calls) >= _MAX_LATER or any(plain_name(call.name) in _ASK for call in turn.calls):
                break  # what follows a question rests on its answer
        return later_calls[:_MAX_LATER]


# Which look, made after a path was not there, should have been made before: one that is for it and told something.

_NEXT, _NEXT_USE, _MAX_NAMES, _MIN_WORD = 3, 2, 20, 3
_ASKS_FOR_HELP = re.compile(r"(?:^|\s)(?:--help|help)(?:\s|$)")
_LISTS_ITSELF = frozenset({"help", "tasks", "list", "ls"})
_SETTLED = ("not_listed", "not_globbed")
_NAMED_FILE = re.compile(r"[\w@+-][\w./@+-]*\.\w+|[\w@+.-]+/[\w./@+-]+")


def search_for(
    path: str, failed: ToolCall, later: Sequence[LaterCall], state: SessionState, cwd: str | None
) -> LaterCall | None:
    """The first look after the failure that is for what was missing and found something, before anything is done.

    It is for it where it is the same search elsewhere, or names it, or lists its folder and what it listed was opened.
    """
    folder, _, name = path.rstrip("/").rpartition("/")
    stem, pattern = name.lstrip(".").partition(".")[0].lower(), failed.arguments.get("pattern")
    is_settled = state.paths.status(normal_path(path, cwd)).why in _SETTLED
    looks_for_text = plain_name(failed.name) in SEARCHES
    for index, look in enumerate(itertools.takewhile(lambda call: call.is_look, later[:_NEXT])):
        words = look.words.lower()
        if look.found_nothing and len(stem) >= _MIN_WORD and stem in words:
            return None  # there is no such file anywhere: its name was made up, and no search is for it
        if not look.has_found or not _is_into_what_was_shown(look, path, state, cwd):
            continue
        if isinstance(pattern, str) and len(pattern) >= _MIN_WORD and pattern.lower() in words:
            return look
        if not _is_new(look, state):
            continue
        if len(stem) >= _MIN_WORD and stem in words:
            return look
        uses = later[index + 1 : index + 1 + _NEXT_USE]
        if not looks_for_text and not is_settled and _lists(look, folder, cwd) and _is_used(look, uses, folder, cwd):
            return look
    return None


def name_to_search(path: str, later: Sequence[LaterCall], state: SessionState, cwd: str | None) -> str | None:
    """The name of a missing file, or its beginning, where a file called so was opened afterwards.

    None also where a look had settled that it is not there.
    """
    if state.paths.status(normal_path(path, cwd)).exists is False:
        return None
    folder, _, name = path.rstrip("/").rpartition("/")
    stem = name[: len(name) - len(name.lstrip("."))] + name.lstrip(".").partition(".")[0]
    other_paths = [call.path for call in later if call.path and normal_path(call.path, cwd) != normal_path(path, cwd)]
    if "." in name[1:] and any(other_path.rpartition("/")[2] == name for other_path in other_paths):
        return name
    is_beside = any(
        other_path.rpartition("/")[0] == folder and _begins(other_path.rpartition("/")[2], stem)
        for other_path in other_paths
    )
    return f"{stem}*" if is_beside and len(stem) > _MIN_WORD else None


def tree_with(name: str, later: Sequence[LaterCall]) -> ToolCall | None:
    """The list of a whole tree that brought up a file of this name."""
    lists = (look.call for look in later[:_NEXT] if look.is_listing and look.is_look and f"/{name}" in look.text)
    return next(lists, None)


def help_for(command: str, later: Sequence[LaterCall]) -> ToolCall | None:
    """What the same program says about itself, asked right after the failure."""
    programs = {name for name, _ in Command.of(command).programs}
    for look in later[:1]:
        look_command = Command.of(look.words)
        same = {first for name, first in look_command.programs if name in programs}
        if same and (_ASKS_FOR_HELP.search(look_command.text) or _LISTS_ITSELF & same):
            return look.call
    return None


def _begins(name: str, stem: str) -> bool:
    return name == stem or name.startswith(f"{stem}.")


def _is_into_what_was_shown(look: LaterCall, missing: str, state: SessionState, cwd: str | None) -> bool:
    """Whether it could have been made before the failure: not where it looks into what nobody had heard of."""
    words = (word for word in Command.of(look.words).words if is_path(word) and "/" in word and "*" not in word)
    names = [look.path] if look.path else list(itertools.islice(words, _MAX_NAMES))
    missing_path = normal_path(missing, cwd)
    return all(
        path == missing_path or _is_known(path, cwd, state) for path in (normal_path(name, cwd) for name in names)
    )


def _is_known(path: str, cwd: str | None, state: SessionState) -> bool:
    """Something had shown it, or it holds the working folder. The folder of a path that was guessed is guessed too."""
    return (
        f"{cwd or ''}/".startswith(f"{path.rstrip('/')}/")
        or bool(state.paths.status(path).exists)
        or state.has_shown(path)
    )


def _is_new(look: LaterCall, state: SessionState) -> bool:
    """Whether it brought a name that had not been shown."""
    names = _NAMED_FILE.findall(without_reminders(look.text))[:_MAX_NAMES]
    return not names or not all(map(state.has_shown, names))


def _lists(look: LaterCall, folder: str, cwd: str | None) -> bool:
    """Whether it shows what this folder holds."""
    names = [look.path or "", *(word for word in Command.of(look.words).words if is_path(word))]
    folders = {normal_path(name, cwd) for name in names if name} - {"/"}
    is_named = folder.rpartition("/")[2].lower() in re.split(r"[/\s]", look.words.lower())
    return look.is_listing and (is_named or normal_path(folder, cwd) in folders)


def _is_used(look: LaterCall, uses: Sequence[LaterCall], folder: str, cwd: str | None) -> bool:
    """Whether what it listed was then opened in that folder: so it was what the failing call was after."""
    paths = [call.path for call in uses if call.path]
    there = [path for path in paths if normal_path(path.rpartition("/")[0], cwd) == normal_path(folder, cwd)]
    return any(path.rpartition("/")[2] in look.text for path in there)


# Whether two calls are about the same thing: the same change, the same place of a file, the same command.

MIN_ALIKE = 0.6
_MIN_SAME_LINE = 0.8
_MIN_CONTAINED, _MIN_COMPARED, _MAX_COMPARED = 8, 20, 4000
_MIN_LINE, _TELLING, _MAX_LINES = 6, 3, 3000
_TOKEN = re.compile(r"[\w-]+|[^\w\s-]")
_WORD = re.compile(r"[\w-]+")
_NAME, _CAPITAL_INSIDE, _LIKENESS_MAX_TEXT = re.compile(r"\w+"), re.compile(r"[a-z][A-Z]"), 100_000
_LIKENESS_NUMBER = re.compile(r"\d{1,4}")
_FOLDERS = re.compile(r"[^\s'\"=:]*/(?=[^\s/])")
_MOVES = "cd"
_WITH_SUBCOMMAND = word_set(
    "git gh glab docker podman kubectl helm terraform aws gcloud az npm yarn pnpm bun go cargo pip pip3 uv poetry mise"
    " brew apt apt-get systemctl make just task dotnet mvn gradle"
)


def command_of(call: ToolCall) -> str:
    return command_text(call.name, call.arguments)


def asked_by(call: ToolCall) -> str:
    """All that a call asks for, without words for the reader of the log."""
    return " ".join(str(value) for key, value in call.arguments.items() if not is_label(call.name, key))


def likeness(one: str, other: str) -> float:
    """The share of words and signs that two texts have in common, in any order: in linear time, whatever they are."""
    first, second = (Counter(_TOKEN.findall(text[:_MAX_COMPARED])) for text in (one, other))
    return 2 * (first & second).total() / max(first.total() + second.total(), 1)


def likeness_of_calls(one: ToolCall, other: ToolCall) -> float:
    """The same for what two calls ask for, where a file counts by its name and not by the way to it."""
    first, second = (_FOLDERS.sub("", asked_by(call)[:_MAX_COMPARED]) for call in (one, other))
    return likeness(first, second)


def have_same_purpose(call: ToolCall, other: ToolCall, error: str) -> bool:
    """Whether a command does what the first should have done: what it leaves out are options, or what was wrong.

    Calls that are no commands have one purpose by their tool.
    """
    ours, theirs = Command.of(command_of(call)), Command.of(command_of(other))
    if _subcommands(ours) != _subcommands(theirs):
        return False
    first, second = ({*_WORD.findall(_FOLDERS.sub("", command.text))} for command in (ours, theirs))
    return all(word in error or word.startswith("-") or len(word) < 3 for word in first - second)


def _subcommands(command: Command) -> set[tuple[str, str]]:
    programs = ((name, first if name in _WITH_SUBCOMMAND else "") for name, first in command.programs)
    return {program for program in programs if program[0] != _MOVES}


def other_paths(wrong: str, right: str) -> list[str] | None:
    """What the second command names inside the paths of the first, where both have the same words but for paths.

    Folders around the first's paths are no names of their own. None where the two differ in something else.
    """
    ours, theirs = (set(text.split()) for text in (wrong, right))
    if ours <= theirs or theirs <= ours or not all("/" in word for word in ours ^ theirs):
        return None
    had, new = ({_bare(word) for word in words} for words in (ours - theirs, theirs - ours))
    inside = [word for word in new if not any(f"{path}/".startswith(f"{word}/") for path in had)]
    return inside if all(any(word.startswith(f"{path}/") for path in had) for word in inside) else None


def _bare(word: str) -> str:
    """A word without what only says that it is a path, and without the dots for all below it."""
    return word.removeprefix("./").removesuffix("...").rstrip("/")


def belong_together(one: Operation, other: Operation) -> float:
    """How surely two edits are about the same place of the same file; 0 where they are not."""
    if not isinstance(one, Replace) or not isinstance(other, Replace) or one.path != other.path:
        return 0.0
    if not _overlap(one.old, other.old) and not _overlap(one.new, other.new):
        return 0.0
    return 1.0 + likeness(one.old, other.old) + likeness(one.new, other.new)


def share_a_place(one: Operation, other: Operation) -> bool:
    """Whether what two edits replace has a line in common or is much alike, or one wrote what the other replaces.

    A text of a word or two is alike by chance, but not where more of its line is named for the very same new text.
    """
    if not isinstance(one, Replace) or not isinstance(other, Replace):
        return False
    if one.new == other.new and one.old.strip() and one.old in other.old:
        return True
    first, second = ({line.strip() for line in edit.old.split("\n")} - {""} for edit in (one, other))
    alike = max(likeness(one.old, other.old), likeness(one.new, other.old))
    return bool(first & second) or _overlap(one.old, other.old) or alike >= MIN_ALIKE


def _overlap(one: str, other_text: str) -> bool:
    """Whether one text is in the other or much like it; short ones are alike by chance."""
    shorter, longer = sorted((one.strip(), other_text.strip()), key=len)
    if len(shorter) < _MIN_CONTAINED:
        return bool(shorter) and shorter == longer
    return shorter in longer or (len(shorter) >= _MIN_COMPARED and likeness(one, other_text) >= MIN_ALIKE)


def lines_for(edits: Iterable[Operation], shown: list[str]) -> list[str]:
    """Those of the lines shown that an edit is about: where one of its telling lines stands, as many as the edit has.

    An edit that replaces no text, as a whole file that is written does, is about all of them.
    """
    shown, line_numbers = shown[:_MAX_LINES], set[int]()
    for edit in edits:
        edit_lines = edit.old.split("\n") if isinstance(edit, Replace) else []
        if not any(line.strip() for line in edit_lines):
            return shown
        for number in sorted(range(len(edit_lines)), key=lambda number: -len(edit_lines[number].strip()))[:_TELLING]:
            for position in _where(edit_lines[number].strip(), shown):
                line_numbers.update(range(position - number, position - number + len(edit_lines)))
    return [shown[number] for number in sorted(line_numbers) if 0 <= number < len(shown)]


def _where(edit_line: str, shown_lines: list[str]) -> list[int]:
    if not edit_line or (len(edit_line) < _MIN_LINE and not any(edit_line == line.strip() for line in shown_lines)):
        return []
    return [n for n, line in enumerate(shown_lines) if edit_line in line or likeness(line, edit_line) >= _MIN_SAME_LINE]


def names_in(text: str) -> set[str]:
    """What a program calls its parts: words with a line or a capital letter inside."""
    return {word for word in _NAME.findall(text[:_LIKENESS_MAX_TEXT]) if "_" in word or _CAPITAL_INSIDE.search(word)}


def is_name(word: str) -> bool:
    """Whether a word of a command names a file, a version, or something else that has to be known."""
    if word.startswith(("-", "/dev/")) or _LIKENESS_NUMBER.fullmatch(word):
        return False
    return ("/" in word and is_path(word)) or any(letter.isdigit() for letter in word)


def plain_words(text: str) -> list[str]:
    return [word for word in "".join(char if char.isalnum() else " " for char in text.lower()).split() if len(word) > 1]
