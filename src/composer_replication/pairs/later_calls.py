"""Find what a session did after a failed call: the calls that worked, and how they relate to the failed one.

- `LaterCalls` indexes a conversation and returns the working calls after an error site.
- `find_search`, `filename_to_search` and `listing_with` find or build the search that a missing path calls for.
- `call_similarity`, `edit_similarity` and the functions after them tell whether two calls are about the same thing.
"""

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

# Calls after these answer something else than the failure.
_MAX_LATER = 12
# Characters of a result or message that are searched for line numbers.
_MAX_TEXT = 300_000
# How read tools and searches number the lines of one file: "   12→def f():" and "12:def f():" -> "12"; not "12 apples"
_LINE_NUMBER_SHOWN = re.compile(r"^[^\S\n]*(\d{1,6})(?:→|\t|[:-])", re.MULTILINE)
# The tools with which agents ask the user. Calls after a question depend on the answer.
_QUESTION_TOOLS = word_set("askuserquestion ask_user ask_user_question ask_followup_question")
_NOTHING_FOUND = ("No files found", "No matches found", "No files matched")
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
        """The command, or all text arguments of another tool, in their original case."""
        command = command_text(self.call.name, self.call.arguments)
        return command or " ".join(value for value in self.call.arguments.values() if isinstance(value, str))

    @property
    def lines(self) -> list[str]:
        """The lines of the result, without line numbers and the agent's reminders."""
        return [LINE_NUMBER.sub("", line) for line in without_reminders(self.text).splitlines()]

    @property
    def is_look(self) -> bool:
        """Whether the call only reads, and its result is not empty."""
        command = self._command
        looks = only_reads(command.text) or command.only_shows or only_looks(self.call.name, self.call.arguments)
        return looks and bool(self.text.strip())

    @property
    def has_found(self) -> bool:
        """Whether the call is a search or listing that found something; a read of one file is neither."""
        programs = {name for name, _ in self._command.programs} & _SEARCHING_PROGRAMS
        searches = self.is_listing or bool(programs) or plain_name(self.call.name) in SEARCHES
        return searches and self.is_look and not self.found_nothing

    @property
    def found_nothing(self) -> bool:
        """Whether the result says that nothing matched."""
        return self.text.strip().startswith(_NOTHING_FOUND)

    @property
    def is_listing(self) -> bool:
        """Whether the call lists the content of folders."""
        programs = self._command.programs
        by_program = any(name in _LISTING_PROGRAMS or (name, first) == _LS_FILES for name, first in programs)
        return plain_name(self.call.name) in LISTS or by_program

    @property
    def _command(self) -> Command:
        return Command.of(command_text(self.call.name, self.call.arguments))


