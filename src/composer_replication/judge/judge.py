"""One call against what is known when it is made."""

from __future__ import annotations

from typing import Protocol

from composer_replication.actions.session_state import SessionState
from composer_replication.actions.tools import NEW_TEXT, OLD_TEXT, channel_of, first_text, is_edit
from composer_replication.judge.verdict import Judgement
from composer_replication.types import ToolCall

UNKNOWN = Judgement("unknown", "no_rule")


class PathKnowledge(Protocol):
    """What earlier sessions of the project know of a path, relative to its root: True, False, or None for not known."""

    def exists(self, relative: str) -> bool | None: ...


class Checkout(Protocol):
    """The project's files at the session's date, by path relative to its root; None for what is not known."""

    def exists(self, relative: str) -> bool | None: ...

    def text(self, relative: str) -> str | None: ...


class Judge:
    """Says of calls what would become of them in this state, which may grow between questions."""

    def __init__(
        self, state: SessionState, *, project: PathKnowledge | None = None, checkout: Checkout | None = None
    ) -> None:
        self.state, self.project, self.checkout = state, project, checkout

    def verdict(self, call: ToolCall) -> Judgement:
        """What would become of this call if it were made now."""
        if call.raw_arguments is not None:
            return Judgement("fails", "arguments_no_json", "input_validation", "its arguments are no JSON object")
        if channel_of(call.name) == "file" and is_edit(call.name):
            old, new = (first_text(call.arguments, keys) for keys in (OLD_TEXT, NEW_TEXT))
            if old is not None and old == new:
                return Judgement("fails", "edit_noop", "edit_noop", "what is to be replaced equals what replaces it")
        return UNKNOWN
