"""Secrets out of a whole conversation, before anybody else sees it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from composer_replication.types import Conversation, ToolCall, ToolResult, Turn


class ScrubScope(Protocol):
    """One numbering of placeholders; linked conversations share it."""

    def text(self, text: str) -> str: ...

    def value(self, value: Any) -> Any: ...


def scrub_conversation(conversation: Conversation, scope: ScrubScope) -> Conversation:
    """The conversation with every text, argument, path and title scrubbed.

    A conversation may be named after its file, so ids and links are scrubbed too: equal ids stay equal within a scope.
    """
    link = conversation.parent
    return replace(
        conversation,
        id=scope.text(conversation.id),
        session_id=_text(conversation.session_id, scope),
        parent=None if link is None else replace(link, conversation_id=scope.text(link.conversation_id)),
        agent_version=_text(conversation.agent_version, scope),
        turns=tuple(_scrub_turn(turn, scope) for turn in conversation.turns),
        title=_text(conversation.title, scope),
        cwd=_text(conversation.cwd, scope),
        extra=scope.value(dict(conversation.extra)),
    )


def _scrub_turn(turn: Turn, scope: ScrubScope) -> Turn:
    text, thinking = scope.text(turn.text), scope.text(turn.thinking)
    extra = dict(turn.extra)
    if (text, thinking) != (turn.text, turn.thinking):
        extra.pop("blocks", None)  # it cuts the texts by length, and the lengths are no longer those
    return replace(
        turn,
        text=text,
        thinking=thinking,
        calls=tuple(_scrub_call(call, scope) for call in turn.calls),
        results=tuple(_scrub_result(result, scope) for result in turn.results),
        model=_text(turn.model, scope),
        provenance=replace(turn.provenance, file=scope.text(turn.provenance.file)),
        # A sampled token id can spell a secret that the text no longer shows.
        token_ids=turn.token_ids if text == turn.text else None,
        logprobs=turn.logprobs if text == turn.text else None,
        extra=scope.value(extra),
    )


def _scrub_call(call: ToolCall, scope: ScrubScope) -> ToolCall:
    raw = _text(call.raw_arguments, scope)
    return replace(call, name=scope.text(call.name), arguments=scope.value(dict(call.arguments)), raw_arguments=raw)


def _scrub_result(result: ToolResult, scope: ScrubScope) -> ToolResult:
    return replace(result, text=scope.text(result.text))


def _text(text: str | None, scope: ScrubScope) -> str | None:
    return None if text is None else scope.text(text)
