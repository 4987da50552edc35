"""Find the successful calls after a failed one, and decide how they relate to it.

- `LaterCalls` indexes a conversation and returns the successful calls after an error site.
- `find_search` and `guess_filename_to_search` find or build the search that would have found a missing path.
- `token_similarity` and the functions after it compare two calls or two edits.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from composer_replication.sites.actions.edits import Operation, Replace
from composer_replication.sites.actions.known_paths import remove_reminders
from composer_replication.sites.actions.session_state import SessionState
from composer_replication.sites.actions.shell_command import Command, is_path, is_read_only_command
from composer_replication.sites.actions.tools import (
    LINE_NUMBER_PREFIX,
    LIST_TOOLS,
    SEARCH_TOOLS,
    command_text,
    is_descriptive_parameter,
    is_read_only_tool_call,
    normal_path,
    path_argument,
    plain_name,
    tool_channel,
    word_set,
)
from composer_replication.sites.find import INTERRUPTED
from composer_replication.types import Conversation, ErrorSite, ToolCall

# Later calls are unlikely to be a reaction to the failure.
_MAX_LATER = 12
# Number of characters of a result or message that are searched for line numbers.
_MAX_TEXT = 300_000
# How read tools and searches number the lines of one file: "   12→def f():" and "12:def f():" -> "12"; not "12 apples"
_LINE_NUMBER_SHOWN = re.compile(r"^[^\S\n]*(\d{1,6})(?:→|\t|[:-])", re.MULTILINE)
# Tools that ask the user a question. Calls after a question depend on the answer.
_QUESTION_TOOLS = word_set("askuserquestion ask_user ask_user_question ask_followup_question")
_NOTHING_FOUND = ("No files found", "No matches found", "No files matched")
_LISTING_PROGRAMS = word_set("ls find fd tree")
_GIT_LS_FILES = ("git", "ls-files")
_SEARCHING_PROGRAMS = word_set("grep rg ag locate")


@dataclass(frozen=True, slots=True)
class LaterCall:
    """A successful call after the failure."""

    call: ToolCall
    text: str

    @property
    def path(self) -> str | None:
        return path_argument(self.call.arguments) if tool_channel(self.call.name) == "file" else None

    @property
    def words(self) -> str:
        """The shell command, or all string arguments of another tool."""
        command = command_text(self.call.name, self.call.arguments)
        return command or " ".join(value for value in self.call.arguments.values() if isinstance(value, str))

    @property
    def lines(self) -> list[str]:
        """The lines of the result, without line numbers and without the harness's reminders."""
        return [LINE_NUMBER_PREFIX.sub("", line) for line in remove_reminders(self.text).splitlines()]

    @property
    def is_lookup(self) -> bool:
        """Whether the call only reads, and its result is not empty."""
        command = self._command
        is_read_only = (
            is_read_only_command(command.text)
            or command.is_display_only
            or is_read_only_tool_call(self.call.name, self.call.arguments)
        )
        return is_read_only and bool(self.text.strip())

    @property
    def found_something(self) -> bool:
        """Whether the call is a search or a listing that found something. Reading a file is neither."""
        programs = {name for name, _ in self._command.programs} & _SEARCHING_PROGRAMS
        searches = self.is_listing or bool(programs) or plain_name(self.call.name) in SEARCH_TOOLS
        return searches and self.is_lookup and not self.found_nothing

    @property
    def found_nothing(self) -> bool:
        """Whether the result says that nothing matched."""
        return self.text.strip().startswith(_NOTHING_FOUND)

    @property
    def is_listing(self) -> bool:
        """Whether the call lists the content of folders."""
        programs = self._command.programs
        by_program = any(name in _LISTING_PROGRAMS or (name, first) == _GIT_LS_FILES for name, first in programs)
        return plain_name(self.call.name) in LIST_TOOLS or by_program

    @property
    def _command(self) -> Command:
        return Command.of(command_text(self.call.name, self.call.arguments))