class LaterCalls:
    """The calls of a conversation, indexed by the error sites that come before them.

    Some logs use a call id more than once. Whose result is whose is then unknown, so these calls are left out.
    """

    def __init__(self, conversation: Conversation, failures: Mapping[str, ErrorSite]) -> None:
        self._conversation = conversation
        self._results = {result.call_id: result for turn in conversation.turns for result in turn.results}
        self._failures = failures
        call_counts = Counter(call.id for turn in conversation.turns for call in turn.calls)
        self._reused_ids = {call_id for call_id, count in call_counts.items() if count > 1}
        self._positions = {turn.id: number for number, turn in enumerate(conversation.turns)}
        assistant_turn_ids = [turn.id for turn in conversation.turns if turn.role == "assistant"]
        self._turn_numbers = {turn_id: number for number, turn_id in enumerate(assistant_turn_ids)}

    def has_worked(self, call: ToolCall) -> bool:
        """Return whether a call has a result of its own, and neither the log nor a failure rule says that it failed."""
        result = self._results.get(call.id)
        if result is None or call.id in self._reused_ids or call.id in self._failures:
            return False
        return result.is_error is not True

    def _failed_at_task(self, call: ToolCall) -> bool:
        """Return whether a call ran as intended and its work failed, as tests do."""
        failure = self._failures.get(call.id)
        return failure is not None and failure.blame == "task" and call.id not in self._reused_ids

    def has_unique_id(self, call: ToolCall) -> bool:
        """Return whether no other call of the conversation has the same id."""
        return call.id not in self._reused_ids

    def result_text(self, call: ToolCall) -> str:
        """Return the text of a call's result; empty if there is none."""
        return self._results[call.id].text if call.id in self._results else ""

    def turn_number(self, turn_id: str) -> int:
        """Return the number of an assistant turn, counted from 0 over the assistant's turns."""
        return self._turn_numbers[turn_id]

    def failed_siblings(self, site: ErrorSite) -> list[ToolCall]:
        """Return the other failed calls of the site's turn."""
        turn_index = self._positions.get(site.turn_id)
        calls = () if turn_index is None else self._conversation.turns[turn_index].calls
        return [call for call in calls if call.id != site.call_id and call.id in self._failures]

    def was_mentioned_by_user(self, site: ErrorSite, word: str) -> bool:
        """Return whether a message of the user contains the word before the site's turn.

        Answers to the agent's questions are tool results, and do not count.
        """
        turns = self._conversation.turns[: self._positions.get(site.turn_id, 0)]
        return any(word in turn.text for turn in turns if turn.role == "user" and turn.origin == "human")

    def has_shown_line_numbers(self, site: ErrorSite, path: str, lines: range) -> bool:
        """Return whether the number of one of these lines of a file was shown before the site: `12→`, `a.py:12`."""
        turns = self._conversation.turns[: self._positions.get(site.turn_id, 0)]
        file_call_ids = {call.id for turn in turns for call in turn.calls if path_argument(call.arguments) == path}
        # With "src/a.py": "a.py:12", "a.py line 12", "a.py, lines 12-20" -> "12"; not "a.py has 12 lines"
        line_reference = re.compile(rf"{re.escape(path.rpartition('/')[2])}(?:[:-]|,? lines? )(\d{{1,6}})")
        results_with_pattern = (
            (result.text, _LINE_NUMBER_SHOWN if result.call_id in file_call_ids else line_reference)
            for turn in turns
            for result in turn.results
        )
        messages_with_pattern = ((turn.text, line_reference) for turn in turns if turn.role == "user")
        return any(
            int(number) in lines
            for text, pattern in (*results_with_pattern, *messages_with_pattern)
            for number in pattern.findall(text[:_MAX_TEXT])
        )

    def after(self, site: ErrorSite, *, with_failed_work: bool = False) -> list[LaterCall]:
        """Return the calls that worked after the site's turn, up to the next message of or question to the user.

        The message that is the site's own evidence does not end the search, nor does the note of an interruption.
        `with_failed_work` also returns calls that ran as intended and whose work failed, such as tests or a build.
        """
        later_calls: list[LaterCall] = []
        turns = self._conversation.turns
        for turn in itertools.islice(turns, self._positions.get(site.turn_id, len(turns)) + 1, None):
            is_user_message = turn.role == "user" and turn.origin == "human" and turn.id != site.result_turn_id
            if is_user_message and not turn.text.startswith(INTERRUPTED):
                break
            ran = [
                call
                for call in turn.calls
                if self.has_worked(call) or (with_failed_work and self._failed_at_task(call))
            ]
            later_calls += [LaterCall(call, self.result_text(call)) for call in ran]
            if len(later_calls) >= _MAX_LATER or any(plain_name(call.name) in _QUESTION_TOOLS for call in turn.calls):
                break
        return later_calls[:_MAX_LATER]


