"""Calls that nothing came back for, and results that came twice: counted alike for every format, each by its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from composer_replication.types import Conversation

LOST = "calls without a result"
IN_FLIGHT = "calls in flight at the end of a log"
INTERRUPTED = "calls that the user interrupted"
TWICE = "second results of a call"
IMAGES = "images"
UNPLACED = (LOST, IN_FLIGHT, INTERRUPTED, TWICE)
_INTERRUPT = "[Request interrupted by user"


class _Said(NamedTuple):
    role: str
    text: str
    calls: tuple[str, ...]
    results: tuple[str, ...]
    images: int


def unplaced_in(conversation: Conversation) -> Counter[str]:
    """What of a conversation has no counterpart, and how many images it shows; nothing is counted that is not there."""
    return _count(
        _Said(
            turn.role,
            turn.text,
            tuple(call.id for call in turn.calls),
            tuple(result.call_id for result in turn.results),
            turn.extra.get("images", 0),
        )
        for turn in conversation.turns
    )


def unplaced_in_row(row: Mapping[str, Any]) -> Counter[str]:
    """The same of a row of `conversations.jsonl`."""
    return _count(
        _Said(
            turn["role"],
            turn["text"],
            tuple(call["id"] for call in turn["calls"]),
            tuple(result["call_id"] for result in turn["results"]),
            turn["extra"].get("images", 0),
        )
        for turn in row["turns"]
    )


def _count(turns: Iterable[_Said]) -> Counter[str]:
    said, found = list(turns), Counter[str]()
    waiting: dict[str, list[int]] = {}
    known: set[str] = set()
    for number, turn in enumerate(said):
        for call_id in turn.calls:
            waiting.setdefault(call_id, []).append(number)
            known.add(call_id)
        for call_id in turn.results:
            if waiting.get(call_id):
                waiting[call_id].pop(0)
            elif call_id in known:
                found[TWICE] += 1
        if type(turn.images) is int and turn.images > 0:
            found[IMAGES] += turn.images
    for numbers in waiting.values():
        for number in numbers:
            found[_why(said, number)] += 1
    return found


def _why(said: list[_Said], number: int) -> str:
    """What became of a call of this turn: the log may end before its result, or the user stop it."""
    after = next((turn for turn in said[number + 1 :] if turn.role != "tool"), None)
    if after is None:
        return IN_FLIGHT
    return INTERRUPTED if after.role == "user" and after.text.startswith(_INTERRUPT) else LOST
