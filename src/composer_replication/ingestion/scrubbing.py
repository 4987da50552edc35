"""Secrets out of a whole conversation, before anybody else sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from composer_replication.actions.write import recut_blocks
from composer_replication.types import Conversation, Link, ToolCall, ToolResult, Turn


class ScrubScope(Protocol):
    """One numbering of placeholders; linked conversations share it."""

    def text(self, text: str) -> str: ...

    def value(self, value: Any) -> Any: ...


HoldsSecret = Callable[[str], bool]
"""Whether a rule knows something in an id, randomness aside: ids are random, and most of them mean nothing."""


def scrub_conversation(
    conversation: Conversation, scope: ScrubScope, *, holds_secret: HoldsSecret | None = None
) -> Conversation:
    """The conversation with every text, argument, path, title and name scrubbed.

    Ids may be made of file names, so they are scrubbed too, where `holds_secret` says that there is something in them:
    equal ids stay equal within a scope. Token ids that could spell what was taken out are left out.
    """
    work = _Work(scope, holds_secret or (lambda _: False))
    return replace(
        conversation,
        id=scope.text(conversation.id),
        session_id=work.text(conversation.session_id),
        parent=work.link(conversation.parent),
        agent_version=work.text(conversation.agent_version),
        turns=tuple(work.turn(turn) for turn in conversation.turns),
        title=work.text(conversation.title),
        cwd=work.text(conversation.cwd),
        extra=scope.value(dict(conversation.extra)),
    )


class _Work:
    def __init__(self, scope: ScrubScope, holds_secret: HoldsSecret) -> None:
        self._scope, self._holds_secret = scope, holds_secret
        self._changed = False  # anything so far: a prompt's token ids spell all that came before

    def text(self, text: str | None) -> str | None:
        return None if text is None else self._scope.text(text)

    def id(self, identity: str) -> str:
        return self._scope.text(identity) if self._holds_secret(identity) else identity

    def link(self, link: Link | None) -> Link | None:
        if link is None:
            return None
        return replace(
            link,
            conversation_id=self._scope.text(link.conversation_id),
            turn_id=None if link.turn_id is None else self.id(link.turn_id),
            call_id=None if link.call_id is None else self.id(link.call_id),
        )

    def turn(self, turn: Turn) -> Turn:
        scope = self._scope
        text, thinking = scope.text(turn.text), scope.text(turn.thinking)
        calls = tuple(self._call(call) for call in turn.calls)
        results = tuple(self._result(result) for result in turn.results)
        is_same = (text, thinking) == (turn.text, turn.thinking)
        extra = dict(turn.extra) if is_same or "blocks" not in turn.extra else recut_blocks(turn, text, thinking)
        own_change = (text, thinking, calls) != (turn.text, turn.thinking, turn.calls)
        self._changed = self._changed or own_change or results != turn.results
        if self._changed and isinstance(extra.get("atif"), dict):
            extra["atif"] = {key: each for key, each in extra["atif"].items() if key != "prompt_token_ids"}
        return replace(
            turn,
            id=self.id(turn.id),
            parent_id=None if turn.parent_id is None else self.id(turn.parent_id),
            text=text,
            thinking=thinking,
            calls=calls,
            results=results,
            model=self.text(turn.model),
            timestamp=None if turn.timestamp is None else self.id(turn.timestamp),
            provenance=replace(turn.provenance, file=scope.text(turn.provenance.file)),
            token_ids=None if own_change else turn.token_ids,
            logprobs=None if own_change else turn.logprobs,
            extra=scope.value(extra),
        )

    def _call(self, call: ToolCall) -> ToolCall:
        return replace(
            call,
            id=self.id(call.id),
            name=self._scope.text(call.name),
            arguments=self._scope.value(dict(call.arguments)),
            raw_arguments=self.text(call.raw_arguments),
        )

    def _result(self, result: ToolResult) -> ToolResult:
        return replace(result, call_id=self.id(result.call_id), text=self._scope.text(result.text))