class LaterCalls:
    """The calls in a conversation, with queries about what happened before and after an error site.

    Some logs use a call id more than once. Their results cannot be assigned, so such calls are excluded.
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

    def has_succeeded(self, call: ToolCall) -> bool:
        """Return whether a call has a result that neither the log nor a rule marks as a failure.

        The answer is False for a call whose id is not unique.
        """
        result = self._results.get(call.id)
        if result is None or call.id in self._reused_ids or call.id in self._failures:
            return False
        return result.is_error is not True

    def _failed_only_at_task(self, call: ToolCall) -> bool:
        """Return whether a call ran as intended but its task failed, such as a failing test."""
        failure = self._failures.get(call.id)
        return failure is not None and failure.blame == "task" and call.id not in self._reused_ids

    def has_unique_id(self, call: ToolCall) -> bool:
        """Return whether no other call in the conversation has the same id."""
        return call.id not in self._reused_ids

    def result_text(self, call: ToolCall) -> str:
        """Return the text of a call's result, or "" without a result."""
        return self._results[call.id].text if call.id in self._results else ""

    def turn_number(self, turn_id: str) -> int:
        """Return the index of an assistant turn among the conversation's assistant turns."""
        return self._turn_numbers[turn_id]

    def failed_siblings(self, site: ErrorSite) -> list[ToolCall]:
        """Return the other failed calls in the site's turn."""
        turn_index = self._positions.get(site.turn_id)
        calls = () if turn_index is None else self._conversation.turns[turn_index].calls
        return [call for call in calls if call.id != site.call_id and call.id in self._failures]

    def was_mentioned_by_user(self, site: ErrorSite, word: str) -> bool:
        """Return whether a message from the user contains the word before the site's turn.

        Answers to the agent's questions are tool results and do not count.
        """
        turns = self._conversation.turns[: self._positions.get(site.turn_id, 0)]
        return any(word in turn.text for turn in turns if turn.role == "user" and turn.origin == "human")

    def has_shown_line_numbers(self, site: ErrorSite, path: str, lines: range) -> bool:
        """Return whether the number of one of these lines was shown before the site, as in `12→` or `a.py:12`."""
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

    def successful_calls_after(self, site: ErrorSite, *, with_failed_work: bool = False) -> list[LaterCall]:
        """Return the successful calls after the site's turn, up to the next exchange with the user.

        Such an exchange is a message from the user or a question to the user. Neither the message that is the site's
        own evidence nor the note of an interruption ends the search. With `with_failed_work`, the result includes calls
        that ran as intended but whose task failed, such as tests or a build.
        """
        later_calls: list[LaterCall] = []
        turns = self._conversation.turns
        for turn in itertools.islice(turns, self._positions.get(site.turn_id, len(turns)) + 1, None):
            is_user_message = turn.role == "user" and turn.origin == "human" and turn.id != site.result_turn_id
            if is_user_message and not turn.text.startswith(INTERRUPTED):
                break
            successful_calls = [
                call
                for call in turn.calls
                if self.has_succeeded(call) or (with_failed_work and self._failed_only_at_task(call))
            ]
            later_calls += [LaterCall(call, self.result_text(call)) for call in successful_calls]
            if len(later_calls) >= _MAX_LATER or any(plain_name(call.name) in _QUESTION_TOOLS for call in turn.calls):
                break
        return later_calls[:_MAX_LATER]


# Number of calls after the failure in which a search is looked for, and number of calls after a listing that may open a
# listed file.
_MAX_NEXT_CALLS, _MAX_USES = 3, 2
# Each name is searched for in everything that was shown, so only the first names are checked.
_MAX_NAMES = 20
# A shorter stem or pattern, such as "a" in "a.py", occurs in many words by chance.
_MIN_STEM_CHARS = 3
# The evidence that a path is missing: a listing of its folder, or a glob, did not contain it.
_KNOWN_MISSING = ("not_listed", "not_globbed")
# "src/a.py", "setup.py" and "src/app"; not "setup"
_FILE_NAME = re.compile(r"[\w@+-][\w./@+-]*\.\w+|[\w@+.-]+/[\w./@+-]+")


def find_search(
    path: str, failed: ToolCall, later: Sequence[LaterCall], state: SessionState, cwd: str | None
) -> LaterCall | None:
    """Return the first successful search for the missing path after the failure, or None.

    A call is a search for that path if it searches for the failed call's pattern elsewhere, if it contains the file's
    name, or if it lists the path's folder and a listed file is opened next. It counts only if the model could have made
    it before the failure, and if the calls before it only read.
    """
    folder, _, name = path.rstrip("/").rpartition("/")
    stem, pattern = name.lstrip(".").partition(".")[0].lower(), failed.arguments.get("pattern")
    # If a listing has already shown that the path is missing, another listing would not have helped the model.
    is_known_missing = state.paths.status(normal_path(path, cwd)).why in _KNOWN_MISSING
    is_text_search = plain_name(failed.name) in SEARCH_TOOLS
    for index, lookup in enumerate(itertools.takewhile(lambda call: call.is_lookup, later[:_MAX_NEXT_CALLS])):
        words = lookup.words.lower()
        if lookup.found_nothing and len(stem) >= _MIN_STEM_CHARS and stem in words:
            return None  # the file exists nowhere: its name was invented, and no search would have found it
        if not lookup.found_something or not _uses_known_paths_only(lookup, path, state, cwd):
            continue
        if isinstance(pattern, str) and len(pattern) >= _MIN_STEM_CHARS and pattern.lower() in words:
            return lookup
        if not _shows_new_files(lookup, state):
            continue
        if len(stem) >= _MIN_STEM_CHARS and stem in words:
            return lookup
        next_calls = later[index + 1 : index + 1 + _MAX_USES]
        if (
            not is_text_search
            and not is_known_missing
            and _lists_folder(lookup, folder, cwd)
            and _was_listed_file_opened(lookup, next_calls, folder, cwd)
        ):
            return lookup
    return None


