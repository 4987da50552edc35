"""What was asked: attempts and outcomes by fingerprint, the order within sessions, how much was in flight at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fault_server.chat import ChatRequest


@dataclass(slots=True)
class Asked:
    """All attempts of one fingerprint, in order: the status (0: no byte was sent) and the outcome of each."""

    model: str
    session: str
    billed: int = 0
    attempts: int = 0
    replies: list[tuple[int, str]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        known = {"model": self.model, "session": self.session, "attempts": self.attempts, "billed": self.billed}
        statuses, outcomes = [status for status, _ in self.replies], [outcome for _, outcome in self.replies]
        return known | {"statuses": statuses, "outcomes": outcomes}


class InFlight:
    """A chat request between its last byte read and its last byte sent, or the end of its connection."""

    __slots__ = ("fingerprint", "is_given_up", "line", "prompt_tokens")

    def __init__(self, line: tuple[str, str], fingerprint: str, prompt_tokens: int) -> None:
        self.line, self.fingerprint, self.prompt_tokens = line, fingerprint, prompt_tokens
        self.is_given_up: Callable[[], bool] = lambda: False  # its connection knows


class Counts:
    def __init__(self) -> None:
        self.connections = 0
        self.in_flight: dict[tuple[str, str], list[InFlight]] = {}
        self._pairs: dict[tuple[int, str], tuple[int, str]] = {}  # one object for each pair, however often it is kept
        self.reset()

    def reset(self) -> None:
        """Forgets what was asked; what is in flight stays in flight."""
        self.num_in_flight = sum(map(len, self.in_flight.values()))
        self.by_fingerprint: dict[str, Asked] = {}
        self.order: dict[tuple[str, str], list[tuple[int, str, bool]]] = {}
        self.prompts_done: dict[tuple[str, str], list[int]] = {}
        self.totals: Counter[str] = Counter()
        self.max_in_flight = self.num_in_flight
        self.max_connections = self.connections

    def begin(self, chat: ChatRequest, *, is_given_up: bool = False) -> InFlight:
        """A question that was given up before it was read is served and billed, but says nothing of the order."""
        line = (chat.session, chat.model)
        others = self.in_flight.setdefault(line, [])
        # An attempt that the client gave up may still be seen here; only another question is out of line.
        overlaps = any(each.fingerprint != chat.fingerprint and not each.is_given_up() for each in others)
        asked = self.by_fingerprint.setdefault(chat.fingerprint, Asked(chat.model, chat.session))
        if not is_given_up:
            self.order.setdefault(line, []).append((chat.num_messages, chat.fingerprint, overlaps))
        asked.attempts += 1
        self._count_cached(line, chat.prompt_tokens)
        entry = InFlight(line, chat.fingerprint, chat.prompt_tokens)
        others.append(entry)
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        return entry

    def replied(self, fingerprint: str, status: int, outcome: str, is_billed: bool) -> None:
        asked = self.by_fingerprint[fingerprint]
        asked.replies.append(self._pairs.setdefault((status, outcome), (status, outcome)))
        asked.billed += is_billed

    def end(self, entry: InFlight) -> None:
        others = self.in_flight[entry.line]
        others.remove(entry)
        self.prompts_done.setdefault(entry.line, []).append(entry.prompt_tokens)
        if not others:
            del self.in_flight[entry.line]
        self.num_in_flight -= 1

    def _count_cached(self, line: tuple[str, str], prompt_tokens: int) -> None:
        """What a provider's prompt cache would have had of this prompt, given that a session's prompts are prefixes.

        One that keeps blocks has as much as the longest prompt it was done with; one that keeps ends of prompts has the
        longest one that this prompt begins with.
        """
        done = self.prompts_done.get(line, [])
        self.totals["prompt_tokens"] += prompt_tokens
        self.totals["cached_by_blocks"] += min(prompt_tokens, max(done, default=0))
        self.totals["cached_by_ends"] += max((each for each in done if each <= prompt_tokens), default=0)

    def connected(self) -> None:
        self.connections += 1
        self.max_connections = max(self.max_connections, self.connections)

    def to_json(self) -> dict[str, Any]:
        replies = Counter(reply for each in self.by_fingerprint.values() for reply in each.replies)
        statuses: Counter[int] = Counter()
        outcomes: Counter[str] = Counter()
        for (status, outcome), count in replies.items():
            statuses[status] += count
            outcomes[outcome] += count
        names = ("num_chat", "with_auth", "without_auth", "refused", "idle_closed", "given_up", "models_listed")
        names += ("prompt_tokens", "cached_by_blocks", "cached_by_ends")
        return {
            "by_fingerprint": {name: each.to_json() for name, each in self.by_fingerprint.items()},
            "outcomes": dict(outcomes),
            "statuses": {str(status): count for status, count in statuses.items()},
            "num_in_flight": self.num_in_flight,
            "max_in_flight": self.max_in_flight,
            "max_connections": self.max_connections,
            **{name: self.totals[name] for name in names},
        }

    def sessions_json(self) -> dict[str, Any]:
        sessions: dict[str, Any] = {}
        for (session, model), line in self.order.items():
            asked = [{"num_messages": size, "fingerprint": name, "overlaps": over} for size, name, over in line]
            sessions.setdefault(session, {})[model] = asked
        return sessions
