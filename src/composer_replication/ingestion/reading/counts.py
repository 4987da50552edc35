"""What a conversation holds, in numbers; calls and results that have no counterpart are counted each by its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from composer_replication.types import Conversation, Turn

COUNTED = ("conversations", "sessions", "turns", "assistant turns", "calls", "results", "errors")
LOST = "calls without a result"
IN_FLIGHT = "calls in flight at the end of a log"
INTERRUPTED = "calls that the user interrupted"
TWICE = "second results of a call"
IMAGES = "images"
UNPLACED = (LOST, IN_FLIGHT, INTERRUPTED, TWICE)
_INTERRUPT = "[Request interrupted by user"


def counts_of(conversation: Conversation) -> Counter[str]:
    """All of `COUNTED`, and what of `UNPLACED` and `IMAGES` there is."""
    counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
    counts["conversations"] = 1
    counts["sessions"] = int(conversation.parent is None)
    counts["turns"] = len(conversation.turns)
    for turn in conversation.turns:
        counts["assistant turns"] += turn.role == "assistant"
        counts["calls"] += len(turn.calls)
        counts["results"] += len(turn.results)
        counts["errors"] += sum(result.is_error is True for result in turn.results)
    counts.update(unplaced_in(conversation))
    return counts


def unplaced_in(conversation: Conversation) -> Counter[str]:
    """What of a conversation has no counterpart, and how many images it shows; nothing is counted that is not there."""
    turns, counts = conversation.turns, Counter[str]()
    waiting: dict[str, list[int]] = {}
    known_ids: set[str] = set()
    for number, turn in enumerate(turns):
        for call in turn.calls:
            waiting.setdefault(call.id, []).append(number)
            known_ids.add(call.id)
        for result in turn.results:
            if waiting.get(result.call_id):
                waiting[result.call_id].pop(0)
            elif result.call_id in known_ids:
                counts[TWICE] += 1
        images = turn.extra.get("images", 0)
        if type(images) is int and images > 0:
            counts[IMAGES] += images
    for numbers in waiting.values():
        for number in numbers:
            counts[_why_unanswered(turns, number)] += 1
    return counts


def _why_unanswered(turns: Sequence[Turn], number: int) -> str:
    """What became of a call of this turn: the log may end before its result, or the user stop it."""
    after = next((turn for turn in turns[number + 1 :] if turn.role != "tool"), None)
    if after is None:
        return IN_FLIGHT
    return INTERRUPTED if after.role == "user" and after.text.startswith(_INTERRUPT) else LOST