# How many calls after the failure may be its search, and how many after a listing may open what it listed.
_MAX_NEXT_CALLS, _MAX_USES = 3, 2
# Every name is searched for in all that was shown, so the first ones have to do.
_MAX_NAMES = 20
# A shorter stem or pattern, such as "a" of "a.py", is in many words by chance.
_MIN_STEM = 3
# "uv --help", "git help log"; not "helper.py"
_ASKS_FOR_HELP = re.compile(r"(?:^|\s)(?:--help|help)(?:\s|$)")
_HELP_SUBCOMMANDS = frozenset({"help", "tasks", "list", "ls"})
# Why a path is known to be missing: the listing of its folder or a glob did not have it.
_KNOWN_MISSING = ("not_listed", "not_globbed")
# "src/a.py", "setup.py" and "src/app"; not "setup"
_FILE_NAME = re.compile(r"[\w@+-][\w./@+-]*\.\w+|[\w@+.-]+/[\w./@+-]+")


def find_search(
    path: str, failed: ToolCall, later: Sequence[LaterCall], state: SessionState, cwd: str | None
) -> LaterCall | None:
    """Return the first search after the failure that was for the missing path and found something, or None.

    It was for that path if it searches for the failed call's pattern elsewhere, if it contains the file's name, or if
    it lists the path's folder and a file that it listed was opened next. A search counts only if the model could have
    made it before the failure, and only until the session does anything else than look.
    """
    folder, _, name = path.rstrip("/").rpartition("/")
    stem, pattern = name.lstrip(".").partition(".")[0].lower(), failed.arguments.get("pattern")
    # If a listing has shown that the path is missing, another listing of its folder is not what the model lacked.
    is_known_missing = state.paths.status(normal_path(path, cwd)).why in _KNOWN_MISSING
    looks_for_text = plain_name(failed.name) in SEARCHES
    for index, look in enumerate(itertools.takewhile(lambda call: call.is_look, later[:_MAX_NEXT_CALLS])):
        words = look.words.lower()
        if look.found_nothing and len(stem) >= _MIN_STEM and stem in words:
            return None  # the file exists nowhere: its name was invented, and no search would have found it
        if not look.has_found or not _stays_in_known_paths(look, path, state, cwd):
            continue
        if isinstance(pattern, str) and len(pattern) >= _MIN_STEM and pattern.lower() in words:
            return look
        if not _is_new(look, state):
            continue
        if len(stem) >= _MIN_STEM and stem in words:
            return look
        uses = later[index + 1 : index + 1 + _MAX_USES]
        if (
            not looks_for_text
            and not is_known_missing
            and _lists_folder(look, folder, cwd)
            and _was_used(look, uses, folder, cwd)
        ):
            return look
    return None


def filename_to_search(path: str, later: Sequence[LaterCall], state: SessionState, cwd: str | None) -> str | None:
    """Return the name of a missing file, or its stem with `*`, if a file of that name was opened afterwards.

    None if there was no such file, or if the session had already shown that the path does not exist.
    """
    if state.paths.status(normal_path(path, cwd)).exists is False:
        return None
    folder, _, name = path.rstrip("/").rpartition("/")
    # With the dots that lead it: ".env" of ".env.local", "app" of "app.test.ts"
    stem = name[: len(name) - len(name.lstrip("."))] + name.lstrip(".").partition(".")[0]
    later_paths = [call.path for call in later if call.path and normal_path(call.path, cwd) != normal_path(path, cwd)]
    folders_and_names = [(later_path.rpartition("/")[0], later_path.rpartition("/")[2]) for later_path in later_paths]
    if "." in name[1:] and any(later_name == name for _, later_name in folders_and_names):
        return name
    has_same_stem = any(
        later_folder == folder and (later_name == stem or later_name.startswith(f"{stem}."))
        for later_folder, later_name in folders_and_names
    )
    return f"{stem}*" if has_same_stem and len(stem) > _MIN_STEM else None


def listing_with(name: str, later: Sequence[LaterCall]) -> ToolCall | None:
    """Return the next listing of a tree that shows a file of this name, or None."""
    listings = (
        look.call for look in later[:_MAX_NEXT_CALLS] if look.is_listing and look.is_look and f"/{name}" in look.text
    )
    return next(listings, None)


