"""One record of a Claude Code log: where it stands, what it names as its parent, the message it holds; and messages.

An assistant's message is spread over records. The service's id says which, but one wrong id must not tear a message out
of its place. Of 33,165 records of real logs none has the id of another one on the far side of a prompt or a compaction,
and none of one message have two request ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from composer_replication.ingestion.formats.claude_code.attachments import Attachment
from composer_replication.ingestion.reading.source import IngestReport, Record

# The service runs the second kind itself; their results come back under the call's id all the same.
CALL_BLOCKS = ("tool_use", "server_tool_use")
SHARED = "message id of another message: read as a message of its own"


@dataclass(slots=True)
class Node:
    """A record that holds a message, an attachment that the model saw, or a compaction boundary."""

    index: int
    line: int
    uuid: str
    record: Record
    parent: str | None
    is_sidechain: bool
    kind: str
    message: Record
    message_key: str
    """What the records of one assistant message share; the uuid stands in where the id is missing."""
    blocks: list[Record]
    agent: str | None
    """The sub-agent whose work came back as a result here."""
    attachment: Attachment | None = None

    @property
    def is_boundary(self) -> bool:
        return self.kind == "system"

    @property
    def called(self) -> list[str]:
        return [_name(block.get("id")) for block in self.blocks if block.get("type") in CALL_BLOCKS]

    @property
    def answered(self) -> list[str]:
        return [_name(block.get("tool_use_id")) for block in self.blocks if block.get("type") == "tool_result"]

    @property
    def is_message(self) -> bool:
        return self.kind in ("user", "assistant")

    @property
    def is_main_message(self) -> bool:
        return self.is_message and not self.is_sidechain

    @property
    def is_summary(self) -> bool:
        """Whether it is what a compaction left of the context before it."""
        return self.kind == "user" and self.record.get("isCompactSummary") is True

    @property
    def begins_turn(self) -> bool:
        """A user's message that answers no call, or what the harness said in the model's place as a session went on."""
        if self.kind == "assistant":
            return self.is_harness
        return self.kind == "user" and not self.answered and not self.is_summary

    @property
    def is_harness(self) -> bool:
        """Whether an assistant's message is the harness's own words ("API Error", "No response requested.")."""
        return self.message.get("model") == "<synthetic>" or self.record.get("isApiErrorMessage") is True

    def rename(self, uuid: str) -> None:
        """Another name, where its own is taken."""
        if self.message_key == self.uuid:
            self.message_key = uuid
        self.uuid = uuid


@dataclass(slots=True)
class Entry:
    """A record as it stands in the file: `parent` and `time` are what it says, whatever that is.

    `node` is None for a silent one."""

    line: int
    uuid: str
    parent: Any
    is_sidechain: bool
    time: Any
    node: Node | None
    agent: str | None = None
    """The sub-agent that a record of a sidechain says it is of."""

    @property
    def named_parent(self) -> str | None:
        """The parent, where what the record says can be one."""
        return self.parent if isinstance(self.parent, str) else None

    @property
    def follows(self) -> str | None:
        """The record it must stand behind: its parent, or where the context ended that a compaction closed."""
        node = self.node
        uuid = node.record.get("logicalParentUuid") if node is not None and node.is_boundary else self.parent
        return uuid if isinstance(uuid, str) else None


def _name(value: Any) -> str:
    return value if isinstance(value, str) else ""


def node_of(uuid: str, kind: str, line: int, record: Record, is_sidechain: bool, shown: Attachment | None) -> Node:
    """A record that holds something; its index and its parent are set when its place is known."""
    message = record.get("message")
    if not isinstance(message, dict):
        message = {}
    name = message.get("id")
    key = name if isinstance(name, str) and name else uuid
    # It repeats the result, often a whole file, in a shape nobody reads; without it there is half as much to hold.
    details = record.pop("toolUseResult", None)
    agent = details.get("agentId") if isinstance(details, dict) else None
    agent = agent if isinstance(agent, str) else None
    return Node(-1, line, uuid, record, None, is_sidechain, kind, message, key, _blocks(message), agent, shown)


def _blocks(message: Record) -> list[Record]:
    """The content blocks of a message; a plain string is one text block, and so is a bare string in the list."""
    content: Any = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        return []
    if len(content) == 1 and isinstance(content[0], dict):  # nearly all of them
        return content
    return [
        block if isinstance(block, dict) else {"type": "text", "text": block}
        for block in cast("list[Any]", content)
        if isinstance(block, (dict, str))
    ]


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
        known_message = of_id.get(request) or of_id.get(None)
        message = next(iter(of_id.values()), None) if request is None else known_message
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
