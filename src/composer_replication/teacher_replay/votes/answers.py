"""One teacher's answer: the action it votes for, or why it has no vote, and its own words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from composer_replication.actions.reply import parse_reply
from composer_replication.actions.write import text_of
from composer_replication.errors import InputError
from composer_replication.types import Action, TeacherCallResult


class Voter(NamedTuple):
    """`action` is None where there is no vote; then `reason` says why: error, unreadable or empty."""

    action: Action | None
    reason: str = ""


def voter_of(result: TeacherCallResult) -> Voter:
    """What a teacher did: by the structured message where there is one, else by its text."""
    if result["error"] is not None:
        return Voter(None, "error")
    message = cast("Mapping[str, Any]", result).get("message")
    try:
        action = parse_reply(message if isinstance(message, Mapping) else result["response_text"] or "")
    except InputError:
        return Voter(None, "unreadable")
    return Voter(action) if action.calls or action.text.strip() else Voter(None, "empty")


def reply_text(result: TeacherCallResult, action: Action) -> str:
    """A teacher's own words, with the calls that only the message holds written behind them."""
    text = result["response_text"] or ""
    if not action.calls or len(parse_reply(text).calls) == len(action.calls):
        return text or action.text
    return text_of(action)
