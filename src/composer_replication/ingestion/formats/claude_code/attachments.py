"""What Claude Code shows its model beside the messages: files, notes, hooks, messages that were typed while it worked.

Newer versions keep these as `attachment` records, each of a kind. The words around them are the harness's and in no
log; what they are about is, for most kinds. A kind is one of: shown with its text here, shown with words that are not
in the log, never shown, or unknown. The first becomes a turn; the turns after the second and the last are marked.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, cast

from composer_replication.ingestion.reading.source import Record, as_text, images_in
from composer_replication.types import Origin

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
