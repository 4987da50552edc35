"""A record in a Claude Code log: its message, its parent, and the grouping of records into messages.

An assistant message is spread over several records that share the id of the API response. A single wrong id must not
move a record out of its message. Among 33,165 records in real logs, no id occurs on both sides of a prompt or a
compaction, and no message has two request ids.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from composer_replication.ingestion.source_files import IngestReport, Record, as_text, images_in
from composer_replication.types import Origin

# Calls of the second kind run on the server; their results also come back under the call id.
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
    """The id shared by the records of one assistant message; the uuid of the record if it has none."""
    blocks: list[Record]
    agent: str | None
    """The id of the subagent whose result is in this record."""
    attachment: Attachment | None = None

    @property
    def is_boundary(self) -> bool:
        return self.kind == "system"

    @property
    def called(self) -> list[str]:
        """The ids of the calls in this record."""
        return [_name(block.get("id")) for block in self.blocks if block.get("type") in CALL_BLOCKS]

    @property
    def answered(self) -> list[str]:
        """The ids of the calls whose results are in this record."""
        return [_name(block.get("tool_use_id")) for block in self.blocks if block.get("type") == "tool_result"]

    @property
    def is_message(self) -> bool:
        return self.kind in ("user", "assistant")

    @property
    def is_main_message(self) -> bool:
        return self.is_message and not self.is_sidechain

    @property
    def is_summary(self) -> bool:
        """Whether this is the summary with which a compaction replaced the previous context."""
        return self.kind == "user" and self.record.get("isCompactSummary") is True

    @property
    def begins_turn(self) -> bool:
        """Whether this is a prompt: a user message without results, or a harness message when a session is resumed."""
        if self.kind == "assistant":
            return self.is_harness
        return self.kind == "user" and not self.answered and not self.is_summary

    @property
    def is_harness(self) -> bool:
        """Whether this is an assistant message written by the harness ("API Error", "No response requested.")."""
        return self.message.get("model") == "<synthetic>" or self.record.get("isApiErrorMessage") is True

    def rename(self, uuid: str) -> None:
        """Give the record another uuid, because another record already has its uuid."""
        if self.message_key == self.uuid:
            self.message_key = uuid
        self.uuid = uuid


@dataclass(slots=True)
class Entry:
    """A record in the file; `parent` and `time` are unvalidated.

    `node` is None for a record without a message, an attachment or a boundary.
    """

    line: int
    uuid: str
    parent: Any
    is_sidechain: bool
    time: Any
    node: Node | None
    agent: str | None = None
    """The id of the subagent in a sidechain record."""

    @property
    def named_parent(self) -> str | None:
        """The uuid of the parent, if the record has one that is a string."""
        return self.parent if isinstance(self.parent, str) else None

    @property
    def follows(self) -> str | None:
        """The uuid of the preceding record: the parent or, for a boundary, the last record of the closed context."""
        node = self.node
        uuid = node.record.get("logicalParentUuid") if node is not None and node.is_boundary else self.parent
        return uuid if isinstance(uuid, str) else None


def _name(value: Any) -> str:
    return value if isinstance(value, str) else ""


def node_of(uuid: str, kind: str, line: int, record: Record, is_sidechain: bool, attachment: Attachment | None) -> Node:
    """Return the node for a record with content. Its index and parent are set later, when its position is known."""
    message = record.get("message")
    if not isinstance(message, dict):
        message = {}
    name = message.get("id")
    key = name if isinstance(name, str) and name else uuid
    # The field repeats the result, often a whole file, in an unused form. Dropping it halves the memory.
    details = record.pop("toolUseResult", None)
    agent = details.get("agentId") if isinstance(details, dict) else None
    agent = agent if isinstance(agent, str) else None
    return Node(-1, line, uuid, record, None, is_sidechain, kind, message, key, _blocks(message), agent, attachment)


def _blocks(message: Record) -> list[Record]:
    """Return the content blocks of a message. A plain string, even inside a list of blocks, becomes a text block."""
    content: Any = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        return []
    if len(content) == 1 and isinstance(content[0], dict):  # the case of nearly all messages
        return content
    return [
        block if isinstance(block, dict) else {"type": "text", "text": block}
        for block in cast("list[Any]", content)
        if isinstance(block, (dict, str))
    ]


@dataclass(slots=True)
class _LoggedMessage:
    """The records of one assistant message."""

    nodes: list[Node] = field(default_factory=list)

    def unshared_key(self, name: str) -> str:
        """Return a key that no other message has. The uuid would not do, because another message may have it as its
        id.
        """
        return f"{name} of line {self.nodes[0].line}"


class Messages:
    """Groups assistant records into messages and sets their `message_key`. Records are passed in order."""

    def __init__(self, file: str, report: IngestReport) -> None:
        self._file, self._report = file, report
        self._open: dict[str, dict[str, dict[str | None, _LoggedMessage]]] = {}
        """Thread -> message id -> request id -> a message to which records may still be added."""
        self._all_messages: dict[str, list[_LoggedMessage]] = {}

    def take(self, node: Node, thread: str) -> None:
        """Add a record to its message. After a prompt or a boundary, no record is added to the thread's earlier
        messages.
        """
        if node.is_boundary or (node.begins_turn and node.kind == "user"):
            self._open.pop(thread, None)
        elif node.kind == "assistant":
            self._take_record(node, self._open.setdefault(thread, {}))

    def _take_record(self, node: Node, opened: dict[str, dict[str | None, _LoggedMessage]]) -> None:
        name, request = node.message_key, node.record.get("requestId")
        request = request if isinstance(request, str) else None
        by_request = opened.setdefault(name, {})
        # A record without a request id fits any message with this id, and a message without one fits any record.
        existing = by_request.get(request) or by_request.get(None)
        message = next(iter(by_request.values()), None) if request is None else existing
        if message is None:
            message = by_request[request] = _LoggedMessage()
            self._all_messages.setdefault(name, []).append(message)
        message.nodes.append(node)
        node.message_key = name if message is self._all_messages[name][0] else message.unshared_key(name)

    def assign_ids(self) -> None:
        """Leave an id that several messages share to the message with the most records; rename the others and count
        their records.
        """
        for name, messages in self._all_messages.items():
            if len(messages) == 1:
                continue
            holder = max(messages, key=lambda message: len(message.nodes))
            for message in messages:
                key = name if message is holder else message.unshared_key(name)
                for node in message.nodes:
                    node.message_key = key
                    if message is not holder:
                        self._report.skip(SHARED, self._file, node.line)


# Attachments: what Claude Code shows its model besides messages, such as files, notes, output of hooks, and messages
# typed while it was working. Newer versions log them as records of type `attachment`, each with a kind. The harness
# formulates them in words that no log contains. There are four cases: the text is in the log (the attachment becomes a
# turn), it was shown in words that are not in the log (the next answer is marked), it was never shown, or the kind is
# unknown (marked as well).

QUEUED = "queued_command"
# Kind -> paths of its text; the first existing path counts. "" means that the kind and the subject are sufficient.
_TEXT_PATHS: dict[str, tuple[str, ...]] = {
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
# Shown to the model in words that the log does not contain.
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
# The model sees the output of these hooks; other successful hooks only print to the screen.
_HOOKS_SHOWN_TO_MODEL = ("SessionStart", "UserPromptSubmit")
# Fields for the subject of an attachment; the first existing field counts.
_SUBJECTS = ("displayPath", "filename", "path", "uri", "hookName", "planFilePath")
_MAX_TAG_LENGTH = 80
# "<task-notification>" or " <notification>"; not "<b>" and not a notification quoted later in the text.
_NOTIFICATION = re.compile(r"\s*<[a-z-]*notification>")


class Attachment(NamedTuple):
    """The part of an attachment record that the model sees; `text` is None if the log does not contain the words."""

    kind: str
    text: str | None
    origin: Origin
    images: int
    is_known: bool


def attachment_of(record: Record) -> Attachment | None:
    """Return the attachment in a record, or None if the model never saw it."""
    attachment = record.get("attachment")
    fields = cast("Record", attachment) if isinstance(attachment, dict) else {}
    kind = fields.get("type")
    kind = kind if isinstance(kind, str) else type(kind).__name__
    if kind in _NEVER_SHOWN or (kind == "hook_success" and fields.get("hookEvent") not in _HOOKS_SHOWN_TO_MODEL):
        return None
    if kind == QUEUED:
        prompt = fields.get("prompt")
        return Attachment(kind, as_text(prompt), _writer(fields), images_in(prompt), True)
    is_known = kind in _TEXT_PATHS or kind in _WITHOUT_TEXT
    content = fields.get("content")
    # The file may be an image.
    is_image = isinstance(content, dict) and cast("Record", content).get("type") == "image"
    return Attachment(kind, "[image]" if is_image else _text(kind, fields), "meta", int(is_image), is_known)


def attachment_kind(record: Record) -> str:
    """Return the kind of a record's attachment, as a key for counting."""
    attachment = record.get("attachment")
    return str(cast("Record", attachment).get("type")) if isinstance(attachment, dict) else type(attachment).__name__


