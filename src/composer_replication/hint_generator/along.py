"""A conversation read up to one turn after the other: the failing call there, and what had been shown by then."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from composer_replication.actions.session_state import SessionState
from composer_replication.actions.tools import (
    NEW_TEXT,
    OLD_TEXT,
    channel_of,
    command_text,
    first_text,
    is_edit,
    path_argument,
)
from composer_replication.hint_generator.files import typed_path
from composer_replication.sites.view import View
from composer_replication.types import Conversation, ErrorSite, ToolCall, ToolResult


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
    return View.of(result.text).is_tagged if result.is_error is None else result.is_error


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
                self._state.heard(turn.text)
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
