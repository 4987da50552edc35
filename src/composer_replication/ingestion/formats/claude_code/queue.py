"""Messages that were typed while Claude Code worked: `queue-operation` records, and where the model saw each message.

`enqueue` brings the text. Then one of these happens (counted on real sessions, versions 2.0.76 to 2.1.39):

* `dequeue`: the turn is over, and the message follows as a record of its own: a text as it was typed, a slash command
  as tags with its name and its arguments. Nothing is to be done.
* `remove`: the message went into the running turn, beside the results of its calls. Up to these versions nothing else
  says so, and the model answers it next; later ones add an `attachment` record, and often a `reason`.
* `popAll`: the user took it back into the editor.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from composer_replication.ingestion.formats.claude_code.attachments import plain_prompt
from composer_replication.ingestion.formats.claude_code.record import Node
from composer_replication.ingestion.reading.source import IngestReport, Record

_TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z$")
# How Claude Code writes a slash command into the message that runs it; some versions leave out the slash.
_COMMAND_NAME = re.compile(r"<command-name>\s*(\S+?)\s*</command-name>")
_COMMAND_ARGUMENTS = re.compile(r"<command-args>(.*?)</command-args>", re.DOTALL)
_ABSORBED = "absorbed_mid_turn"
PLACED, TAKEN_BACK = "queued messages placed", "queued messages taken back"
NOT_DELIVERED = "queued messages never delivered"


@dataclass(frozen=True, slots=True)
class Queued:
    """A message that left the queue: its text, the lines of its records, and when it left."""

    text: str
    lines: tuple[int, ...]
    timestamp: str
    operation: str = "enqueue"
    reason: str | None = None


@dataclass(slots=True)
class MessageQueue:
    """The queue of one log, as its records tell it."""

    report: IngestReport
    _waiting: list[Queued] = field(default_factory=list[Queued])
    _left: list[Queued] = field(default_factory=list[Queued])

    def take(self, line: int, record: Record) -> None:
        operation = record.get("operation")
        if operation == "enqueue":
            self._waiting.append(Queued(_words(record.get("content")), (line,), _time(record)))
        elif operation == "popAll":
            self.report.counts[TAKEN_BACK] += len(self._waiting)
            self._waiting.clear()
        elif operation in ("dequeue", "remove") and self._waiting:
            message = self._waiting.pop(self._place_of(record.get("content")))
            reason = record.get("reason")
            reason = reason if isinstance(reason, str) else None
            self._left.append(Queued(message.text, (*message.lines, line), _time(record), operation, reason))

    def _place_of(self, content: Any) -> int:
        """Which message a record means: the one it quotes, else the oldest."""
        texts = [message.text for message in self._waiting]
        return texts.index(content) if content in texts else 0

    def place(self, nodes: Iterable[Node], attachments: list[Record]) -> dict[str, list[Queued]]:
        """Uuid of the answer before which the model saw it -> messages that no other record holds; "" is the end."""
        if self._waiting:
            self.report.counts[NOT_DELIVERED] += len(self._waiting)
        if not self._left:
            return {}
        main = [node for node in nodes if not node.is_sidechain]
        shown_texts = Counter(plain_prompt(record) for record in attachments)
        placed: dict[str, list[Queued]] = {}
        for message in self._left:
            text = message.text.strip()
            if shown_texts[text] > 0:  # the attachment is the message
                shown_texts[text] -= 1
            elif message.operation == "dequeue" and _has_own_record(message, main):
                continue
            elif message.operation == "remove" and not _was_absorbed(message, bool(attachments)):
                self.report.counts[TAKEN_BACK] += 1
            else:
                self.report.counts[PLACED] += 1
                placed.setdefault(_answer_to(message, main), []).append(message)
        return placed


def _was_absorbed(removed: Queued, has_attachments: bool) -> bool:
    """Where a log keeps attachments, a message that was removed without one and without a reason was taken back."""
    return removed.reason == _ABSORBED or (removed.reason is None and not has_attachments)


def _has_own_record(message: Queued, main: list[Node]) -> bool:
    text = message.text.strip()
    users = (node for node in main if node.kind == "user" and node.line > message.lines[0])
    return any(_says(_words(block.get("text")), text) for node in users for block in node.blocks)


def _says(words: str, text: str) -> bool:
    """Whether a message holds what was queued: as typed, or, of `/name arguments`, in the tags of a command."""
    name = _COMMAND_NAME.search(words)
    if name is None or not text.startswith("/"):
        return text in words
    arguments = _COMMAND_ARGUMENTS.search(words)
    called = [name[1].removeprefix("/"), *(arguments[1].split() if arguments else ())]
    return called == text.removeprefix("/").split()


def _answer_to(message: Queued, main: list[Node]) -> str:
    """The first assistant message that began after it: records of one that was being written stand behind it too."""
    seen_keys = {node.message_key for node in main if node.line < message.lines[-1]}
    for node in main:
        if node.kind != "assistant" or node.line < message.lines[-1] or node.message_key in seen_keys:
            continue
        if not message.timestamp or not _time(node.record) or _time(node.record) >= message.timestamp:
            return node.uuid
        seen_keys.add(node.message_key)
    return ""


def _words(content: Any) -> str:
    return content if isinstance(content, str) else ""


def _time(record: Record) -> str:
    """When it was written, where that is a time that can be compared as text."""
    written = record.get("timestamp")
    return written if isinstance(written, str) and _TIME.match(written) else ""