def plain_prompt(record: Record) -> str:
    """Return the text of a queued message as the queue's records contain it, or "" for other attachments."""
    attachment = record.get("attachment")
    fields = cast("Record", attachment) if isinstance(attachment, dict) else {}
    prompt: Any = fields.get("prompt") if fields.get("type") == QUEUED else ""
    if isinstance(prompt, list):
        texts = [cast("Record", block).get("text") for block in cast("list[Any]", prompt) if isinstance(block, dict)]
        return "\n".join(text for text in texts if isinstance(text, str)).strip()
    return prompt.strip() if isinstance(prompt, str) else ""


def is_notification(text: str) -> bool:
    """Return whether a queued message was written by the harness to report that a background task ended."""
    return "notification>" in text[:_MAX_TAG_LENGTH] and _NOTIFICATION.match(text) is not None


def _writer(fields: Record) -> Origin:
    source = fields.get("origin")
    kind = cast("Record", source).get("kind") if isinstance(source, dict) else None
    is_human = kind in (None, "human") and fields.get("commandMode") in (None, "prompt", "bash")
    return "human" if is_human and not is_notification(as_text(fields.get("prompt"))) else "meta"


def _text(kind: str, fields: Record) -> str | None:
    paths = _TEXT_PATHS.get(kind)
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
    """Return the text of an entry in a list such as a todo list. The text of a task begins with its status."""
    if not isinstance(item, dict):
        return as_text(item)
    entry = cast("Record", item)
    # Lists of todos, memories, skills, diagnostics and resources use different keys for their text.
    content = next((entry[key] for key in ("content", "subject", "text", "name", "uri") if entry.get(key)), None)
    text = as_text(content if content is not None else item)
    return f"[{entry['status']}] {text}" if isinstance(entry.get("status"), str) else text
