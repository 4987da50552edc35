"""A failure in the course of its session: known before, brought about by somebody else, or a look before writing.

The rules say what a message means; here stands what the calls before it, and the file that is written after it, say.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from composer_replication.actions.paths import normal_path
from composer_replication.actions.shell.command import Command
from composer_replication.actions.tools import (
    channel_of,
    command_text,
    is_edit,
    only_looks,
    path_argument,
    plain_name,
    word_set,
)
from composer_replication.canonical_json import encode
from composer_replication.errors import InputError
from composer_replication.sites.gates import WENT_ROUND, as_convention, gate_of, goes_round
from composer_replication.sites.taxonomy import Verdict
from composer_replication.types import Blame, Conversation, ErrorSite, ToolCall, ToolResult

_SAID_ABOUT = frozenset({"description", "timeout", "run_in_background", "explanation"})
_WORTH_ANOTHER_TRY = frozenset(
    ["network", "timeout", "os_permission", "test_failure", "lint_or_typecheck", "compile_error", "python_exception"]
)
_REFUSALS = frozenset(["permission_denied", "hook_blocked", "sibling_cancelled"])
_SURE = 0.7
# These ask again until something has happened, or run what is being worked on.
_ASKS_ON = re.compile(
    r"\b(?:sleep|watch|wait|checks?|status|logs?|ps|pgrep|curl|run|tests?|lint|build|make|compile|vet|fmt|go|cargo|npm"
    r"|python3?|node|pytest)\b"
)
_NOT_APPLIED = re.compile(r"Your proposed edit has introduced")  # a linter's word, but the tool refused the edit
_WRITES_NEW = word_set("write write_file create create_file write_to_file")
# A formatter changes files that nobody named; these change what the model asked for.
_MOVES_THE_TREE = frozenset(
    ("git", each)
    for each in word_set("checkout restore switch stash reset rebase merge pull cherry-pick revert apply am")
)
_REWRITES_HISTORY = re.compile(r"\bgit\b.{0,60}\b(?:rebase|commit\b.{0,80}--amend|reset|filter-branch)\b")
_PUSH_REFUSED = re.compile(r"\[rejected\]|non-fast-forward|failed to push some refs|tip of your current")
_PUSHES = re.compile(r"\bgit\b.{0,40}\bpush\b")
_FORCED = re.compile(r"\s(?:-f|--force|--force-with-lease)\b|\s\+\w")
_WRITES = re.compile(r"\bsed\b.{0,80}\s-\w{0,4}i|\btee\b|(?<![&2=-])>(?![&=]|\s*/dev/)")
# `create a/b.py`, `new file: b.py`, `b.py (new)`
_PLANNED = re.compile(
    r"\b(?:creat(?:e|ing)|new file)\b[ :`'\"*]{1,4}(?:(?:a|the|new|file) ){0,3}[`'\"*]{0,3}([\w./-]{1,200}\.\w{1,10})\b"
    r"|\b([\w./-]{1,200}\.\w{1,10})[`'\"*]{0,3} \((?:new|create|to be created)\b",
    re.IGNORECASE,
)
_MAX_SAID = 20_000


@dataclass(frozen=True, slots=True)
class _Failure:
    """The last failure of a call: its site, the number of the call, and the turn since which it is known."""

    site: ErrorSite
    number: int
    known_at: int


class Course:
    """Grows with the session: `at` and `heard` as turns come, `judge` and `keep` with every result."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation, self._cwd = conversation, conversation.cwd
        self._turn = self._number = 0  # of the turn, and of the call
        self._heard_at = -1  # the last turn in which somebody but the model spoke
        self._made_at: dict[str, int] = {}
        self._failed: dict[bytes, _Failure] = {}
        self._gates: dict[str, int] = {}  # what a hook refused -> since when that is known
        self._missing: dict[str, int] = {}  # a path that was not there -> since when that is known
        self._faults: list[tuple[tuple[str, str], int, int]] = []  # of a tool: which, at which call, known since
        self._touched: dict[str, int] = {}  # a file -> the call that read or wrote it last
        self._worked: list[tuple[int, ToolCall]] = []  # calls that did; looked at when it matters
        self._said: list[str] = []  # not looked through yet
        self._planned: set[str] = set()
        self._written: dict[str, int] | None = None

    def at(self, turn: int, text: str, calls: tuple[ToolCall, ...]) -> None:
        """Turn number `turn`, with what it says and asks for."""
        self._turn = turn
        if text:
            self._said.append(text)
        for call in calls:
            self._made_at[call.id] = turn

    def heard(self, text: str) -> None:
        """Somebody but the model spoke."""
        self._heard_at = self._turn if text.strip() else self._heard_at

    def judge(self, call: ToolCall, result: ToolResult, verdict: Verdict) -> Verdict:
        """The verdict on the next result in the order of the session, as far as its course changes it."""
        self._number += 1
        path = path_argument(call.arguments) if channel_of(call.name) == "file" else None
        name = normal_path(path, self._cwd) if path else ""
        if not verdict.is_failure:
            self._note(call, name)
            return verdict
        changed = next(self._second_thoughts(call, result, verdict, name), verdict)
        if name and verdict.kind == "file_not_found":
            self._missing.setdefault(name, self._turn)
        fault = _fault(call, result, verdict)
        self._faults += [(fault, self._number, self._turn)] if fault is not None else []
        return changed

    def keep(self, site: ErrorSite, call: ToolCall) -> ErrorSite:
        """A failure, with its repetitions counted: calls made when it was known, not parallel ones."""
        key = _key(call)
        earlier = self._failed.get(key)
        if earlier is not None and earlier.site.kind == site.kind and earlier.known_at < self._made(call):
            between = self._number - earlier.number - 1
            site = replace(site, repeats=earlier.site.repeats + 1, repeat_of=earlier.site.id, between=between)
        self._failed[key] = _Failure(site, self._number, self._turn)
        return site

    def _note(self, call: ToolCall, name: str) -> None:
        """A call that worked, and the file it was about."""
        if self._failed:
            self._failed.pop(_key(call), None)
        if name:
            self._touched[name] = self._number
            self._missing.pop(name, None)
        self._worked.append((self._number, call))

    def _made(self, call: ToolCall) -> int:
        return self._made_at.get(call.id, self._turn)

    def _second_thoughts(self, call: ToolCall, result: ToolResult, verdict: Verdict, name: str) -> Iterator[Verdict]:
        command, kind, blame = _command(call), verdict.kind, verdict.blame
        gate = gate_of(verdict, command, result.text)
        if gate and self._gates.setdefault(gate, self._turn) < self._made(call):
            yield as_convention(verdict)
        if goes_round(verdict, command):
            yield as_convention(verdict, WENT_ROUND)
        if self._is_again(call, result, verdict):
            yield _models(verdict, "the same call had just failed in the same way, and nothing was done in between")
        if self._is_broken(call, result, verdict):
            yield _models(verdict, "this tool had just failed twice in this way, whatever it was asked for")
        if kind == "file_not_found" and name and self._looks_before_writing(call, name):
            yield _others(verdict, "task", "a look at a file that is to be written")
        if kind == "file_not_found" and blame == "unknown" and self._is_known_missing(call, name):
            yield _models(verdict, "the session had shown that this path is not there")
        if kind == "edit_stale" and name in self._touched and not self._changed_it_itself(name):
            yield _others(verdict, "unknown", "somebody else, or a formatter, had changed the file")
        if kind == "git_state" and blame == "unknown" and self._pushes_rewritten(result, command):
            yield _models(verdict, "the session itself had rewritten what was pushed")
        if kind == "usage_error" and blame == "model" and self._is_about(command):
            yield _others(verdict, "unknown", "the project may be this program's")

    def _is_again(self, call: ToolCall, result: ToolResult, verdict: Verdict) -> bool:
        """Whether the failure of this very call was known, and nothing was done since but looking.

        Whatever the first failure was, the second is the model's: nothing had changed. Not where the user or the
        harness refused it, where trying again is right (networks, timeouts), or where it asks how things stand by now;
        and work that fails is never taught.
        """
        earlier = self._failed.get(_key(call)) if self._failed else None
        if earlier is None or earlier.site.kind != verdict.kind or earlier.known_at >= self._made(call):
            return False
        if self._heard_at >= earlier.known_at or not all(map(_only_looks, self._worked_since(earlier.number))):
            return False
        if _NOT_APPLIED.search(result.text[:400]):
            return True
        if verdict.blame in ("model", "user") or verdict.kind in _REFUSALS | _WORTH_ANOTHER_TRY or verdict.is_soft:
            return False
        return _ASKS_ON.search(command_text(call.name, call.arguments)) is None

    def _is_broken(self, call: ToolCall, result: ToolResult, verdict: Verdict) -> bool:
        """Whether the last two calls were of this tool, too, and failed in these words: not for what they asked."""
        fault, last = _fault(call, result, verdict), self._faults[-2:]
        is_same = [each == fault and number >= self._number - 2 for each, number, _ in last]
        return fault is not None and is_same == [True, True] and last[-1][2] < self._made(call)

    def _looks_before_writing(self, call: ToolCall, name: str) -> bool:
        if is_edit(call.name) and call.arguments.get("command") != "view":
            return False
        if self._written is None:
            self._written = _written_files(self._conversation)
        for text in self._said:
            named = (first or second for first, second in _PLANNED.findall(text[:_MAX_SAID]))
            self._planned.update(path.rpartition("/")[2] for path in named)
        self._said.clear()
        return name.rpartition("/")[2] in self._planned or self._written.get(name, -1) > self._made(call)

    def _is_known_missing(self, call: ToolCall, name: str) -> bool:
        """Whether this path had been refused as missing, and nobody has said anything since."""
        known_at = self._missing.get(name)
        return known_at is not None and self._heard_at < known_at < self._made(call)

    def _changed_it_itself(self, name: str) -> bool:
        """Whether a command of the model's had changed the file since it was last read or written."""
        commands = map(_command, self._worked_since(self._touched[name]))
        file = name.rpartition("/")[2]
        return any(
            (file in command.text and not _only_shows(command)) or not _MOVES_THE_TREE.isdisjoint(command.programs)
            for command in commands
            if command.text
        )

    def _pushes_rewritten(self, result: ToolResult, command: Command) -> bool:
        """Whether a push was refused because the session had changed commits that were there, and did not say so."""
        if _PUSH_REFUSED.search(result.text) is None or _FORCED.search(command.text) is not None:
            return False
        commands = (_command(call).text for call in self._worked_since(0))
        since = itertools.takewhile(lambda text: _PUSHES.search(text) is None, commands)
        return any(_REWRITES_HISTORY.search(text) is not None for text in since)

    def _is_about(self, command: Command) -> bool:
        folders = frozenset((self._cwd or "").lower().split("/"))
        return any(name in folders for name, _ in command.programs)

    def _worked_since(self, number: int) -> Iterator[ToolCall]:
        """Calls that worked after call number `number`, the last one first."""
        later = itertools.takewhile(lambda each: each[0] > number, reversed(self._worked))
        return (call for _, call in later)


def _command(call: ToolCall) -> Command:
    return Command.of(command_text(call.name, call.arguments))


def _only_looks(call: ToolCall) -> bool:
    command = _command(call)
    return _only_shows(command) if command.text else only_looks(call.name, call.arguments)


def _only_shows(command: Command) -> bool:
    return command.only_shows and _WRITES.search(command.text) is None


def _fault(call: ToolCall, result: ToolResult, verdict: Verdict) -> tuple[str, str] | None:
    """The tool and its words, where the tool itself is broken."""
    if verdict.kind != "other" or verdict.blame != "harness":
        return None
    return call.name, result.text[slice(*verdict.span)][:80]


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


def _key(call: ToolCall) -> bytes:
    """Equal for calls that ask the same of the same tool, however they describe it."""
    command = command_text(call.name, call.arguments)
    asked = command or {key: each for key, each in call.arguments.items() if key not in _SAID_ABOUT}
    try:
        return encode([call.name, asked, call.raw_arguments or ""], where="call")
    except InputError:
        return repr((call.name, call.raw_arguments, sorted(call.arguments, key=str))).encode("utf-8", "replace")