def find_help_call(command: str, later: Sequence[LaterCall]) -> ToolCall | None:
    """Return the call right after the failure if it asks the same program for help or for its subcommands."""
    programs = {name for name, _ in Command.of(command).programs}
    for look in later[:1]:
        look_command = Command.of(look.words)
        subcommands = {subcommand for name, subcommand in look_command.programs if name in programs}
        if subcommands and (_ASKS_FOR_HELP.search(look_command.text) or _HELP_SUBCOMMANDS & subcommands):
            return look.call
    return None


def _stays_in_known_paths(look: LaterCall, missing: str, state: SessionState, cwd: str | None) -> bool:
    """Return whether a search could have been made before the failure: all of its paths were known by then."""
    words = (word for word in Command.of(look.words).words if is_path(word) and "/" in word and "*" not in word)
    names = [look.path] if look.path else list(itertools.islice(words, _MAX_NAMES))
    missing_path = normal_path(missing, cwd)
    return all(
        path == missing_path or _is_known(path, cwd, state) for path in (normal_path(name, cwd) for name in names)
    )


def _is_known(path: str, cwd: str | None, state: SessionState) -> bool:
    """Return whether a path had been shown, or contains the working folder."""
    return (
        f"{cwd or ''}/".startswith(f"{path.rstrip('/')}/")
        or bool(state.paths.status(path).exists)
        or state.has_shown(path)
    )


def _is_new(look: LaterCall, state: SessionState) -> bool:
    """Return whether a result has a file name that had not been shown, or no file names at all."""
    names = _FILE_NAME.findall(without_reminders(look.text))[:_MAX_NAMES]
    return not names or not all(map(state.has_shown, names))


def _lists_folder(look: LaterCall, folder: str, cwd: str | None) -> bool:
    """Return whether the call lists this folder, by its path or by its name."""
    names = [look.path or "", *(word for word in Command.of(look.words).words if is_path(word))]
    folders = {normal_path(name, cwd) for name in names if name} - {"/"}
    is_named = folder.rpartition("/")[2].lower() in re.split(r"[/\s]", look.words.lower())
    return look.is_listing and (is_named or normal_path(folder, cwd) in folders)


def _was_used(look: LaterCall, uses: Sequence[LaterCall], folder: str, cwd: str | None) -> bool:
    """Return whether a file that was listed was then opened in the folder: so the failed call had meant that file."""
    paths = [call.path for call in uses if call.path]
    paths_in_folder = [path for path in paths if normal_path(path.rpartition("/")[0], cwd) == normal_path(folder, cwd)]
    return any(path.rpartition("/")[2] in look.text for path in paths_in_folder)


MIN_SIMILARITY = 0.6
"""From here on two texts count as versions of one another."""

_MIN_LINE_SIMILARITY = 0.8
# Characters: of a text that may be part of another, of one that may be similar to another, and of what is compared.
_MIN_CONTAINED, _MIN_COMPARED, _MAX_COMPARED = 8, 20, 4000
# A shorter line of an edit, such as `else:`, has to be equal to a line of the file.
_MIN_LINE_CHARS = 6
# An edit is located by its longest lines; a file is searched for them up to a limit.
_NUM_ANCHOR_LINES, _MAX_LINES = 3, 3000
# "a-b == c" -> "a-b", "=", "=", "c"
_TOKEN = re.compile(r"[\w-]+|[^\w\s-]")
# "pytest --maxfail=1" -> "pytest", "--maxfail", "1"
_WORD = re.compile(r"[\w-]+")
# "user_id = userId" -> "user_id", "userId"
_NAME = re.compile(r"\w+")
# "userId", "HttpServer"; not "Http" or "HTTP"
_INNER_CAPITAL = re.compile(r"[a-z][A-Z]")
_MAX_NAMES_TEXT = 100_000
# "-n 50" has the number "50": a count that need not be known. Longer ones may be ids or ports.
_SHORT_NUMBER = re.compile(r"\d{1,4}")
# "src/app/cart.py" -> "src/app/", so that "cart.py" is left; not the slash of "src/"
_FOLDERS = re.compile(r"[^\s'\"=:]*/(?=[^\s/])")
# Programs whose first argument says what they do, so `git log` and `git push` have different purposes.
_WITH_SUBCOMMAND = word_set(
    "git gh glab docker podman kubectl helm terraform aws gcloud az npm yarn pnpm bun go cargo pip pip3 uv poetry mise"
    " brew apt apt-get systemctl make just task dotnet mvn gradle"
)


