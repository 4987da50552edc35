"""One record of a Claude Code log: where it stands, what it names as its parent, the message it holds; and messages.

An assistant's message is spread over records. The service's id says which, but one wrong id must not tear a message out
of its place. Of 33,165 records of real logs none has the id of another one on the far side of a prompt or a compaction,
and none of one message have two request ids.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from composer_replication.ingestion.source import (
    IngestReport,
    Record,
    as_text,
    images_in,
)
from composer_replication.types import Origin

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
class _LoggedMessage:
    nodes: list[Node] = field(default_factory=list)

    def own_key(self, name: str) -> str:
        """Another name than that which it shares; a uuid may be somebody's message id."""
        return f"{name} of line {self.nodes[0].line}"


class Messages:
    """Takes the records of every thread in order; a node's `message_key` is its message's alone."""

    def __init__(self, file: str, report: IngestReport) -> None:
        self._file, self._report = file, report
        self._open: dict[str, dict[str, dict[str | None, _LoggedMessage]]] = {}
        """Thread -> id -> request -> a message that may still get records."""
        self._all: dict[str, list[_LoggedMessage]] = {}

    def take(self, node: Node, thread: str) -> None:
        if node.is_boundary or (node.begins_turn and node.kind == "user"):
            self._open.pop(thread, None)
        elif node.kind == "assistant":
            self._take_record(node, self._open.setdefault(thread, {}))

    def _take_record(self, node: Node, opened: dict[str, dict[str | None, _LoggedMessage]]) -> None:
        name, request = node.message_key, node.record.get("requestId")
        request = request if isinstance(request, str) else None
        of_id = opened.setdefault(name, {})
        known_message = of_id.get(request) or of_id.get(None)
        message = next(iter(of_id.values()), None) if request is None else known_message
        if message is None:
            message = of_id[request] = _LoggedMessage()
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


# What Claude Code shows its model beside the messages: files, notes, hooks, messages that were typed while it worked.
#
# Newer versions keep these as `attachment` records, each of a kind. The words around them are the harness's and in no
# log; what they are about is, for most kinds. A kind is one of: shown with its text here, shown with words that are not
# in the log, never shown, or unknown. The first becomes a turn; the turns after the second and the last are marked.

QUEUED = "queued_command"
# Kind -> where its text stands, the first that is there. "" is for kinds of which the name and the subject say all.
_TEXT_AT: dict[str, tuple[str, ...]] = {
    "agent_listing_delta": ("addedLines",),
    "agent_mention": ("agentType",),
    "already_read_file": ("content.file.content", "content", ""),
    "async_hook_response": ("response.hookSpecificOutput.additionalContext", "response.systemMessage"),
    "budget_usd": ("remaining",),
    "compact_file_reference": ("",),
    "critical_system_reminder": ("content",),
    "date_change": ("newDate",),
    "deferred_tools_delta": ("addedLines", "addedNames"),
    "diagnostics": ("files",),
    "directory": ("content",),
    "edited_text_file": ("snippet",),
    "file": ("content.file.content", "content"),
    "hook_additional_context": ("content",),
    "hook_blocking_error": ("blockingError.blockingError", "blockingError"),
    "hook_stopped_continuation": ("message",),
    "hook_success": ("content",),
    "invoked_skills": ("skills",),
    "mcp_instructions_delta": ("addedBlocks",),
    "mcp_resource": ("content",),
    "nested_memory": ("content.content", "content"),
    "opened_file_in_ide": ("",),
    "output_style": ("style",),
    "pdf_reference": ("",),
    "plan_file_reference": ("planContent",),
    "read_truncation_notice": ("banner",),
    "relevant_memories": ("memories",),
    "selected_lines_in_ide": ("content",),
    "skill_listing": ("content",),
    "task_reminder": ("content",),
    "task_status": ("deltaSummary", "status"),
    "todo": ("content",),
    "todo_reminder": ("content",),
    "token_usage": ("remaining",),
    "total_tokens_reminder": ("text",),
}
_WITHOUT_TEXT = frozenset(
    {
        "auto_mode",
        "auto_mode_exit",
        "plan_mode",
        "plan_mode_exit",
        "plan_mode_reentry",
        "ultra_effort_enter",
        "ultra_effort_exit",
        "verify_plan_reminder",
    }
)
_NEVER_SHOWN = frozenset(
    {
        "command_permissions",
        "edited_image_file",
        "hook_cancelled",
        "hook_error_during_execution",
        "hook_non_blocking_error",
        "hook_permission_decision",
        "hook_system_message",
        "max_turns_reached",
        "structured_output",
    }
)
# What other hooks print when all is well is for the screen.
_HOOKS_THAT_SPEAK = ("SessionStart", "UserPromptSubmit")
_SUBJECTS = ("displayPath", "filename", "path", "uri", "hookName", "planFilePath")
_LONGEST_TAG = 80
_NOTIFICATION = re.compile(r"\s*<[a-z-]*notification>")


