"""What a session did after a call that failed: the calls that worked, and what each of them looks at or for."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from composer_replication.actions.shell.command import Command
from composer_replication.actions.shell.effects import only_reads
from composer_replication.actions.shown.views import without_reminders
from composer_replication.actions.tools import (
    LINE_NUMBER,
    LISTS,
    SEARCHES,
    channel_of,
    command_text,
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