def command_of(call: ToolCall) -> str:
    return command_text(call.name, call.arguments)


def argument_text(call: ToolCall) -> str:
    """Return all arguments of a call as one text, without labels that only describe it to the user."""
    return " ".join(str(value) for key, value in call.arguments.items() if not is_label(call.name, key))


def similarity(text_a: str, text_b: str) -> float:
    """Return the share of tokens that two texts have in common, in any order (0 to 1).

    Unlike difflib's ratio it takes linear time for any texts.
    """
    tokens_a, tokens_b = (Counter(_TOKEN.findall(text[:_MAX_COMPARED])) for text in (text_a, text_b))
    return 2 * (tokens_a & tokens_b).total() / max(tokens_a.total() + tokens_b.total(), 1)


def call_similarity(call_a: ToolCall, call_b: ToolCall) -> float:
    """Return the similarity of two calls' arguments, in which a path counts by its file name only."""
    text_a, text_b = (_FOLDERS.sub("", argument_text(call)[:_MAX_COMPARED]) for call in (call_a, call_b))
    return similarity(text_a, text_b)


def have_same_purpose(failed: ToolCall, later: ToolCall, error: str) -> bool:
    """Return whether a later command does what the failed one was meant to do.

    It runs the same programs, and leaves out nothing but options, short words, and words of the error message. Calls of
    other tools than the shell always do.
    """
    failed_command, later_command = Command.of(command_of(failed)), Command.of(command_of(later))
    if _subcommands(failed_command) != _subcommands(later_command):
        return False
    failed_words, later_words = (
        {*_WORD.findall(_FOLDERS.sub("", command.text))} for command in (failed_command, later_command)
    )
    return all(word in error or word.startswith("-") or len(word) < 3 for word in failed_words - later_words)


def _subcommands(command: Command) -> set[tuple[str, str]]:
    """Return the programs of a command with their subcommands. `cd` only changes where they run."""
    programs = ((name, first if name in _WITH_SUBCOMMAND else "") for name, first in command.programs)
    return {program for program in programs if program[0] != "cd"}


def new_paths_inside(failed_command: str, later_command: str) -> list[str] | None:
    """Return the new paths of a later command that are inside paths of the failed one.

    Parents of the failed command's paths need no lookup, and are left out. None if the two commands differ in anything
    but their paths, or if a new path is elsewhere.
    """
    failed_words, later_words = (set(text.split()) for text in (failed_command, later_command))
    is_extension = failed_words <= later_words or later_words <= failed_words
    if is_extension or not all("/" in word for word in failed_words ^ later_words):
        return None
    old_paths = {_bare_path(word) for word in failed_words - later_words}
    new_paths = {_bare_path(word) for word in later_words - failed_words}
    inside = [word for word in new_paths if not any(f"{path}/".startswith(f"{word}/") for path in old_paths)]
    return inside if all(any(word.startswith(f"{path}/") for path in old_paths) for word in inside) else None


def _bare_path(word: str) -> str:
    """Return a path without a leading `./`, and without Go's `...` for everything below it: `./cmd/...` -> `cmd`."""
    return word.removeprefix("./").removesuffix("...").rstrip("/")