def guess_filename_to_search(path: str, later: Sequence[LaterCall], state: SessionState, cwd: str | None) -> str | None:
    """Return the name of a missing file, or its stem with `*`, if a file with that name was opened afterwards.

    Return None if no such file was opened, or if the session had already shown that the path does not exist.
    """
    if state.paths.status(normal_path(path, cwd)).exists is False:
        return None
    folder, _, name = path.rstrip("/").rpartition("/")
    # The stem includes leading dots: ".env" for ".env.local", "app" for "app.test.ts"
    stem = name[: len(name) - len(name.lstrip("."))] + name.lstrip(".").partition(".")[0]
    later_paths = [call.path for call in later if call.path and normal_path(call.path, cwd) != normal_path(path, cwd)]
    folders_and_names = [(later_path.rpartition("/")[0], later_path.rpartition("/")[2]) for later_path in later_paths]
    if "." in name[1:] and any(later_name == name for _, later_name in folders_and_names):
        return name
    has_same_stem = any(
        later_folder == folder and (later_name == stem or later_name.startswith(f"{stem}."))
        for later_folder, later_name in folders_and_names
    )
    return f"{stem}*" if has_same_stem and len(stem) > _MIN_STEM_CHARS else None


def _uses_known_paths_only(look: LaterCall, missing: str, state: SessionState, cwd: str | None) -> bool:
    """Return whether a search could have been made before the failure, because all its paths were already known."""
    words = (word for word in Command.of(look.words).words if is_path(word) and "/" in word and "*" not in word)
    names = [look.path] if look.path else list(itertools.islice(words, _MAX_NAMES))
    missing_path = normal_path(missing, cwd)
    return all(
        path == missing_path or _is_known(path, cwd, state) for path in (normal_path(name, cwd) for name in names)
    )


def _is_known(path: str, cwd: str | None, state: SessionState) -> bool:
    """Return whether a path had been shown, or is a parent of the working folder."""
    return (
        f"{cwd or ''}/".startswith(f"{path.rstrip('/')}/")
        or bool(state.paths.status(path).exists)
        or state.has_shown(path)
    )


def _shows_new_files(look: LaterCall, state: SessionState) -> bool:
    """Return whether a result contains a file name that had not been shown, or no file names at all."""
    names = _FILE_NAME.findall(remove_reminders(look.text))[:_MAX_NAMES]
    return not names or not all(map(state.has_shown, names))


def _lists_folder(look: LaterCall, folder: str, cwd: str | None) -> bool:
    """Return whether the call lists this folder, given by its path or by its name."""
    names = [look.path or "", *(word for word in Command.of(look.words).words if is_path(word))]
    folders = {normal_path(name, cwd) for name in names if name} - {"/"}
    is_named = folder.rpartition("/")[2].lower() in re.split(r"[/\s]", look.words.lower())
    return look.is_listing and (is_named or normal_path(folder, cwd) in folders)


def _was_listed_file_opened(look: LaterCall, uses: Sequence[LaterCall], folder: str, cwd: str | None) -> bool:
    """Return whether a listed file in the folder was opened next: the failed call had meant that file."""
    paths = [call.path for call in uses if call.path]
    paths_in_folder = [path for path in paths if normal_path(path.rpartition("/")[0], cwd) == normal_path(folder, cwd)]
    return any(path.rpartition("/")[2] in look.text for path in paths_in_folder)


MIN_SIMILARITY = 0.6
"""Texts with at least this token similarity count as versions of each other."""

# In characters: the minimum length of a text that may be contained in another, the minimum length of a text that may be
# similar to another, and the maximum length that is compared.
_MIN_CONTAINED, _MIN_COMPARED, _MAX_COMPARED = 8, 20, 4000
# "a-b == c" -> "a-b", "=", "=", "c"
_TOKEN = re.compile(r"[\w-]+|[^\w\s-]")
# "pytest --maxfail=1" -> "pytest", "--maxfail", "1"
_WORD = re.compile(r"[\w-]+")
# "src/app/cart.py" -> "src/app/", so that "cart.py" is left; not the slash of "src/"
_FOLDERS = re.compile(r"[^\s'\"=:]*/(?=[^\s/])")
# Programs whose first argument is a subcommand, so that `git log` and `git push` have different purposes.
_PROGRAMS_WITH_SUBCOMMANDS = word_set(
    "git gh glab docker podman kubectl helm terraform aws gcloud az npm yarn pnpm bun go cargo pip pip3 uv poetry mise"
    " brew apt apt-get systemctl make just task dotnet mvn gradle"
)


