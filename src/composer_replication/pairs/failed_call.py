"""One failing call at the state before its turn: what the session knew by then, and what it did afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from composer_replication.actions.paths import normal_path
from composer_replication.actions.tools import channel_of, path_argument
from composer_replication.types import ErrorSite, ToolCall

if TYPE_CHECKING:
    from composer_replication.judge import Judge
    from composer_replication.pairs.later_calls import LaterCalls

How = Literal["corrected", "look_first"]
Decided = tuple[ToolCall, How] | None
"""The call to choose, and how it belongs to the one that failed."""
_MAX_WORDS = 20


class FailedCall:
    """What a rule is asked about. `later` are the calls after it, `beside` the others of its turn."""

    def __init__(self, judge: Judge, site: ErrorSite, call: ToolCall, log: LaterCalls, cwd: str | None) -> None:
        self.judge, self.site, self.call, self.cwd = judge, site, call, cwd
        self.later, self.beside, self.error = log.after(site), log.beside(site), log.text_of(call)
        self.ran, self.log = log.after(site, with_failed_work=True), log
        self.path = path_argument(call.arguments) if channel_of(call.name) == "file" else None

    def is_ours(self, later: ToolCall, measure: Callable[[ToolCall, ToolCall], float]) -> bool:
        """Whether a later call is like this one, and like no other of its turn more."""
        ours = measure(self.call, later)
        return ours > 0 and all(measure(other_call, later) <= ours for other_call in self.beside)

    def are_shown(self, words: Sequence[str]) -> bool:
        """Whether the session had shown all of them; of very many nobody asks, for each is searched for."""
        return len(words) <= _MAX_WORDS and all(map(self.judge.state.has_shown, words))

    def is_same_path(self, path: str, other: str) -> bool:
        return normal_path(path, self.cwd) == normal_path(other, self.cwd)