def edit_similarity(edit_a: Operation, edit_b: Operation) -> float:
    """Return how similar two edits of one file are (1 to 3); 0 if neither their old nor their new texts overlap."""
    if not isinstance(edit_a, Replace) or not isinstance(edit_b, Replace) or edit_a.path != edit_b.path:
        return 0.0
    if not _overlap(edit_a.old, edit_b.old) and not _overlap(edit_a.new, edit_b.new):
        return 0.0
    return 1.0 + similarity(edit_a.old, edit_b.old) + similarity(edit_a.new, edit_b.new)


def replace_same_text(failed: Operation, later: Operation) -> bool:
    """Return whether two edits replace the same text, or the later one replaces what the failed one would have written.

    The replaced texts are the same if they share a line, overlap, or are similar.
    """
    if not isinstance(failed, Replace) or not isinstance(later, Replace):
        return False
    # A short old text overlaps by chance, unless the later edit writes the same and merely quotes more of the line.
    if failed.new == later.new and failed.old.strip() and failed.old in later.old:
        return True
    failed_lines, later_lines = ({line.strip() for line in edit.old.split("\n")} - {""} for edit in (failed, later))
    best_similarity = max(similarity(failed.old, later.old), similarity(failed.new, later.old))
    return bool(failed_lines & later_lines) or _overlap(failed.old, later.old) or best_similarity >= MIN_SIMILARITY


def _overlap(text_a: str, text_b: str) -> bool:
    """Return whether one text is in the other or similar to it. Very short texts have to be equal."""
    shorter, longer = sorted((text_a.strip(), text_b.strip()), key=len)
    if len(shorter) < _MIN_CONTAINED:
        return bool(shorter) and shorter == longer
    return shorter in longer or (len(shorter) >= _MIN_COMPARED and similarity(text_a, text_b) >= MIN_SIMILARITY)


def lines_about(edits: Iterable[Operation], lines: list[str]) -> list[str]:
    """Return those lines of a file that edits are about.

    An edit is located by its longest lines. Where one of them matches, as many lines count as the edit replaces. An
    edit that replaces no text, such as a write of the whole file, is about all lines.
    """
    lines, line_numbers = lines[:_MAX_LINES], set[int]()
    for edit in edits:
        edit_lines = edit.old.split("\n") if isinstance(edit, Replace) else []
        if not any(line.strip() for line in edit_lines):
            return lines
        longest_first = sorted(range(len(edit_lines)), key=lambda number: -len(edit_lines[number].strip()))
        for number in longest_first[:_NUM_ANCHOR_LINES]:
            for position in _matching_positions(edit_lines[number].strip(), lines):
                line_numbers.update(range(position - number, position - number + len(edit_lines)))
    return [lines[number] for number in sorted(line_numbers) if 0 <= number < len(lines)]


def _matching_positions(edit_line: str, lines: list[str]) -> list[int]:
    """Return the indices of the lines that contain a line of an edit or are similar to it."""
    if not edit_line or (len(edit_line) < _MIN_LINE_CHARS and not any(edit_line == line.strip() for line in lines)):
        return []
    return [
        index
        for index, line in enumerate(lines)
        if edit_line in line or similarity(line, edit_line) >= _MIN_LINE_SIMILARITY
    ]


def names_in(text: str) -> set[str]:
    """Return the identifiers in a text: words with an underscore or an inner capital letter."""
    return {word for word in _NAME.findall(text[:_MAX_NAMES_TEXT]) if "_" in word or _INNER_CAPITAL.search(word)}


def is_name(word: str) -> bool:
    """Return whether a word of a command is a path, a version or another name that one has to know."""
    if word.startswith(("-", "/dev/")) or _SHORT_NUMBER.fullmatch(word):
        return False
    return ("/" in word and is_path(word)) or any(letter.isdigit() for letter in word)


def plain_words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation and single letters."""
    return [word for word in "".join(char if char.isalnum() else " " for char in text.lower()).split() if len(word) > 1]
