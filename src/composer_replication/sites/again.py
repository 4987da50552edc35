"""Failures that were known: the same call, the same message, the same broken tool, with nothing done about it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from composer_replication.actions.tools import command_text
from composer_replication.canonical_json import encode
from composer_replication.errors import InputError
from composer_replication.sites.calls import CallsSoFar, command_of
from composer_replication.sites.taxonomy import Verdict
from composer_replication.types import ErrorSite, ToolCall, ToolResult

_SAID_ABOUT = frozenset({"description", "timeout", "run_in_background", "explanation"})
_WORTH_ANOTHER_TRY = frozenset(
    ["network", "timeout", "os_permission", "test_failure", "lint_or_typecheck", "compile_error", "python_exception"]
)
_ALWAYS_THE_SAME = frozenset(["lint_or_typecheck", "compile_error"])  # unlike tests, if nothing was changed
_REFUSALS = frozenset(["permission_denied", "hook_blocked", "sibling_cancelled"])
# These ask again until something has happened, or run what is being worked on.
_ASKS_ON = re.compile(
    r"\b(?:sleep|watch|wait|checks?|status|logs?|ps|pgrep|curl|run|tests?|lint|build|make|compile|vet|fmt|go|cargo|npm"
    r"|python3?|node|pytest)\b"
)
_NOT_APPLIED = re.compile(r"Your proposed edit has introduced")  # a linter's word, but the tool refused the edit
_INSTALLS = re.compile(
    r"\b(?:install|add|get|use|brew|apt|apt-get|dnf|yum|pip3?|npm|asdf|mise|export|source)\b|\bPATH="
)
_ESCAPED = "\\!"  # what some tools make of each exclamation mark, whatever the quotes


@dataclass(frozen=True, slots=True)
class _Failure:
    """The last failure of a call: site, what came back, the number of the call, and since which turn it is known."""

    site: ErrorSite
    text: str
    number: int
    known_at: int


class KnownFailures:
    """What had failed so far, each with when, and since which turn the model could know it."""

    def __init__(self, calls: CallsSoFar) -> None:
        self._calls = calls
        self._failed: dict[bytes, _Failure] = {}
        self._told: dict[tuple[str, str], tuple[int, int]] = {}  # kind and message
        self._missing: dict[str, int] = {}  # paths
        self._faults: list[tuple[tuple[str, str], int, int]] = []  # of tools that are broken
        self._escaped_at: int | None = None

    def reasons(self, call: ToolCall, result: ToolResult, verdict: Verdict, path: str) -> Iterator[str]:
        """Why a failure is the model's, whatever it is taken for."""
        if self._is_again(call, result, verdict):
            yield "the same call had just failed in the same way, and nothing was done in between"
        if self._is_broken(call, result, verdict):
            yield "this tool had just failed twice in this way, whatever it was asked for"
        if self._was_told(call, result, verdict) or self._is_missing(call, verdict, path):
            yield "the session had shown that this is not there"
        if self._escaped_at is not None and self._escaped_at < self._calls.made(call) and _is_escaped(call, result):
            yield "the session had shown what becomes of an exclamation mark"

    def note(self, call: ToolCall, result: ToolResult, verdict: Verdict, path: str) -> None:
        """A failure, once it has been judged."""
        if path and verdict.kind == "file_not_found":
            self._missing.setdefault(path, self._calls.turn)
        self._told[verdict.kind, _message(result, verdict)] = (self._calls.number, self._calls.turn)
        fault = _fault(call, result, verdict)
        self._faults += [(fault, self._calls.number, self._calls.turn)] if fault is not None else []
        if self._escaped_at is None and _is_escaped(call, result):
            self._escaped_at = self._calls.turn

    def forget(self, call: ToolCall, path: str) -> None:
        """The call has worked, on this file."""
        if self._failed:
            self._failed.pop(_key(call), None)
        self._missing.pop(path, None)

    def counted(self, site: ErrorSite, call: ToolCall, result: ToolResult) -> ErrorSite:
        """A failure, with its repetitions counted: calls made when it was known, not parallel ones."""
        key, number = _key(call), self._calls.number
        earlier = self._failed.get(key)
        if earlier is not None and earlier.site.kind == site.kind and earlier.known_at < self._calls.made(call):
            between = number - earlier.number - 1
            site = replace(site, repeats=earlier.site.repeats + 1, repeat_of=earlier.site.id, between=between)
        self._failed[key] = _Failure(site, result.text, number, self._calls.turn)
        return site

    def _is_again(self, call: ToolCall, result: ToolResult, verdict: Verdict) -> bool:
        """Whether the failure of this very call was known, and nothing was done since but looking.

        Whatever the first failure was, the second is the model's: nothing had changed. Not where the user or the
        harness refused it, where trying again is right (networks, timeouts, tests), or where it asks how things stand
        by now.
        """
        earlier = self._failed.get(_key(call)) if self._failed else None
        if earlier is None or earlier.site.kind != verdict.kind or earlier.known_at >= self._calls.made(call):
            return False
        if self._calls.heard_at >= earlier.known_at or not self._calls.only_looked_since(earlier.number):
            return False
        if _NOT_APPLIED.search(result.text[:400]):
            return True
        if verdict.kind in _ALWAYS_THE_SAME and verdict.blame == "task":
            return earlier.text == result.text and not verdict.is_soft
        if verdict.blame in ("model", "user") or verdict.kind in _REFUSALS | _WORTH_ANOTHER_TRY or verdict.is_soft:
            return False
        return _ASKS_ON.search(command_text(call.name, call.arguments)) is None

    def _was_told(self, call: ToolCall, result: ToolResult, verdict: Verdict) -> bool:
        """Whether a program or a path was missing in these very words, and nothing was done about it."""
        number, known_at = self._told.get((verdict.kind, _message(result, verdict)), (0, self._calls.turn))
        if known_at >= self._calls.made(call) or self._calls.heard_at >= known_at or verdict.is_soft:
            return False
        if verdict.kind == "cmd_not_found" and verdict.blame == "env":
            since = self._calls.worked_since(number)
            return not any(_INSTALLS.search(command_of(later_call).text) for later_call in since)
        is_path = verdict.kind == "shell_path_missing" and verdict.blame == "unknown"
        return is_path and self._calls.only_looked_since(number)

    def _is_missing(self, call: ToolCall, verdict: Verdict, path: str) -> bool:
        """Whether this path had been refused as missing, and nobody has said anything since."""
        known_at = self._missing.get(path)
        is_excused = verdict.kind == "file_not_found" and verdict.blame == "unknown"
        return is_excused and known_at is not None and self._calls.heard_at < known_at < self._calls.made(call)

    def _is_broken(self, call: ToolCall, result: ToolResult, verdict: Verdict) -> bool:
        """Whether the last two calls were of this tool, too, and failed in these words: not for what they asked."""
        fault, last = _fault(call, result, verdict), self._faults[-2:]
        is_same = [earlier_fault == fault and number >= self._calls.number - 2 for earlier_fault, number, _ in last]
        return fault is not None and is_same == [True, True] and last[-1][2] < self._calls.made(call)


def _message(result: ToolResult, verdict: Verdict) -> str:
    return result.text[slice(*verdict.span)]


def _fault(call: ToolCall, result: ToolResult, verdict: Verdict) -> tuple[str, str] | None:
    """The tool and its words, where the tool itself is broken."""
    if verdict.kind != "other" or verdict.blame != "harness":
        return None
    return call.name, _message(result, verdict)[:80]


def _is_escaped(call: ToolCall, result: ToolResult) -> bool:
    return _ESCAPED in result.text[:2000] and _ESCAPED not in command_text(call.name, call.arguments)


def _key(call: ToolCall) -> bytes:
    """Equal for calls that ask the same of the same tool, however they describe it."""
    command = command_text(call.name, call.arguments)
    request = command or {key: value for key, value in call.arguments.items() if key not in _SAID_ABOUT}
    try:
        return encode([call.name, request, call.raw_arguments or ""], where="call")
    except InputError:
        return repr((call.name, call.raw_arguments, sorted(call.arguments, key=str))).encode("utf-8", "replace")