class Attachment(NamedTuple):
    """What a record shows: `text` is None where the model saw words that the log does not have."""

    kind: str
    text: str | None
    origin: Origin
    images: int
    is_known: bool


def attachment_of(record: Record) -> Attachment | None:
    """The attachment of a record, or None for one that no model saw."""
    attachment = record.get("attachment")
    fields = cast("Record", attachment) if isinstance(attachment, dict) else {}
    kind = fields.get("type")
    kind = kind if isinstance(kind, str) else type(kind).__name__
    if kind in _NEVER_SHOWN or (kind == "hook_success" and fields.get("hookEvent") not in _HOOKS_THAT_SPEAK):
        return None
    if kind == QUEUED:
        prompt = fields.get("prompt")
        return Attachment(kind, as_text(prompt), _writer(fields), images_in(prompt), True)
    is_known = kind in _TEXT_AT or kind in _WITHOUT_TEXT
    content = fields.get("content")
    is_image = isinstance(content, dict) and cast("Record", content).get("type") == "image"
    return Attachment(kind, "[image]" if is_image else _text(kind, fields), "meta", int(is_image), is_known)


def attachment_kind(record: Record) -> str:
    """The kind of a record's attachment, for a count."""
    attachment = record.get("attachment")
    return str(cast("Record", attachment).get("type")) if isinstance(attachment, dict) else type(attachment).__name__


def plain_prompt(record: Record) -> str:
    """The words of a queued message, by which the queue's own records know it; "" for other attachments."""
    attachment = record.get("attachment")
    fields = cast("Record", attachment) if isinstance(attachment, dict) else {}
    prompt: Any = fields.get("prompt") if fields.get("type") == QUEUED else ""
    if isinstance(prompt, list):
        texts = [cast("Record", block).get("text") for block in cast("list[Any]", prompt) if isinstance(block, dict)]
        return "\n".join(text for text in texts if isinstance(text, str)).strip()
    return prompt.strip() if isinstance(prompt, str) else ""


def is_notification(text: str) -> bool:
    """Whether the harness wrote a message that went through the queue: a task that ended says so this way."""
    return "notification>" in text[:_LONGEST_TAG] and _NOTIFICATION.match(text) is not None


def _writer(fields: Record) -> Origin:
    source = fields.get("origin")
    kind = cast("Record", source).get("kind") if isinstance(source, dict) else None
    is_human = kind in (None, "human") and fields.get("commandMode") in (None, "prompt", "bash")
    return "human" if is_human and not is_notification(as_text(fields.get("prompt"))) else "meta"


def _text(kind: str, fields: Record) -> str | None:
    paths = _TEXT_AT.get(kind)
    if paths is None:
        return None
    body = next((text for path in paths if path and (text := _at(fields, path))), "")
    if not body and "" not in paths:
        return None
    subject = next((fields[key] for key in _SUBJECTS if isinstance(fields.get(key), str)), "")
    heading = f"[{kind}: {subject}]" if subject else f"[{kind}]"
    return f"{heading}\n{body}" if body else heading


def _at(fields: Record, path: str) -> str:
    value: Any = fields
    for key in path.split("."):
        value = cast("Record", value).get(key) if isinstance(value, dict) else None
    if isinstance(value, list):
        return "\n".join(_line(entry) for entry in cast("list[Any]", value)).strip()
    return "" if isinstance(value, dict) or value is None else as_text(value).strip()


def _line(item: Any) -> str:
    """An entry of a list: its text, with its state before it where it is something to do."""
    if not isinstance(item, dict):
        return as_text(item)
    entry = cast("Record", item)
    content = next((entry[key] for key in ("content", "subject", "text", "name", "uri") if entry.get(key)), None)
    text = as_text(content if content is not None else item)
    return f"[{entry['status']}] {text}" if isinstance(entry.get("status"), str) else text