def call_command(call: ToolCall) -> str:
    return command_text(call.name, call.arguments)


def all_argument_text(call: ToolCall) -> str:
    """Return all arguments of a call as one text, without those that only describe it to the user."""
    return " ".join(str(value) for key, value in call.arguments.items() if not is_descriptive_parameter(call.name, key))


def token_similarity(text_a: str, text_b: str) -> float:
    """Return the fraction of tokens that two texts have in common, in any order (0 to 1).

    Unlike `SequenceMatcher.ratio` in difflib, it always takes linear time.
    """
    tokens_a, tokens_b = (Counter(_TOKEN.findall(text[:_MAX_COMPARED])) for text in (text_a, text_b))
    return 2 * (tokens_a & tokens_b).total() / max(tokens_a.total() + tokens_b.total(), 1)


def call_similarity(call_a: ToolCall, call_b: ToolCall) -> float:
    """Return the similarity of the arguments of two calls. Folders in paths are ignored."""
    text_a, text_b = (_FOLDERS.sub("", all_argument_text(call)[:_MAX_COMPARED]) for call in (call_a, call_b))
    return token_similarity(text_a, text_b)


def have_same_purpose(failed: ToolCall, later: ToolCall, error: str) -> bool:
    """Return whether a later command does what the failed one was meant to do.

    Such a command runs the same programs, and omits only options, short words, and words that occur in the error
    message. Calls to other tools always have the same purpose.
    """
    failed_command, later_command = Command.of(call_command(failed)), Command.of(call_command(later))
    if _programs_with_subcommands(failed_command) != _programs_with_subcommands(later_command):
        return False
    failed_words, later_words = (
        {*_WORD.findall(_FOLDERS.sub("", command.text))} for command in (failed_command, later_command)
    )
    return all(word in error or word.startswith("-") or len(word) < 3 for word in failed_words - later_words)


def _programs_with_subcommands(command: Command) -> set[tuple[str, str]]:
    """Return the programs in a command with their subcommands, without `cd`, which only changes where they run."""
    programs = ((name, first if name in _PROGRAMS_WITH_SUBCOMMANDS else "") for name, first in command.programs)
    return {program for program in programs if program[0] != "cd"}


def edit_similarity(edit_a: Operation, edit_b: Operation) -> float:
    """Return the similarity of two edits of the same file (1 to 3).

    The result is 0 if neither their old nor their new texts overlap.
    """
    if not isinstance(edit_a, Replace) or not isinstance(edit_b, Replace) or edit_a.path != edit_b.path:
        return 0.0
    if not _texts_overlap(edit_a.old, edit_b.old) and not _texts_overlap(edit_a.new, edit_b.new):
        return 0.0
    return 1.0 + token_similarity(edit_a.old, edit_b.old) + token_similarity(edit_a.new, edit_b.new)


def replace_same_text(failed: Operation, later: Operation) -> bool:
    """Return whether two edits replace the same text, or the later one replaces what the failed one would have written.

    Replaced texts count as the same if they have a line in common, overlap, or are similar.
    """
    if not isinstance(failed, Replace) or not isinstance(later, Replace):
        return False
    # A short old text may overlap by chance, unless the later edit writes the same text and merely quotes more of the
    # line.
    if failed.new == later.new and failed.old.strip() and failed.old in later.old:
        return True
    failed_lines, later_lines = ({line.strip() for line in edit.old.split("\n")} - {""} for edit in (failed, later))
    best_similarity = max(token_similarity(failed.old, later.old), token_similarity(failed.new, later.old))
    return (
        bool(failed_lines & later_lines) or _texts_overlap(failed.old, later.old) or best_similarity >= MIN_SIMILARITY
    )


def _texts_overlap(text_a: str, text_b: str) -> bool:
    """Return whether one text contains the other or is similar to it. Very short texts must be equal."""
    shorter, longer = sorted((text_a.strip(), text_b.strip()), key=len)
    if len(shorter) < _MIN_CONTAINED:
        return bool(shorter) and shorter == longer
    return shorter in longer or (len(shorter) >= _MIN_COMPARED and token_similarity(text_a, text_b) >= MIN_SIMILARITY)
