"""A failure in the course of its session: known before, brought about by somebody else, or a look before writing.

The rules say what a message means; here stands what the calls before it, and the file that is written after it, say.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

from composer_replication.actions.paths import normal_path
from composer_replication.actions.shell.command import Command, is_path
from composer_replication.actions.tools import channel_of, is_edit, path_argument, plain_name, word_set
from composer_replication.sites.again import KnownFailures
from composer_replication.sites.calls import CallsSoFar, command_of
from composer_replication.sites.gates import WENT_ROUND, as_convention, gate_of, goes_round
from composer_replication.sites.taxonomy import Verdict
from composer_replication.types import Blame, Conversation, ToolCall, ToolResult

_SURE = 0.7
_WRITES_NEW = word_set("write write_file create create_file write_to_file")
# What changes a file that the command names. Commits and runs do not, though a hook of theirs may.
_CHANGES_FILES = re.compile(
    r"\b(?:sed|perl|awk)\b.{0,80}\s-\w{0,4}i|--(?:in-place|write|fix)\b|\s-w\b|\b(?:tee|mv|cp|patch|python3?|node|ruby)\b"
    r"|(?<![&2=-])>(?![&=]|\s*/dev/)"
)
# A formatter changes files that nobody named; these change what the model asked for.
_MOVES_THE_TREE = frozenset(
    ("git", subcommand)
    for subcommand in word_set("checkout restore switch stash reset rebase merge pull cherry-pick revert apply am")
)
_REWRITES_HISTORY = re.compile(r"\bgit\b.{0,60}\b(?:rebase|commit\b.{0,80}--amend|reset|filter-branch)\b")
_PUSH_REFUSED = re.compile(r"\[rejected\]|non-fast-forward|failed to push some refs|tip of your current")
_PUSHES = re.compile(r"\bgit\b.{0,40}\bpush\b")
_FORCED = re.compile(r"\s(?:-f|--force|--force-with-lease)\b|\s\+\w")
# `create a/b.py`, `new file: b.py`, `b.py (new)`
_PLANNED = re.compile(
    r"\b(?:creat(?:e|ing)|new file)\b[ :`'\"*]{1,4}(?:(?:a|the|new|file) ){0,3}[`'\"*]{0,3}([\w./-]{1,200}\.\w{1,10})\b"
    r"|\b([\w./-]{1,200}\.\w{1,10})[`'\"*]{0,3} \((?:new|create|to be created)\b",
    re.IGNORECASE,
)
_MAX_SAID = 20_000


class Course:
    """Grows with the session: `at` and `heard` as turns come, `judge` and `counted` with every result."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation, self._cwd = conversation, conversation.cwd
        self._calls = CallsSoFar()
        self._known = KnownFailures(self._calls)
        self.counted = self._known.counted
        self._gates: dict[str, int] = {}  # what a hook refused -> since when that is known
        self._touched: dict[str, int] = {}  # a file -> the call that read or wrote it last
        self._said: list[str] = []  # not looked through yet
        self._planned: set[str] = set()
        self._written: dict[str, int] | None = None

    def at(self, turn: int, text: str, calls: tuple[ToolCall, ...]) -> None:
        """Turn number `turn`, with what it says and asks for."""
        self._calls.at(turn, calls)
        if text:
            self._said.append(text)

    def heard(self, text: str) -> None:
        """Somebody but the model spoke."""
        if text.strip():
            self._calls.heard_at = self._calls.turn

    def judge(self, call: ToolCall, result: ToolResult, verdict: Verdict) -> Verdict:
        """The verdict on the next result in the order of the session, as far as its course changes it."""
        self._calls.number += 1
        path = path_argument(call.arguments) if channel_of(call.name) == "file" else None
        name = normal_path(path, self._cwd) if path else ""
        if verdict.is_failure:
            changed = next(self._second_thoughts(call, result, verdict, name), verdict)
            self._known.note(call, result, verdict, name)
            return changed
        self._known.forget(call, name)
        self._calls.add_worked(call)
        if name:
            self._touched[name] = self._calls.number
        return verdict

    def _second_thoughts(self, call: ToolCall, result: ToolResult, verdict: Verdict, name: str) -> Iterator[Verdict]:
        command, kind, blame = command_of(call), verdict.kind, verdict.blame
        gate = gate_of(verdict, command, result.text)
        if gate and self._gates.setdefault(gate, self._calls.turn) < self._calls.made(call):
            yield as_convention(verdict)
        if goes_round(verdict, command):
            yield as_convention(verdict, WENT_ROUND)
        if kind in ("file_not_found", "shell_path_missing") and self._looks_before_writing(call, result, verdict, name):
            yield _others(verdict, "task", "a look at a file that is to be written")
        for reason in self._known.reasons(call, result, verdict, name):
            yield _models(verdict, reason)
        if kind == "edit_stale" and name in self._touched and not self._changed_it_itself(name):
            yield _others(verdict, "unknown", "somebody else, or a formatter, had changed the file")
        if kind == "edit_no_match" and blame == "unknown" and name in self._touched and self._changed_it_itself(name):
            yield _models(verdict, "a command of its own had changed the file since it was read")
        if kind == "git_state" and blame == "unknown" and self._pushes_rewritten(result, command):
            yield _models(verdict, "the session itself had rewritten what was pushed")
        if kind == "usage_error" and blame == "model" and self._is_about(command):
            yield _others(verdict, "unknown", "the project may be this program's")

    def _looks_before_writing(self, call: ToolCall, result: ToolResult, verdict: Verdict, name: str) -> bool:
        if is_edit(call.name) and call.arguments.get("command") != "view":
            return False
        if self._written is None:
            self._written = _written_files(self._conversation)
        for text in self._said:
            planned_paths = (first or second for first, second in _PLANNED.findall(text[:_MAX_SAID]))
            self._planned.update(path.rpartition("/")[2] for path in planned_paths)
        self._said.clear()
        message = result.text[slice(*verdict.span)]
        typed = (word for word in command_of(call).words if word in message and is_path(word))
        names = [name] if name else [normal_path(word, self._cwd) for word in typed]
        call_turn = self._calls.made(call)
        return any(
            path.rpartition("/")[2] in self._planned or self._written.get(path, -1) > call_turn for path in names
        )

    def _changed_it_itself(self, name: str) -> bool:
        """Whether a command of the model's had changed the file since it was last read or written."""
        commands = map(command_of, self._calls.worked_since(self._touched[name]))
        file = name.rpartition("/")[2]
        return any(
            (file in command.text and _CHANGES_FILES.search(command.text))
            or not _MOVES_THE_TREE.isdisjoint(command.programs)
            for command in commands
            if command.text
        )

    def _pushes_rewritten(self, result: ToolResult, command: Command) -> bool:
        """Whether a push was refused because the session had changed commits that were there, and did not say so."""
        if _PUSH_REFUSED.search(result.text) is None or _FORCED.search(command.text) is not None:
            return False
        commands = (command_of(call).text for call in self._calls.worked_since(0))
        since = itertools.takewhile(lambda text: _PUSHES.search(text) is None, commands)
        return any(_REWRITES_HISTORY.search(text) is not None for text in since)

    def _is_about(self, command: Command) -> bool:
        folders = frozenset((self._cwd or "").lower().split("/"))
        return any(name in folders for name, _ in command.programs)


def _models(verdict: Verdict, reason: str) -> Verdict:
    return replace(verdict, blame="model", confidence=max(verdict.confidence, _SURE), reason=reason)


def _others(verdict: Verdict, blame: Blame, reason: str) -> Verdict:
    return replace(verdict, blame=blame, reason=reason)


def _written_files(conversation: Conversation) -> dict[str, int]:
    """Files that a tool wrote as a whole, with the turn of the last time."""
    return {
        normal_path(path, conversation.cwd): number
        for number, turn in enumerate(conversation.turns)
        for call in turn.calls
        if (plain_name(call.name) in _WRITES_NEW or call.arguments.get("command") == "create")
        and (path := path_argument(call.arguments))
    }
